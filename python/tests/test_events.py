"""KV events: which are made of a store, and when vLLM gets them."""

import pickle
import unittest
from types import SimpleNamespace

from lmc.vllm.events import MAX_WAITING, EventSource, EventTally, StoredChunks
from lmc.vllm.scheduler import SchedulerSide
from lmc.vllm.weights import Weights
from lmc.vllm.worker import WorkerSide
from tests import stub
from tests.engine import BLOCK, CHUNK, Adapter, Blocks, Request, chunk_hashes, output

PER_CHUNK = CHUNK // BLOCK


class WorkerAdapter:
    """A worker adapter that remembers its stores; `ended` says what was committed of them."""

    num_blocks_per_chunk = PER_CHUNK

    def __init__(self):
        self.stores, self.ended = [], []

    def batched_submit_store_requests(self, ops, *, stream=None):
        self.stores += ops

    def take_ended_stores(self):
        ended, self.ended = self.ended, []
        return ended


def source():
    return EventSource(BLOCK, lambda found: found[0], lambda *span: [span[1:]] * 9)


def event(**fields):
    return tuple(sorted((name, str(value)) for name, value in fields.items()))


def worker(can_store=True):
    adapter = WorkerAdapter()
    made = []

    def remembered(**fields):
        made.append(fields)
        return event(**fields)

    side = WorkerSide(
        adapter, can_store=can_store, events=StoredChunks(adapter, BLOCK, remembered)
    )
    return side, adapter, made


def begin(side, step):
    """Begins a step and its stores, as vLLM's worker does."""
    side.begin_step(step)
    side.submit_stores(step)


class Described(unittest.TestCase):
    def test_a_store_is_described_by_its_blocks_and_the_one_before(self):
        lora = SimpleNamespace(adapter_id=3, name="lora")
        request = Request("a", list(range(70)), lora_request=lora, session_id="s")
        events = source()
        number, first = events.describe(request, 0, 32, is_tail=False)
        following, second = events.describe(request, 32, 64, is_tail=False)
        self.assertNotEqual(number, following)
        self.assertEqual((first.parent, first.hashes), (None, list(range(8))))
        self.assertEqual((second.parent, second.hashes), (7, list(range(8, 16))))
        self.assertEqual(second.token_ids, list(range(32, 64)))
        self.assertEqual((second.lora_id, second.lora_name), (3, "lora"))
        self.assertEqual(second.session_id, "s")
        self.assertEqual(second.extra_keys[0], (32, 64))

    def test_stores_have_numbers_only_where_events_are_wanted(self):
        for events, wanted in ((None, None), (source(), 0)):
            scheduler = SchedulerSide(
                Adapter(),
                chunk_hashes,
                Weights(""),
                block_size=BLOCK,
                by_hash=True,
                can_store=True,
                events=events,
            )
            request = Request("a", list(range(40)))
            scheduler.get_num_new_matched_tokens(request, 0)
            scheduler.update_state_after_alloc(request, Blocks(list(range(10))), 0)
            step = scheduler.build_connector_meta(output({"a": 40}, {"a": [list(range(10))]}))
            (store,) = step.stores
            self.assertEqual(store.store_number, wanted)
            self.assertEqual(list(step.blocks), [] if wanted is None else [wanted])
            self.assertEqual(pickle.loads(pickle.dumps(step)), step)


