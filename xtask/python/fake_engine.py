"""One of vLLM's own schedulers with lmc's connector and workers without a model, for scheduler.py.

A seed decides which scheduler, what is asked and aborted when, and which faults the server has.
"""

import collections
import os
import pickle
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from lmc.vllm.metadata import Step
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fake_runner import (
    BLOCK,
    HEADS,
    NULL,
    TARGET_LAYERS,
    VOCABULARY,
    WORDS,
    Runner,
    answer_of,
    watch,
)
from harness import eventually

CHUNK = 64
MAX_LENGTH = 1024
# In which all requests must have ended, in seconds.
DEADLINE = 60

init_none_hash(sha256)


@dataclass
class Plan:
    """What a seed plays with."""

    is_async: bool
    v2: bool
    # Draft tokens of a step.
    drafts: int
    # Workers of one tensor-parallel group.
    ranks: int
    by_hash: bool
    is_early: bool
    prefix_caching: bool
    layout: str
    blocks: int
    # Tokens of a step.
    budget: int
    running: int
    # Tokens that each of the model's layers looks back; layers that differ have a KV group each.
    windows: tuple[int | None, ...]
    # Of the server: none, it is stopped for a while, or it is killed.
    fault: str
    counts: collections.Counter = field(default_factory=collections.Counter)

    @classmethod
    def of(cls, seed, rng):
        return cls(
            is_async=bool(seed & 1),
            v2=bool(seed & 2),
            drafts=3 if seed & 4 else 0,
            ranks=rng.choice((1, 1, 2)),
            by_hash=rng.random() < 0.6,
            is_early=rng.random() < 0.3,
            prefix_caching=rng.random() < 0.5,
            layout=rng.choice(("LBHNC", "LBNHC")),
            blocks=rng.randrange(30, 70),
            budget=rng.choice((40, 96, 256)),
            running=rng.choice((3, 8)),
            fault=rng.choice(("", "", "stopped", "stopped", "killed")),
            windows=rng.choice(((None, None), (None, 20), (None, 100), (50, 50), (24, 33))),
        )

    @property
    def kind(self):
        return (f"{'AsyncScheduler' if self.is_async else 'Scheduler'}, order of runner "
                f"{'V2' if self.v2 else 'V1'}{', drafts' if self.drafts else ''}")


def configs(plan, model, port):
    """vLLM's configuration for a plan, and that of its KV cache."""
    # Its folder is read, and its weights are not loaded.
    model_config = ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=MAX_LENGTH,
                               dtype="float32", enforce_eager=True)
    parallel_config = ParallelConfig(tensor_parallel_size=plan.ranks)
    # As if it were not a CPU, which has V1 only.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=plan.running, max_num_batched_tokens=plan.budget, max_model_len=MAX_LENGTH,
            enable_chunked_prefill=True, is_encoder_decoder=False),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=plan.prefix_caching),
        device_config=DeviceConfig("cpu"),
        parallel_config=parallel_config,
        speculative_config=SpeculativeConfig(
            method="draft_model", model=model, num_speculative_tokens=plan.drafts,
            target_model_config=model_config, target_parallel_config=parallel_config,
            draft_tensor_parallel_size=plan.ranks,
        ) if plan.drafts else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LmcConnector", kv_connector_module_path="lmc.vllm", kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "lmc.server": f"tcp://127.0.0.1:{port}",
                "lmc.hash_mode": plan.by_hash,
                "lmc.lookup_on_arrival": plan.is_early,
            }),
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(plan.v2))
    config.scheduler_config.async_scheduling = plan.is_async
    config.cache_config.num_gpu_blocks = plan.blocks
    shape = dict(block_size=BLOCK, num_kv_heads=HEADS, head_size=WORDS, dtype=torch.float32)
    layers = [f"layer{at}" for at in range(TARGET_LAYERS + bool(plan.drafts))]
    groups = []
    for window in dict.fromkeys(plan.windows):
        names = [layer for layer, own in zip(layers, plan.windows) if own == window]
        if not groups:
            # A draft model's layer looks back as the first one does.
            names += layers[TARGET_LAYERS:]
        spec = (FullAttentionSpec(**shape) if window is None
                else SlidingWindowSpec(**shape, sliding_window=window))
        groups.append(KVCacheGroupSpec(names, spec))
    return config, KVCacheConfig(
        num_blocks=plan.blocks, kv_cache_tensors=[],
        kv_cache_groups=groups, kv_cache_layout=plan.layout)


