"""Following one launch's job: its object, its pods and what they print, until there is an ending to tell."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from holdfast.components.launch.emitters import LAUNCH_LABEL, RUN_LABEL
from holdfast.components.launch.ending import root_cause
from holdfast.components.launch.interface import Ending
from holdfast.components.launch.kubernetes import classify
from holdfast.components.launch.kubernetes.client import PODS, Api
from holdfast.components.launch.kubernetes.kinds import Kind, Status
from holdfast.components.launch.kubernetes.output import LogFollower, last_lines
from holdfast.components.launch.kubernetes.watch import Mirror
from holdfast.components.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")

SETTLE_SECONDS = 5.0  # for the cause of a failure to show, when only its consequences are known
DRAIN_SECONDS = 10.0  # for the last lines
_CONSEQUENCES = {ExitCode.LOST_PEER, ExitCode.TERMINATED, ExitCode.PREEMPTED}
_TOLD_TO_LEAVE = _CONSEQUENCES | {ExitCode.KILLED}


@dataclass(frozen=True)
class _Verdict:
    code: int
    detail: str = ""
    cause: classify.Symptom | None = None
    blamed: frozenset[str] = frozenset()  # nodes


class Follower:
    """The job of one launch. `changed` is the condition that also wakes it when the launcher is asked something."""

    def __init__(self, api: Api, kind: Kind, name: str, run_id: str, launch: int, changed: threading.Condition) -> None:
        selector = f"{RUN_LABEL}={run_id},{LAUNCH_LABEL}={launch}"
        self._api, self._kind, self._name, self._changed = api, kind, name, changed
        self._jobs = Mirror(api, kind.resource, selector, changed)
        self._pods = Mirror(api, PODS, selector, changed)
        self._stack = ExitStack()
        self._log: LogFollower | None = None
        self._followed = ""  # uid of the pod whose log is followed
        self._since: dict[tuple[str, str], float] = {}  # when an obstacle was first seen
        self._failed_at: float | None = None
        self._told = ""

    def __enter__(self) -> Self:
        self._stack.enter_context(self._jobs)
        self._stack.enter_context(self._pods)
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(0.0)
        self._stack.close()

    @property
    def status(self) -> Status:
        """What the job object said last."""
        with self._changed:
            found = [*self._jobs.gone.values(), *self._jobs.objects.values()]
        return self._kind.status(found[-1]) if found else Status("waiting")

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of the rank that is followed."""
        return tuple(self._log.tail) if self._log else ()

    def follow(
        self,
        uid: str,
        pending_seconds: float,
        interrupted: Callable[[], bool],
    ) -> Ending | None:
        """Wait for the end of the job `uid`; None when `interrupted` says so."""
        while not interrupted():
            with self._changed:
                for mirror in (self._jobs, self._pods):
                    if mirror.failure is not None:
                        raise mirror.failure
                self._follow_log()
                ending = self._judge(uid, pending_seconds) if self._jobs.synced and self._pods.synced else None
                if ending is None:
                    self._changed.wait(0.5)
                    continue
            return self._completed(self._confirmed(ending, uid))
        return None

    def symptoms(self) -> list[classify.Symptom]:
        """How the pods ended that did not end well."""
        container = self._kind.container
        with self._changed:
            pods = [*self._pods.gone.values(), *self._pods.objects.values()]
        ends = (classify.end_of(pod, container, self._kind.rank(pod)) for pod in pods)
        return [end for end in ends if end is not None]

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait until neither the job nor a pod of it is left; whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._jobs.synced and self._pods.synced and not self._jobs.objects and not self._pods.objects,
                seconds,
            )

    def finish(self, seconds: float) -> None:
        """Take the last lines that come within so many seconds, and hang up."""
        if self._log is not None:
            self._log.finish(seconds)

    def _follow_log(self) -> None:
        """Follow the log of rank 0 from when it has one."""
        container = self._kind.container
        for uid, pod in self._pods.objects.items():
            if self._kind.rank(pod) != 0 or not classify.has_started(pod, container):
                continue
            if uid != self._followed and self._followed not in self._pods.objects:
                self._followed = uid
                self._log = LogFollower(self._api, pod["metadata"]["name"], container)
            if uid == self._followed and self._log is not None and classify.has_ended(pod, container):
                self._log.ended.set()

    def _judge(self, uid: str, pending_seconds: float) -> _Verdict | None:  # noqa: PLR0911
        """What the job has come to, if it has come to something. `changed` is held."""
        job = self._jobs.objects.get(uid)
        symptoms = self.symptoms()
        if job is None:
            gone = self._jobs.gone.get(uid)
            if gone is not None and self._kind.status(gone).state == "succeeded":
                return _Verdict(ExitCode.OK)
            if not self._waited(SETTLE_SECONDS) and self._pods.objects:
                return None
            return self._deleted(symptoms)
        status = self._kind.status(job)
        if status.state == "succeeded":
            return _Verdict(ExitCode.OK)
        if "longer than specified deadline" in status.message or "deadline" in status.reason.lower():
            return _Verdict(ExitCode.CANCELLED, f"job {self._name} ran longer than cluster.deadline_hours")
        if symptoms:
            if not self._settled(symptoms):
                return None
            return self._deleted(symptoms) if job["metadata"].get("deletionTimestamp") else self._failure(symptoms)
        if job["metadata"].get("deletionTimestamp"):
            return None if any(map(classify.is_ready, self._pods.objects.values())) else self._deleted([])
        if lost := self._vanished():
            return lost
        if status.state == "failed":
            if not self._waited(SETTLE_SECONDS):
                return None
            return _Verdict(
                ExitCode.KILLED, f"job {self._name} failed: {status.message or status.reason or 'no reason'}"
            )
        return self._obstacle(status, pending_seconds)

    def _settled(self, symptoms: list[classify.Symptom]) -> bool:
        """Whether the cause is among the symptoms, or will not show any more."""
        codes = {symptom.code for symptom in symptoms}
        pods = list(self._pods.objects.values())
        every = [*pods, *self._pods.gone.values()]
        if any(pod.get("status", {}).get("phase") == "Succeeded" for pod in every) and codes <= _TOLD_TO_LEAVE:
            return self._waited(SETTLE_SECONDS)  # the job has ended well, and its object is about to say so
        if not codes <= _CONSEQUENCES | {ExitCode.WRONG_ARITHMETIC}:  # of which there are several suspects
            return True
        return all(classify.has_ended(pod, self._kind.container) for pod in pods) or self._waited(SETTLE_SECONDS)

    def _waited(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        return now - self._failed_at >= seconds

    def _failure(self, symptoms: list[classify.Symptom]) -> _Verdict:
        if all(symptom.code == ExitCode.LOST_PEER for symptom in symptoms):  # of which one?
            for pod in self._pods.objects.values():
                if not classify.has_ended(pod, self._kind.container) and not classify.is_ready(pod):
                    lost = classify.Symptom(
                        pod["metadata"]["name"], pod["spec"].get("nodeName", ""), self._kind.rank(pod),
                        ExitCode.KILLED, "the others lost it, and its node does not answer", True,
                    )  # fmt: skip
                    return _Verdict(lost.code, str(lost), lost, classify.blamed_nodes(lost, [lost]))
        cause = classify.cause_of(symptoms)
        return _Verdict(cause.code, str(cause), cause, classify.blamed_nodes(cause, symptoms))

    def _deleted(self, symptoms: list[classify.Symptom]) -> _Verdict:
        """The job object went away, and nobody here has asked for it."""
        code = root_cause(symptom.code for symptom in symptoms) or ExitCode.KILLED
        return _Verdict(
            code, f"job {self._name} was deleted by somebody else; to end a run, end its pipeline run or its launcher"
        )

    def _vanished(self) -> _Verdict | None:
        """A pod that was deleted under a running job: its operator makes another, which the gang cannot take in."""
        for pod in self._pods.gone.values():
            if not classify.has_ended(pod, self._kind.container) and classify.has_started(pod, self._kind.container):
                name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
                gone = classify.Symptom(name, node, self._kind.rank(pod), ExitCode.KILLED, "its pod was deleted")
                return _Verdict(gone.code, str(gone), gone)
        return None

    def _obstacle(self, status: Status, pending_seconds: float) -> _Verdict | None:
        container, now = self._kind.container, time.monotonic()
        found: dict[tuple[str, str], classify.Obstacle] = {}
        if status.state != "suspended":  # a queue lets it wait as long as it likes
            for uid, pod in self._pods.objects.items():
                obstacle = classify.obstacle_of(pod, container, self._kind.rank(pod), pending_seconds)
                if obstacle is not None:
                    found[uid, str(obstacle.symptom.code)] = obstacle
        self._since = {key: self._since.get(key, now) for key in found}
        for key, obstacle in found.items():
            if str(obstacle.symptom) != self._told:
                self._told = str(obstacle.symptom)
                log.info("waiting: %s", obstacle.symptom)
            if now - self._since[key] >= obstacle.patience:
                return _Verdict(obstacle.symptom.code, str(obstacle.symptom), obstacle.symptom)
        return None

    def _confirmed(self, verdict: _Verdict, uid: str) -> _Verdict:
        """Pods that were told to leave leave the same way whether the job failed, ended well or was deleted; which of
        them it was is asked again, because the watches of pods and of jobs tell in no common order."""
        if verdict.cause is None or verdict.code not in _TOLD_TO_LEAVE:
            return verdict
        job = self._api.get(self._kind.resource, self._name)
        if job is None or job["metadata"]["uid"] != uid or job["metadata"].get("deletionTimestamp"):
            return self._deleted([verdict.cause])
        return _Verdict(ExitCode.OK) if self._kind.status(job).state == "succeeded" else verdict

    def _completed(self, verdict: _Verdict) -> Ending:
        """The ending with the last lines of the rank that explains it. `changed` is not held."""
        self.finish(DRAIN_SECONDS if verdict.code == ExitCode.OK else 2.0)
        tail, cause = list(self.tail), verdict.cause
        if cause is not None and cause.rank != 0 and (lines := last_lines(self._api, cause.pod, self._kind.container)):
            tail = [f"[rank {cause.rank}] {line}" for line in lines]
        return Ending(int(verdict.code), tuple(tail), verdict.detail, verdict.blamed)
