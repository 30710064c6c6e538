"""The DAG as a job of the Ray Jobs API: its name and the request.

It contains no secret: variables come from the spec, and secrets from the environment of the cluster's nodes.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

from holdfast.launch.choose import require_no_spares
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root, with_absolute_paths
from holdfast.runtime.environment import store_url
from holdfast.spec import Spec, digest, dump_spec
from holdfast.spec.engine_text import escape_environment, escape_for_ray
from holdfast.spec.errors import Problem, SpecError
from holdfast.steps.outcomes import RUN_ID

PREFIX = "holdfast"
STORE_DIGITS = 6
SPEC = "HOLDFAST_SPEC"  # text of the spec
SPEC_BYTES = 64 * 1024  # Linux allows no variable of 128 KiB, and Ray nests this one in another
# Ray kills a job 3 seconds after a stop request unless this variable sets another time.
STOP_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S"
LEAVE_MARGIN = 120  # seconds for steps and the exit handler after the ranks have exited
DRIVER = "holdfast.pipelines.backends.ray.driver"


@dataclass(frozen=True)
class RayOrder:
    """The common part of all submissions of one run."""

    request: RunRequest
    spec: Spec  # as the steps read it
    key: str  # the run id, or a digest of the request where the id is unknown here; then the store's mark

    @classmethod
    def of(cls, request: RunRequest) -> RayOrder:
        """Build it from a request. Paths of the spec become absolute, because steps run elsewhere."""
        require_no_spares(request.spec.cluster, "Ray")
        spec = with_absolute_paths(request.spec)
        mark = store_mark(store_root(request.store or store_url(spec)))
        return cls(request, spec, f"{request.run_id or digest([request.question()])}-{mark}")

    def submission_id(self, number: int) -> str:
        """The name of the job. Ray refuses a second job with it."""
        return f"{PREFIX}-{self.key}-{number}"

    def entrypoint(self, submission: str) -> str:
        """The command of the job's driver; with `exec`, because Ray also signals the shell that starts it."""
        command = ["python", "-m", DRIVER, f"--job={submission}"]
        if self.request.store:
            command.append(f"--store={store_root(self.request.store)}")
        if self.request.salt:
            command.append(f"--salt={self.request.salt}")
        if self.request.replan:
            command.append("--replan=true")
        return "exec " + shlex.join(command)

    def runtime_env(self) -> dict[str, Any]:
        """The variables of every process of the job. Raises SpecError for a spec that is too long for a variable."""
        text = dump_spec(self.spec)
        if len(escape_for_ray(text).encode()) > SPEC_BYTES:
            remedy = f"Ray passes it as a variable: shorten it to {SPEC_BYTES} bytes"
            raise SpecError([Problem("spec", f"{len(text.encode())} bytes", "is too long for a job of Ray", remedy)])
        variables = escape_environment({**self.spec.cluster.environment, SPEC: text}, escape_for_ray)
        variables |= {STOP_SECONDS: str(stop_seconds(self.spec))}
        variables["RAY_DEDUP_LOGS"] = "0"  # keep repeated lines
        if self.request.run_id:
            variables[RUN_ID] = self.request.run_id
        return {"env_vars": variables}

    def metadata(self) -> dict[str, str]:
        """The job's metadata for listings."""
        return {"name": self.spec.name, "run_id": self.request.run_id, "holdfast": self.key}


def store_mark(store: str) -> str:
    """A digest of the store at the end of a key: the same run in another store is another run."""
    return digest([store])[:STORE_DIGITS]


def stop_seconds(spec: Spec) -> int:
    """Seconds that a job has to save and exit."""
    return math.ceil(spec.checkpoint.grace_seconds) + LEAVE_MARGIN
