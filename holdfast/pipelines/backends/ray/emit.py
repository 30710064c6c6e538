"""The DAG as a job of the Ray Jobs API: what is sent to a cluster, and what the job is called.

Promises that no secret is in it: variables come from the spec, and secrets from the environment of the cluster's nodes.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

from holdfast.launch.spares import require_no_spares
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root, with_absolute_paths
from holdfast.runtime.environment import store_url
from holdfast.runtime.outcomes import RUN_ID
from holdfast.spec import Spec, digest, dump_spec
from holdfast.spec.engine_text import escape_environment, escape_for_ray
from holdfast.spec.errors import Problem, SpecError

PREFIX = "holdfast"
STORE_DIGITS = 6
SPEC = "HOLDFAST_SPEC"  # the spec's text
SPEC_BYTES = 64 * 1024  # Linux passes no variable of 128 KiB, and Ray writes this one into another
# Ray kills a job 3 seconds after it was asked to stop, unless this says otherwise.
STOP_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S"
LEAVE_MARGIN = 120  # seconds that steps and the exit handler have after the ranks have left
DRIVER = "holdfast.pipelines.backends.ray.driver"


@dataclass(frozen=True)
class RayOrder:
    """What all submissions of one run share."""

    request: RunRequest
    spec: Spec  # as the steps read it
    key: (
        str  # the run id, or a digest of what was asked for where that is not known here, and what stands for the store
    )

    @classmethod
    def of(cls, request: RunRequest) -> RayOrder:
        """What is sent for an order. Paths of the spec are made absolute: steps run elsewhere."""
        require_no_spares(request.spec.cluster, "Ray")
        spec = with_absolute_paths(request.spec)
        mark = store_mark(store_root(request.store or store_url(spec)))
        return cls(request, spec, f"{request.run_id or digest([request.question()])}-{mark}")

    def submission_id(self, number: int) -> str:
        """What the job is called: Ray refuses a second one of that name."""
        return f"{PREFIX}-{self.key}-{number}"

    def entrypoint(self, submission: str) -> str:
        """The command of the job's driver; `exec`, since Ray signals the shell before it as well."""
        words = ["python", "-m", DRIVER, f"--job={submission}"]
        if self.request.store:
            words.append(f"--store={store_root(self.request.store)}")
        if self.request.salt:
            words.append(f"--salt={self.request.salt}")
        if self.request.replan:
            words.append("--replan=true")
        return "exec " + shlex.join(words)

    def runtime_env(self) -> dict[str, Any]:
        """The variables of every process of the job. Raises SpecError for a spec that is too long for one."""
        text = dump_spec(self.spec)
        if len(escape_for_ray(text).encode()) > SPEC_BYTES:
            remedy = f"Ray passes it as a variable: shorten it to {SPEC_BYTES} bytes"
            raise SpecError([Problem("spec", f"{len(text.encode())} bytes", "is too long for a job of Ray", remedy)])
        variables = escape_environment({**self.spec.cluster.environment, SPEC: text}, escape_for_ray)
        variables |= {STOP_SECONDS: str(stop_seconds(self.spec))}
        variables["RAY_DEDUP_LOGS"] = "0"  # each line counts
        if self.request.run_id:
            variables[RUN_ID] = self.request.run_id
        return {"env_vars": variables}

    def metadata(self) -> dict[str, str]:
        """What a listing shows."""
        return {"name": self.spec.name, "run_id": self.request.run_id, "holdfast": self.key}


def store_mark(store: str) -> str:
    """What stands for a store at the end of a key: the same run in another store is another one."""
    return digest([store])[:STORE_DIGITS]


def stop_seconds(spec: Spec) -> int:
    """Seconds that a job has to save and leave."""
    return math.ceil(spec.checkpoint.grace_seconds) + LEAVE_MARGIN
