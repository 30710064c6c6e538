"""The number of repetitions of random drills: HOLDFAST_TEST_SEEDS. CI has 50 minutes and sets fewer."""

import os

import pytest

SEEDS = int(os.environ.get("HOLDFAST_TEST_SEEDS", "10"))

FEW = SEEDS < 5  # whether drills are left out whose promise a shorter drill has, too
in_full = pytest.mark.skipif(FEW, reason="a shorter drill has its promise: HOLDFAST_TEST_SEEDS is less than 5")
