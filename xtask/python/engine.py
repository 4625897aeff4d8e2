"""One vLLM engine, driven by JSON lines: commands on stdin, answers on stdout.

  {"op": "generate", "prompts": [{"ids": [...], "salt": "...", "transfer": {...}}], "max_tokens": 16}
      -> {"outputs": [{"ids": [...], "cached": 512, "finish": "length"}]}
  {"op": "quit"}

The first line out is {"ready": true}. Everything that vLLM prints goes to stderr.
"""

import argparse
import json
import os
import sys


def connector(args):
    """The stock connector's configuration, as `--kv-transfer-config` would hold it."""
    from vllm.config import KVTransferConfig

    if args.port == 0:
        return None
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0, help="0: no connector")
    parser.add_argument("--mode", default="engine_driven")
    parser.add_argument("--policy", default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=10)
    parser.add_argument("--heartbeat", type=float, default=1)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.tp == 1:
        # One process, so that killing it kills all of the engine at once.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        dtype=args.dtype,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        tensor_parallel_size=args.tp,
        kv_transfer_config=connector(args),
        disable_log_stats=True,
    )
    out.write('{"ready": true}\n')
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "quit":
            break
        prompts, params = [], []
        for prompt in command["prompts"]:
            request = {"prompt_token_ids": prompt["ids"]}
            if prompt.get("salt"):
                request["cache_salt"] = prompt["salt"]
            prompts.append(request)
            extra = {"kv_transfer_params": prompt["transfer"]} if "transfer" in prompt else None
            params.append(SamplingParams(
                max_tokens=command["max_tokens"], temperature=0, ignore_eos=True,
                detokenize=False, extra_args=extra
            ))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answer = [
            {
                "ids": list(o.outputs[0].token_ids),
                "cached": o.num_cached_tokens or 0,
                "finish": o.outputs[0].finish_reason,
            }
            for o in outputs
        ]
        out.write(json.dumps({"outputs": answer}) + "\n")


if __name__ == "__main__":
    main()
