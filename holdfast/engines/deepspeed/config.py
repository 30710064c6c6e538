"""DeepSpeed's JSON configuration from the spec, for the engine and for `holdfast compile --target deepspeed`."""

from typing import Any

from holdfast.spec.parallel import Parallel
from holdfast.spec.training import Training

SUB_GROUP = 100_000_000  # elements of a rank's state that are in memory together, with state on a disk
BUFFERS = 4  # weights, two moments and gradients of one such group: 16 bytes of host memory per element


def deepspeed_config(
    training: Training, parallel: Parallel, accumulation: int, swap: str | None = None, largest: int | None = None
) -> dict[str, Any]:
    """The configuration for `accumulation` micro-batches per rank and step. `swap` is the rank's folder in
    `parallel.offload_path`. `largest` is the number of elements in its part of the largest weight."""
    optimizer = training.optimizer
    return {
        "train_batch_size": training.global_batch,
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": training.clip_norm or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "torch_adam": True,  # also with host offload: DeepSpeed's CPUAdam has other bits
                "lr": optimizer.learning_rate,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
            },
        },
        "bf16": {"enabled": training.precision == "bf16"},
        "zero_optimization": {
            "stage": int(parallel.strategy.removeprefix("zero")),
            "overlap_comm": False,  # a second stream would make the order of sums random
            "contiguous_gradients": True,
            "round_robin_gradients": False,
        }
        | _offloaded(parallel, swap, largest),
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _offloaded(parallel: Parallel, swap: str | None, largest: int | None) -> dict[str, Any]:
    """The offload settings: state in host memory, pinned for an accelerator, and state on a disk of the node."""
    if parallel.offload == "none":
        return {}
    host = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {"offload_optimizer": host}
    if parallel.offload_path is not None:
        disk = {"device": "nvme", "nvme_path": swap or parallel.offload_path, "pin_memory": True}
        settings = {"offload_optimizer": disk | {"buffer_count": BUFFERS}, "sub_group_size": SUB_GROUP}
        if parallel.offload == "parameters_on_disk":
            # A weight is read when a module needs it, into one buffer (see `swapper`), and freed after it. By default
            # DeepSpeed keeps gathered weights that are used again within a billion elements, which is all of most
            # models.
            read = {"buffer_count": 1} | ({"buffer_size": largest} if largest is not None else {})
            settings["offload_param"] = disk | read | {"max_in_cpu": 0}
            settings |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return settings | ({"offload_param": host} if parallel.offload == "parameters" else {})
