"""Environment of Slurm's commands, without variables of an enclosing job.

Slurm gives a job variables that its own commands read as options. Inside a job, `srun` leaves SLURM_CPU_BIND and
`sbatch --array` leaves SLURM_ARRAY_TASK_ID, and `sbatch` copies all of them into the job that it makes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The controller's address, the credentials, and the format of times.
_OF_THE_SITE = re.compile(r"SLURM_(CONF|CONF_SERVER|JWT|SACK_\w+|TIME_FORMAT)")
_OF_A_JOB = re.compile(r"(SLURMD?_|PMIX?2?_|SRUN_|SBATCH_(ARRAY_INX|EXPORT|WAIT)$|SBATCH_(CPU|MEM|GPU)_BIND)")
# Variables that `srun` sets for a step, or reads as options that are not meant for the ranks. `sbatch` sets none of
# them.
_OF_A_STEP = re.compile(
    r"PMIX?2?_|SRUN_|SBATCH_(CPU|MEM|GPU)_BIND|SLURM_((CPU|MEM|GPU)_BIND|STEP|SRUN_|STD(IN|OUT|ERR)MODE|OPEN_MODE|LABELIO"
    r"|UNBUFFEREDIO|KILL_BAD_EXIT|IMMEDIATE|WAIT$|REMOTE_CWD|WORKING_DIR|(TASK_)?(PROLOG|EPILOG)$|EXPORT_ENV|MULTI|EXACT"
    r"|EXCLUSIVE|OVERCOMMIT|OVERLAP|RELATIVE|WHOLE)"
)


def without_job(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for a command that submits or queries, without those of an enclosing job. SBATCH_ACCOUNT,
    SBATCH_PARTITION and similar ones stay: a site or a person sets them for every job."""
    return {
        name: value for name, value in variables.items() if _OF_THE_SITE.fullmatch(name) or not _OF_A_JOB.match(name)
    }


def without_step(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for `srun` inside an allocation, without those of another step."""
    return {name: value for name, value in variables.items() if not _OF_A_STEP.match(name)}


def own_job(variables: Mapping[str, str]) -> str:
    """The job that this process is in, as Slurm's commands take it; empty for none. The last task of an array has the
    number of the whole array, so it is written NUMBER_TASK. Array variables with another number may come from the job
    that submitted this one."""
    number, array = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_ARRAY_JOB_ID", "")
    task = variables.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if task and number == array else number
