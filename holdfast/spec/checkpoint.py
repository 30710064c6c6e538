"""The `checkpoint` section: when the state is saved, and which checkpoints are kept."""

from typing import Literal

from pydantic import Field

from holdfast.spec.section import Section, runtime_field


class MemoryTier(Section):
    """Copies of the state in the memory of its node (`/dev/shm`, up to three). The next launch on that node resumes
    from them. See docs/checkpoints-tiers.md."""

    every_steps: int | None = runtime_field(None, "Steps between two copies. Default: no copies.", ge=1)
    peers: int = runtime_field(0, "Other nodes that hold a copy of this node's state in their memory.", ge=0, le=1)


class DiskTier(Section):
    """Copies of the state on a disk of its node (up to three). The next launch on that node resumes from them."""

    every_steps: int | None = runtime_field(None, "Steps between two copies. Default: no copies.", ge=1)
    path: str | None = runtime_field(
        None, "A folder on a disk of the node, as an absolute path. Each run has its own folder in it."
    )


class Checkpoint(Section):
    """When the state is saved, and which checkpoints are kept. No field can change the weights."""

    every: Literal["steps", "auto"] = runtime_field(
        "steps",
        "`steps` saves at multiples of `every_steps`. `auto` chooses the interval from the measured cost of a save and "
        "how often the run fails.",
    )
    every_steps: int = runtime_field(
        50, "Steps between two checkpoints; with `auto` the maximum. The last step is always saved.", ge=1
    )
    every_minutes: float | None = runtime_field(
        None, "Also save when this many minutes have passed since the last save, by the clock of rank 0.", gt=0
    )
    max_lag_steps: int | None = runtime_field(
        None,
        "Steps that training may continue past the newest checkpoint while the store accepts none. Then the gang ends, "
        "and is started again. Default: three times `every_steps`.",
        ge=1,
    )
    digest_every: int | None = runtime_field(
        None,
        "Steps between two state digests in the history. Replicas compare their digests then, and at every save. "
        "Default: only at saves.",
        ge=1,
    )
    keep_last: int = runtime_field(3, "Number of newest checkpoints to keep.", ge=1)
    keep_every: int | None = runtime_field(
        None, "Also keep one checkpoint per this many steps: at the multiple, or else the next one after it.", ge=1
    )
    keep_days: float | None = runtime_field(
        None, "Also keep every checkpoint of the last this many days.", gt=0, le=3650
    )
    upload_mib_per_second: float | None = runtime_field(
        None,
        "Limit of the upload of checkpoints by all ranks of one host, in MiB per second. The last save before a "
        "requested shutdown is not limited. Default: no limit.",
        gt=0,
    )
    grace_seconds: float = runtime_field(25.0, "Time to save and exit after SIGTERM, in seconds.", gt=0, le=3600)
    compression: Literal["none", "lossless"] = runtime_field(
        "none",
        "`lossless` compresses tensor bytes if that saves space, which is measured at every save. It writes 20 to 33 % "
        "less, and costs about 3 s of a core per GB and a copy of the state in memory.",
    )

    memory: MemoryTier = Field(default_factory=MemoryTier, description="Copies in the memory of the nodes.")
    disk: DiskTier = Field(default_factory=DiskTier, description="Copies on the disks of the nodes.")

    @property
    def lag_steps(self) -> int:
        """`max_lag_steps`, with the default resolved."""
        return self.max_lag_steps or 3 * self.every_steps
