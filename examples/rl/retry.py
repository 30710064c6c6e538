"""An environment with a second try: it checks a sum, and says no to a wrong one."""

from __future__ import annotations

from typing import Any


def reply(record: dict[str, Any], turns: list[str]) -> str | None:
    """Ask again after a wrong sum. None ends the answer."""
    return None if turns[-1] == record["answer"] else f"no {record['prompt']}"


def reward(record: dict[str, Any], answer: str) -> float:
    """1 for a right first try, 0.5 for a right later one. `answer` is the last turn of the model."""
    if answer != record["answer"]:
        return 0.0
    return 0.5 if "turns" in record else 1.0