class Stored(unittest.TestCase):
    def step(self, *numbers):
        events = source()
        request = Request("a", list(range(100)))
        described = []
        for number in range(max(numbers) + 1):
            request.session_id = str(number)
            described.append(events.describe(request, 16, 64, is_tail=False))
        blocks = {number: blocks for number, blocks in described if number in numbers}
        return SimpleNamespace(stores=list(blocks), loads=[], tails=[], handed_over=[], blocks=blocks)

    def test_each_committed_chunk_is_an_event_of_its_blocks(self):
        side, adapter, made = worker()
        begin(side, self.step(0))
        self.assertEqual(side.take_events(), [])
        adapter.ended = [(0, [0, 2])]
        self.assertEqual(len(side.take_events()), 2)
        first, last = made
        self.assertEqual((first["parent_block_hash"], first["block_hashes"]), (3, [4, 5, 6, 7]))
        self.assertEqual((last["parent_block_hash"], last["block_hashes"]), (11, [12, 13, 14, 15]))
        self.assertEqual(first["token_ids"], list(range(16, 32)))
        self.assertEqual(last["token_ids"], list(range(48, 64)))
        self.assertEqual((first["block_size"], first["session_id"]), (BLOCK, "0"))

    def test_each_block_of_a_tail_is_an_event(self):
        side, adapter, made = worker()
        request = Request("a", list(range(60)))
        number, blocks = source().describe(request, 48, 60, is_tail=True)
        op = SimpleNamespace(store_number=number)
        step = SimpleNamespace(stores=[], loads=[], tails=[op], handed_over=[], blocks={number: blocks})
        begin(side, step)
        self.assertEqual(adapter.stores, [op])
        adapter.ended = [(number, [0, 2])]
        self.assertEqual(len(side.take_events()), 2)
        hashes = [(event["parent_block_hash"], event["block_hashes"]) for event in made]
        self.assertEqual(hashes, [(11, [12]), (13, [14])])
        self.assertEqual(made[1]["token_ids"], list(range(56, 60)))
        self.assertEqual(side._events._submitted, {})

    def test_what_was_not_committed_is_no_event_and_is_not_kept(self):
        side, adapter, _ = worker()
        begin(side, self.step(0, 1))
        adapter.ended = [(0, []), (1, []), (7, [0])]
        self.assertEqual(side.take_events(), [])
        self.assertEqual(side._events._submitted, {})

    def test_a_chunk_is_named_once_a_step(self):
        side, adapter, _ = worker()
        begin(side, self.step(0, 1))
        adapter.ended = [(0, [1]), (1, [1])]
        self.assertEqual(len(side.take_events()), 1)

    def test_a_rank_that_stores_nothing_has_no_events(self):
        side, adapter, _ = worker(can_store=False)
        begin(side, self.step(0))
        adapter.ended = [(0, [0])]
        self.assertEqual((adapter.stores, side.take_events()), ([], []))


class Tally(unittest.TestCase):
    def test_an_event_is_complete_when_every_rank_has_named_it(self):
        tally = EventTally(2, str)
        tally.add(["a", "b"])
        self.assertEqual(tally.take(), [])
        # In another step, and twice in one.
        tally.add(["b", "c", "c"])
        self.assertEqual(tally.take(), ["b", "c"])
        self.assertEqual(tally.take(), [])
        tally.add(["a"])
        self.assertEqual(tally.take(), ["a"])

    def test_ranks_may_store_their_parts_for_different_requests(self):
        tally = EventTally(2, lambda event: event[0])
        tally.add([("chunk", "one session"), ("other", "one session")])
        tally.add([("chunk", "another session")])
        self.assertEqual(tally.take(), [("chunk", "another session")])

    def test_events_that_a_rank_never_names_are_bounded(self):
        tally = EventTally(2, int)
        tally.add(range(MAX_WAITING + 3))
        self.assertEqual(tally.dropped, 3)
        tally.add(range(MAX_WAITING + 3))
        self.assertNotIn(0, tally.take())


class Container(unittest.TestCase):
    def test_it_does_what_vllm_does_with_the_outputs_of_workers(self):
        with stub.vllm():
            from lmc.vllm.kv_events import LmcKVEvents

            first, second = LmcKVEvents(["a", "b"]), LmcKVEvents(["b", "c"])
            self.assertTrue(first)
            # As vLLM's KVOutputAggregator does.
            first.add_events(second.get_all_events())
            first.increment_workers(1)
            self.assertEqual(first.get_number_of_workers(), 2)
            self.assertEqual(sorted(first.get_all_events()), ["a", "b", "b", "c"])
            tally = EventTally(2, str)
            tally.add(first.get_all_events())
            self.assertEqual(tally.take(), ["b"])
            self.assertEqual(first.aggregate().get_all_events(), ["b"])
            self.assertEqual(first.get_number_of_workers(), 1)
            first.clear_events()
            self.assertEqual(first.get_all_events(), [])

    def test_events_are_made_only_where_vllm_publishes_them(self):
        with stub.vllm():
            from lmc.vllm import kv_events

            for config, wanted in (
                (None, False),
                (SimpleNamespace(enable_kv_cache_events=False), False),
                (SimpleNamespace(enable_kv_cache_events=True), True),
            ):
                config = SimpleNamespace(kv_events_config=config)
                self.assertEqual(kv_events.are_wanted(config), wanted)
