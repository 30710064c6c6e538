"""The `cluster.slurm` section: what only a Slurm has words for."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from holdfast.spec.section import Section, runtime_field

# A name of Slurm's: of a partition (or several with commas), an account, a quality of service.
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,-]{0,126}$")]
Constraint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]{0,254}$")]


class Slurm(Section):
    """Where the jobs of a run go on a Slurm; what is left out is what SBATCH_* variables or the site say."""

    partition: SlurmName | None = runtime_field(None, "Partition, or several with commas; none takes the default one.")
    account: SlurmName | None = runtime_field(None, "Account that pays; none takes yours.")
    qos: SlurmName | None = runtime_field(None, "Quality of service; none takes the default one.")
    constraint: Constraint | None = runtime_field(
        None, "Features that the nodes of the training must have, as `--constraint`."
    )
    slot_minutes: int | None = runtime_field(
        None,
        "Time limit of one allocation, in minutes. The training saves ahead of it and goes back into the queue; none "
        "takes the partition's.",
        ge=1,
        le=525_600,
    )
