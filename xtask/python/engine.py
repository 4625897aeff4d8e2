"""One vLLM engine, driven by JSON lines: commands on stdin, answers on stdout.

  {"op": "generate", "prompts": [{"ids": [...], "salt": "...", "transfer": {...}, "lora": "name"}],
   "max_tokens": 16, "settle": true}
      -> {"outputs": [{"ids": [...], "cached": 512, "finish": "length"}]};
         with "settle" when the engine holds nothing any more, its stores too, at most 5 s later
  {"op": "abort", "prompts": [...], "max_tokens": 16, "steps": 3}
      -> {"unfinished": 2, "outputs": []}; the prompts are aborted after so many steps of the engine,
         but for those with "keep", whose outputs are returned
  {"op": "idle", "wait": 10}
      -> {"requests": 0, "blocks": 0}; what the engine still holds when it has stepped until it
         holds nothing or so many seconds are over
  {"op": "preemptions"}
      -> {"preemptions": 3} since the start
  {"op": "time connector"}, {"op": "connector times"}
      -> {"steps": [{"seconds": 0.1, "lookups": 3, "running": [0, 3]}]} of the scheduler's side of the
         connector since the first: time, questions how much is cached, requests that ran before
         and after the step
  {"op": "worker stats"}
      -> the figures of the worker's side of lmc's connector, and how long its thread ran, and
         waited for a core
  {"op": "time stock copies"}, {"op": "copies"}
      -> {"store": [1048576, 0.1], "retrieve": [0, 0.0]}; bytes and seconds of the stock connector's
         copies since the first
  {"op": "cores"}
      -> {"threads": 2, "bound": [[0, 1]]}; threads of the computation, and the sets of cores that
         threads of the process may run on
  {"op": "connections lost"}
      -> {"scheduler": 0, "worker": 0} of lmc's connector
  {"op": "poison"}
      -> {"freed": 300, "loaded": 40, "preempted": 10, "faults": []}; blocks: see poison.py
  {"op": "stop server", "pid": 1234}, {"op": "inject", "fault": "finished", "byte": 60}
      -> {}; faults that poison.py injects
  {"op": "quit"}

The first line out is {"ready": true}. Everything that vLLM prints goes to stderr.
"""

import argparse
import json
import os
import sys
import time

from timing import Timing


def connector(args):
    """The connector's configuration, as `--kv-transfer-config` would hold it."""
    from vllm.config import KVTransferConfig

    if args.port == 0:
        return None
    if args.connector == "lmc":
        return KVTransferConfig(
            kv_connector="FaultyConnector" if args.faulty else "LmcConnector",
            kv_connector_module_path="faulty" if args.faulty else "lmc.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=args.policy,
            kv_connector_extra_config={
                "lmc.server": args.server or f"tcp://127.0.0.1:{args.port}",
                "lmc.hash_mode": args.naming == "hashes",
                "lmc.tails": args.tails,
                **({"lmc.weights": args.weights} if args.weights else {}),
            },
        )
    return KVTransferConfig(
        kv_connector="LMCacheMPConnector",
        kv_role="kv_both",
        kv_load_failure_policy=args.policy,
        kv_connector_extra_config={
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": args.port,
            "lmcache.mp.mp_transfer_mode": args.mode,
            "lmcache.mp.mq_timeout": args.timeout,
            "lmcache.mp.heartbeat_interval": args.heartbeat,
        },
    )


def request(prompt, max_tokens):
    """A prompt and its parameters, as vLLM takes them."""
    from vllm import SamplingParams

    made = {"prompt_token_ids": prompt["ids"]}
    if prompt.get("salt"):
        made["cache_salt"] = prompt["salt"]
    extra = {"kv_transfer_params": prompt["transfer"]} if "transfer" in prompt else None
    return made, SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
    )


def output(of):
    """What is answered of a vLLM output."""
    return {
        "ids": list(of.outputs[0].token_ids),
        "cached": of.num_cached_tokens or 0,
        "finish": of.outputs[0].finish_reason,
    }


