"""The scheduler's side, step by step."""

import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

from lmc.vllm.scheduler import SchedulerSide
from lmc.vllm.weights import TAG, Weights
from tests.engine import BLOCK, Adapter, Blocks, Request, chunk_hashes, output


# Blocks of a request that the scheduler does not look at.
NONE = [[]]


def side(adapter, **options):
    options = {"by_hash": True, "can_store": True} | options
    weights = options.pop("weights", Weights(""))
    return SchedulerSide(adapter, chunk_hashes, weights, block_size=BLOCK, **options)


def admit(scheduler, request, computed=0):
    """Asks until the answer is there and allocates the blocks, as vLLM does. Returns the tokens."""
    tokens, is_async = scheduler.get_num_new_matched_tokens(request, computed)
    assert is_async == (tokens > 0)
    blocks = list(range(100, 100 + -(-request.num_tokens // BLOCK)))
    scheduler.update_state_after_alloc(request, Blocks(blocks), tokens)
    request.num_computed_tokens = computed + tokens
    return tokens, blocks


def lookups(adapter):
    return [call for call in adapter.calls if call[0] == "lookup"]


def loaded(scheduler, *ids):
    scheduler.update_connector_output(SimpleNamespace(finished_recving=set(ids)))


class Lookup(unittest.TestCase):
    def test_nothing_is_known_while_the_lookup_is_pending(self):
        adapter = Adapter({"a": None})
        scheduler = side(adapter)
        request = Request("a", list(range(40)))
        for _ in range(3):
            self.assertEqual(scheduler.get_num_new_matched_tokens(request, 0), (None, False))
        self.assertEqual(adapter.named("lookup"), ["a"])
        adapter.found["a"] = 32
        self.assertEqual(scheduler.get_num_new_matched_tokens(request, 0), (32, True))
        self.assertEqual(adapter.named("cleanup"), ["a"])

    def test_a_whole_prompt_lacks_one_token_and_vllms_own_are_taken_off(self):
        for length, found, computed, wanted in (
            (32, 32, 0, 31),
            (33, 32, 0, 32),
            (32, 32, 20, 11),
            (40, 16, 16, 0),
            (40, 16, 24, 0),
            (40, 0, 0, 0),
        ):
            scheduler = side(Adapter({"a": found}))
            request = Request("a", list(range(length)))
            answer = scheduler.get_num_new_matched_tokens(request, computed)
            self.assertEqual(answer, (wanted, wanted > 0), (length, found, computed))

    def test_a_request_that_another_engine_waits_for_keeps_its_session_to_its_end(self):
        prefill, decode = {"lmcache.pd.id": "x"}, {"lmcache.pd.id": "x", "lmcache.pd.wait_ms": 5}
        for params, found, tokens, notices, early in (
            (None, 0, 1, False, 1),
            (None, 16, 1, False, 1),
            (prefill, 0, 1, False, 0),
            (prefill, 16, 1, False, 0),
            (prefill, 16, 2, False, 1),
            ({"lmcache.pd.id": "x" * 257}, 0, 1, False, 1),
            ({"lmcache.pd.id": 5}, 0, 1, False, 1),
            (decode, 0, 1, False, 1),
            (decode, 16, 1, False, 1),
            # The proxy of any may wait for a notice.
            (None, 0, 1, True, 0),
            (None, 16, 1, True, 0),
            (None, 16, 2, True, 1),
            (decode, 16, 1, True, 1),
        ):
            adapter = Adapter({"a": found})
            adapter.notices = notices
            scheduler = side(adapter, can_store=False)
            request = Request("a", list(range(40)), kv_transfer_params=params, max_tokens=tokens)
            _, blocks = admit(scheduler, request)
            loaded(scheduler, *(["a"] if found else []))
            self.assertEqual(len(adapter.named("end")), early, (params, found))
            scheduler.request_finished(request, [blocks])
            self.assertEqual(len(adapter.named("end")), 1, (params, found))

    def test_a_preempted_request_waits_for_no_other_engine(self):
        waits = {"lmcache.pd.id": "x", "lmcache.pd.wait_ms": 5, "lmcache.tag.a": "b"}
        for params, kept in (
            (waits, {"lmcache.tag.a": "b"}),
            ({"lmcache.pd.id": "x"}, {"lmcache.pd.id": "x"}),
        ):
            adapter = Adapter()
            scheduler = side(adapter)
            request = Request("a", list(range(40)), kv_transfer_params=params)
            admit(scheduler, request)
            request.num_preemptions = 1
            admit(scheduler, request)
            asked = [call[2]["configs"] for call in lookups(adapter)]
            self.assertEqual(asked, [params, kept])

    def test_tokens_that_are_loaded_are_counted_by_tier(self):
        tiers = [("dram", 16), ("disk", 16), ("dram", 8)]
        for computed, length, wanted in (
            (0, 48, {"dram": 24, "disk": 16}),
            (0, 40, {"dram": 23, "disk": 16}),
            (16, 48, {"disk": 16, "dram": 8}),
            (20, 32, {"disk": 11}),
        ):
            scheduler = side(Adapter({"a": min(40, length)}, tiers))
            request = Request("a", list(range(length)))
            tokens, _ = admit(scheduler, request, computed)
            self.assertEqual(scheduler.tiers_of("a", tokens), wanted, (computed, length))
        self.assertEqual(side(Adapter()).tiers_of("b", 8), {})

    def test_a_request_is_named_by_hashes_or_by_tokens(self):
        for by_hash, is_known in ((True, True), (True, False), (False, True)):
            adapter = Adapter({"a": 16})
            adapter.hash_mode = is_known
            request = Request("a", list(range(40)))
            scheduler = side(adapter, by_hash=by_hash)
            admit(scheduler, request)
            (_, _, named), *_ = adapter.calls
            (load,) = scheduler.build_connector_meta(output({}, {})).loads
            if by_hash and is_known:
                self.assertEqual(
                    (named["token_ids"], named["block_hashes"]), (None, request.block_hashes)
                )
                self.assertEqual((load.token_ids, load.chunk_hashes), (None, bytes([3]) * 32))
            else:
                self.assertEqual(
                    (named["token_ids"], named["block_hashes"]), (list(range(40)), None)
                )
                self.assertEqual((load.token_ids, load.chunk_hashes), (list(range(16)), None))

    def test_token_mode_refuses_what_tokens_do_not_name(self):
        for by_hash in (True, False):
            for extra in (
                {"mm_features": [object()]},
                {"prompt_embeds": object()},
                {"resumable": True},
            ):
                adapter = Adapter({"a": 32})
                scheduler = side(adapter, by_hash=by_hash)
                request = Request("a", list(range(40)), **extra)
                scheduler.on_new_request(request)
                is_refused = not by_hash or "resumable" in extra
                tokens, blocks = admit(scheduler, request)
                self.assertEqual(tokens, 0 if is_refused else 32)
                self.assertEqual(scheduler.counts["refused_requests"], int(is_refused))
                request.num_computed_tokens = 32
                step = scheduler.build_connector_meta(output({"a": 20}, {"a": [blocks]}))
                self.assertEqual((step.stores, scheduler.request_finished(request, NONE)), ([], False))

    def test_a_request_whose_adapter_has_no_name_is_refused_and_counted_once(self):
        lora = SimpleNamespace(
            lora_name="name", lora_path="/absent", lora_int_id=1, load_inplace=False
        )
        for is_counted_at_once in (True, False):
            adapter = Adapter({"a": 32})
            scheduler = side(adapter)
            request = Request("a", list(range(40)), lora_request=lora)
            with self.assertLogs("vllm.lmc", "WARNING"):
                if is_counted_at_once:
                    scheduler.on_new_request(request)
                    self.assertEqual(scheduler.counts["refused_requests"], 1)
                for _ in range(3):
                    answer = scheduler.get_num_new_matched_tokens(request, 0)
                    self.assertEqual(answer, (0, False))
            self.assertEqual(scheduler.counts["refused_requests"], 1)
            tokens, blocks = admit(scheduler, request)
            step = scheduler.build_connector_meta(output({"a": 40}, {"a": [blocks]}))
            self.assertEqual((step.stores, adapter.calls), ([], []))
            self.assertFalse(scheduler.request_finished(request, NONE))
            self.assertEqual(scheduler._refused, set())

    def test_a_running_request_stores_nothing_more_when_its_adapter_changed(self):
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder, "adapter_model.safetensors")
            weights.write_bytes(b"first")

            def lora(number):
                return SimpleNamespace(
                    lora_name="name", lora_path=folder, lora_int_id=number, load_inplace=False
                )

            scheduler = side(Adapter())
            running = Request("a", list(range(64)), lora_request=lora(1))
            _, blocks = admit(scheduler, running)
            step = scheduler.build_connector_meta(output({"a": 32}, {"a": [blocks]}))
            self.assertEqual([store.end for store in step.stores], [32])
            running.num_computed_tokens = 32
            weights.write_bytes(b"second")
            with self.assertLogs("vllm.lmc", "WARNING"):
                scheduler.on_new_request(Request("b", list(range(40)), lora_request=lora(2)))
            step = scheduler.build_connector_meta(output({"a": 32}, {"a": [blocks]}))
            self.assertEqual(step.stores, [])
            # Nor is it looked up again when it was preempted.
            running.num_preemptions = 1
            self.assertEqual(scheduler.get_num_new_matched_tokens(running, 0), (0, False))
            # The worker knows its first store.
            self.assertTrue(scheduler.request_finished(running, NONE))

    def test_a_request_is_looked_up_when_it_arrives_where_that_is_wanted(self):
        for is_early, wanted in ((False, []), (True, ["a"])):
            adapter = Adapter({"a": 32})
            scheduler = side(adapter, looks_up_early=is_early)
            request = Request("a", list(range(40)))
            scheduler.on_new_request(request)
            self.assertEqual(adapter.named("lookup"), wanted)
            self.assertEqual(admit(scheduler, request)[0], 32)
            self.assertEqual(adapter.named("lookup"), ["a"])
            scheduler.on_new_request(Request("b", list(range(40))))
            self.assertFalse(scheduler.request_finished(Request("b", []), NONE))
            self.assertEqual(adapter.named("end"), wanted and ["b"])

    def test_requests_that_read_no_cache_store_all_the_same(self):
        adapter = Adapter({"a": 32})
        scheduler = side(adapter)
        request = Request("a", list(range(40)), skip_reading_prefix_cache=True)
        tokens, blocks = admit(scheduler, request)
        self.assertEqual((tokens, adapter.calls), (0, []))
        (store,) = scheduler.build_connector_meta(output({"a": 40}, {"a": [blocks]})).stores
        self.assertEqual((store.start, store.end), (0, 32))

    def test_without_a_server_nothing_is_asked_or_stored(self):
        adapter = Adapter()
        adapter.chunk_size = 0
        scheduler = side(adapter)
        request = Request("a", list(range(40)))
        tokens, blocks = admit(scheduler, request)
        step = scheduler.build_connector_meta(output({"a": 40}, {"a": [blocks]}))
        self.assertEqual((tokens, step.stores, adapter.calls), (0, [], []))


class Load(unittest.TestCase):
    def test_shared_blocks_are_skipped(self):
        scheduler = side(Adapter({"a": 48}))
        request = Request("a", list(range(60)))
        self.assertEqual(admit(scheduler, request, computed=20)[0], 28)
        (load,) = scheduler.build_connector_meta(output({}, {})).loads
        self.assertEqual((load.start, load.end, load.skip_first_n_tokens), (16, 48, 4))
        self.assertEqual(load.block_ids, [list(range(104, 112))])
        self.assertEqual(scheduler.build_connector_meta(output({}, {})).loads, [])

    def test_leases_go_back_when_the_load_ends_or_is_not_needed(self):
        adapter = Adapter({"a": 16, "b": 16})
        scheduler = side(adapter)
        first, second = Request("a", list(range(20))), Request("b", list(range(20)))
        admit(scheduler, first)
        admit(scheduler, second, computed=16)
        self.assertEqual(adapter.named("end"), ["b"])
        loaded(scheduler, "a")
        self.assertEqual(adapter.named("end"), ["b", "a"])
        for request in (first, second):
            scheduler.request_finished(request, NONE)
        self.assertEqual(adapter.named("end"), ["b", "a"])

    def test_another_connector_may_load_instead(self):
        adapter = Adapter({"a": 32})
        scheduler = side(adapter)
        request = Request("a", list(range(60)))
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, Blocks(list(range(15))), 0)
        self.assertEqual(scheduler.build_connector_meta(output({}, {})).loads, [])
        self.assertEqual(adapter.named("end"), ["a"])

    def test_what_failed_to_load_is_stored_again(self):
        for kept, wanted in ((32, 32), (20, 16), (0, 0)):
            scheduler = side(Adapter({"a": 32}))
            request = Request("a", list(range(64)))
            _, blocks = admit(scheduler, request)
            request.num_computed_tokens = kept
            loaded(scheduler, "a")
            step = scheduler.build_connector_meta(output({"a": 64 - kept}, {"a": [blocks]}))
            (store,) = step.stores
            self.assertEqual((store.start, store.end), (wanted, 64), kept)

    def test_a_whole_prompt_that_was_loaded_is_not_stored_again(self):
        scheduler = side(Adapter({"a": 32}))
        request = Request("a", list(range(32)))
        _, blocks = admit(scheduler, request)
        loaded(scheduler, "a")
        step = scheduler.build_connector_meta(output({"a": 1}, {"a": [blocks]}))
        self.assertEqual(step.stores, [])

    def test_a_load_that_failed_whole_is_not_tried_again(self):
        adapter = Adapter({"a": 32})
        scheduler = side(adapter)
        request = Request("a", list(range(40)))
        admit(scheduler, request)
        request.num_computed_tokens = 0
        loaded(scheduler, "a")
        self.assertEqual(scheduler.get_num_new_matched_tokens(request, 0), (0, False))
        self.assertEqual(adapter.named("lookup"), ["a"])

    def test_blocks_of_a_request_aborted_while_loading_wait_for_the_load_alone(self):
        scheduler = side(Adapter({"a": 16}))
        request = Request("a", list(range(64)))
        _, blocks = admit(scheduler, request)
        loaded(scheduler, "a")
        scheduler.build_connector_meta(output({"a": 48}, {"a": [blocks]}))
        # It has stored, is preempted, and loads again when it is aborted.
        request.num_preemptions, request.num_computed_tokens = 1, 0
        admit(scheduler, request)
        self.assertFalse(scheduler.request_finished(request, NONE))
        self.assertEqual(scheduler.build_connector_meta(output({}, {})).finished, set())
        # vLLM reports the load afterwards.
        loaded(scheduler, "a")


class Store(unittest.TestCase):
    def test_chunks_are_stored_as_they_become_complete(self):
        scheduler = side(Adapter())
        request = Request("a", list(range(40)))
        _, blocks = admit(scheduler, request)
        stores = []
        for scheduled in (10, 10, 20):
            step = scheduler.build_connector_meta(output({"a": scheduled}, {"a": [blocks]}))
            stores += [(store.start, store.end, store.block_ids) for store in step.stores]
            request.num_computed_tokens += scheduled
        self.assertEqual(stores, [(0, 16, [blocks[:4]]), (16, 32, [blocks[4:8]])])

    def test_generated_tokens_are_stored_and_draft_tokens_are_not(self):
        for volatile, wanted in ((0, 48), (3, None)):
            scheduler = side(Adapter(), volatile_tokens=volatile)
            request = Request("a", list(range(47)))
            _, blocks = admit(scheduler, request)
            scheduler.build_connector_meta(output({"a": 47}, {"a": [blocks]}))
            request.num_computed_tokens = 47
            # Five tokens are scheduled of which four are drafts.
            request.all_token_ids.append(47)
            step = scheduler.build_connector_meta(output({"a": 5}, {"a": [blocks]}))
            self.assertEqual([store.end for store in step.stores], [wanted] if wanted else [])

    def test_what_vllm_had_itself_is_stored_and_what_the_server_had_is_not(self):
        scheduler = side(Adapter({"a": 16}))
        request = Request("a", list(range(60)))
        _, blocks = admit(scheduler, request, computed=36)
        step = scheduler.build_connector_meta(output({"a": 24}, {"a": [blocks]}))
        self.assertEqual([(store.start, store.end) for store in step.stores], [(16, 48)])

    def test_consumers_store_nothing_and_neither_does_anyone_without_a_server(self):
        for can_store, is_healthy in ((False, True), (True, False)):
            adapter = Adapter()
            adapter.healthy = is_healthy
            scheduler = side(adapter, can_store=can_store)
            request = Request("a", list(range(40)))
            _, blocks = admit(scheduler, request)
            step = scheduler.build_connector_meta(output({"a": 40}, {"a": [blocks]}))
            self.assertEqual((step.stores, scheduler.request_finished(request, NONE)), ([], False))

    def test_blocks_are_kept_for_a_request_that_has_stored(self):
        adapter = Adapter()
        scheduler = side(adapter)
        stores, small = Request("a", list(range(40))), Request("b", list(range(10)))
        tables = {request.request_id: [admit(scheduler, request)[1]] for request in (stores, small)}
        scheduler.build_connector_meta(output({"a": 40, "b": 10}, tables))
        self.assertTrue(scheduler.request_finished(stores, NONE))
        self.assertFalse(scheduler.request_finished(small, NONE))
        self.assertEqual(scheduler.build_connector_meta(output({}, {})).finished, {"a"})
        self.assertEqual(scheduler.build_connector_meta(output({}, {})).finished, set())

    def test_a_request_that_is_aborted_before_its_answer_leaves_nothing(self):
        adapter = Adapter({"a": None})
        scheduler = side(adapter)
        request = Request("a", list(range(40)))
        scheduler.get_num_new_matched_tokens(request, 0)
        self.assertFalse(scheduler.request_finished(request, NONE))
        self.assertEqual(adapter.calls[1:], [("cleanup", "a"), ("end", "a")])
        self.assertFalse(scheduler.request_finished(request, NONE))


class Window(unittest.TestCase):
    """Two KV groups, of which the second looks back 8 tokens."""

    def test_workers_wait_for_stores_of_blocks_that_a_window_leaves(self):
        scheduler = side(Adapter(), windows=(None, 8))
        request = Request("a", list(range(64)))
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, Blocks(), 0)
        freed = []
        for computed, in_flight, scheduled in (
            (0, 0, 32),
            # What is in flight may need its window yet.
            (32, 32, 16),
            (48, 16, 8),
            # Only blocks that no store reads.
            (56, 0, 1),
            (57, 0, 1),
        ):
            request.num_computed_tokens, request.num_in_flight_tokens = computed, in_flight
            tables = [list(range(1, 17)), list(range(20, 36))]
            step = scheduler.build_connector_meta(output({"a": scheduled}, {"a": tables}))
            freed.append((step.freed, [store.end for store in step.stores]))
        self.assertEqual(
            freed, [({}, [32]), ({}, [48]), ({"a": 24}, []), ({"a": 48}, []), ({}, [])]
        )

    def test_windows_that_leave_a_block_in_different_steps_are_each_waited_for(self):
        scheduler = side(Adapter(), windows=(8, 9))
        request = Request("a", list(range(64)))
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, Blocks(), 0)
        tables = {"a": [list(range(1, 17)), list(range(20, 36))]}
        freed = []
        for computed in (0, 32, 33, 35, 36):
            request.num_computed_tokens = computed
            freed.append(scheduler.build_connector_meta(output({"a": 32}, tables)).freed)
        self.assertEqual(freed, [{}, {"a": 24}, {}, {"a": 28}, {"a": 28}])

    def test_workers_wait_for_stores_of_a_request_that_ends(self):
        for computed, wanted in ((8, {}), (32, {"a": 24})):
            scheduler = side(Adapter(), windows=(8,))
            request = Request("a", list(range(40)))
            scheduler.get_num_new_matched_tokens(request, 0)
            scheduler.update_state_after_alloc(request, Blocks(), 0)
            tables = {"a": [list(range(1, 11))]}
            scheduler.build_connector_meta(output({"a": 32}, tables))
            # vLLM takes blocks when the request ends, and does not schedule it again.
            request.num_computed_tokens = computed
            self.assertTrue(scheduler.request_finished(request, NONE))
            for expected in (wanted, {}):
                step = scheduler.build_connector_meta(output({}, {}))
                self.assertEqual(step.freed, expected)

    def test_a_chunk_is_stored_if_what_loads_need_of_it_is_there(self):
        for gone, wanted in ((0, 0), (2, 0), (3, 16), (6, 16), (7, 32), (10, 32), (11, None)):
            adapter = Adapter()
            adapter.healthy = False
            scheduler = side(adapter, windows=(None, 8))
            request = Request("a", list(range(48)))
            scheduler.get_num_new_matched_tokens(request, 0)
            scheduler.update_state_after_alloc(request, Blocks(), 0)
            tables = [list(range(1, 13)), [0] * gone + list(range(20, 32 - gone))]
            # The server comes back when the last chunk is complete.
            adapter.healthy, request.num_computed_tokens = True, 32
            stores = scheduler.build_connector_meta(output({"a": 16}, {"a": tables})).stores
            self.assertEqual([store.start for store in stores], [] if wanted is None else [wanted])
            self.assertEqual(scheduler.counts["unstorable_tokens"], 48 if wanted is None else wanted)
            for store in stores:
                self.assertEqual(store.block_ids, [table[wanted // BLOCK :] for table in tables])

    def test_a_load_is_of_all_tokens_that_were_found_or_of_none(self):
        for taken, is_right in ((32, True), (0, True), (31, False), (16, False)):
            scheduler = side(Adapter({"a": 32}), windows=(None, 8))
            request = Request("a", list(range(40)))
            self.assertEqual(scheduler.get_num_new_matched_tokens(request, 0), (32, True))
            tables = Blocks(list(range(1, 9)), [0] * 6 + [9, 10])
            if not is_right:
                with self.assertRaises(RuntimeError):
                    scheduler.update_state_after_alloc(request, tables, taken)
                continue
            scheduler.update_state_after_alloc(request, tables, taken)
            loads = scheduler.build_connector_meta(output({}, {})).loads
            wanted = [list(tables.tables)] if taken else []
            self.assertEqual([load.block_ids for load in loads], wanted)


class Tail(unittest.TestCase):
    def test_the_blocks_after_the_last_whole_chunk_are_stored_when_a_request_ends(self):
        for tokens, computed, stored, wanted in (
            (46, 45, 32, [(32, 44)]),
            # The last token is not computed, also where a step that runs ahead counts it.
            (48, 47, 32, [(32, 44)]),
            (48, 48, 32, [(32, 44)]),
            (45, 44, 32, [(32, 44)]),
            # Without a whole block, and without a whole chunk.
            (36, 35, 32, []),
            (33, 32, 32, []),
            (10, 9, 0, [(0, 8)]),
            (4, 3, 0, []),
            # An aborted prefill.
            (46, 39, 32, [(32, 36)]),
            (46, 0, 0, []),
        ):
            adapter = Adapter(tails=True)
            request = Request("a", list(range(tokens)))
            scheduler = side(adapter)
            admit(scheduler, request)
            request.num_computed_tokens = computed
            state = scheduler._requests["a"]
            state.stored, state.has_stored = stored, stored > 0
            is_kept = scheduler.request_finished(request, [list(range(50, 62))])
            step = scheduler.build_connector_meta(output({}, {}))
            found = [(op.start, op.end) for op in step.tails]
            self.assertEqual((found, is_kept), (wanted, stored > 0 or bool(wanted)), tokens)
            for op in step.tails:
                first, last = op.start // BLOCK, op.end // BLOCK
                self.assertTrue(op.is_tail)
                self.assertEqual(op.block_ids, [list(range(50 + first, 50 + last))])
                hashes = b"".join(request.block_hashes[first:last])
                self.assertEqual((op.chunk_hashes, op.token_ids), (hashes, None))
            self.assertEqual(scheduler.build_connector_meta(output({}, {})).tails, [])

    def test_no_tail_is_stored_that_could_not_be_found_or_is_not_known(self):
        def tails(tokens=46, *, found=0, blocks=12, change=None, tails=True, **options):
            adapter = Adapter({"a": found}, tails=tails)
            request = Request("a", list(range(tokens)))
            scheduler = side(adapter, **options)
            admit(scheduler, request)
            loaded(scheduler, "a")
            request.num_computed_tokens = tokens - 1
            state = scheduler._requests["a"]
            state.stored = 32
            if change is not None:
                change(adapter, request, state)
            scheduler.request_finished(request, [list(range(blocks))])
            step = scheduler.build_connector_meta(output({}, {}))
            return [(op.start, op.end) for op in step.tails]

        def changed(which, name, value):
            def change(*parts):
                setattr(parts[which], name, value)

            return change

        self.assertEqual(tails(), [(32, 44)])
        self.assertEqual(tails(found=40), [(32, 44)])
        self.assertEqual(tails(found=44), [], "it was found")
        self.assertEqual(tails(tails=False), [])
        self.assertEqual(tails(by_hash=False), [], "tokens name no blocks")
        self.assertEqual(tails(can_store=False), [])
        self.assertEqual(tails(blocks=10), [], "the blocks are gone")
        self.assertEqual(tails(volatile_tokens=3), [(32, 40)])
        # A chunk that no step has stored is stored with it.
        self.assertEqual(tails(change=changed(2, "stored", 16)), [(16, 32), (32, 44)])
        self.assertEqual(tails(change=changed(1, "num_preemptions", 1)), [])
        self.assertEqual(tails(change=changed(2, "is_mixed", True)), [])
        self.assertEqual(tails(change=changed(2, "is_loading", True)), [])
        self.assertEqual(tails(change=changed(0, "healthy", False)), [])

    def test_a_tail_has_its_blocks_described_where_events_are_wanted(self):
        events = SimpleNamespace(describe=lambda *span, is_tail: (7, (span[1:], is_tail)))
        scheduler = side(Adapter(tails=True), events=events)
        request = Request("a", list(range(10)))
        admit(scheduler, request)
        request.num_computed_tokens = 9
        scheduler.request_finished(request, [[1, 2, 3]])
        step = scheduler.build_connector_meta(output({}, {}))
        self.assertEqual([op.store_number for op in step.tails], [7])
        self.assertEqual(step.blocks, {7: ((0, 8), True)})

    def test_chunks_and_tail_are_loaded_by_one_request(self):
        for computed, found, wanted in (
            (0, 44, [(0, 32, 0), (32, 44, 0)]),
            (0, 32, [(0, 32, 0)]),
            (0, 8, [(0, 8, 0)]),
            (20, 44, [(16, 32, 4), (32, 44, 0)]),
            (32, 44, [(32, 44, 0)]),
            (36, 44, [(32, 44, 4)]),
        ):
            scheduler = side(Adapter({"a": found}, tails=True))
            request = Request("a", list(range(46)))
            tokens, _ = admit(scheduler, request, computed)
            self.assertEqual(tokens, found - computed)
            loads = scheduler.build_connector_meta(output({}, {})).loads
            made = [(op.start, op.end, op.skip_first_n_tokens) for op in loads]
            self.assertEqual(made, wanted)
            self.assertEqual([op.is_tail for op in loads], [op.end % 16 > 0 for op in loads])
            # A chunk that becomes whole is stored as such.
            self.assertEqual(scheduler._requests["a"].stored, found // 16 * 16)

    def test_a_tail_whose_load_failed_is_stored_again(self):
        for kept, wanted in ((44, []), (36, [(32, 44)]), (0, [(0, 32), (32, 44)])):
            scheduler = side(Adapter({"a": 44}, tails=True))
            request = Request("a", list(range(46)))
            admit(scheduler, request)
            scheduler.build_connector_meta(output({}, {}))
            # What failed is computed again.
            request.num_computed_tokens = kept
            loaded(scheduler, "a")
            request.num_computed_tokens = 45
            scheduler.request_finished(request, [list(range(12))])
            step = scheduler.build_connector_meta(output({}, {}))
            self.assertEqual([(op.start, op.end) for op in step.tails], wanted, kept)

    def test_what_is_not_worth_a_load_is_computed(self):
        for found, computed, wanted in ((12, 0, 12), (8, 0, 0), (32, 24, 0), (44, 24, 20)):
            adapter = Adapter({"a": found}, tails=True)
            scheduler = side(adapter, min_load_tokens=12)
            tokens, _ = admit(scheduler, Request("a", list(range(46))), computed)
            self.assertEqual(tokens, wanted, (found, computed))
            self.assertEqual(adapter.named("end"), [] if wanted else ["a"])
        adapter = Adapter(tails=True)
        admit(side(adapter, min_load_tokens=12), Request("a", list(range(11))))
        self.assertEqual(adapter.named("lookup"), [])

    def test_a_chunk_that_the_last_step_has_filled_is_stored_at_the_end(self):
        for by_hash in (True, False):
            scheduler = side(Adapter(), by_hash=by_hash)
            request = Request("a", list(range(33)))
            admit(scheduler, request)
            request.num_computed_tokens = 32
            self.assertTrue(scheduler.request_finished(request, [list(range(8))]))
            (op,) = scheduler.build_connector_meta(output({}, {})).tails
            self.assertEqual((op.start, op.end, op.is_tail), (0, 32, False))

    def test_a_prompt_without_a_whole_chunk_is_looked_up_if_it_has_a_block(self):
        for tokens, tails, wanted in ((10, True, ["a"]), (3, True, []), (10, False, [])):
            adapter = Adapter(tails=tails)
            admit(side(adapter), Request("a", list(range(tokens))))
            self.assertEqual(adapter.named("lookup"), wanted)

    def test_the_tail_of_a_prompt_for_one_token_is_stored_with_its_chunks(self):
        adapter = Adapter(tails=True)
        scheduler = side(adapter)
        request = Request("a", list(range(46)), max_tokens=1)
        _, table = admit(scheduler, request)
        step = scheduler.build_connector_meta(output({"a": 40}, {"a": [table]}))
        self.assertEqual([(op.start, op.end) for op in step.stores], [(0, 32)])
        request.num_computed_tokens = 40
        step = scheduler.build_connector_meta(output({"a": 6}, {"a": [table]}))
        self.assertEqual([(op.start, op.end) for op in step.stores], [(32, 44)])
        self.assertEqual(step.handed_over, ["a"])
        request.num_computed_tokens = 46
        request.all_token_ids.append(1)
        self.assertTrue(scheduler.request_finished(request, [table]))
        self.assertEqual(scheduler.build_connector_meta(output({}, {})).tails, [])


class Reset(unittest.TestCase):
    def tags(self, adapter):
        return [(named["configs"] or {}).get(TAG) for _, _, named in lookups(adapter)]

    def test_a_request_that_waits_is_looked_up_again_under_the_new_name(self):
        for found in (None, 32):
            adapter = Adapter({"a": found})
            scheduler = side(adapter)
            request = Request("a", list(range(40)))
            scheduler.get_num_new_matched_tokens(request, 0)
            scheduler.reset_cache()
            adapter.found["a"] = 0
            # What was found is of the weights before.
            self.assertEqual(admit(scheduler, request)[0], 0)
            before, after = self.tags(adapter)
            self.assertIsNone(before)
            self.assertTrue(after.startswith("reset-"), after)
            self.assertIn("a", adapter.named("cleanup"))

    def test_a_request_that_runs_stores_nothing_more_until_it_starts_again(self):
        adapter = Adapter()
        scheduler = side(adapter)
        request = Request("a", list(range(64)))
        _, blocks = admit(scheduler, request)
        step = scheduler.build_connector_meta(output({"a": 32}, {"a": [blocks]}))
        self.assertEqual(len(step.stores), 1)
        request.num_computed_tokens = 32
        scheduler.reset_cache()
        step = scheduler.build_connector_meta(output({"a": 32}, {"a": [blocks]}))
        self.assertEqual(step.stores, [])
        request.num_preemptions, request.num_computed_tokens = 1, 0
        _, blocks = admit(scheduler, request)
        step = scheduler.build_connector_meta(output({"a": 64}, {"a": [blocks]}, ["a"]))
        self.assertEqual(step.preempted, ["a"], "the store before may still read its blocks")
        (store,) = step.stores
        self.assertEqual((store.start, store.end), (0, 64))
        self.assertEqual(store.configs[TAG], self.tags(adapter)[-1])


class Preemption(unittest.TestCase):
    def test_workers_wait_for_the_stores_of_preempted_requests(self):
        scheduler = side(Adapter())
        stores, small = Request("a", list(range(40))), Request("b", list(range(10)))
        tables = {request.request_id: [admit(scheduler, request)[1]] for request in (stores, small)}
        scheduler.build_connector_meta(output({"a": 40, "b": 10}, tables))
        step = scheduler.build_connector_meta(output({}, {}, preempted=("a", "b", "unknown")))
        self.assertEqual(step.preempted, ["a"])

    def test_a_preempted_request_is_looked_up_and_loaded_again(self):
        adapter = Adapter({"a": 0})
        scheduler = side(adapter)
        request = Request("a", list(range(64)))
        _, blocks = admit(scheduler, request)
        scheduler.build_connector_meta(output({"a": 40}, {"a": [blocks]}))
        request.num_preemptions, request.num_computed_tokens = 1, 0
        adapter.found["a"] = 32
        self.assertEqual(admit(scheduler, request)[0], 32)
        self.assertEqual(adapter.named("lookup"), ["a", "a"])
        loaded(scheduler, "a")
        moved = [block + 50 for block in blocks]
        (store,) = scheduler.build_connector_meta(output({"a": 32}, {"a": [moved]})).stores
        self.assertEqual((store.start, store.block_ids), (32, [moved[8:16]]))
        # The earlier stores count: a worker that knows them reports the request.
        self.assertTrue(scheduler.request_finished(request, NONE))
