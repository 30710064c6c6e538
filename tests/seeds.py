"""The number of repetitions of random drills: HOLDFAST_TEST_SEEDS. CI has 50 minutes and sets fewer."""

import os

SEEDS = int(os.environ.get("HOLDFAST_TEST_SEEDS", "10"))
