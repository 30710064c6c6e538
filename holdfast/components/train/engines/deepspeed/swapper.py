"""Weights in swap files: DeepSpeed's swapper, which here keeps no weight in the buffer that it was read into.

DeepSpeed holds a buffer as long as a weight is in use, so that there must be as many as that may be, which depends on
the order of autograd. And a rank that is alone computes with the buffer itself: what activation checkpointing then
remembers of a weight has the numbers of the next one that is read, and nobody notices.
"""

from __future__ import annotations

from typing import Any

import torch


def copy_what_is_read() -> None:
    """Have DeepSpeed's engines, from now on, copy a weight when it has been read, and let go of the buffer."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
        AsyncPartitionedParameterSwapper,
        PartitionedParamStatus,
    )
    from deepspeed.runtime.zero import partition_parameters

    class Swapper(AsyncPartitionedParameterSwapper):
        def __init__(self, config: Any, _: torch.dtype) -> None:
            # DeepSpeed says bf16 on every CPU: `Init._set_dtype` looks at what it is given only where fp16 is supported
            super().__init__(config, torch.bfloat16 if config.bfloat16_config.enabled else torch.float32)

        def synchronize_reads(self) -> None:
            read = list(self.inflight_params)
            super().synchronize_reads()
            for parameter in read:
                numbers = parameter.ds_tensor.data.clone()
                self.remove_partition_and_release_buffers([parameter])
                parameter.ds_tensor.data = numbers
                parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    partition_parameters.AsyncPartitionedParameterSwapper = Swapper
