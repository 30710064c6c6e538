"""How each kind of job reports its state, and which node of the job a pod is."""

import pytest

from holdfast.launch.kubernetes.client import Object
from holdfast.launch.kubernetes.kinds import KINDS


def conditions(*words: str, spec: Object | None = None, **status: object) -> Object:
    """Conditions of these types that are true, and one that is no longer true."""
    entries = [
        {"type": condition, "status": "True", "reason": condition, "message": f"it is {condition}"}
        for condition in words
    ]
    entries.append({"type": "Restarting", "status": "False"})
    job_spec = {"runPolicy": {"ttlSecondsAfterFinished": 60}} if spec is None else spec
    return {"spec": job_spec, "status": {"conditions": entries, **status}}


@pytest.mark.parametrize(
    ("job", "state", "finished"),
    [
        ({"spec": {"runPolicy": {}}}, "waiting", False),
        (conditions("Created"), "waiting", False),
        (conditions("Running", "Created"), "running", False),
        (conditions("Suspended", "Created"), "suspended", False),
        (conditions("Succeeded", "Created", completionTime="2026-01-01T00:00:00Z"), "succeeded", True),
        (conditions("Running", "Created", "Failed", completionTime="2026-01-01T00:00:00Z"), "failed", True),
        (conditions("Failed"), "failed", False),  # without an end time, its time to live never runs out
    ],
)
def test_the_status_of_a_pytorchjob_is_read_from_its_conditions_in_any_order(
    job: Object, state: str, finished: bool
) -> None:
    status = KINDS["pytorchjob"].status(job)
    assert (status.state, status.finished) == (state, finished)


@pytest.mark.parametrize(
    ("words", "state"),
    [((), "waiting"), (("Suspended",), "suspended"), (("Complete",), "succeeded"), (("Failed",), "failed")],
)
def test_the_status_of_a_trainjob_is_read_from_its_conditions_without_a_ttl(words: tuple[str, ...], state: str) -> None:
    status = KINDS["trainjob"].status(conditions(*words, spec={}))
    assert (status.state, status.finished) == (state, False)


@pytest.mark.parametrize(
    ("phase", "state", "finished"),
    [
        ("Pending", "waiting", False),
        ("Inqueue", "waiting", False),
        ("Running", "running", False),
        ("Completing", "running", False),
        ("Completed", "succeeded", True),
        ("Terminating", "failed", False),
        ("Failed", "failed", True),
        ("Aborted", "failed", False),
    ],
)
def test_the_status_of_a_volcano_job_is_its_phase(phase: str, state: str, finished: bool) -> None:
    job = {"spec": {"ttlSecondsAfterFinished": 60}, "status": {"state": {"phase": phase}}}
    status = KINDS["volcano"].status(job)
    assert (status.state, status.finished) == (state, finished)


def pod(labels: dict[str, str], **annotations: str) -> Object:
    return {"metadata": {"labels": labels, "annotations": annotations}}


def replica(index: int) -> Object:
    prefix = "training.kubeflow.org"
    return pod({f"{prefix}/replica-type": "worker", f"{prefix}/replica-index": str(index)})


@pytest.mark.parametrize(
    ("kind", "found", "rank"),
    [
        ("pytorchjob", replica(0), 0),
        ("pytorchjob", replica(2), 2),
        ("trainjob", pod({"batch.kubernetes.io/job-completion-index": "2"}), 2),
        ("trainjob", pod({}, **{"batch.kubernetes.io/job-completion-index": "2"}), 2),
        ("volcano", pod({}, **{"volcano.sh/task-index": "3"}), 3),
    ],
)
def test_the_node_rank_is_read_from_the_pod(kind: str, found: Object, rank: int) -> None:
    assert KINDS[kind].rank(found) == rank
