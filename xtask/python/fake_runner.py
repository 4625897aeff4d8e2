"""A worker without a model, for fake_engine.py: vLLM's own calls of the connector around a forward
pass that writes tags.

The KV data of a token is made of its tag, a hash of the prompt up to it, and differs between
layers, heads and words. The next token is computed from the KV data as it lies in memory. A wrong
byte is seen before a token is computed with it; a token that is computed with one is wrong.
"""

import collections
import copy
import zlib

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

BLOCK, HEADS, WORDS = 16, 2, 4
# Of the model; one more where a draft model is.
TARGET_LAYERS = 2
TARGET, DRAFT = list(range(TARGET_LAYERS)), [TARGET_LAYERS]
VOCABULARY = 16
# The block that stands for one that is not kept.
NULL = 0
POISON = np.uint64(0x5A5A5A5A5A5A5A5A)
# Part of each word, by layer, head and word. An odd factor loses nothing of a tag.
FACTORS = np.random.default_rng(7).integers(
    1 << 63, size=(TARGET_LAYERS + 1, HEADS, WORDS), dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class Fault(Exception):
    """What the connector must not do."""


def weights_of(epoch, rank):
    """The part of all words that differs between ranks and changes with the model's weights."""
    return np.uint64((2 * epoch + rank) * 0x9E3779B97F4A7C15 % (1 << 64))


def next_token(words, windows):
    """The token after those with these words, which are free of the weights' part. Of a layer with a
    window it depends on the last tokens only, as many as the window has."""
    words = words.copy()
    for layer, window in enumerate(windows):
        if window is not None:
            words[: max(len(words) - window, 0), layer] = 0
    return zlib.crc32(np.ascontiguousarray(words).tobytes()) % VOCABULARY


class Text:
    """Tokens and their tags."""

    def __init__(self, tokens=()):
        self.tokens, self.tags = [], []
        self.extend(tokens)

    def extend(self, tokens):
        tag = self.tags[-1] if self.tags else 1
        for token in tokens:
            tag = ((tag ^ (token + 2)) * 0xBF58476D1CE4E5B9) % (1 << 64)
            tag ^= tag >> 29
            self.tokens.append(token)
            self.tags.append(tag)

    def words(self, start, end):
        """The words of these positions, by layer, head and word."""
        tags = np.array(self.tags[start:end], dtype=np.uint64)
        return tags[:, None, None, None] * FACTORS

    def next_token(self, windows):
        return next_token(self.words(0, len(self.tokens))[:, TARGET], windows)


def answer_of(prompt, length, windows):
    """What the model generates for a prompt, without vLLM."""
    text = Text(prompt)
    for _ in range(length):
        text.extend([text.next_token(windows)])
    return text.tokens[len(prompt):]


class Memory:
    """The KV cache of the worker. `groups` are the layers with a block table of their own."""

    def __init__(self, blocks, groups, windows, layout):
        self.groups, self.windows = groups, windows
        layers = sum(map(len, groups))
        if layout == "LBNHC":
            flat = np.zeros((layers, blocks, BLOCK, HEADS, WORDS), dtype=np.uint64)
            self.words = flat.transpose(0, 1, 3, 2, 4)
        else:
            flat = self.words = np.zeros((layers, blocks, HEADS, BLOCK, WORDS), dtype=np.uint64)
        floats = torch.from_numpy(flat.view(np.float32))
        self.tensors = floats.transpose(2, 3) if layout == "LBNHC" else floats
        self.weights = np.uint64(0)

    def parts(self, tables, layers, start, end):
        """Of each group: its layers among these, the positions, and the blocks of these."""
        for group, table in zip(self.groups, tables, strict=True):
            of_group = [layer for layer in group if layer in layers]
            at = np.arange(start, min(end, len(table) * BLOCK))
            if of_group and len(at):
                yield np.array(of_group), at, np.array(table, dtype=np.int64)[at // BLOCK]

    def read(self, tables, end, layers):
        """The words of the first positions, free of the weights' part."""
        words = np.zeros((end, len(layers), HEADS, WORDS), dtype=np.uint64)
        for of_group, at, blocks in self.parts(tables, layers, 0, end):
            found = self.words[of_group][:, blocks, :, at % BLOCK] ^ self.weights
            words[:, [layers.index(layer) for layer in of_group]] = found
        return words

    def write(self, tables, text, start, end, layers):
        """Writes the tokens of these positions to these layers, where blocks are there for them."""
        for of_group, at, blocks in self.parts(tables, layers, start, end):
            words = text.words(start, at[-1] + 1)[:, of_group] ^ self.weights
            for number, layer in enumerate(of_group):
                self.words[layer][blocks, :, at % BLOCK] = words[:, number]

    def check_computed(self, what, tables, text, end, layers):
        """Looks at what the token at `end` and those after it look back to."""
        for table, group, window in zip(tables, self.groups, self.windows, strict=True):
            first = 0 if window is None else max(end - window + 1, 0)
            needed = table[first // BLOCK : end // BLOCK]
            if NULL in needed and not set(layers).isdisjoint(group):
                raise Fault(f"{what}: vLLM has given up a block that is needed: {table}")
            only = [table if other is table else [] for other in tables]
            self.check(what, only, text, first, end, layers)

    def check(self, what, tables, text, start, end, layers):
        """Looks at the KV data of these positions; block 0 stands for those that are not kept."""
        for of_group, at, blocks in self.parts(tables, layers, start, end):
            wanted = text.words(start, at[-1] + 1)[:, of_group]
            found = self.words[of_group][:, blocks, :, at % BLOCK] ^ self.weights
            right = (found == wanted).all(axis=(1, 2, 3)) | (blocks == NULL)
            if not right.all():
                first = int(np.argmin(right))
                block = blocks[first]
                words = self.words[:, block, 0, at[first] % BLOCK, 0]
                raise Fault(
                    f"{what}: wrong KV data of token {at[first]} in block {block}: "
                    f"{[hex(word) for word in words]}, {int((~right).sum())} tokens are wrong")


class State:
    """A request as the worker knows it."""

    def __init__(self, tokens, tables, computed):
        self.text, self.computed = Text(tokens), computed
        self.tables = [list(table) for table in tables]
        self.drafts = []


class Runner:
    """Runs the steps that the scheduler sends, in the order of vLLM's model runner V1 or V2."""

    def __init__(self, config, kv_cache_config, plan, rank, tokens_of):
        """`tokens_of` gives the tokens of a request that may not have run here."""
        self.plan, self.rank, self.tokens_of = plan, rank, tokens_of
        self.config = config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        names = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self.memory = Memory(
            kv_cache_config.num_blocks, [[int(name.removeprefix("layer")) for name in group]
                                         for group in names],
            [getattr(group.kv_cache_spec, "sliding_window", None)
             for group in kv_cache_config.kv_cache_groups], plan.layout)
        self.layers = [layer for group in self.memory.groups for layer in group]
        self.new_weights(0)
        self.connector = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        caches = {name: self.memory.tensors[int(name.removeprefix("layer"))]
                  for group in names for name in group}
        if plan.v2:
            self.calls = ActiveKVConnector(config, caches)
        else:
            self.connector.register_kv_caches(caches)
        self.wait, self.connector.handle_preemptions = (
            self.connector.handle_preemptions, self.handle_preemptions)
        # Loads under way by request, and blocks that were reported as not loaded.
        self.requests, self.loads, self.failed = {}, {}, set()
        # Blocks that vLLM has given out and freed since the step before, in that order; free blocks
        # that hold the pattern.
        self.blocks, self.clean = [], set()
        self.counts = collections.Counter() if rank else plan.counts
        self.draft_ids = None

    def shutdown(self):
        self.connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def execute(self, output, blocks):
        """Runs a step. `blocks`: what vLLM has given out and freed until it had scheduled it."""
        self.blocks = blocks
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        loads = collections.defaultdict(list)
        for op in output.kv_connector_metadata.loads:
            loads[op.request_id].append(op)
        for name, ops in loads.items():
            ends = [op.end for op in ops]
            if name in self.loads:
                raise Fault(f"{name} is loaded twice at once")
            # Whole chunks, and then their tail.
            if [op.start for op in ops[1:]] != ends[:-1]:
                raise Fault(f"the loads of {name} do not join: {ops}")
            self.loads[name] = ops
        result = self.execute_v2(output) if self.plan.v2 else self.execute_v1(output)
        if result.kv_connector_output is not None:
            self.check_loads(result.kv_connector_output)
        return result

    def execute_v1(self, output):
        """`execute_model` and `sample_tokens` of vllm/v1/worker/gpu_model_runner.py."""
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.update_states(output)
        calls = KVConnectorModelRunnerMixin
        if not output.total_num_scheduled_tokens:
            return calls.kv_connector_no_forward(output, self.config)
        has_drafts = bool(self.plan.drafts)
        with (
            set_forward_context(None, self.config),
            calls.maybe_get_kv_connector_output(output, defer_finalize=has_drafts) as reported,
        ):
            steps = self.forward(output)
        sampled = self.sample(steps)
        if has_drafts:
            calls.finalize_kv_connector()
        return self.result(sampled, reported)

    def execute_v2(self, output):
        """`execute_model` and `sample_tokens` of vllm/v1/worker/gpu/model_runner.py."""
        self.update_states(output)
        if not output.total_num_scheduled_tokens:
            return self.calls.no_forward(output)
        with set_forward_context(None, self.config):
            # Without an input batch it has no arguments for loads, which lmc does not read.
            self.calls.pre_forward(output)
            steps = self.forward(output)
        self.calls.finish_forward()
        sampled = self.sample(steps)
        return self.result(sampled, self.calls.post_forward(output.finished_req_ids))

    def result(self, sampled, reported):
        ids = list(sampled)
        return ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)},
                                 [sampled[name] for name in ids], kv_connector_output=reported)

    def handle_preemptions(self, metadata):
        """vLLM may write to all blocks that it has freed, as soon as the connector's returns."""
        self.wait(metadata)
        before, words = set(self.clean), self.memory.words
        for kind, block in self.blocks:
            if kind == "new":
                if block in before and not (words[:, block] == POISON).all():
                    raise Fault(f"block {block} was written to while it was free")
                self.clean.discard(block)
            else:
                self.clean.add(block)
        touched = sorted({block for _, block in self.blocks})
        words[:, touched] = POISON
        self.blocks = []

    def update_states(self, output):
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        if self.plan.v2:
            for name in output.preempted_req_ids or ():
                self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self.plan.v2 else new.prompt_token_ids
            self.requests[new.req_id] = State(tokens, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids,
                                          cached.num_computed_tokens):
            state = self.requests[name]
            if name in cached.resumed_req_ids:
                self.requests[name] = State(cached.all_token_ids[name], blocks, computed)
                continue
            if blocks is not None:
                for table, more in zip(state.tables, blocks, strict=True):
                    table += more
            # A scheduler that is ahead takes all drafts for accepted.
            is_ahead = self.plan.is_async and self.plan.drafts
            assert computed == state.computed or (is_ahead and computed > state.computed), (
                name, computed, state.computed)

    def forward(self, output):
        """Writes the KV data of the tokens that are scheduled, with the model's layers."""
        steps = []
        for name, count in output.num_scheduled_tokens.items():
            state = self.requests[name]
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            if drafts and self.plan.is_async:
                # The scheduler knows their number only.
                drafts = (state.drafts + drafts)[: len(drafts)]
            start, end = state.computed, state.computed + count - len(drafts)
            assert end <= len(state.text.tokens), (name, start, count, drafts)
            self.memory.check_computed(f"{name} computes", state.tables, state.text, start, TARGET)
            text = Text()
            text.tokens, text.tags = state.text.tokens[:end], state.text.tags[:end]
            text.extend(drafts)
            assert all(start + count <= len(table) * BLOCK for table in state.tables), (
                name, start, count)
            self.memory.write(state.tables, text, start, start + count, TARGET)
            steps.append((name, state, start, end, drafts))
        return steps

    def sample(self, steps):
        """The new tokens of each request; then the draft model's part of the step."""
        sampled, draft_ids = {}, {}
        for name, state, start, end, drafts in steps:
            sampled[name] = new = []
            if end == len(state.text.tokens):
                words = self.memory.read(state.tables, end + len(drafts), TARGET)
                new.append(next_token(words[:end], self.plan.windows))
                for at, draft in enumerate(drafts, 1):
                    if draft != new[-1]:
                        break
                    new.append(next_token(words[: end + at], self.plan.windows))
                self.counts["drafts_rejected"] += len(drafts) + 1 - len(new)
                self.counts["drafts_accepted"] += len(new) - 1
                state.text.extend(new)
                state.computed = len(state.text.tokens) - 1
            else:
                state.computed = end
            if self.plan.drafts:
                draft_ids[name] = state.drafts = self.draft(name, state, start, bool(new))
        self.draft_ids = DraftTokenIds(list(draft_ids), list(draft_ids.values()))
        return sampled

    def draft(self, name, state, start, has_sampled):
        """Writes the draft model's layer, and guesses the next tokens."""
        # Another request of this step may have written its part just now.
        self.memory.check_computed(f"{name} drafts", state.tables, state.text, start, DRAFT)
        if not has_sampled:
            self.memory.write(state.tables, state.text, start, state.computed, DRAFT)
            return []
        text, guessed = Text(state.text.tokens), []
        for _ in range(self.plan.drafts):
            right = text.next_token(self.plan.windows)
            # All ranks guess the same.
            is_wrong = text.tags[-1] % 10 < 3
            guessed.append((right + is_wrong) % VOCABULARY)
            text.extend(guessed[-1:])
        # Of its last guess it computes nothing.
        self.memory.write(state.tables, text, start, len(text.tokens) - 1, DRAFT)
        return guessed

    def check_loads(self, reported):
        """Looks at each load that has ended, before anything else is done with its blocks."""
        # They may be reported before their load.
        self.failed |= reported.invalid_block_ids
        for name in reported.finished_recving or ():
            ops = self.loads.pop(name, None)
            if ops is None:
                raise Fault(f"the load of {name} is reported, and there is none")
            has_failed = name in reported.failed_recving
            assert not has_failed or self.memory.windows != [None]
            for op in ops:
                text = Text(self.tokens_of(name)[: op.end])
                first = op.start + op.skip_first_n_tokens
                before = [NULL] * (op.start // BLOCK)
                tables = [before + list(blocks) for blocks in op.block_ids]
                if self.memory.windows == [None]:
                    failed = self.failed.intersection(*tables)
                    self.failed -= failed
                    tables = [[NULL if block in failed else block for block in tables[0]]]
                    has_failed |= bool(failed)
                elif has_failed:
                    tables = [[] for _ in tables]
                self.memory.check(f"{name} has loaded", tables, text, first, op.end, self.layers)
            self.counts["loads_of_tails"] += ops[-1].is_tail
            self.counts["failed_loads" if has_failed else "loads"] += 1
            windows = [window for window in self.memory.windows if window is not None]
            self.counts["loads_with_windows"] += bool(windows)
            self.counts["loads_with_two_windows"] += len(windows) > 1
            self.counts["loads_with_one_window_alone"] += windows == self.memory.windows != []
            self.counts["loads_of_two_ranks"] += self.plan.ranks == 2
        self.counts["saves"] += len(reported.finished_sending or ())

    def new_weights(self, epoch):
        self.memory.weights = weights_of(epoch, self.rank)


def watch(pool):
    """Returns a list of the blocks that a pool gives out and frees from now on; it grows."""
    events = []
    give, free = pool.get_new_blocks, pool.free_blocks

    def get_new_blocks(count):
        blocks = give(count)
        events.extend(("new", block.block_id) for block in blocks)
        return blocks

    def free_blocks(blocks):
        blocks = list(blocks)
        free(blocks)
        # What vLLM's prefix cache can find again stays until it is given out.
        events.extend(("free", block.block_id) for block in blocks
                      if block.ref_cnt == 0 and not block.is_null
                      and not (pool.enable_caching and block.block_hash is not None))

    pool.get_new_blocks, pool.free_blocks = get_new_blocks, free_blocks
    return events
