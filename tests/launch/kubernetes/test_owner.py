"""Owner of a launcher's job: the Workflow that started it, not another one with the same name."""

from holdfast.launch.kubernetes.owner import find_own_pod, find_pipeline
from tests.cluster.emulation import Emulation


def test_a_new_workflow_of_the_old_name_is_another_one_and_the_old_has_ended(cluster: Emulation) -> None:
    cluster.start_workflow()
    pipeline = find_pipeline(cluster.api(), find_own_pod(cluster.api(), "launcher-1"))
    assert pipeline is not None and not pipeline.was_ended()
    cluster.objects.delete("workflows", "pipeline")
    cluster.start_workflow(pods=())
    assert pipeline.was_ended()
