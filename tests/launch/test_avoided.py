"""Nodes that the next launch avoids."""

import time
from pathlib import Path

from holdfast.launch.exits import LaunchExit
from holdfast.launch.launches import (
    UNHEALTHY_SECONDS,
    avoided_nodes,
    bad_nodes,
    nodes_of_the_last_end,
    record_exit,
)
from holdfast.spec.cluster import Cluster, Nodes
from holdfast.spec.errors import ExitCode
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import emit, recording
from holdfast.telemetry.events import StragglerDetected


def ended(folder: Path, *endings: tuple[int, list[str]]) -> Store:
    store = open_store(f"file://{folder}")
    for number, (code, nodes) in enumerate(endings, 1):
        record_exit(store, "run", number, LaunchExit.model_validate({"code": code, "blamed_nodes": nodes}))
    return store


def test_a_node_that_hung_is_avoided_after_the_second_time(tmp_path: Path) -> None:
    store = ended(tmp_path, (ExitCode.HUNG, ["a"]), (ExitCode.HUNG, ["b"]), (ExitCode.KILLED, ["a"]))
    assert bad_nodes(store, "run") == {"a"}


def test_a_node_with_wrong_arithmetic_is_avoided_if_it_is_the_only_suspect(tmp_path: Path) -> None:
    store = ended(tmp_path, (ExitCode.WRONG_ARITHMETIC, ["a"]), (ExitCode.WRONG_ARITHMETIC, ["b", "c"]))
    assert bad_nodes(store, "run") == {"a"}


def test_every_node_that_failed_a_health_check_is_avoided(tmp_path: Path) -> None:
    store = ended(tmp_path, (ExitCode.HUNG, ["c"]), (ExitCode.UNHEALTHY_NODE, ["a", "b"]))
    assert bad_nodes(store, "run") == {"a", "b"}


def test_a_failed_health_check_expires_after_a_day(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    for number, age in enumerate((60.0, UNHEALTHY_SECONDS + 60.0), 1):
        exit_record = {"code": ExitCode.UNHEALTHY_NODE, "blamed_nodes": [f"node-{number}"], "ended": time.time() - age}
        record_exit(store, "run", number, LaunchExit.model_validate(exit_record))
    assert bad_nodes(store, "run") == {"node-1"}


def test_the_nodes_of_the_last_end_are_those_of_the_newest_launch_that_ended(tmp_path: Path) -> None:
    assert nodes_of_the_last_end(ended(tmp_path / "none"), "run") == ()
    assert nodes_of_the_last_end(ended(tmp_path / "one", (201, ["a"]), (201, ["b", "c"])), "run") == ("b", "c")
    assert nodes_of_the_last_end(ended(tmp_path / "other", (201, ["a"]), (203, [])), "run") == ()


def test_an_end_that_was_not_written_whole_is_left_out(tmp_path: Path) -> None:
    store = ended(tmp_path, (201, ["a"]), (201, ["b"]))
    store.put(layout.ending("run", 2), b'{"code": 201, "bla')
    assert nodes_of_the_last_end(store, "run") == ("a",)


def test_the_node_of_a_slow_rank_is_avoided_where_the_spec_wants_it(tmp_path: Path) -> None:
    store = ended(tmp_path, (ExitCode.HUNG, ["a"]))
    with recording(store, "run", "rank 0"):
        emit(StragglerDetected(rank=3, host="slow", phase="data", ratio=1.3, seconds=0.1, step=20))
    nodes = Nodes(min=2, max=2)
    assert avoided_nodes(store, "run", Cluster(nodes=nodes, stragglers="report")) == frozenset()
    assert avoided_nodes(store, "run", Cluster(nodes=nodes, stragglers="exclude")) == {"slow"}


def test_nodes_of_the_newest_stragglers_are_avoided_while_enough_nodes_remain(tmp_path: Path) -> None:
    store = ended(tmp_path)
    with recording(store, "run", "rank 0"):
        for step, host in enumerate(("a", "b", "c", "a")):
            emit(StragglerDetected(rank=3, host=host, phase="data", ratio=1.3, seconds=0.1, step=step))

    def avoided(fewest: int, most: int) -> frozenset[str]:
        return avoided_nodes(store, "run", Cluster(nodes=Nodes(min=fewest, max=most), stragglers="exclude"))

    assert [avoided(2, 6), avoided(2, 4), avoided(3, 4), avoided(4, 4)] == [{"a", "b", "c"}, {"a", "c"}, {"a"}, {"a"}]
    record_exit(
        store, "run", 1, LaunchExit.model_validate({"code": ExitCode.WRONG_ARITHMETIC, "blamed_nodes": ["wrong"]})
    )
    assert [avoided(2, 4), avoided(3, 4)] == [{"wrong", "a"}, {"wrong"}]
