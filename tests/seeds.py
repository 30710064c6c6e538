"""How often drills repeat what chance decides: HOLDFAST_TEST_SEEDS. CI, which has 50 minutes, asks for fewer."""

import os

SEEDS = int(os.environ.get("HOLDFAST_TEST_SEEDS", "10"))
