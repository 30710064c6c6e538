"""Rewards: what each built-in check accepts, and that no answer costs more than its limits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from holdfast.code.closure import role_digest, source_text
from holdfast.rewards.builtin import CHECKS
from holdfast.rewards.process import RewardProcess
from holdfast.spec.rollout import Reward

SCHEMA = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
MINE = """\
import os, socket, threading

def length(record, answer, *, scale=1.0):
    return scale * len(answer) + record["base"]

def odd(record, answer):
    if answer == "hang":
        threading.Event().wait()
    if answer == "fill":
        return float(len(bytearray(2**31)))
    if answer == "exit":
        os._exit(3)
    if answer == "deaf":
        os.dup(0)
        os.dup2(os.pipe()[0], 0)
        return 1
    if answer == "print":
        print("not a reply", flush=True)
        return 2
    if answer == "network":
        try:
            socket.create_connection(("192.0.2.1", 9), timeout=2)
        except OSError as error:
            return float(error.errno or 0)
    return "text"
"""


@pytest.mark.parametrize(
    ("kind", "value", "answer", "expected"),
    [
        ("exact", "95", " 95\n", 1.0),
        ("exact", "95", "It is 95", 0.0),
        ("number", "1,024", "so 2 + 2 ... = 1024.0", 1.0),
        ("number", -3, "about -3.5", 0.0),
        ("number", 7, "no number", 0.0),
        ("regex", r"\bcat\b", "a cat sat", 1.0),
        ("regex", r"\bcat\b", "concatenate", 0.0),
        ("json_schema", SCHEMA, 'Here:\n```json\n{"x": 1}\n```', 1.0),
        ("json_schema", json.dumps(SCHEMA), '{"x": "1"}', 0.0),
        ("json_schema", SCHEMA, "{", 0.0),
    ],
)
def test_a_check_accepts_what_it_says(kind: str, value: Any, answer: str, expected: float) -> None:
    assert CHECKS[kind](value, answer) == expected


def test_code_passes_its_tests_in_a_process_of_its_own() -> None:
    record = {"tests": ["assert add(2, 3) == 5"], "answer": "x"}
    slow = Reward(kind="tests", timeout_seconds=60)
    with RewardProcess([slow, Reward(kind="exact", timeout_seconds=60)]) as rewards:
        good = rewards.score(record, "```python\ndef add(a, b):\n    return a + b\n```")
        bad = rewards.score(record, "def add(a, b):\n    return a - b")
        missing = rewards.score({"answer": "x"}, "x")
        leaving = rewards.score(record, "def add(a, b):\n    return a - b\nraise SystemExit(0)")
        writing = "import os\nwas = os.path.exists('x')\nopen('x', 'w')\ndef add(a, b):\n    return 0 if was else a + b"
        assert [rewards.score(record, writing).values[0] for _ in range(2)] == [1.0, 1.0], "answers share no files"
    assert (good.values, bad.values) == ([1.0, 0.0], [0.0, 0.0])
    assert leaving.values == [0.0, 0.0]
    assert missing.values == [0.0, 1.0]
    assert "has no 'tests'" in missing.errors[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_of_a_reward_model_that_is_not_finite_is_a_failure(value: float) -> None:
    settings = [Reward(kind="model", model="m", on_failure=-2, weight=3), Reward(kind="model", model="n")]
    with RewardProcess(settings) as rewards:
        found = rewards.score({}, "x", {0: value, 1: 0.5})
    assert (found.values, found.errors) == ([-2.0, 0.5], [f"the reward model gives {value}", ""])
    assert found.total(settings) == -5.5


@pytest.mark.slow
def test_a_reward_of_user_code_costs_at_most_its_limits(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    texts = {"mine.py": source_text(MINE.encode())}

    def reward(name: str, **fields: Any) -> Reward:
        use = f"mine.py:{name}"
        return Reward.model_validate({"use": use, "digest": role_digest(texts, use), **fields})

    record = {"base": 1}
    with RewardProcess([reward("length", scale=2.0, timeout_seconds=60)], str(tmp_path)) as rewards:
        assert rewards.score(record, "abc").values == [7.0]
    limited = reward("odd", timeout_seconds=3, memory_mib=256, on_failure=-1)
    with RewardProcess([limited], str(tmp_path)) as rewards:
        hung = rewards.score(record, "hang")
        assert rewards.score(record, "deaf").values == [1.0]
        assert rewards.score(record, "a" * 2**20).errors == ["took more than 3 s"], "it does not read"
        found = {answer: rewards.score(record, answer) for answer in ("fill", "exit", "print", "text", "network")}
    assert (hung.values, hung.errors) == ([-1.0], ["took more than 3 s"])
    assert found["fill"].values == found["exit"].values == found["text"].values == [-1.0]
    assert "MemoryError" in found["fill"].errors[0]
    assert "code 3" in found["exit"].errors[0]
    assert "no finite number" in found["text"].errors[0]
    assert found["print"].values == [2.0]
    assert found["network"].values[0] != 0
