"""The `cluster.slurm` section: settings that only Slurm has."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from holdfast.spec.section import Section, runtime_field

# A name in Slurm: a partition (or several, separated by commas), an account, or a quality of service.
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,-]{0,126}$")]
Constraint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]{0,254}$")]


class Slurm(Section):
    """Settings of the jobs of a run on Slurm. For fields that are not given, SBATCH_* variables or the site decide."""

    partition: SlurmName | None = runtime_field(
        None, "Partition, or several separated by commas. Default: the site's default."
    )
    account: SlurmName | None = runtime_field(None, "Account that is charged. Default: your account.")
    qos: SlurmName | None = runtime_field(None, "Quality of service. Default: the site's default.")
    constraint: Constraint | None = runtime_field(
        None, "Features that the training nodes must have, as for `--constraint`."
    )
    slot_minutes: int | None = runtime_field(
        None,
        "Time limit of one allocation, in minutes. Training saves before the limit and returns to the queue. Default: "
        "the limit of the partition.",
        ge=1,
        le=525_600,
    )
