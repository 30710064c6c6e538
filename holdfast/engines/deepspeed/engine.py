"""The DeepSpeed engine: ZeRO 1, 2 and 3 behind the `Engine` interface, configured from the spec.

State is exchanged as views of DeepSpeed's fp32 partitions, in memory or in its swap files. Each rank loads and saves
its own partitions, and only tensors that are about to compute are gathered. Names and values are those of the torch
engine, so a run can change engines at a checkpoint.
"""

import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist

from holdfast.checkpoint import TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.engines.deepspeed.aio import load_async_io
from holdfast.engines.deepspeed.config import deepspeed_config
from holdfast.engines.deepspeed.swap import SwapFiles
from holdfast.engines.deepspeed.swapper import copy_what_is_read
from holdfast.engines.interface import UPDATES, Judge, Scalars, StepOutput
from holdfast.engines.layout import flat_boxes
from holdfast.engines.recompute import recompute
from holdfast.engines.torch.optimizers import parameter_groups
from holdfast.engines.weights import MOMENTS
from holdfast.launch.device import local_device
from holdfast.model.decoder import Decoder
from holdfast.objectives.interface import Objective, ObjectiveInputs, count_terms, metrics_of, micro_batches, weighted
from holdfast.objectives.table import build_objective
from holdfast.telemetry import phases

log = logging.getLogger("holdfast.train")


