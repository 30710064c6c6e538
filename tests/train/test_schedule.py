"""The learning rate at every edge of every schedule."""

from typing import Any

import pytest

from holdfast.rank.schedule import learning_rate
from holdfast.spec.training import BatchRamp, Optimizer, Schedule, Training


def rates(steps: int, **schedule: Any) -> list[float]:
    training = Training(steps=steps, optimizer=Optimizer(learning_rate=8.0), schedule=Schedule(**schedule))
    return [learning_rate(training, step) for step in range(steps)]


@pytest.mark.parametrize(
    ("steps", "schedule", "expected"),
    [
        (4, {"kind": "constant"}, [8, 8, 8, 8]),
        (4, {"kind": "constant", "warmup_steps": 2}, [4, 8, 8, 8]),
        (5, {"kind": "linear", "final_ratio": 0}, [8, 6, 4, 2, 0]),
        (5, {"kind": "linear", "final_ratio": 0.5}, [8, 7, 6, 5, 4]),
        (7, {"kind": "linear", "final_ratio": 0, "warmup_steps": 2}, [4, 8, 8, 6, 4, 2, 0]),
        (3, {"kind": "cosine", "final_ratio": 0}, [8, 4, 0]),
        (5, {"kind": "cosine", "final_ratio": 0.5, "warmup_steps": 2}, [4, 8, 8, 6, 4]),
        (1, {"kind": "cosine", "final_ratio": 0.1}, [8]),
        (1, {"kind": "linear", "warmup_steps": 1}, [8]),
        (4, {"kind": "cosine", "warmup_steps": 4}, [2, 4, 6, 8]),
        (2, {"kind": "cosine", "warmup_steps": 4}, [2, 4]),
        (7, {"kind": "wsd", "decay_steps": 2, "final_ratio": 0, "warmup_steps": 2}, [4, 8, 8, 8, 8, 4, 0]),
        (
            6,
            {"kind": "wsd", "decay_steps": 4, "final_ratio": 0.5, "decay_shape": "sqrt"},
            [8, 8, 6, 8 - 4 * 0.5**0.5, 8 - 4 * 0.75**0.5, 4],
        ),
        (5, {"kind": "wsd", "decay_steps": 2, "final_ratio": 0, "decay_shape": "cosine"}, [8, 8, 8, 4, 0]),
        (4, {"kind": "wsd", "decay_steps": 1, "final_ratio": 0, "warmup_steps": 2}, [4, 8, 8, 0]),
        (
            16,
            {"kind": "inverse_sqrt", "warmup_steps": 4},
            [2, 4, 6, 8, *(8 * (4 / step) ** 0.5 for step in range(5, 17))],
        ),
    ],
)
def test_the_learning_rate_is(steps: int, schedule: dict[str, Any], expected: list[float]) -> None:
    assert rates(steps, **schedule) == pytest.approx(expected, rel=1e-15, abs=1e-15)


def test_a_rate_that_is_scaled_follows_the_batch_of_its_step() -> None:
    ramp = BatchRamp(start=16, increment=16, steps=3)
    for scaling, expected in (("linear", [8, 16, 24, 32]), ("sqrt", [8, 8 * 2**0.5, 8 * 3**0.5, 16])):
        schedule = Schedule(kind="constant", scaling=scaling, base_batch=16)
        training = Training(
            steps=4, global_batch=64, batch_ramp=ramp, optimizer=Optimizer(learning_rate=8.0), schedule=schedule
        )
        assert [learning_rate(training, step) for step in range(4)] == expected
        whole = training.model_copy(update={"batch_ramp": BatchRamp()})
        assert {learning_rate(whole, step) for step in range(4)} == {expected[-1]}


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_decay_never_rises_and_ends_where_it_should(kind: str) -> None:
    decay = rates(1000, kind=kind, final_ratio=0.1, warmup_steps=10)[10:]
    assert decay == sorted(decay, reverse=True)
    assert (decay[0], decay[-1]) == (8.0, 0.8)
