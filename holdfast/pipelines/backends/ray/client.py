"""Typed client of the Ray Jobs API.

A cluster that does not respond raises ClusterUnreachableError. A refused request raises SpecError with Ray's message.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.launch.choose import require_ray
from holdfast.spec.errors import ClusterUnreachableError, MissingError, Problem, SpecError

VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
DEFAULT = "http://127.0.0.1:8265"

T = TypeVar("T")


@dataclass(frozen=True)
class RayJob:
    """A job, as Ray reports it."""

    id: str  # submission id
    state: str  # PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED
    message: str = ""
    code: int = 0  # exit code of its driver
    started: float = 0.0  # unix seconds
    name: str = ""  # name of the spec

    @property
    def unfinished(self) -> bool:
        """Whether it may still change."""
        return self.state in ("PENDING", "RUNNING")


def address_of(endpoint: str = "") -> str:
    """The address of the Jobs API: `endpoint`, otherwise as Ray's commands find it."""
    values = (os.environ.get(name, "") for name in VARIABLES)
    return endpoint or next((value for value in values if value.startswith("http")), DEFAULT)


class Jobs:
    """The jobs of one cluster."""

    def __init__(self, endpoint: str = "") -> None:
        """`endpoint`: URL of the cluster's dashboard. Connects on first use."""
        self.address = address_of(endpoint)
        self._opened: Any = None

    def submit(self, identity: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> bool:
        """Submit a job. Returns False if the name is taken and no job was made."""
        try:
            self._ask(
                lambda: self._client.submit_job(
                    submission_id=identity, entrypoint=entrypoint, runtime_env=runtime_env, metadata=metadata
                )
            )
        except SpecError as error:
            if "already exists" in str(error):
                return False
            raise
        return True

    def all(self) -> list[RayJob]:
        """The submitted jobs, oldest first."""
        details = self._ask(lambda: list(self._client.list_jobs()))
        jobs = [_job(detail) for detail in details if detail.submission_id]
        return sorted(jobs, key=lambda one: one.started)

    def logs(self, identity: str) -> str:
        """The output of a job's driver."""
        return str(self._ask(lambda: self._client.get_job_logs(identity)))

    def stop(self, identity: str) -> None:
        """Ask a job to save and exit. Does not wait for it."""
        self._ask(lambda: self._client.stop_job(identity))

    def forget(self, identity: str) -> None:
        """Remove an ended job from the list."""
        self._ask(lambda: self._client.delete_job(identity))

    @property
    def _client(self) -> Any:
        if self._opened is None:
            require_ray()
            from ray.job_submission import JobSubmissionClient

            os.environ[VARIABLES[0]] = self.address  # in Ray this variable overrides the argument
            self._opened = JobSubmissionClient(self.address)
        return self._opened

    def _ask(self, action: Callable[[], T]) -> T:
        from requests.exceptions import RequestException

        try:
            return action()
        except (ConnectionError, RequestException, OSError) as error:
            raise ClusterUnreachableError(f"Ray at {self.address}: {_first_line(error)}") from None
        except RuntimeError as error:
            message = _first_line(error)
            if "status code 404" in message:
                raise MissingError(f"Ray at {self.address}: {message}") from None
            if any(f"status code {code}" in message for code in (500, 502, 503, 504)) and "already" not in str(error):
                raise ClusterUnreachableError(f"Ray at {self.address}: {message}") from None
            remedy = "see what Ray says; where it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            last = str(error).strip().splitlines()[-1]  # line of Ray's traceback
            raise SpecError([Problem("Ray", None, last[:1000], remedy)], "Ray") from None


def _job(found: Any) -> RayJob:
    name = (found.metadata or {}).get("name", "")
    started = (found.start_time or 0) / 1000
    message = "" if found.status == "SUCCEEDED" else (found.message or "").partition("\n")[0]
    return RayJob(found.submission_id, str(found.status), message, found.driver_exit_code or 0, started, name)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:500]
