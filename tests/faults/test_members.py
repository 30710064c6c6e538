"""Nodes leave and return while the gang trains. The remaining nodes continue immediately, and the resulting model
equals that of a single rank.
"""

import os
from pathlib import Path

import pytest

from holdfast.checkpoint import read_manifest
from holdfast.engines.assignment import Assignment
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.store import Store, open_store
from tests.faults.history import require_sound_history
from tests.faults.nodes import Nodes
from tests.faults.picture import picture
from tests.train.ranks import identity_of, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, tiny_spec, write_dataset

STEPS = 48


def overrides_of(strategy: str, ranks: int = 1) -> tuple[str, ...]:
    """Four micro-batches of two rows, for one to four nodes. Three nodes have 1, 1 and 2."""
    return (
        "training.determinism=elastic", f"training.steps={STEPS}", f"parallel.strategy={strategy}",
        f"parallel.processes={ranks}", "checkpoint.every_steps=8", "checkpoint.grace_seconds=10",
        "cluster.nodes.min=1", f"cluster.nodes.max={4 if ranks == 1 else 1}",
    )  # fmt: skip


def require_the_bits_of_one_rank(store: Store, spec: Spec, folder: Path) -> None:
    """Require the bits of an undisturbed run on one rank. For other numbers of ranks, see
    tests/train/test_elastic.py.
    """
    require_sound_history(store, Assignment.of(spec, identity_of(spec), DATASET_ID))
    overrides, salt = overrides_of(spec.parallel.strategy), "calm-1"
    assert train_in_ranks(1, store.url, folder / salt, [(overrides, salt, None)]) == [""]
    assert trained(store, spec) == trained(store, tiny_spec(*overrides), salt)


def draw(file: Path, store: Store, nodes: Nodes) -> None:
    """The picture of a run, with the digests of the undisturbed runs."""
    digests = {
        label: read_manifest(store, run_id(tiny_spec(*overrides_of("ddp")), DATASET_ID, salt), STEPS).state_digest
        for label, salt in (("this run", ""), ("1 rank, undisturbed", "calm-1"))
    }
    lines = [f"{label:<21} {digest}" for label, digest in digests.items()]
    lines.insert(0, f"digest of the state after step {STEPS}")
    names = ["host", "first", "third", "fourth", "fifth", "sixth"]
    file.write_text(picture(nodes.stretches(), names, ("first", "third"), lines), encoding="utf-8")


@pytest.mark.drill
def test_four_nodes_become_two_then_three_then_four_and_end_with_the_bits_of_one(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_dataset(store)
    spec = tiny_spec(*overrides_of("fsdp"))
    with Nodes(store, spec, tmp_path / "nodes") as nodes:
        nodes.start("first", "host", "third", "fourth")
        nodes.wait_for_world(4)
        nodes.let(12)
        nodes.kill("first")  # with rank 0
        nodes.kill("third")
        nodes.hold(20)
        nodes.wait_for_world(2)
        nodes.let(20)
        nodes.start("fifth")
        nodes.wait_for_world(3)
        nodes.let(28)
        nodes.start("sixth")
        nodes.wait_for_world(4)
        nodes.let(STEPS)
        codes = nodes.wait_for_end()
    assert codes == {"first": -9, "third": -9, "host": 0, "fourth": 0, "fifth": 0, "sixth": 0}, nodes.printed()
    attempts = nodes.began()
    gangs = iter(attempts)  # More than four if a slow node misses a rendezvous and causes another one.
    _, _, three, four = (next(attempt for attempt in gangs if attempt.world == size) for size in (4, 2, 3, 4))
    assert attempts[-1].world == 4
    assert three.step >= 20, "growth lost a step"
    assert four.step >= 28, "growth lost a step"
    assert len({attempt.launch for attempt in attempts}) == 1  # no launcher restarted anything
    require_the_bits_of_one_rank(store, spec, tmp_path)
    if file := os.environ.get("HOLDFAST_PICTURE"):
        draw(Path(file), store, nodes)


@pytest.mark.drill
def test_a_silent_node_is_dropped_and_readmitted_when_it_responds(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_dataset(store)
    spec = tiny_spec(*overrides_of("ddp"))
    with Nodes(store, spec, tmp_path / "nodes") as nodes:
        nodes.start("host", "second", "third", "fourth")
        nodes.wait_for_world(4)
        nodes.let(9)
        nodes.freeze("third")
        nodes.hold(20)
        nodes.wait_for_world(3)
        nodes.let(20)
        nodes.thaw("third")
        nodes.wait_for_world(4)
        nodes.let(30)
        nodes.drain("second")
        nodes.hold(STEPS)
        nodes.wait_for_world(3)
        codes = nodes.wait_for_end()
    assert nodes.began()[-1].step > 30, "what the drained node had computed was lost"
    assert codes == {"host": 0, "second": ExitCode.PREEMPTED, "third": 0, "fourth": 0}, nodes.printed()
    require_the_bits_of_one_rank(store, spec, tmp_path)


@pytest.mark.drill
def test_a_gang_of_another_size_computes_nothing_where_its_size_makes_bits(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_dataset(store)
    spec = tiny_spec("cluster.nodes={min: 2, max: 2}", "checkpoint.every_steps=4", "checkpoint.grace_seconds=10")
    with Nodes(store, spec, tmp_path / "nodes", fewest=1) as nodes:
        nodes.start("host", "second")
        nodes.wait_for_world(2)
        nodes.let(6)
        nodes.kill("second")
        nodes.hold(12)
        codes = nodes.wait_for_end()
    assert codes == {"host": ExitCode.PLAN_CHANGED, "second": -9}, nodes.printed()
    assert "cluster.nodes: 2 before, 1 now" in nodes.printed()
    assert nodes.worlds() == [2]