class DeepSpeedEngine:
    """See `Engine`."""

    def __init__(self, spec: Assignment, vocabulary: int, end_of_text: int, objective: Objective | None = None) -> None:
        self._spec = spec
        self._objective = objective or build_objective(spec.objective, spec.training)
        self._device = local_device(spec.accelerator)
        if self._device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.ops

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed uses this to find its inference collectives for CPUs. It would query the compiler about all
        # operators in each rank and compile those collectives. All other ranks wait for the compiling rank, and forever
        # if that rank was killed.
        deepspeed.ops.__compatible_ops__ = {}
        self._swap: SwapFiles | None = None
        if spec.parallel.offload_path is not None:
            self._swap = SwapFiles(spec.parallel.offload_path, spec.run_id)
        try:
            self._build(vocabulary, end_of_text)
        except BaseException:
            self.close()
            raise

    def _build(self, vocabulary: int, end_of_text: int) -> None:
        import deepspeed

        spec = self._spec
        if self._swap:
            load_async_io(self._swap.handle)
            copy_what_is_read()
        self._end_of_text = end_of_text if spec.document_masks else None
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._stage = int(spec.parallel.strategy.removeprefix("zero"))

        decoder = Decoder.empty(spec.model, vocabulary, self._device)
        decoder.loss_chunk = spec.training.loss_chunk
        for layer in decoder.model.layers:
            recompute(layer, spec.training.activation_checkpointing)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()
        swap = str(self._swap.folder) if self._swap else None
        largest = max(-(-parameter.numel() // self._world) for parameter in decoder.parameters())
        config = deepspeed_config(spec.training, spec.parallel, spec.accumulation, swap, largest)
        if self._rank == 0:
            log.info("DeepSpeed's configuration, from the spec: %s", json.dumps(config))
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=decoder,
            model_parameters=parameter_groups(decoder.named_parameters(), spec.training.optimizer),
            config=config,
        )
        self._parameters = dict(decoder.named_parameters())
        self._held = 0  # updates held back before this engine loaded the state
        self._warm_up(vocabulary)

    @property
    def layout(self) -> dict[str, Any]:
        """See Engine."""
        return {"engine": "deepspeed", "strategy": self._spec.parallel.strategy, "world_size": self._world}

    def step(
        self,
        rows: torch.Tensor,
        learning_rate: float,
        before_update: Callable[[], None] = lambda: None,
        judge: Judge | None = None,
        size: int | None = None,  # noqa: ARG002 - always the whole one
    ) -> StepOutput:
        """See Engine. DeepSpeed applies the update before the judge sees it. So the judge can end the run, but cannot
        hold the update back."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        count = count_terms(self._objective, rows.to(self._device, non_blocking=True))
        share = self._world / count  # DeepSpeed averages gradients over the ranks
        total = torch.zeros_like(count)
        for batch in micro_batches(rows, self._spec.training.micro_batch, self._end_of_text, self._device):
            phases.enter("forward")
            losses = self._engine(batch.tokens, batch.targets, batch.segments, reduction="none")
            sums = self._objective.sums(ObjectiveInputs(losses), batch)
            phases.enter("backward")
            self._engine.backward(weighted(self._objective, sums * share), scale_wrt_gas=False)
            if self._engine.is_gradient_accumulation_boundary():
                before_update()
            phases.enter("optimizer")
            self._engine.step()
            total += sums.detach()
        phases.enter("communication")
        dist.all_reduce(total)
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self._device)
        loss = weighted(self._objective, values := total / count)
        held = judge(loss, norm) if judge is not None else None
        return StepOutput(loss, norm, held, metrics_of(self._objective, values))

    def boxes(self) -> Sequence[TensorBox]:
        """See Engine. The boxes are views of the live fp32 master weights and moments of this rank's partitions."""
        if self._swap:
            self._swap.mapped_anew()
        shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in self._parameters.items()}
        boxes = []
        for name, parameter in self._parameters.items():
            for moment, prefix in [(None, ""), *MOMENTS.items()]:
                start, flat = self._shard(parameter, moment)
                boxes += flat_boxes(prefix + name, tuple(shapes[name]), start, start + len(flat), flat)
        return boxes

    def frozen(self) -> list[TensorBox]:
        """See Engine. Everything is trained."""
        return []

    @torch.no_grad()
    def restored(self, step: int, scalars: Scalars = MappingProxyType({})) -> None:
        """See Engine. Rebuilds the computing weights from the master weights."""
        if self._stage == 3:
            for parameter in self._parameters.values():
                self._refresh(parameter)
        else:
            self._optimizer.update_lp_params()
        if self._swap:
            self._swap.filled()
        self._held = step - int(scalars.get(UPDATES, step))
        for state in self._optimizer.optimizer.state.values():
            if "step" in state:
                current = torch.as_tensor(state["step"], dtype=torch.float32)
                state["step"] = torch.full_like(current, float(step - self._held))

    def scalars(self, step: int) -> dict[str, float | int]:
        """See Engine."""
        return {UPDATES: step - self._held}

    def replicas(self) -> Mapping[Hashable, Sequence[TensorBox]]:
        """See Engine: master weights and moments are sharded at every stage."""
        return {}

    def saved(self) -> Sequence[TensorBox]:
        """See Engine. Every element of the state is on exactly one rank."""
        boxes = self.boxes()
        if self._swap:
            self._swap.require_as_written()
        return boxes

    def close(self) -> None:
        """See Engine."""
        if self._swap:
            self._swap.close()

    def _shard(self, parameter: Any, moment: str | None) -> tuple[int, torch.Tensor]:
        """The start of this rank's flat range of the parameter (or of a moment), and a view of the range without
        padding."""
        if self._stage < 3:  # a partition is a range of a group's parameters, in order
            mapping = parameter._hp_mapping  # None if the partition contains nothing of this parameter
            if mapping is None:
                return 0, torch.empty(0)
            return mapping.lp_fragment_address.start, mapping.get_hp_fragment(moment).detach().view(-1)
        shard = self._partition(parameter, moment)  # equal ranges of each parameter, with padding at the end
        start = min(self._rank * len(shard), parameter.ds_numel)
        return start, shard[: parameter.ds_numel - start]

    def _partition(self, parameter: Any, moment: str | None) -> torch.Tensor:
        """ZeRO 3: this rank's fp32 partition of the parameter (or of a moment), in place and with padding. DeepSpeed's
        public functions return a copy for host memory, and a buffer for a disk."""
        zero = self._optimizer
        group, start, size = zero.grad_position[zero.get_param_id(parameter)]
        if self._swap and zero._swappable_optimizer_subgroup(group):  # small groups are never swapped
            master = zero.fp32_partitioned_groups_flat[group]
            tensor = master if moment is None else zero.optimizer.state[master][moment]
            files = zero.optimizer_swapper.swap_params_info[master.ds_id].tensors
            (path,) = (file.swap_path for file in files if file.compute_tensor is tensor)
            return self._swap.mapped(path)[start : start + size]
        partition, _ = parameter._z3_optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=moment
        )
        return cast("torch.Tensor", partition).detach().view(-1)

    def _refresh(self, parameter: Any) -> None:
        """ZeRO 3: update in place the computing partition from the master. Also update the whole parameter if DeepSpeed
        keeps it between steps, as it does with small ones."""
        master = self._partition(parameter, None)
        if self._swap and parameter.ds_tensor.final_location == "nvme":  # between steps it is only in the file
            path = parameter.nvme_swapper.get_path(parameter, must_exist=True)
            self._swap.mapped(path, parameter.dtype)[: len(master)].copy_(master)
            return
        parameter.ds_tensor.copy_(master)
        if parameter.data.numel():
            parameter.partition([parameter])
            parameter.all_gather([parameter])

    def _warm_up(self, vocabulary: int) -> None:
        """Run one step on made-up tokens at learning rate zero. DeepSpeed creates its optimizer state in the first
        step, and compile errors or lack of memory show here. `restored` replaces the state."""
        if self._stage < 3:  # DeepSpeed 0.19 maps states to names after the first group's step: all must exist
            for group in self._optimizer.optimizer.param_groups:
                for shard in group["params"]:
                    self._optimizer.optimizer.state[shard] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(shard),
                        "exp_avg_sq": torch.zeros_like(shard),
                    }
        rows = torch.arange(self._spec.training.micro_batch * self._spec.accumulation * (self._spec.model.context + 1))
        self.step((rows % vocabulary).view(-1, self._spec.model.context + 1), 0.0)
