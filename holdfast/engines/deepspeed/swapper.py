"""Swapper for weights on disk: DeepSpeed's, changed so that no weight stays in the buffer that it was read into.

DeepSpeed holds a buffer while a weight is in use. The number of buffers then depends on the order of autograd. A single
rank also computes with the buffer itself. Activation checkpointing would then silently see the numbers of the weight
that was read next.
"""

from typing import Any

import torch


def copy_what_is_read() -> None:
    """Make DeepSpeed's engines copy each weight after reading it, and release the buffer."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
        AsyncPartitionedParameterSwapper,
        PartitionedParamStatus,
    )
    from deepspeed.runtime.zero import partition_parameters

    class Swapper(AsyncPartitionedParameterSwapper):
        def __init__(self, config: Any, _: torch.dtype) -> None:
            # DeepSpeed passes bf16 on every CPU: `Init._set_dtype` checks its argument only where fp16 is supported
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