class Engine:
    """One engine; with its scheduler in this process unless it has several workers."""

    def __init__(self, llm, adapters=None):
        self.llm = llm
        # Folder of LoRA adapters.
        self.adapters = adapters
        self.aborted = self.preempted = 0
        core = self.llm.llm_engine.engine_core
        # Of an engine with several workers it is in another process.
        if hasattr(core, "engine_core"):
            self.scheduler = core.engine_core.scheduler
            self.preempt, self.scheduler._preempt_request = (
                self.scheduler._preempt_request, self.count_preemption)
            self.timing = Timing(self.scheduler)

    def count_preemption(self, *args, **named):
        self.preempted += 1
        return self.preempt(*args, **named)

    def generate(self, command):
        made = [request(prompt, command["max_tokens"]) for prompt in command["prompts"]]
        began = time.perf_counter()
        loras = [self.adapter(prompt.get("lora")) for prompt in command["prompts"]]
        outputs = self.llm.generate(*map(list, zip(*made)), use_tqdm=False,
                                    **({"lora_request": loras} if any(loras) else {}))
        answer = {"seconds": time.perf_counter() - began, "outputs": list(map(output, outputs))}
        if command.get("settle") and hasattr(self, "scheduler"):
            self.idle({"wait": 15})
        return answer

    def adapter(self, name):
        from vllm.lora.request import LoRARequest

        if name is None:
            return None
        number = sorted(os.listdir(self.adapters)).index(name) + 1
        return LoRARequest(name, number, os.path.join(self.adapters, name))

    def abort(self, command):
        engine, aborted, kept, finished = self.llm.llm_engine, [], [], {}
        for prompt in command["prompts"]:
            self.aborted += 1
            name = f"aborted-{self.aborted}"
            added = engine.add_request(name, *request(prompt, command["max_tokens"]))
            (kept if prompt.get("keep") else aborted).append((name, added))

        def step():
            finished.update((o.request_id, output(o)) for o in engine.step() if o.finished)

        for _ in range(command["steps"]):
            step()
        unfinished = sum(name not in finished for name, _ in aborted)
        engine.abort_request([added for _, added in aborted], internal=True)
        while any(name not in finished for name, _ in kept):
            step()
        return {"unfinished": unfinished, "outputs": [finished[name] for name, _ in kept]}

    def idle(self, command):
        core, scheduler = self.llm.llm_engine.engine_core.engine_core, self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        deadline = time.monotonic() + command.get("wait", 10)
        while scheduler.has_requests() and time.monotonic() < deadline:
            core.step_fn()
        # The first block stands for none.
        blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return {"requests": len(scheduler.requests), "blocks": blocks}

    def connections_lost(self, _):
        scheduler = self.scheduler.connector._scheduler.adapter.stats()
        return {"scheduler": scheduler["scheduler_connections_lost"],
                "worker": self.timing.worker_stats(None)["worker_connections_lost"]}

    def weights(self, command):
        """Scales weights of the first layer, and resets the caches as users of vLLM do then."""
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layer = worker.model_runner.model.model.layers[0]
        layer.input_layernorm.weight.data.mul_(command["factor"])
        is_reset = self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        return {"reset": is_reset}

    def preemptions(self, _):
        return {"preemptions": self.preempted}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--connector", choices=["stock", "lmc"], default="stock")
    parser.add_argument("--faulty", action="store_true",
                        help="lmc's connector with faults: see faulty.py")
    parser.add_argument("--naming", choices=["hashes", "tokens"], default="hashes",
                        help="of chunks, by lmc's connector")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--hash-algo", default="sha256", help="of vLLM's block hashes")
    parser.add_argument("--blocks", type=int, help="of the KV cache")
    parser.add_argument("--block-size", type=int, help="in tokens")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="in one step at most")
    parser.add_argument("--server", help="lmc.server of lmc's own connector, instead of the port")
    parser.add_argument("--tails", action="store_true", help="lmc.tails of lmc's own connector")
    parser.add_argument("--weights", help="lmc.weights of lmc's own connector")
    parser.add_argument("--port", type=int, default=0, help="0: no connector")
    parser.add_argument("--mode", default="engine_driven")
    parser.add_argument("--policy", default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--lora", metavar="FOLDER", help="of LoRA adapters, a folder each")
    parser.add_argument("--one-group", action="store_true",
                        help="of layers with and without a sliding window")
    parser.add_argument("--events", type=int, metavar="PORT", help="that publishes KV events")
    parser.add_argument("--poison", action="store_true", help="free blocks: see poison.py")
    parser.add_argument("--timeout", type=float, default=10)
    parser.add_argument("--heartbeat", type=float, default=3)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.tp == 1:
        # One process, so that killing it kills all of the engine at once.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if args.connector == "lmc":
        # It needs no LMCache: this makes importing that fail.
        sys.modules["lmcache"] = None
    from vllm import LLM
    from vllm.config import KVEventsConfig

    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=args.prefix_caching,
        prefix_caching_hash_algo=args.hash_algo,
        enforce_eager=True,
        dtype=args.dtype,
        max_num_batched_tokens=args.batched_tokens,
        num_gpu_blocks_override=args.blocks,
        block_size=args.block_size,
        max_model_len=4096,
        tensor_parallel_size=args.tp,
        kv_transfer_config=connector(args),
        kv_events_config=args.events and KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"tcp://*:{args.events}"),
        disable_log_stats=True,
        disable_hybrid_kv_cache_manager=args.one_group or None,
        enable_lora=args.lora is not None,
        max_loras=2,
        max_lora_rank=8,
    )
    engine = Engine(llm, args.lora)
    operations = {
        "generate": engine.generate,
        "abort": engine.abort,
        "idle": engine.idle,
        "preemptions": engine.preemptions,
        "weights": engine.weights,
        "connections lost": engine.connections_lost,
    }
    if args.tp == 1:
        operations |= engine.timing.operations()
    if args.poison:
        from poison import Poison

        poison = Poison(llm.llm_engine.engine_core.engine_core)
        operations |= {
            "poison": poison.report,
            "stop server": poison.stop_server,
            "inject": poison.inject,
        }
    out.write('{"ready": true}\n')
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "quit":
            break
        out.write(json.dumps(operations[command["op"]](command)) + "\n")


if __name__ == "__main__":
    main()
