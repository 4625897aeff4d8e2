"""A small model of vLLM's scheduler and workers that drives both sides of the connector by a seed.

Each block's memory holds a tag for each token: the hash of the prompt up to it, and the number of
the weights that computed it. Layers may look back a window of tokens only, in a KV group of their
own: vLLM frees the blocks that a window has left, while the request runs. What vLLM frees is
overwritten before the next step computes, so that a store that still reads it stores a wrong tag,
and a load that still writes to it is seen by its owner. All choices come from one generator, in an
order that no hash of a text changes, so that a seed replays exactly.
"""

import pickle
import random
from itertools import takewhile
from types import SimpleNamespace

from lmc.vllm.scheduler import SchedulerSide
from lmc.vllm.weights import TAG, Weights
from lmc.vllm.worker import WorkerSide
from tests.engine import BLOCK, CHUNK, Blocks, chunk_hashes, output

PER_CHUNK = CHUNK // BLOCK
POISON = "freed"
# Stands in a table for a block that is not kept.
NULL = 0
# How far back the layers of each KV group look.
# Windows that differ by no whole blocks leave them in different steps.
WINDOWS = ((None,), (None, 6), (None, 24), (9,), (20, None, 5), (None, 8, 9), (6, 9), (15, None, 17))
MAX_RUNNING = 5


class Request:
    """What the connector reads of a request, and what the model knows of it."""

    cache_salt = lora_request = kv_transfer_params = prompt_embeds = None
    mm_features, resumable = (), False

    def __init__(self, request_id, tokens, length, skips_reading):
        self.request_id = request_id
        self.all_token_ids, self.tags = [], []
        for token in tokens:
            self.append(token)
        self.length = length
        self.max_tokens = length - len(tokens)
        self.skip_reading_prefix_cache = skips_reading
        self.num_computed_tokens = self.num_preemptions = self.num_in_flight_tokens = 0
        self.status = "waiting"
        # Blocks of each KV group.
        self.tables = []

    def append(self, token):
        self.all_token_ids.append(token)
        self.tags.append(hash((self.tags[-1] if self.tags else 0, token)))

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def block_hashes(self):
        ends = range(BLOCK - 1, self.num_tokens, BLOCK)
        return [(self.tags[end] % (1 << 255)).to_bytes(32, "big") for end in ends]


class Server:
    """Chunks by rank and name; leases by request."""

    def __init__(self):
        self.chunks = {}
        self.leases = {}

    def holds(self, name, ranks):
        return all((rank, name) in self.chunks for rank in range(ranks))

    def evict(self, rng, everything):
        leased = {name for names in self.leases.values() for name in names}
        for key in list(self.chunks):
            if everything or (key[1] not in leased and rng.random() < 0.5):
                del self.chunks[key]


def names_of(prompt, configs, is_tail=False):
    """The names of a prompt's chunks, from block hashes or tokens, with those of the weights."""
    if is_tail:
        hashes = [("tail", prompt[at : at + 32]) for at in range(0, len(prompt), 32)]
    elif isinstance(prompt, bytes):
        hashes = [prompt[at : at + 32] for at in range(0, len(prompt), 32)]
    else:
        hashes = Request("", prompt, 0, False).block_hashes[PER_CHUNK - 1 :: PER_CHUNK]
    return [((configs or {}).get(TAG), name) for name in hashes]


class SchedulerAdapter:
    """Lookups that are answered after some time."""

    chunk_size = CHUNK

    def __init__(self, rng, server, ranks, hash_mode, tails):
        self.rng, self.server, self.ranks = rng, server, ranks
        self.hash_mode, self.healthy, self.tails = hash_mode, True, tails
        self.notices = rng.random() < 0.5
        self.pending, self.found = {}, {}

    def maybe_submit_lookup_request(
        self, request_id, *, token_ids, block_hashes, cache_salt, configs
    ):
        assert (token_ids is None) != (block_hashes is None)
        assert request_id not in self.pending and request_id not in self.found
        prompt, blocks = token_ids, []
        if block_hashes is not None:
            prompt = b"".join(block_hashes[PER_CHUNK - 1 :: PER_CHUNK])
            blocks = names_of(b"".join(block_hashes), configs, is_tail=True) if self.tails else []
        self.pending[request_id] = names_of(prompt, configs), blocks

    def answer(self):
        for request_id in list(self.pending):
            if self.rng.random() < 0.5:
                names, blocks = self.pending.pop(request_id)
                chunks = self.leading(names)
                # Where no chunk is found, a tail is looked for only in prompts without one.
                blocks = blocks if chunks or not names else []
                tail = self.leading(blocks[len(chunks) * PER_CHUNK :][: PER_CHUNK - 1])
                self.found[request_id] = len(chunks) * CHUNK + len(tail) * BLOCK
                self.server.leases[request_id] = chunks + tail

    def leading(self, names):
        return list(takewhile(lambda name: self.server.holds(name, self.ranks), names))

    def check_lookup_result(self, request_id):
        assert request_id in self.pending or request_id in self.found
        return self.found.get(request_id)

    def lookup_tiers(self, request_id):
        return []

    def cleanup_lookup_result(self, request_id):
        self.pending.pop(request_id, None)
        self.found.pop(request_id, None)

    def end_session(self, request_id):
        self.cleanup_lookup_result(request_id)
        self.server.leases.pop(request_id, None)


