"""A node of a gang with a spare dies during training. The spare replaces it, and the model equals that of an
undisturbed run.
"""

from pathlib import Path

import pytest

from holdfast.engines.assignment import Assignment
from holdfast.store import open_store
from tests.faults.history import require_sound_history
from tests.faults.nodes import Nodes
from tests.train.ranks import identity_of, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, tiny_spec, write_dataset

STEPS = 24
RUN = (f"training.steps={STEPS}", "checkpoint.every_steps=4", "checkpoint.grace_seconds=10")
CALM = (*RUN, "parallel.processes=2")


@pytest.mark.drill
def test_a_spare_takes_the_seat_of_a_killed_node_at_the_same_world_size_and_with_the_same_bits(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_dataset(store)
    spec = tiny_spec(*RUN, "parallel.processes=1", "cluster.nodes={min: 2, max: 2}", "cluster.spares=1")
    with Nodes(store, spec, tmp_path / "nodes") as nodes:
        nodes.start("host", "second")
        nodes.wait_for_world(2)
        nodes.start("spare")
        nodes.wait(lambda: "this node is a spare" in nodes.printed(), "the spare")
        nodes.let(6)
        nodes.kill("second")
        nodes.hold(STEPS)
        nodes.wait(lambda: len(nodes.began()) > 1, "the second gang")
        codes = nodes.wait_for_end()
    assert codes == {"host": 0, "second": -9, "spare": 0}, nodes.printed()
    assert nodes.worlds() == [2]
    assert len({attempt.launch for attempt in nodes.began()}) == 1  # no launcher restarted anything
    require_sound_history(store, Assignment.of(spec, identity_of(spec), DATASET_ID))
    assert train_in_ranks(2, store.url, tmp_path / "calm", [(CALM, "calm", None)]) == [""]
    assert trained(store, spec) == trained(store, tiny_spec(*CALM), "calm")
