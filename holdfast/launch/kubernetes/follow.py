"""Follower of one launch's job: its object, its pods and their output, until it has ended."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from holdfast.launch.emitters import LAUNCH_LABEL, RUN_LABEL
from holdfast.launch.exits import root_cause
from holdfast.launch.interface import GangExit
from holdfast.launch.kubernetes import classify
from holdfast.launch.kubernetes.client import PODS, Api, Object
from holdfast.launch.kubernetes.kinds import Kind, Status, is_held
from holdfast.launch.kubernetes.output import LogFollower, last_lines
from holdfast.launch.kubernetes.watch import Mirror, PodEvents
from holdfast.launch.reporting import WaitReport
from holdfast.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")

SETTLE_SECONDS = 5.0  # for the cause of a failure to appear when only its consequences are known
DRAIN_SECONDS = 10.0  # for the last lines
QUIET_SECONDS = 15.0  # for pods to appear, before a wait without events is reported
_ABSENT = ("", "absent")
_CONSEQUENCES = {ExitCode.LOST_PEER, ExitCode.TERMINATED, ExitCode.PREEMPTED}
_TERMINATED_CODES = _CONSEQUENCES | {ExitCode.KILLED}


@dataclass(frozen=True)
class _Verdict:
    code: int
    detail: str = ""
    cause: classify.Symptom | None = None
    blamed: frozenset[str] = frozenset()  # nodes


class Follower:
    """The job of one launch. `changed` is the condition that also wakes it for requests to the launcher."""

    def __init__(self, api: Api, kind: Kind, name: str, run_id: str, launch: int, changed: threading.Condition) -> None:
        selector = f"{RUN_LABEL}={run_id},{LAUNCH_LABEL}={launch}"
        self._api, self._kind, self._name, self._changed = api, kind, name, changed
        self._jobs = Mirror(api, kind.resource, selector, changed)
        self._pods = Mirror(api, PODS, selector, changed)
        self._stack = ExitStack()
        self._log: LogFollower | None = None
        self._followed = ""  # uid of the pod whose log is followed
        self._complaints = PodEvents(api)
        self._nodes = 1  # that form a gang
        self._replaceable = 0  # pods that may still be replaced
        self._waits = False  # for pods
        self._aside: set[str] = set()  # uids of ignored pods: a queue took the job back, or they were replaced
        self._generations: dict[str, int] = {}  # pod uid → generation of the job's spec when the pod was first seen
        self._since: dict[tuple[str, str], float] = {}  # when an obstacle was first seen
        self._failed_at: float | None = None
        self._report = WaitReport()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._jobs)
        self._stack.enter_context(self._pods)
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(0.0)
        self._stack.close()

    @property
    def status(self) -> Status:
        """The last state of the job object."""
        with self._changed:
            jobs = [*self._jobs.gone.values(), *self._jobs.objects.values()]
        return self._kind.status(jobs[-1]) if jobs else Status("waiting")

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of rank 0, whose log is followed."""
        return tuple(self._log.tail) if self._log else ()

    def follow(
        self,
        uid: str,
        pending_seconds: float,
        interrupted: Callable[[], bool],
        nodes: int = 1,
        replaceable: int = 0,
    ) -> GangExit | None:
        """Wait for the end of the job `uid`. Returns None when `interrupted` returns True.

        The job waits at most `pending_seconds` until `nodes` of its pods have started, not counting the time in a
        queue. Its gang continues without a lost pod for up to `replaceable` pods, and its operator creates another.
        Raises the error of a watch that cannot continue.
        """
        self._nodes, self._replaceable = nodes, replaceable
        while not interrupted():
            if self._waits:
                self._complaints.ask(self._held_up(uid))
            with self._changed:
                for mirror in (self._jobs, self._pods):
                    if mirror.failure is not None:
                        raise mirror.failure
                self._follow_log()
                ending = self._judge(uid, pending_seconds) if self._jobs.synced and self._pods.synced else None
                if ending is None:
                    self._changed.wait(0.5)
                    continue
            if (confirmed := self._confirmed(ending, uid)) is not None:
                return self._completed(confirmed)
        return None

    def symptoms(self) -> list[classify.Symptom]:
        """How the pods ended that did not succeed."""
        container = self._kind.container
        with self._changed:
            pods = self._counted()
        ends = (classify.end_of(pod, container, self._kind.rank(pod)) for pod in pods)
        return [end for end in ends if end is not None]

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait at most `seconds` until the job and all of its pods are gone. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._jobs.synced and self._pods.synced and not self._jobs.objects and not self._pods.objects,
                seconds,
            )

    def finish(self, seconds: float) -> None:
        """Take the last lines that arrive within `seconds`, and close the log."""
        if self._log is not None:
            self._log.finish(seconds)

    def _follow_log(self) -> None:
        """Follow the log of rank 0 as soon as it exists."""
        container = self._kind.container
        for uid, pod in self._pods.objects.items():
            if self._kind.rank(pod) != 0 or not classify.has_started(pod, container):
                continue
            if uid != self._followed and self._followed not in self._pods.objects:
                self._followed = uid
                self._log = LogFollower(self._api, pod["metadata"]["name"], container)
            if uid == self._followed and self._log is not None and classify.has_ended(pod, container):
                self._log.ended.set()

    def _judge(self, uid: str, pending_seconds: float) -> _Verdict | None:  # noqa: PLR0911, PLR0912
        """The job's verdict; None while it has none. The caller holds `changed`."""
        job = self._jobs.objects.get(uid)
        symptoms = self.symptoms()
        if job is None:
            deleted = self._jobs.gone.get(uid)
            if deleted is not None and self._kind.status(deleted).state == "succeeded":
                return _Verdict(ExitCode.OK)
            if not self._waited(SETTLE_SECONDS) and self._pods.objects:
                return None
            return self._deleted(symptoms)
        status = self._kind.status(job)
        self._note_generation(job)
        if status.state == "succeeded":
            return _Verdict(ExitCode.OK)
        if "longer than specified deadline" in status.message or "deadline" in status.reason.lower():
            return _Verdict(ExitCode.CANCELLED, f"job {self._name} ran longer than cluster.deadline_hours")
        if status.state == "suspended" and not job["metadata"].get("deletionTimestamp"):
            self._put_aside()
            self._report.record(f"job {self._name} is in its queue until that lets it go: kubectl describe workloads")
            return None
        if not job["metadata"].get("deletionTimestamp") and self._replaced():
            symptoms = self.symptoms()
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
        return self._obstacle(pending_seconds)

    def _counted(self) -> list[Object]:
        """The pods of the job, existing or gone, without the ignored ones (`_aside`)."""
        pods = {**self._pods.gone, **self._pods.objects}
        return [pod for uid, pod in pods.items() if uid not in self._aside]

    def _note_generation(self, job: Object) -> None:
        """Record the generation of the job that its new pods belong to. Only a queue changes the job's spec. A pod that
        appears while the queue still holds the job was made after the release. Conditions do not help: they change
        after pods appear."""
        generation = job["metadata"].get("generation", 0) + is_held(job)
        for uid in self._pods.objects:
            self._generations.setdefault(uid, generation)

    def _put_aside(self) -> None:
        """Ignore the pods of a job that its queue took back: how they end says nothing, and the release creates them
        again."""
        if fresh := self._left():
            log.info(
                "job %s was taken back by its queue; its ranks saved what they could, and continue with it", self._name
            )
            self._aside |= fresh
        self._since, self._failed_at, self._waits = {}, None, False

    def _left(self) -> set[str]:
        """The uids of counted pods that are gone, or about to be. The caller holds `changed`."""
        leaving_uids = [
            uid
            for uid, pod in self._pods.objects.items()
            if "deletionTimestamp" in pod["metadata"] or classify.has_ended(pod, self._kind.container)
        ]
        return {*self._pods.gone, *leaving_uids} - self._aside

    def _settled(self, symptoms: list[classify.Symptom]) -> bool:
        """Whether the cause is among the symptoms, or will not appear any more."""
        codes = {symptom.code for symptom in symptoms}
        pods = list(self._pods.objects.values())
        all_pods = [*pods, *self._pods.gone.values()]
        if any(pod.get("status", {}).get("phase") == "Succeeded" for pod in all_pods) and codes <= _TERMINATED_CODES:
            return self._waited(SETTLE_SECONDS)  # the job has succeeded, and its object is about to show it
        if not codes <= _CONSEQUENCES | {ExitCode.WRONG_ARITHMETIC}:  # wrong arithmetic has several suspects
            return True
        return all(classify.has_ended(pod, self._kind.container) for pod in pods) or self._waited(SETTLE_SECONDS)

    def _waited(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        return now - self._failed_at >= seconds

    def _failure(self, symptoms: list[classify.Symptom]) -> _Verdict:
        if all(symptom.code == ExitCode.LOST_PEER for symptom in symptoms):  # which peer was lost?
            for pod in self._pods.objects.values():
                if not classify.has_ended(pod, self._kind.container) and not classify.is_ready(pod):
                    lost = classify.Symptom(
                        pod["metadata"]["name"],
                        pod["spec"].get("nodeName", ""),
                        self._kind.rank(pod),
                        ExitCode.KILLED,
                        "other nodes lost it, and its node does not respond",
                        True,
                    )
                    return _Verdict(lost.code, str(lost), lost, classify.blamed_nodes(lost, [lost]))
        cause = classify.cause_of(symptoms)
        detail = str(cause)
        if cause.code == ExitCode.RENDEZVOUS_TIMEOUT and self._waits:  # the pods that came waited for others in vain
            detail += f"; {self._missing()}"
        return _Verdict(cause.code, detail, cause, classify.blamed_nodes(cause, symptoms))

    def _deleted(self, symptoms: list[classify.Symptom]) -> _Verdict:
        """The verdict for a job object that was deleted, but not by this launcher."""
        code = root_cause(symptom.code for symptom in symptoms) or ExitCode.KILLED
        return _Verdict(
            code, f"job {self._name} was deleted by another user; to end a run, end its pipeline run or its launcher"
        )

    def _replaced(self) -> bool:
        """Whether an elastic gang lost a pod, and continues until its operator has made another. Not the pod of node 0,
        where the nodes meet, and not one whose end blames its node or the run."""
        is_replaced = False
        for uid, pod in {**self._pods.gone, **self._pods.objects}.items():
            end = None if uid in self._aside else self._end_of(uid, pod)
            if end is None or end.rank == 0 or end.code not in _TERMINATED_CODES or not self._replaceable:
                continue
            log.warning("%s: the other nodes continue, and admit the pod that replaces it", end)
            self._aside.add(uid)
            self._replaceable -= not end.reclaimed
            is_replaced = True
        return is_replaced

    def _end_of(self, uid: str, pod: Object) -> classify.Symptom | None:
        """How a pod ended, if it did not succeed; also a pod that was deleted while it ran."""
        container, rank = self._kind.container, self._kind.rank(pod)
        end = classify.end_of(pod, container, rank)
        deleted = uid in self._pods.gone and not classify.has_ended(pod, container)
        if end is None and deleted and classify.has_started(pod, container):
            name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
            return classify.Symptom(name, node, rank, ExitCode.KILLED, "its pod was deleted")
        return end

    def _vanished(self) -> _Verdict | None:
        """The verdict for a pod that was deleted under a running job: the gang cannot admit the pod that its operator
        makes."""
        for uid, pod in self._pods.gone.items():
            if uid not in self._aside and (vanished := self._end_of(uid, pod)) is not None:
                return _Verdict(vanished.code, str(vanished), vanished)
        return None

    def _held_up(self, uid: str) -> list[str]:
        """The names of the objects whose events may say why pods do not appear or start."""
        with self._changed:
            pods = [pod["metadata"]["name"] for pod in self._pods.objects.values() if not self._runs(pod)]
        return [*self._kind.makers(self._name, uid), *sorted(pods)[:3]]

    def _runs(self, pod: Object) -> bool:
        return classify.has_started(pod, self._kind.container)

    def _obstacle(self, pending_seconds: float) -> _Verdict | None:
        """The verdict for an obstacle that has blocked the job's pods for too long. The caller holds `changed`."""
        started, now = sum(map(self._runs, self._pods.objects.values())), time.monotonic()
        self._waits = started < self._nodes
        obstacles: dict[tuple[str, str], classify.Obstacle] = {}
        if self._waits:
            for uid, pod in self._pods.objects.items():
                obstacle = classify.obstacle_of(pod, self._kind.container, self._kind.rank(pod), pending_seconds)
                if obstacle is not None:
                    obstacles[uid, str(obstacle.symptom.code)] = obstacle
        self._since = {key: self._since.get(key, now) for key in [*obstacles, *([_ABSENT] if self._waits else [])]}
        if obstacles:
            self._report.record(_in_words([obstacle.symptom for obstacle in obstacles.values()]))
        for key, obstacle in obstacles.items():
            if now - self._since[key] >= obstacle.patience:
                return _Verdict(obstacle.symptom.code, str(obstacle.symptom), obstacle.symptom)
        if not self._waits:
            self._report.end()
            return None
        waited, event_text, detail = now - self._since[_ABSENT], self._complaints.words, self._missing()
        if not obstacles and (event_text or waited > QUIET_SECONDS):
            self._report.record(detail)
        if waited >= pending_seconds:
            if obstacles:  # it was seen a little after the wait began, and says more
                symptom = next(iter(obstacles.values())).symptom
                return _Verdict(symptom.code, str(symptom), symptom)
            code, _ = classify.classify_message(event_text)
            return _Verdict(code, f"{detail} (cluster.pending_timeout_minutes: {pending_seconds / 60:g})")
        return None

    def _missing(self) -> str:
        """How many pods have not started, and why."""
        started, event_text = sum(map(self._runs, self._pods.objects.values())), self._complaints.words
        reason = f"{event_text}; {classify.classify_message(event_text)[1]}" if event_text else ""
        detail = f"{started} of {self._nodes} pods of job {self._name} have started: "
        return detail + (reason or "no event says why; does the controller of its kind run?")

    def _confirmed(self, verdict: _Verdict, uid: str) -> _Verdict | None:
        """The verdict after a second look at the job; None if a queue took the job back.

        Pods that are stopped leave the same way if the job failed, succeeded, was deleted, or was taken back by its
        queue. The watches of pods and jobs have no common order, so the job is read again. Only a queue changes the
        spec of a job.
        """
        if verdict.cause is None or verdict.code not in _TERMINATED_CODES:
            return verdict
        job = self._api.get(self._kind.resource, self._name)
        if job is None or job["metadata"]["uid"] != uid or job["metadata"].get("deletionTimestamp"):
            return self._deleted([verdict.cause])
        generation = job["metadata"].get("generation", 0)
        with self._changed:
            is_former = any(self._generations.get(pod_uid, generation) != generation for pod_uid in self._left())
            if is_former or self._kind.status(job).state == "suspended":
                self._put_aside()
                return None
        return _Verdict(ExitCode.OK) if self._kind.status(job).state == "succeeded" else verdict

    def _completed(self, verdict: _Verdict) -> GangExit:
        """The ending with the last lines of the rank that explains it. The caller does not hold `changed`."""
        self.finish(DRAIN_SECONDS if verdict.code == ExitCode.OK else 2.0)
        tail, cause = list(self.tail), verdict.cause
        if cause is not None and cause.rank != 0 and (lines := last_lines(self._api, cause.pod, self._kind.container)):
            tail = [f"[node rank {cause.rank}] {line}" for line in lines]
        process, node = (cause.process, cause.rank) if cause is not None else (None, None)
        rank, attempt = (process.rank, process.attempt) if process is not None else (None, None)
        return GangExit(int(verdict.code), tuple(tail), verdict.detail, verdict.blamed, rank, node, attempt)


def _in_words(symptoms: Sequence[classify.Symptom]) -> str:
    """Why pods do not start: a single pod by its name, several with the same reason by their number."""
    counts = Counter(symptom.words for symptom in symptoms)
    reasons = []
    for text, count in sorted(counts.items()):
        if count == 1:
            reasons += [str(symptom) for symptom in symptoms if symptom.words == text]
        else:
            reasons.append(f"{count} pods {text}" if text.startswith("cannot ") else f"{count} pods: {text}")
    return "; ".join(reasons)
