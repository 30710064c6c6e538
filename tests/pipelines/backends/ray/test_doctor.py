"""The doctor's findings about the nodes of a Ray; tests/ray queries a real one."""

from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")

from holdfast.pipelines.backends.ray.node_probe import PACKAGES, NodeProbe, probe_node
from holdfast.pipelines.doctor import ray
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import ExitCode, parse_spec

HERE = probe_node("file:///nowhere", "doctor/none")["versions"]
NODE = NodeProbe("10.0.0.1", {"CPU": 8.0, "memory": 32.0 * 2**30}, HERE, store="s3://bucket/prefix", word="word")
SPEC = "{name: small, data: {sources: [{uri: 's3://bucket/corpus'}]}}"


def one(findings: object) -> Finding:
    """The only finding."""
    (finding,) = list(findings)  # type: ignore[call-overload]
    assert isinstance(finding, Finding)
    return finding


def test_nodes_with_equal_versions_pass() -> None:
    assert set(HERE) == {"python", *PACKAGES}
    finding = one(ray._versions([NODE, replace(NODE, node="10.0.0.2")]))
    assert (finding.outcome, finding.message) == (
        "ok",
        "every node has " + ", ".join(f"{k} {v}" for k, v in HERE.items()),
    )


@pytest.mark.parametrize("name", ["python", "torch", "ray", "holdfast"])
def test_nodes_that_differ_are_reported(name: str) -> None:
    other = replace(NODE, node="10.0.0.2", versions={**HERE, name: "0.0.1"})
    finding = one(ray._versions([NODE, other]))
    assert finding.outcome == "fail"
    assert finding.message == f"{name} differs: {HERE[name]} on 10.0.0.1; 0.0.1 on 10.0.0.2"


@pytest.mark.parametrize(("name", "outcome"), [("ray", "warn"), ("holdfast", "fail")])
def test_nodes_with_other_versions_than_the_submitter_are_reported(name: str, outcome: str) -> None:
    finding = one(ray._versions([replace(NODE, versions={**HERE, name: "0.0.1"})]))
    assert (finding.outcome, finding.message) == (outcome, f"{name}: 0.0.1 on 10.0.0.1; here it is {HERE[name]}")


def test_a_store_that_differs_or_is_unreadable_on_a_node_is_reported() -> None:
    url = "s3://bucket/prefix"
    assert one(ray._store([NODE], url + "/", "word")).message == f"every node reads {url}"
    for node, message in (
        (replace(NODE, word=""), f"10.0.0.1 sees another {url} than this machine"),
        (replace(NODE, word="", problem="it refused"), f"10.0.0.1 does not read {url}: it refused"),
        (replace(NODE, store="file:///tmp"), f"10.0.0.1 has its store at file:///tmp, and this machine at {url}"),
    ):
        finding = one(ray._store([node], url, "word"))
        assert (finding.outcome, finding.message) == ("fail", message)


def test_a_gang_and_steps_need_nodes_that_are_large_enough() -> None:
    small, large = "cluster.resources={cpu: 8, memory: 32Gi}", "cluster.resources={cpu: 9, memory: 32Gi}"
    two = ("cluster.nodes={min: 2, max: 2}", "training.global_batch=16")
    assert one(ray._room(parse_spec(SPEC, [small]), [NODE])).outcome == "ok"
    for overrides, message in (([large], "wants a node with 9 CPU"), ([small, *two], "wants 2 nodes with 8 CPU")):
        finding = one(ray._room(parse_spec(SPEC, overrides), [NODE]))
        assert (finding.outcome, finding.code) == ("fail", ExitCode.UNSCHEDULABLE)
        assert message in finding.message
