"""The state of a script is saved by name, and restored without pickles at another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import Attempt, Checkpointer, Retention, StateDigest, digest_of
from holdfast.collectives import Gang
from holdfast.script.state import ScriptState
from holdfast.script.tree import StateError
from holdfast.store import Store
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import DESCRIBE, RUN, opened


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store in a folder."""
    return opened(f"file://{tmp_path / 'store'}")


class Small(nn.Module):
    """Two layers with tied weights, buffers of dtypes that the format lacks, and state beyond tensors."""

    seen: torch.Tensor
    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 5)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen[self.calls % 3] = True
        self.counts += 1
        return self.second(torch.dropout(self.head(self.first(inputs)), 0.1, train=True))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Script:
    """The objects of a small script."""

    def __init__(self, wrap: Any = None) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = Small()
        if wrap is not None:
            wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.ema: dict[str, Any] = {"loss": 0.0, "seen": [], "mean": torch.zeros(3)}

    def state(self, gang: Gang, **per_rank: Any) -> ScriptState:
        """All state, as `session.restore` takes it."""
        items = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "ema": self.ema}
        return ScriptState(items, per_rank, gang)

    def train(self, start: int, stop: int) -> None:
        """Steps from `start` to `stop`."""
        for step in range(start, stop):
            torch.manual_seed(step)
            loss = self.model(torch.randn(4, 6)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.ema["loss"] = 0.9 * self.ema["loss"] + loss.item()
            self.ema["seen"].append(step)
            self.ema["mean"] += loss.item()


def digest(state: ScriptState, gang: Gang) -> str:
    """The digest of the whole state."""
    parts = gang.all_gather(digest_of(state.saved(state.live())), StateDigest)
    return str(sum(parts, StateDigest()))


def saver(store: Store, gang: Gang, number: int = 1) -> Checkpointer:
    """A checkpointer of a gang."""
    return Checkpointer(store, Attempt(RUN, number), Retention(9), describe=DESCRIBE, gang=gang)


def test_a_state_comes_back_whole_and_training_continues_bit_for_bit(store: Store) -> None:
    calm = Script()
    calm.train(0, 8)
    first, gang = Script(), Gang()
    first.train(0, 5)
    saved = first.state(gang)
    writer = saver(store, gang)
    writer.save(5, saved.saved(saved.live()), {})
    writer.wait()

    second = Script()
    state = second.state(gang)
    assert saver(store, gang, 2).restore(state.boxes, lambda _: None) == 5
    state.adopt()
    assert digest(state, gang) == digest(saved, gang)
    second.train(5, 8)
    assert digest(state, gang) == digest(calm.state(gang), gang)
    assert second.ema["seen"] == list(range(8))
    assert second.model.calls == 8


class Nested(torch.optim.SGD):
    """An optimizer with tensors in lists and dictionaries of a parameter's state."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", {"norms": [], "both": (torch.ones(2), 3)})
            kept["norms"].append(parameter.detach().norm())


def test_tensors_within_the_state_of_an_optimizer_come_back(store: Store) -> None:
    def made() -> tuple[nn.Linear, Nested]:
        model = nn.Linear(2, 2)
        return model, Nested(model.parameters(), lr=0.1, momentum=0.9)

    gang, (model, optimizer) = Gang(), made()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    saved = ScriptState({"model": model, "optimizer": optimizer}, {}, gang)
    writer = saver(store, gang)
    writer.save(2, saved.saved(saved.live()), {})
    writer.wait()

    other, second = made()
    state = ScriptState({"model": other, "optimizer": second}, {}, gang)
    assert saver(store, gang, 2).restore(state.boxes, lambda _: None) == 2
    state.adopt()
    assert digest(state, gang) == digest(saved, gang)
    assert len(second.state[other.weight]["kept"]["norms"]) == 2


def test_only_what_may_change_before_the_next_update_is_copied() -> None:
    script = Script()
    script.train(0, 1)
    held = {layout.name: box.data for layout, box in script.state(Gang()).live()}
    before = {name: data.clone() for name, data in held.items()}
    script.model(torch.randn(4, 6))  # changes buffers
    script.ema["mean"] += 1
    assert all(torch.equal(data, before[name]) for name, data in held.items())
    script.train(1, 2)
    changed = {name for name, data in held.items() if not torch.equal(data, before[name])}
    assert {"model/second.weight", "optimizer/exp_avg/model/second.weight"} <= changed


def test_a_checkpoint_that_is_not_adopted_leaves_the_objects_as_they_are(store: Store) -> None:
    first, gang = Script(), Gang()
    first.train(0, 2)
    saved = first.state(gang)
    writer = saver(store, gang)
    writer.save(2, saved.saved(saved.live()), {})
    writer.wait()
    second = Script()
    state = second.state(gang)
    before = digest(state, gang)
    saver(store, gang, 2).restore(state.boxes, lambda _: None)  # as for a step of a local tier that does not verify
    assert digest(state, gang) == before


def test_a_state_saved_by_two_ranks_is_the_same_on_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    saved = in_ranks(2, _sharded, url, tmp_path / "two", 0)
    assert saved[0] == saved[1]
    assert in_ranks(1, _sharded, url, tmp_path / "one", 5) == saved[:1]


def _sharded(rank: int, size: int, url: str, meeting: Path, expected: int) -> str:
    """Restore with FSDP2, or train and save where nothing is saved. Returns the digest."""
    from torch.distributed.fsdp import fully_shard

    with process_group(meeting, rank, size):
        gang = Gang()

        def shard(model: Small) -> None:
            fully_shard(model.second)
            fully_shard(model)

        script = Script(shard if size > 1 else None)
        state, writer = script.state(gang), saver(opened(url), gang, 1 + bool(expected))
        assert writer.restore(state.boxes, lambda _: None) == expected
        if expected:
            state.adopt()
        else:
            script.train(0, 5)
            held = state.live()
            state.require_equal(held, 5)
            writer.save(5, state.saved(held), {})
            writer.wait()
        return digest(state, gang)


def test_state_that_differs_between_ranks_is_refused_with_its_path(tmp_path: Path) -> None:
    messages = in_ranks(2, _differing, tmp_path / "meeting")
    assert all("state.json differ between the ranks (ema.loss: 0.0 and 1.0)" in message for message in messages)


def _differing(rank: int, size: int, meeting: Path) -> str:
    with process_group(meeting, rank, size):
        script = Script()
        script.ema["loss"] = float(rank)
        state = script.state(Gang())
        with pytest.raises(StateError) as error:
            state.require_equal(state.live(), 3)
        return str(error.value)


def test_state_per_rank_is_refused_at_another_number_of_ranks(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    assert in_ranks(2, _per_rank, url, tmp_path / "two", 0) == [[0], [1]]
    assert in_ranks(2, _per_rank, url, tmp_path / "again", 5) == [[0], [1]]
    with pytest.raises(AssertionError, match=r"state per rank \(own\) of 2 ranks, and there are 1"):
        in_ranks(1, _per_rank, url, tmp_path / "one", 5)


def _per_rank(rank: int, size: int, url: str, meeting: Path, expected: int) -> list[int]:
    with process_group(meeting, rank, size):
        gang, own = Gang(), [-1 if expected else rank]
        state = ScriptState({"shared": {"a": 1}}, {"own": own}, gang)
        writer = saver(opened(url), gang, 1 + bool(expected))
        assert writer.restore(state.boxes, lambda _: None) == expected
        if expected:
            state.adopt()
        else:
            writer.save(5, state.saved(state.live()), {})
            writer.wait()
        return own


def test_what_no_checkpoint_can_hold_is_refused_when_it_is_given() -> None:
    model = Small()
    loose = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(StateError, match="optimizer: parameter 0 of group 0 is in no module"):
        ScriptState({"model": model, "optimizer": loose}, {}, Gang())
    with pytest.raises(StateError, match=r"count is a builtins\.int, which cannot be restored in place"):
        ScriptState({"count": 3}, {}, Gang())
    with pytest.raises(StateError, match="'a b' is no name of an item"):
        ScriptState({"a b": {}}, {}, Gang())
    with pytest.raises(StateError, match="model/weight is on the meta device"):
        ScriptState({"model": nn.Linear(2, 2, device="meta")}, {}, Gang())


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"model": nn.Linear(2, 3)}, r"session\.restore got model; the checkpoint has model, notes"),
        ({"model": nn.Linear(2, 3, bias=False), "notes": {}}, "Only in the checkpoint: model/bias"),
        ({"model": nn.Linear(2, 3), "more": {}}, r"session\.restore got model, more"),
    ],
)
def test_objects_that_are_not_those_of_the_checkpoint_are_refused(
    store: Store, items: dict[str, Any], message: str
) -> None:
    gang = Gang()
    state = ScriptState({"model": nn.Linear(2, 3), "notes": {"a": 1}}, {}, gang)
    writer = saver(store, gang)
    writer.save(1, state.saved(state.live()), {})
    writer.wait()
    other = ScriptState(items, {}, gang)
    with pytest.raises(StateError, match=message):
        saver(store, gang, 2).restore(other.boxes, lambda _: None)
        other.adopt()


def test_a_parameter_that_appears_between_saves_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    state = ScriptState({"model": model}, {}, Gang())
    model.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(StateError, match=r"the tensors of model are not those of session\.restore: model/bias"):
        state.live()


def test_a_parameter_that_vanishes_between_saves_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = ScriptState({"model": model}, {}, Gang())
    model.bias = None  # type: ignore[assignment]
    with pytest.raises(StateError, match=r"the tensors of model are not those of session\.restore: model/bias"):
        state.live()
