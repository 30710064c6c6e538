"""The DeepSpeed engine: ZeRO 1, 2 and 3 behind the same interface, with its configuration derived from the spec.

State crosses the seam whole: each tensor is gathered, and written by one rank. Names and values are those of the torch
engine, so a run can change engines at a checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.components.checkpoint import TensorBox
from holdfast.components.model.decoder import Decoder
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.device import local_device
from holdfast.components.train.engine import StepOutput
from holdfast.components.train.engines.layout import share_out
from holdfast.components.train.engines.loss import counted_tokens, micro_batches
from holdfast.components.train.engines.torch.engine import decay_groups
from holdfast.components.train.weights import MOMENTS

log = logging.getLogger("holdfast.train")


def deepspeed_config(spec: Assignment) -> dict[str, Any]:
    """DeepSpeed's JSON for a spec."""
    optimizer = spec.training.optimizer
    return {
        "train_batch_size": spec.training.global_batch,
        "train_micro_batch_size_per_gpu": spec.training.micro_batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": spec.training.clip_norm or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "torch_adam": True,
                "lr": optimizer.learning_rate,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
            },
        },
        "bf16": {"enabled": spec.training.precision == "bf16"},
        "zero_optimization": {
            "stage": int(spec.parallel.strategy.removeprefix("zero")),
            "overlap_comm": False,  # a second stream would make the order of sums a matter of luck
            "contiguous_gradients": True,
            "round_robin_gradients": False,
        },
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def load_shared_memory_collectives() -> None:
    """Build, if need be, and load DeepSpeed's collectives for CPUs, one rank of a node after another.

    torch guards the building by a file that a rank which is killed leaves behind, and all later ones would wait for it
    without end. Under a lock of ours, which the kernel takes from the dead, such a file is nobody's.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not builder.is_compatible():
        return
    version = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    root = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(get_default_build_root()) / version)))
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{builder.name}.holdfast.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (root / builder.name / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)


class DeepSpeedEngine:
    """See `Engine`."""

    def __init__(self, spec: Assignment, vocabulary: int, end_of_text: int) -> None:
        self._spec = spec
        self._device = local_device(spec.accelerator)
        if self._device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if self._device.type == "cpu":
            load_shared_memory_collectives()
        config = deepspeed_config(spec)
        if dist.get_rank() == 0:
            log.info("DeepSpeed's configuration, from the spec: %s", json.dumps(config))
        self._end_of_text = end_of_text if spec.document_masks else None
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._stage = int(spec.parallel.strategy.removeprefix("zero"))

        decoder = Decoder.empty(spec.model, vocabulary, self._device)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=decoder,
            model_parameters=decay_groups(decoder, spec.training.optimizer.weight_decay),
            config=config,
        )
        self._state: dict[str, tuple[torch.nn.Parameter, str | None]] = {}  # canonical name -> parameter, moment
        for name, parameter in decoder.named_parameters():
            self._state[name] = (parameter, None)
            self._state |= {prefix + name: (parameter, moment) for moment, prefix in MOMENTS.items()}
        self._incoming: list[TensorBox] = []
        self._warm_up(vocabulary)

    @property
    def layout(self) -> dict[str, Any]:
        """See Engine."""
        return {"engine": "deepspeed", "strategy": self._spec.parallel.strategy, "world_size": self._world}

    def step(self, rows: torch.Tensor, learning_rate: float) -> StepOutput:
        """See Engine."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        rows = rows.to(self._device, non_blocking=True)
        counted = counted_tokens(rows)
        share = self._world / counted  # DeepSpeed averages gradients over the ranks
        total = torch.zeros((), device=self._device)
        for tokens, targets, documents in micro_batches(rows, self._spec.training.micro_batch, self._end_of_text):
            loss = self._engine(tokens, targets, documents, reduction="sum")
            self._engine.backward(loss * share, scale_wrt_gas=False)
            self._engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self._device)
        return StepOutput(total / counted, norm)

    def boxes(self) -> Sequence[TensorBox]:
        """See Engine: whole tensors in host memory, which `restored` cuts into DeepSpeed's shards."""
        self._incoming = self._whole_boxes("cpu")
        return self._incoming

    def restored(self, step: int) -> None:
        """See Engine."""
        for box in self._incoming:
            self._put(box)
        self._incoming = []
        for state in self._optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"], dtype=torch.float32), float(step))

    def replicas(self) -> Sequence[TensorBox]:
        """See Engine: master weights and moments are sharded at every stage."""
        return []

    def saved(self) -> Sequence[TensorBox]:
        """See Engine. Every rank takes part in gathering each tensor, and keeps those that it writes."""
        empty = self._whole_boxes("meta")
        mine = {box.name for box in share_out(empty, self._rank, self._world)}
        saved = []
        for box in empty:
            whole = self._get(box.name)
            if box.name in mine:
                saved.append(TensorBox.whole(box.name, whole))
        return saved

    def _whole_boxes(self, device: str) -> list[TensorBox]:
        shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, (parameter, _) in self._state.items()}
        return [TensorBox.whole(name, torch.empty(shape, device=device)) for name, shape in shapes.items()]

    def _get(self, name: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter, moment = self._state[name]
        whole: torch.Tensor = (
            safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        )
        return whole

    def _put(self, box: TensorBox) -> None:
        """Write a whole tensor into DeepSpeed's shards: the fp32 master, and the copy that computes."""
        import deepspeed
        from deepspeed import utils

        value = box.data.to(self._device)
        parameter, moment = self._state[box.name]
        if (
            self._stage == 3
        ):  # a shard at a time: DeepSpeed 0.19 cuts whole tensors past their end if ranks do not divide
            shard = self._shard(value, parameter.ds_tensor.numel())  # type: ignore[attr-defined]
            if moment:
                utils.safe_set_local_optimizer_state(parameter, shard, moment)
            else:
                utils.safe_set_local_fp32_param(parameter, shard)
        elif moment:
            utils.safe_set_full_optimizer_state(parameter, value, moment)
        else:
            utils.safe_set_full_fp32_param(parameter, value)
        if not moment:
            with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], 0, enabled=self._stage == 3):
                parameter.data.copy_(value)

    def _shard(self, whole: torch.Tensor, elements: int) -> torch.Tensor:
        """This rank's part of a tensor in ZeRO 3: equal flat ranges of `elements`, the last filled up with zeros."""
        shard = torch.zeros(elements, dtype=whole.dtype, device=whole.device)
        part = whole.flatten()[self._rank * elements : (self._rank + 1) * elements]
        shard[: part.numel()] = part
        return shard

    def _warm_up(self, vocabulary: int) -> None:
        """A whole step on made-up tokens at learning rate zero: DeepSpeed makes its optimizer state in the first step,
        and whatever does not compile or fit shows now. `restored` replaces all that it left."""
        if self._stage < 3:  # DeepSpeed 0.19 ties states to names after the first group's step: they must all be there
            for group in self._optimizer.optimizer.param_groups:
                for shard in group["params"]:
                    self._optimizer.optimizer.state[shard] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(shard),
                        "exp_avg_sq": torch.zeros_like(shard),
                    }
        rows = torch.arange(self._spec.training.micro_batch * self._spec.accumulation * (self._spec.model.context + 1))
        self.step((rows % vocabulary).view(-1, self._spec.model.context + 1), 0.0)
