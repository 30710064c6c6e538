"""The `parallel` section: the layout of a run."""

from typing import Literal

from pydantic import model_validator

from holdfast.spec.section import Section, plan_field, runtime_field
from holdfast.spec.training import AUTO


class Parallel(Section):
    """The layout: how one step is distributed over processes. It sets the order of sums, and so the last bits."""

    auto: bool = runtime_field(
        False,
        "Use the fastest layout that the planner finds for `processes`, `cluster.nodes` and the accelerator. It "
        "replaces the fields below, `training.micro_batch` and `training.activation_checkpointing`. `parallel: auto` "
        "means the same. See docs/planner.md.",
    )
    processes: int = plan_field(
        1, "Processes on each node: one for each accelerator, or several on CPU cores.", ge=1, le=1024
    )
    threads: int = plan_field(
        1, "CPU threads of each process. On a CPU the number sets the order of sums.", ge=1, le=1024
    )
    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = plan_field(
        "ddp", "`ddp` and `fsdp` (FSDP2) train with the torch engine, `zero1`-`zero3` with DeepSpeed."
    )
    bucket_mib: float = plan_field(
        25.0,
        "With `ddp`: size of a bucket of gradients, in MiB. It is reduced while later ones are computed.",
        gt=0,
        le=4096,
    )
    deal: Literal["equal", "measured"] = runtime_field(
        "equal",
        "With `determinism: elastic` and `ddp`: `measured` gives a faster rank more micro-batches of each step. Each "
        "launch measures the ranks when it starts. The bits are equal.",
    )
    replicas: int = plan_field(
        1,
        "With `fsdp`: copies of the model, each sharded over its own ranks (HSDP). 1 shards over all ranks.",
        ge=1,
        le=1_000_000,
    )
    reshard: Literal["always", "never"] = plan_field(
        "always",
        "With `fsdp`: `always` frees a layer's gathered weights after forward and gathers them again for backward. "
        "`never` keeps them: more memory, less traffic.",
    )
    offload: Literal["none", "optimizer", "parameters", "parameters_on_disk"] = plan_field(
        "none",
        "`optimizer` (`zero1`-`zero3`): master weights and moments are in host memory, and the optimizer steps there. "
        "`parameters` (`zero3`, `fsdp`): weights too, until they are gathered. `parameters_on_disk` (`zero3` with "
        "`offload_path`): weights are also on the disk, and are read for each use.",
    )
    offload_path: str | None = plan_field(
        None,
        "With `zero3` and `offload`: a folder on a fast local disk of each node (NVMe), as an absolute path. Master "
        "weights and moments are stored there and pass through host memory one group at a time. Each rank has its own "
        "folder in it, which is removed at the end. Default: host memory. The plan records that a path is set, not "
        "which one.",
    )
    tensor: int = plan_field(
        1,
        "Ranks that compute one micro-batch together. Matrices, vocabulary and sequence are split among them (tensor "
        "and sequence parallelism). They communicate within every layer: keep them on one node.",
        ge=1,
        le=1024,
    )
    pipeline: int = plan_field(
        1, "Stages that the layers are distributed to, each on its own ranks (pipeline parallelism).", ge=1, le=1024
    )
    stages: tuple[int, ...] | None = plan_field(
        None,
        "With `pipeline`: layers of each stage, in the order of the model, such as `[3, 5]`. `interleaved` needs twice "
        "as many entries: rank r has entries r and r + `pipeline`. Default: even stages, with the head counted.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = plan_field(
        "1f1b",
        "With `pipeline`: order of the micro-batches. `gpipe`: all forward, then all backward. `1f1b`: alternately, "
        "which keeps fewer activations. `interleaved`: two stages on each rank, with less idle time and more traffic. "
        "`zero_bubble`: `1f1b`, with gradients of weights computed in idle time.",
    )
    context: int = plan_field(
        1,
        "Ranks that each sequence is split over, so that a long one fits (context parallelism). Attention covers the "
        "whole sequence: keys and values are gathered in every layer.",
        ge=1,
        le=1024,
    )
    expert: int = plan_field(
        1,
        "Ranks of a stage that the experts of each layer are distributed over (expert parallelism). These ranks "
        "process different tokens. Each token is sent to the ranks that have its experts.",
        ge=1,
        le=1024,
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_is_a_word(cls, value: object) -> object:
        return {"auto": True} if value == AUTO else value

    @property
    def engine(self) -> Literal["torch", "deepspeed"]:
        """The engine that implements `strategy`."""
        return "deepspeed" if self.strategy.startswith("zero") else "torch"