class Engine:
    """A scheduler of vLLM and its workers, with what their engine core does."""

    def __init__(self, seed, model, server):
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.plan, self.server = Plan.of(seed, rng), server
        self.counts = self.plan.counts
        config, kv_cache_config = configs(self.plan, model, server.port)
        kind = AsyncScheduler if self.plan.is_async else Scheduler
        self.scheduler = kind(config, kv_cache_config, StructuredOutputManager(config), BLOCK)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.runners = [Runner(config, kv_cache_config, self.plan, rank, self.tokens_of)
                        for rank in range(self.plan.ranks)]
        self.aggregator = KVOutputAggregator.from_connector(
            self.scheduler.connector, self.plan.ranks)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.blocks = watch(self.pool)
        self.preempt, self.scheduler._preempt_request = (
            self.scheduler._preempt_request, self.count_preemption)
        # All requests, also those that vLLM does not know any more; their new tokens.
        self.requests, self.answers, self.finished = {}, {}, set()
        # Steps that are scheduled, each with its result where the worker has run it; newest first.
        self.queue = collections.deque()
        self.prefixes = [[rng.randrange(VOCABULARY) for _ in range(300)] for _ in range(3)]
        groups = len(kv_cache_config.kv_cache_groups)
        self.most = (self.plan.blocks - 1) // groups * BLOCK - 40
        self.epoch, self.now, self.back_at = 0, 0, None

    def count_preemption(self, *args, **named):
        self.counts["preemptions"] += 1
        return self.preempt(*args, **named)

    def tokens_of(self, name):
        return list(self.requests[name].all_token_ids)

    # Requests.

    def add(self):
        rng = self.rng
        if self.requests and rng.random() < 0.2:
            # One that is asked again, with some of its answer.
            tokens = self.tokens_of(rng.choice(list(self.requests)))
        else:
            tokens = rng.choice(self.prefixes)[: rng.randrange(1, 300)]
            tokens = tokens + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(30))]
        if rng.random() < 0.3:
            # Found whole, vLLM computes its last token only.
            tokens = tokens[: max(len(tokens) // CHUNK * CHUNK, 1)]
        # A request must fit, with the slots that drafts need.
        length = rng.randrange(1, 90)
        tokens = tokens[: self.most - length]
        sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        if rng.random() < 0.1:
            sampling.skip_reading_prefix_cache = True
        self.ask(tokens, sampling, "salt" if rng.random() < 0.1 else None)

    def ask(self, tokens, sampling, salt):
        name = f"{self.seed}-{len(self.requests)}"
        request = Request(name, tokens, sampling, None, block_hasher=self.hasher, cache_salt=salt)
        self.requests[name], self.answers[name] = request, []
        self.scheduler.add_request(request)

    def abort(self):
        alive = [r for r in self.scheduler.requests.values() if not r.is_finished()]
        loading = [r for r in alive if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if not alive:
            return
        request = self.rng.choice(loading if loading and self.rng.random() < 0.6 else alive)
        self.counts["aborted"] += 1
        self.counts["aborted_while_loading"] += request in loading
        self.finished.add(request.request_id)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        """New weights: what was computed with the old ones must be used by no request any more."""
        # The workers have run what they were sent, and vLLM may have taken the results.
        self.run_queued()
        if self.rng.random() < 0.7:
            while self.queue:
                self.update()
        try:
            # Running requests are preempted, or refuse it.
            is_reset = self.scheduler.reset_prefix_cache(self.rng.random() < 0.8, True)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            # vLLM refuses it while a request loads, or has ended and its blocks are kept.
            is_reset = False
        self.counts["resets" if is_reset else "refused_resets"] += 1
        if is_reset:
            self.epoch += 1
            for runner in self.runners:
                runner.new_weights(self.epoch)

    # `EngineCore.step` and `step_with_batch_queue`.

    def step(self):
        ahead = 2 if self.plan.is_async else 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            # As vLLM sends it to its workers' processes.
            self.queue.appendleft(SimpleNamespace(
                output=output, sent=pickle.dumps(output), blocks=self.blocks[:], result=None))
            self.blocks.clear()
            self.check_blocks(output.kv_connector_metadata.loads)
            self.inject(output.kv_connector_metadata)
            executes = output.total_num_scheduled_tokens > 0
            if len(self.queue) < ahead and (executes or self.scheduler.has_requests()):
                return
        if self.queue:
            self.update()

    def check_blocks(self, loads):
        """A load writes to blocks of its request alone, which vLLM's prefix cache does not have."""
        for op in loads:
            for block in (block for blocks in op.block_ids
                          for block in blocks[op.skip_first_n_tokens // BLOCK :] if block != NULL):
                of = self.pool.blocks[block]
                assert (of.ref_cnt, of.block_hash) == (1, None), (
                    f"{op.request_id} loads into block {block} of others: {of}")

    def run_queued(self, count=None):
        """The workers run steps, oldest first."""
        due = [step for step in reversed(self.queue) if step.result is None]
        for step in due[:count]:
            results = [runner.execute(pickle.loads(step.sent), step.blocks)
                       for runner in self.runners]
            results = pickle.loads(pickle.dumps(results))
            step.result = self.aggregator.aggregate(results) if len(results) > 1 else results[0]

    def update(self):
        """Gives the oldest step's result to the scheduler, as late as vLLM may."""
        # The workers may be one step behind, or not.
        self.run_queued(1 if self.queue[-1].result is None and self.rng.random() < 0.5 else None)
        step = self.queue.pop()
        self.counts["ahead"] += len(self.queue)
        while self.rng.random() < 0.05:
            self.abort()
        made = self.scheduler.update_from_output(step.output, step.result)
        for outputs in made.values():
            for output in outputs.outputs:
                self.answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.end(output)
        if self.plan.drafts and not self.plan.is_async and step.output.num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.runners[0].draft_ids)

    def end(self, output):
        name = output.request_id
        request, answer = self.requests[name], self.answers[name]
        assert name not in self.finished, f"{name} ends twice"
        self.finished.add(name)
        self.counts["finished"] += 1
        assert str(output.finish_reason) == "length", f"{name} ends by {output.finish_reason}"
        right = answer_of(request.prompt_token_ids, request.max_tokens, self.plan.windows)
        assert answer == right, f"{name} answers {answer}, without a connector {right}"

    # The server.

    def inject(self, step):
        """The server dies, comes back or stands still, mostly when copies will begin."""
        rng, child = self.rng, self.server.child
        if self.back_at is not None:
            if self.now >= self.back_at:
                self.come_back()
        elif self.plan.fault == "killed" and rng.random() < (0.5 if step.loads else 0.01):
            self.counts["kills"] += 1
            child.kill()
            self.back_at = self.now + rng.randrange(5, 60)
        elif self.plan.fault == "stopped" and rng.random() < (0.3 if step.stores else 0.02):
            self.counts["stops"] += 1
            os.kill(child.process.pid, signal.SIGSTOP)
            threading.Timer(rng.uniform(0.005, 0.1), child.process.send_signal,
                            (signal.SIGCONT,)).start()

    def come_back(self):
        if self.back_at is not None:
            self.server.start()
            self.back_at = None

    def play(self, steps=200):
        rng = self.rng
        for self.now in range(steps):
            busy = len(self.scheduler.requests)
            if rng.random() < (0.4 if busy < 12 else 0.02):
                self.add()
            if rng.random() < 0.04:
                self.abort()
            if rng.random() < 0.02 and self.back_at is None:
                self.reset()
            self.step()
            # Copies go on meanwhile.
            time.sleep(rng.choice((0, 0.0005, 0.002)))
        self.come_back()
        self.plan.fault = ""
        self.drain()
        self.read_again()
        self.check_idle()

    def drain(self):
        end = time.monotonic() + DEADLINE
        while self.scheduler.has_requests() or self.queue:
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < end, f"these do not end: {list(self.scheduler.requests)}"

    def read_again(self):
        """Loads what was stored, which is looked at then."""
        self.scheduler.reset_prefix_cache()
        before = self.counts["loads"]
        for name, request in list(self.requests.items()):
            tokens = self.tokens_of(name)[: self.most]
            self.ask(tokens, SamplingParams(max_tokens=1, ignore_eos=True), request.cache_salt)
        self.drain()
        self.counts["loads_at_end"] += self.counts["loads"] - before

    def check_idle(self):
        """Nothing is left of requests that have all ended."""
        lost = set(self.requests) - self.finished
        assert not lost, f"no end was seen of {lost}"
        free = self.pool.get_num_free_blocks()
        assert free == self.free_at_start, f"{free} of {self.free_at_start} blocks are free"
        side = self.scheduler.connector._scheduler
        assert not (side._requests or side._refused) and side._next == Step(), vars(side)
        lost = [list(runner.loads) for runner in self.runners]
        assert not any(lost), f"loads without a report: {lost}"
        held = eventually(lambda: not any(self.server.held().values()))
        assert held, f"the server holds {self.server.held()}"

    def shutdown(self):
        self.scheduler.shutdown()
        for runner in self.runners:
            runner.shutdown()