class WorkerAdapter:
    """Copies that take some time, as `WorkerAdapter` in Rust reports them."""

    num_blocks_per_chunk = PER_CHUNK

    def __init__(self, model, rank, stored_rank):
        self.model, self.rank, self.stored_rank = model, rank, stored_rank
        self.memory = [[POISON] * BLOCK for _ in range(model.blocks)]
        # Stores as [op, what was read of its blocks or none, whether it is being copied].
        self.stores, self.loads = [], []
        self.had_stores, self.named, self.retrieved = set(), set(), set()
        self.failed, self.failed_requests = set(), set()

    def batched_submit_store_requests(self, ops, *, stream=None):
        self.stores += [[op, None] for op in ops]
        self.had_stores |= {op.request_id for op in ops}

    def batched_submit_retrieve_requests(self, ops, *, stream=None):
        self.loads += ops

    def work(self):
        """Carries on with some copies."""
        rng = self.model.rng
        for op in list(self.loads):
            if rng.random() < 0.4:
                self.loads.remove(op)
                self.load(op)
        for store in list(self.stores):
            if rng.random() < 0.4:
                self.carry_on(store)

    def carry_on(self, store):
        op, read = store
        if read is None:
            store[1] = self.read(op)
            return
        self.stores.remove(store)
        assert read == self.read(op), f"blocks of {op.request_id} changed while they were stored"
        if self.model.rng.random() < 0.1:
            return
        unit = BLOCK if op.is_tail else CHUNK
        for at, name in enumerate(self.names(op)):
            chunk = [tags[at * unit : (at + 1) * unit] for tags in read]
            wanted = self.model.held_by(name)
            for tags, window in zip(chunk, self.model.windows, strict=True):
                for token, tag in enumerate(tags):
                    is_needed = window is None or token >= unit - window
                    assert tag == wanted[token] or (tag is None and not is_needed), (
                        f"{op.request_id} stored other data: {tags}"
                    )
            self.model.server.chunks[self.stored_rank, name] = chunk
            self.model.tails += op.is_tail

    def names(self, op):
        prompt = op.token_ids if op.chunk_hashes is None else op.chunk_hashes
        names = names_of(prompt, op.configs, op.is_tail)
        if op.is_tail:
            assert self.model.adapter.tails and op.start % CHUNK == 0
            assert 0 < op.end - op.start == len(names) * BLOCK < CHUNK
            return names
        assert len(names) == op.end // CHUNK
        return names[op.start // CHUNK :]

    def read(self, op):
        """Returns what lies in the blocks of a store, for each group."""
        assert [len(blocks) * BLOCK for blocks in op.block_ids] == (
            [op.end - op.start] * len(self.model.windows)
        )
        return [
            [tag for block in blocks for tag in (self.memory[block] if block else [None] * BLOCK)]
            for blocks in op.block_ids
        ]

    def load(self, op):
        model, skipped = self.model, op.skip_first_n_tokens // BLOCK
        assert op.skip_first_n_tokens % BLOCK == 0
        for block in (block for blocks in op.block_ids for block in blocks[skipped:]):
            assert block == NULL or model.holders[block] == [op.request_id], (
                f"{op.request_id} loads into block {block} of {model.holders[block]}"
            )
        names = self.names(op)
        leased = set(model.server.leases.get(op.request_id, ()))
        has_all = all(
            name in leased and (self.stored_rank, name) in model.server.chunks for name in names
        )
        fails = not has_all or model.rng.random() < 0.1
        if fails:
            self.failed_requests.add(op.request_id)
        for group, blocks in enumerate(op.block_ids):
            for at, block in enumerate(blocks):
                if at < skipped or block == NULL:
                    continue
                if fails:
                    self.failed.add(block)
                    self.memory[block] = ["torn"] * BLOCK
                else:
                    index, start = (at, 0) if op.is_tail else divmod(at, PER_CHUNK)
                    start *= BLOCK
                    chunk = model.server.chunks[self.stored_rank, names[index]]
                    self.memory[block] = chunk[group][start : start + BLOCK]
        self.retrieved.add(op.request_id)
        model.tail_loads += op.is_tail and not fails

    def wait_until_reserved(self, request_ids, timeout):
        return True

    def wait_for_stores(self, request_ids, timeout):
        return self.wait_for_stores_before(dict.fromkeys(request_ids, 1 << 30), timeout)

    def wait_for_stores_before(self, requests, timeout):
        drops = self.model.rng.random() < 0.3
        dropped = 0
        for store in list(self.stores):
            if store[0].start >= requests.get(store[0].request_id, 0):
                continue
            if drops and store[1] is None:
                self.stores.remove(store)
                dropped += 1
                continue
            while store in self.stores:
                self.carry_on(store)
        return dropped == 0

    def get_finished(self, finished):
        self.named |= finished & self.had_stores
        busy = {op.request_id for op, _ in self.stores}
        ended = self.named - busy
        self.named -= ended
        self.had_stores -= ended
        # A request that loads twice in a row is reported when no load is left.
        retrieved = self.retrieved - {op.request_id for op in self.loads}
        self.retrieved -= retrieved
        failed = self.failed_requests & retrieved
        self.failed_requests -= failed
        return ended, retrieved, failed

    def get_block_ids_with_load_errors(self):
        failed, self.failed = self.failed, set()
        return failed


class Model:
    """vLLM: one scheduler and its workers."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.ranks = rng.choice((1, 1, 2))
        # Ranks of latent layers hold the same data, which the first stores.
        is_latent = self.ranks == 2 and rng.random() < 0.5
        self.windows = rng.choice(WINDOWS) if rng.random() < 0.6 else (None,)
        self.fails_by_block = self.windows == (None,)
        # As with asynchronous scheduling: a step's tokens count when the next one was scheduled.
        self.lags = rng.random() < 0.5
        self.blocks = rng.randrange(24, 60) * len(self.windows)
        self.budget = rng.choice((10, 24, 64))
        self.shares = rng.random() < 0.5
        self.server = Server()
        by_hash = rng.random() < 0.7
        stored_ranks = 1 if is_latent else self.ranks
        tails = by_hash and self.fails_by_block and rng.random() < 0.7
        self.adapter = SchedulerAdapter(rng, self.server, stored_ranks, by_hash, tails)
        names = Weights("")
        self.scheduler = SchedulerSide(
            self.adapter,
            chunk_hashes,
            names,
            block_size=BLOCK,
            by_hash=by_hash,
            can_store=True,
            looks_up_early=rng.random() < 0.3,
            windows=self.windows,
        )
        # Number of the weights that compute now, and of those behind each name.
        self.names, self.weights, self.weights_of = names, 0, {None: 0}
        self.workers = [
            WorkerSide(
                WorkerAdapter(self, rank, 0 if is_latent else rank),
                can_store=not is_latent or rank == 0,
            )
            for rank in range(self.ranks)
        ]
        self.prefixes = [[rng.randrange(4) for _ in range(60)] for _ in range(3)]
        # Tokens of requests that have ended.
        self.past = []
        self.requests, self.waiting, self.running = {}, [], []
        self.free = list(range(NULL + 1, self.blocks))
        self.holders = [[] for _ in range(self.blocks)]
        # Blocks that were freed since the workers last computed.
        self.freed = []
        # Block of each finished block hash, for sharing.
        self.cached = {}
        # What each chunk must hold.
        self.expected = {}
        self.loaded, self.failed_loads, self.failed_whole = set(), set(), set()
        self.reset_preempted = []
        self.reports = {"sending": {}, "recving": {}}
        self.tails = self.tail_loads = 0
        self.made = self.loads = self.saves = self.preemptions = self.resets = self.slides = 0

    # The scheduler.

    def add(self, follows=False):
        rng = self.rng
        prefix = rng.choice(self.prefixes)
        tokens = prefix[: rng.randrange(1, len(prefix))]
        if self.past and (follows or rng.random() < 0.3):
            # A further turn, or the same prompt.
            tokens = list(rng.choice(self.past))
        tokens += [rng.randrange(4) for _ in range(rng.randrange(12))]
        # A request must fit.
        fits = (self.blocks - 1) // len(self.windows) * BLOCK
        length = min(len(tokens) + rng.randrange(1, 30), fits)
        request = Request(f"r{self.made}", tokens[: length - 1], length, rng.random() < 0.1)
        self.made += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.on_new_request(request)

    def abort(self):
        alive = [r for r in self.requests.values() if r.status != "finished"]
        if not alive:
            return
        request = self.rng.choice(alive)
        is_loading = request.status == "loading" and request.request_id not in self.loaded
        self.loaded.discard(request.request_id)
        self.failed_loads.discard(request.request_id)
        self.finish(request, is_loading)

    def finish(self, request, is_loading=False):
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        self.past = [*self.past[-5:], request.all_token_ids]
        if request.tables:
            self.slide(request, request.num_computed_tokens)
        kept = self.scheduler.request_finished(request, [list(table) for table in request.tables])
        if not kept and not is_loading:
            self.release(request)

    def release(self, request):
        """Frees a finished request's blocks; vLLM does not know it any more."""
        assert request.status == "finished"
        self.free_blocks(request)
        del self.requests[request.request_id]

    def free_blocks(self, request):
        for table in request.tables:
            for block in table:
                self.free_block(request, block)
        request.tables = []

    def free_block(self, request, block):
        if block == NULL:
            return
        self.holders[block].remove(request.request_id)
        if not self.holders[block]:
            self.free.append(block)
            self.freed.append(block)
            self.cached = {h: b for h, b in self.cached.items() if b != block}

    def slide(self, request, computed):
        """Frees the blocks that each window has left."""
        for table, window in zip(request.tables, self.windows, strict=True):
            gone = self.gone(window, computed - request.num_in_flight_tokens)
            for at, block in enumerate(table[:gone]):
                self.slides += block != NULL
                self.free_block(request, block)
                table[at] = NULL

    def gone(self, window, computed):
        """Blocks at the start that the next token does not need."""
        return 0 if window is None else max(computed - window + 1, 0) // BLOCK

    def allocate(self, request, tokens, shared=(), computed=0):
        """Allocates blocks for the first `tokens` tokens; `shared` are those of the leading blocks that
        there are, of each group, and `computed` the tokens that are not computed here."""
        is_new = not request.tables
        if is_new:
            request.tables = [list(blocks) for blocks in shared or [()] * len(self.windows)]
            for table, window in zip(request.tables, self.windows, strict=True):
                gone = self.gone(window, computed)
                table[:gone] = [NULL] * gone
                for block in filter(None, table):
                    self.holders[block].append(request.request_id)
        else:
            self.slide(request, request.num_computed_tokens)
        needed = -(-tokens // BLOCK)
        lacking = [max(needed - len(table), 0) for table in request.tables]
        if sum(lacking) > len(self.free):
            if is_new:
                self.free_blocks(request)
            return False
        self.rng.shuffle(self.free)
        for table, count in zip(request.tables, lacking, strict=True):
            taken = [self.free.pop() for _ in range(count)]
            for block in taken:
                self.holders[block].append(request.request_id)
            table += taken
        return True

    def preempt(self, request):
        self.running.remove(request)
        self.free_blocks(request)
        request.status = "waiting"
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.preemptions += 1
        self.waiting.insert(0, request)

    def reset(self):
        """New weights; vLLM's own cache is empty then, unless a request loads."""
        if not any(request.status == "loading" for request in self.requests.values()):
            while self.running:
                self.reset_preempted.append(self.running[-1].request_id)
                self.preempt(self.running[-1])
            self.cached.clear()
            # Requests that have loaded wait with their blocks.
            if not any(request.tables for request in self.waiting):
                self.weights += 1
                self.resets += 1
        self.scheduler.reset_cache()
        self.weights_of[self.names.name] = self.weights

    def held_by(self, name):
        """What a chunk with a name holds."""
        weights, tokens = name
        return [(self.weights_of[weights], tag) for tag in self.expected[tokens]]

    def schedule(self):
        budget, scheduled, preempted = self.budget, {}, []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.allocate(request, request.num_computed_tokens + count):
                victim = self.running[-1]
                budget += scheduled.pop(victim.request_id, 0)
                self.preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    break
            else:
                scheduled[request.request_id] = count
                budget -= count
        # vLLM keeps requests that hold blocks in a queue of their own, which goes first.
        waiting = sorted(self.waiting, key=lambda request: not request.tables)
        for request in [] if preempted else waiting:
            if len(self.running) >= MAX_RUNNING or budget == 0:
                break
            count = self.admit(request, budget)
            if count is None:
                break
            if count:
                scheduled[request.request_id] = count
                budget -= count
        tables = {request.request_id: request.tables for request in self.requests.values()}
        preempted += self.reset_preempted
        self.reset_preempted = []
        step = self.scheduler.build_connector_meta(output(scheduled, tables, preempted))
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        for request_id, request in self.requests.items():
            request.num_in_flight_tokens = scheduled.get(request_id, 0) if self.lags else 0
        return scheduled, pickle.loads(pickle.dumps(step))

    def admit(self, request, budget):
        """Returns the tokens that a waiting request computes, or `None` where no block is left."""
        if request.status == "loading":
            if request.request_id not in self.loaded:
                return 0
            self.end_load(request)
        shared, external, is_async = (), 0, False
        computed = request.num_computed_tokens
        if computed == 0:
            shared = self.shared(request)
            computed = len(shared[0]) * BLOCK
            external, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            if external is None:
                return 0
            assert is_async == (external > 0)
            computed += external
        count = 0 if is_async else min(request.num_tokens - computed, budget)
        # A load keeps its blocks without progress: those that hold some must be able to go on.
        if is_async and self.lacking(request) > len(self.free) - sum(
            self.lacking(other) for other in self.waiting if other.tables
        ):
            return None
        if not self.allocate(request, computed + count, shared, computed):
            return None
        tables = [list(table) for table in request.tables]
        self.scheduler.update_state_after_alloc(request, Blocks(*tables), external)
        request.num_computed_tokens = computed
        if is_async:
            request.status = "loading"
            self.loads += 1
            return 0
        request.status = "running"
        self.waiting.remove(request)
        self.running.append(request)
        return count

    def lacking(self, request):
        needed = -(-(request.num_tokens + 1) // BLOCK)
        return sum(needed - len(table) for table in request.tables or [()] * len(self.windows))

    def shared(self, request):
        """The leading blocks that another request holds, of each group; never all of a prompt."""
        names = request.block_hashes[: (request.num_tokens - 1) // BLOCK]
        if not self.shares or request.skip_reading_prefix_cache:
            names = []
        for count in range(len(names), -1, -1):
            found = [
                [self.cached.get((group, name), NULL) for name in names[:count]]
                for group in range(len(self.windows))
            ]
            if all(
                NULL not in blocks[self.gone(window, count * BLOCK) :]
                for blocks, window in zip(found, self.windows, strict=True)
            ):
                return found
        raise AssertionError("no prefix is one")

    def end_load(self, request):
        self.loaded.remove(request.request_id)
        if request.request_id in self.failed_loads:
            self.failed_loads.remove(request.request_id)
            if request.num_computed_tokens == 0:
                self.free_blocks(request)
        self.cache(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = "waiting"

    def cache(self, request):
        whole = request.num_computed_tokens // BLOCK
        for group, table in enumerate(request.tables):
            for name, block in zip(request.block_hashes[:whole], table):
                if block != NULL:
                    self.cached.setdefault((group, name), block)

    def update(self, scheduled, outputs):
        """Takes what the workers report, in vLLM's order."""
        failed = set().union(*(output.failed for output in outputs))
        whole = set().union(*(output.whole for output in outputs))
        for request in self.waiting:
            if request.status != "loading":
                continue
            if request.request_id in whole:
                self.failed_whole.add(request.request_id)
            if not self.fails_by_block:
                assert not failed, "block ids say nothing where there are several groups"
                continue
            (table,) = request.tables
            for at, block in enumerate(table[: -(-request.num_computed_tokens // BLOCK)]):
                if block in failed:
                    request.num_computed_tokens = at * BLOCK
                    self.failed_loads.add(request.request_id)
                    break
        for request_id in scheduled:
            request = self.requests.get(request_id)
            if request is None or request.status != "running":
                continue
            self.cache(request)
            if request.num_computed_tokens == request.num_tokens:
                request.append(self.rng.randrange(4))
                self.expect(request)
                if request.num_tokens >= request.length:
                    self.finish(request)
        recving = self.aggregate("recving", outputs)
        # vLLM looks at these first, when all ranks have named the load.
        for request_id in self.failed_whole.intersection(recving):
            self.failed_whole.remove(request_id)
            if self.requests[request_id].status == "loading":
                self.requests[request_id].num_computed_tokens = 0
                self.failed_loads.add(request_id)
        self.scheduler.update_connector_output(SimpleNamespace(finished_recving=set(recving)))
        for request_id in recving:
            request = self.requests[request_id]
            assert request_id not in self.loaded, f"{request_id} is reported twice"
            if request.status == "loading":
                self.loaded.add(request_id)
            else:
                self.release(request)
        for request_id in self.aggregate("sending", outputs):
            self.saves += 1
            self.release(self.requests[request_id])

    def aggregate(self, kind, outputs):
        """Requests that every worker has reported, in an order that does not depend on hashes."""
        counts, complete = self.reports[kind], []
        for reported in outputs:
            for request_id in sorted(getattr(reported, kind)):
                assert request_id in self.requests, f"{request_id} is reported and not known"
                counts[request_id] = counts.get(request_id, 0) + 1
                if counts[request_id] == self.ranks:
                    del counts[request_id]
                    complete.append(request_id)
        return complete

    def expect(self, request):
        """Notes what the chunks of a request must hold."""
        for at, name in enumerate(request.block_hashes, start=1):
            self.expected["tail", name] = request.tags[(at - 1) * BLOCK : at * BLOCK]
            if at % PER_CHUNK == 0:
                self.expected[name] = request.tags[at * BLOCK - CHUNK : at * BLOCK]

    # The workers.

    def run(self, worker, scheduled, step, freed):
        worker.handle_preemptions(step)
        memory = worker.adapter.memory
        for block in freed:
            memory[block] = [POISON] * BLOCK
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            end = request.num_computed_tokens
            for table, window in zip(request.tables, self.windows, strict=True):
                first = 0 if window is None else max(end - count - window + 1, 0)
                for at in range(first, end):
                    block, offset = table[at // BLOCK], at % BLOCK
                    assert block != NULL, f"{request_id} has no block for token {at}"
                    tag = (self.weights, request.tags[at])
                    if at >= end - count:
                        memory[block][offset] = tag
                    else:
                        assert memory[block][offset] == tag, (
                            f"{request_id} computes with {memory[block][offset]} at token {at}"
                        )
        worker.begin_step(step)
        worker.submit_stores(step)
        worker.adapter.work()
        # As the connector has it.
        sending, recving, whole = worker.get_finished(step)
        failed = worker.adapter.get_block_ids_with_load_errors()
        failed, whole = (failed, set()) if self.fails_by_block else (set(), whole)
        return SimpleNamespace(sending=sending, recving=recving, failed=failed, whole=whole)

    def step(self):
        scheduled, step = self.schedule()
        # Blocks that are freed from here on are overwritten before the next step.
        freed, self.freed = self.freed, []
        outputs = [self.run(worker, scheduled, step, freed) for worker in self.workers]
        self.update(scheduled, outputs)
        self.adapter.answer()
        for worker in self.workers:
            worker.adapter.work()

    def play(self, steps=80):
        rng = self.rng
        for _ in range(steps):
            if rng.random() < 0.4:
                self.add()
                self.expect(list(self.requests.values())[-1])
            if rng.random() < 0.08:
                self.abort()
            if rng.random() < 0.05:
                self.server.evict(rng, rng.random() < 0.3)
            if rng.random() < 0.05:
                self.reset()
            if rng.random() < 0.05:
                self.adapter.healthy = not self.adapter.healthy
            self.step()
        self.drain()
        for _ in range(18):
            self.add(follows=True)
            self.expect(list(self.requests.values())[-1])
            self.step()
            self.step()
        self.drain()
        self.check_idle()

    def drain(self):
        """Goes on until all requests have ended."""
        for _ in range(3000):
            if not self.requests:
                break
            self.step()

    def check_idle(self):
        """Nothing is left of requests that have all ended."""
        assert not self.requests, f"these never end: {list(self.requests)}"
        assert not any(self.holders) and len(self.free) == self.blocks - 1
        assert not self.server.leases, f"leases are left: {self.server.leases}"
        assert not self.scheduler._requests
        assert not self.adapter.pending and not self.adapter.found
        assert not self.reports["sending"] and not self.reports["recving"]
        for worker in self.workers:
            adapter = worker.adapter
            assert not (adapter.loads or adapter.retrieved or adapter.named)
