"""DeepSpeed, imported once for all ranks of tests: two seconds of each that would import it itself."""

import os
from contextlib import suppress

os.environ["DS_ACCELERATOR"] = "cpu"
with suppress(ImportError):
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.zero.stage3  # noqa: F401
