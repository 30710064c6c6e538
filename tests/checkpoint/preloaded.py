"""DeepSpeed, imported once for all ranks of the tests. This saves each rank an import of two seconds."""

import os
from contextlib import suppress

os.environ["DS_ACCELERATOR"] = "cpu"
with suppress(ImportError):
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.zero.stage3  # noqa: F401
