"""Every way a pod can end, or fail to start, gets its code, its message and its remedy."""

import pytest

from holdfast.launch.kubernetes.classify import Symptom, cause_of, end_of, obstacle_of
from holdfast.launch.kubernetes.client import Object
from holdfast.spec import ExitCode


def pod(leaving: bool = False, **status: object) -> Object:
    metadata = {"name": "gang-worker-0", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {})}
    return {"metadata": metadata, "spec": {"nodeName": "node-b"}, "status": status}


def ended(code: int, reason: str = "Error", phase: str = "Failed", leaving: bool = False, **more: object) -> Object:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": "as it says"}}
    return pod(leaving, phase=phase, containerStatuses=[{"name": "pytorch", "state": state}], **more)


def waiting(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(phase="Pending", containerStatuses=[{"name": "pytorch", "state": state}])


def disrupted(reason: str) -> list[Object]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "the cluster says so"}]


@pytest.mark.parametrize(
    ("found", "code", "words", "blames"),
    [
        (ended(12), 12, "exit code 12, diverged", False),
        (ended(11), 11, "bad data", False),
        (ended(99), 99, "exit code 99", False),
        (ended(204), 204, "preempted", False),
        (ended(202), 202, "lost peer", False),
        (ended(137), 137, "killed", False),
        (ended(139), 139, "signal 11", True),
        (ended(201), 201, "hung", True),
        (ended(208), 208, "wrong arithmetic", True),
        (ended(205), 205, "no space", True),
        (ended(137, "OOMKilled"), 137, "cluster.resources.memory", False),
        (ended(128, "StartError"), ExitCode.BAD_SPEC, "check cluster.image", False),
        (ended(137, "ContainerStatusUnknown"), 137, "it is unknown", True),
        (ended(143, conditions=disrupted("EvictionByEvictionAPI"), leaving=True), 143, "EvictionByEvictionAPI", False),
        (ended(204, conditions=disrupted("PreemptionByScheduler")), 204, "the cluster says so", False),
        (pod(phase="Failed", reason="Evicted", message="low on memory"), 137, "evicted by its node: low on mem", True),
        (ended(137, phase="Failed") | {}, 137, "killed", False),
        (pod(phase="Failed", reason="Preempting"), 137, "preempted", False),
        (pod(phase="Failed", reason="OutOfcpu", message="no cores"), 137, "no cores", True),
        (pod(phase="Failed", reason="UnexpectedAdmissionError"), 137, "UnexpectedAdmissionError", True),
        (pod(phase="Failed", reason="DeadlineExceeded"), ExitCode.CANCELLED, "cluster.deadline_hours", False),
        (pod(phase="Failed"), 137, "no reason given", False),
        (pod(phase="Unknown"), 137, "does not answer", True),
        (pod(leaving=True, phase="Running", reason="NodeLost"), 137, "its node was lost", True),
        (pod(leaving=True, phase="Running", conditions=disrupted("DeletionByTaintManager")), 137, "was lost", True),
    ],
    ids=str,
)
def test_an_end_has_a_code_words_and_perhaps_a_node_to_blame(
    found: Object, code: int, words: str, blames: bool
) -> None:
    symptom = end_of(found, "pytorch", 1)
    assert symptom is not None
    assert (symptom.code, symptom.blames_node, symptom.node) == (code, blames, "node-b")
    assert words in str(symptom)
    assert str(symptom).startswith("node rank 1 (pod gang-worker-0 on node node-b): ")


@pytest.mark.parametrize(
    "found", [ended(0, "Completed", "Succeeded"), pod(phase="Running"), pod(phase="Pending"), pod()]
)
def test_a_running_waiting_or_succeeded_pod_has_no_symptom(found: Object) -> None:
    assert end_of(found, "pytorch", 0) is None


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (waiting("ErrImagePull", "manifest unknown"), ExitCode.NOT_FOUND, "manifest unknown; check cluster.image"),
        (waiting("ImagePullBackOff", "401 Unauthorized"), ExitCode.ACCESS_DENIED, "pull secrets"),
        (waiting("InvalidImageName"), ExitCode.NOT_FOUND, "cluster.image"),
        (
            waiting("CreateContainerConfigError", 'secret "s3-credentials" not found'),
            ExitCode.NOT_FOUND,
            'secret "s3-credentials" not found; check cluster.secrets',
        ),
    ],
    ids=str,
)
def test_a_pod_start_failure_is_permanent_and_names_the_remedy(found: Object, code: ExitCode, words: str) -> None:
    obstacle = obstacle_of(found, "pytorch", 0, 600.0)
    assert obstacle is not None
    assert obstacle.symptom.code == code and not ExitCode(code).retryable
    assert words in str(obstacle.symptom)
    assert (obstacle.patience == 0) == ("InvalidImageName" in str(obstacle.symptom))


def test_a_container_before_the_ranks_that_has_no_image_or_fails_is_reported() -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    main = {"name": "pytorch", "state": {"waiting": {"reason": "PodInitializing"}}}
    before = [{"name": "fetch", "state": state}]
    obstacle = obstacle_of(
        pod(phase="Pending", initContainerStatuses=before, containerStatuses=[main]), "pytorch", 0, 9
    )
    assert obstacle is not None and "container fetch's image cannot be pulled" in str(obstacle.symptom)
    failed = [{"name": "fetch", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no route"}}}]
    symptom = end_of(pod(phase="Failed", initContainerStatuses=failed, containerStatuses=[main]), "pytorch", 0)
    assert symptom is not None and symptom.code == ExitCode.KILLED
    assert "its container fetch, which runs before the ranks, ended with 3: no route" in str(symptom)


def test_an_unschedulable_pod_waits_for_the_pending_timeout_of_the_spec() -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]
    obstacle = obstacle_of(pod(phase="Pending", conditions=conditions), "pytorch", 0, 600.0)
    assert obstacle is not None and obstacle.patience == 600.0
    assert obstacle.symptom.code == ExitCode.UNSCHEDULABLE
    assert "cannot be scheduled: 0/3 nodes; cluster.pending_timeout_minutes: 10" in str(obstacle.symptom)
    assert obstacle_of(waiting("ContainerCreating"), "pytorch", 0, 600.0) is None


def test_the_cause_of_a_gang_is_named_before_its_consequences() -> None:
    ends = [
        Symptom("p0", "a", 0, 202, "lost peer"),
        Symptom("p1", "b", 1, 137, "killed"),
        Symptom("p2", "c", 2, 137, "node lost", True),
    ]
    assert cause_of(ends).pod == "p2"
    assert cause_of([*ends, Symptom("p3", "d", 3, 12, "diverged")]).pod == "p3"
