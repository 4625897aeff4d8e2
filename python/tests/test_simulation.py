"""Both sides of the connector in a model of vLLM, by seeds: LMC_SEED=N replays one."""

import logging
import os
import unittest

from tests.simulation import Model

SEEDS = 200


class Simulation(unittest.TestCase):
    def setUp(self):
        # Each dropped store is a warning.
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)

    def test_no_schedule_of_vllm_and_the_copies_breaks_a_rule(self):
        chosen = os.environ.get("LMC_SEED")
        seeds = range(SEEDS) if chosen is None else [int(chosen)]
        seen = dict.fromkeys(("loads", "saves", "preemptions", "resets", "slides", "tails", "tail_loads"), 0)
        for seed in seeds:
            model = Model(seed)
            try:
                model.play()
            except Exception as error:
                raise AssertionError(f"LMC_SEED={seed}: {error}") from error
            for name in seen:
                seen[name] += getattr(model, name)
        if chosen is None:
            # Else it shows nothing.
            for name, count in seen.items():
                self.assertGreater(count, SEEDS, name)
