"""Child process that computes rewards and replies of an environment. It reads requests from its input, one JSON object
a line, and writes replies.

The first line has the rewards, the environment, and the folder of user code. The process limits its memory, leaves the
network where the system lets it, and runs in an empty folder. What user code prints is lost.
"""

import ctypes
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.code.load import describe
from holdfast.code.resolve import bind
from holdfast.rewards.builtin import CHECKS, end_with_parent
from holdfast.spec.rollout import Environment, Reward

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare(2)
Score = Callable[[dict[str, Any], str], Any]
Reply = Callable[[dict[str, Any], list[str]], Any]


def main() -> None:
    """Entry point of the child process."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    setup = json.loads(sys.stdin.readline())
    rewards = [Reward.model_validate(each) for each in setup["rewards"]]
    end_with_parent()
    isolated = _leave_network()
    scores = [_score_of(reward, setup["code"]) for reward in rewards]
    reply_of: Reply | None = None
    limits: list[Reward | Environment] = [*rewards]
    if setup["environment"] is not None:
        environment = Environment.model_validate(setup["environment"])
        reply_of = bind(environment, setup["code"])
        limits.append(environment)
    own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    memory = own + max(limit.memory_mib for limit in limits) * 2**20
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print(json.dumps({"isolated": isolated}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        code = Path(setup["code"] or ".")
        if reply_of is not None and "turns" in request:
            reply = _replied(reply_of, request, code)
        else:
            reply = _scored(scores[request["reward"]], request, code)
        print(json.dumps(reply), file=replies, flush=True)


def _score_of(reward: Reward, code: str) -> Score:
    if reward.use:
        return bind(reward, code)
    if reward.kind == "model":
        return lambda *_: None  # the parent has its value
    check = CHECKS[reward.kind]

    def score(record: dict[str, Any], answer: str) -> float:
        if reward.key not in record:
            raise ValueError(f"the record has no {reward.key!r}")
        return check(record[reward.key], answer)

    return score


def _scored(score: Score, request: dict[str, Any], code: Path) -> dict[str, Any]:
    """The value of a reward, or why there is none."""
    try:
        value = score(request["record"], request["answer"])
    except Exception as error:  # noqa: BLE001 - of user code, or of a limit
        return {"error": describe(error, code)[:500]}
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return {"error": f"returned {value!r:.80}, which is no finite number"}
    return {"value": float(value)}


def _replied(reply_of: Reply, request: dict[str, Any], code: Path) -> dict[str, Any]:
    """The text of a reply, or why there is none."""
    try:
        text = reply_of(request["record"], request["turns"])
    except Exception as error:  # noqa: BLE001 - of user code, or of a limit
        return {"error": describe(error, code)[:500]}
    if text is not None and not isinstance(text, str):
        return {"error": f"returned {text!r:.80}, which is no text"}
    return {"text": text}


def _leave_network() -> bool:
    """Enter an empty network namespace. Returns whether the system lets it."""
    try:
        return ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_NETWORK) == 0
    except (AttributeError, OSError):
        return False


if __name__ == "__main__":
    main()
