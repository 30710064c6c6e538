"""Caller's side of the child process that computes rewards, and replies of an environment.

An answer costs at most the time and memory of its rewards and replies. A child over a limit is killed with the
processes of its session, and the next request starts another one. The answer gets `on_failure`, or ends, and the cause
is recorded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

from holdfast.rendering.process import VARIABLES
from holdfast.runtime.logs import log
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import DataError, HoldfastError, UserCodeError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.rollout import Environment, Reward

START_SECONDS = 120.0
MAX_REPLY = 2**20  # bytes
PIPE_BYTES = 2**12  # that a pipe which is ready for writing takes without a wait (PIPE_BUF)


class TimeoutReason(str):
    """Why a value is missing: its time is over."""

    __slots__ = ()


def _not_started(reason: str) -> HoldfastError:
    return UserCodeError(
        f"training.grpo: the process that computes rewards and replies does not start: {reason}; look at its "
        "error above, raise memory_mib, or correct the file of your function"
    )


@dataclass(frozen=True)
class Scored:
    """The rewards of one answer, in the order of the spec."""

    values: list[float]
    errors: list[str]  # why a value is that of `on_failure`; empty if it is not

    def total(self, rewards: Sequence[Reward]) -> float:
        """The weighted sum of the values."""
        return sum(reward.weight * value for reward, value in zip(rewards, self.values, strict=True))


class RewardProcess:
    """Computes the rewards of answers in a child process, and the replies of an `environment`. Use it as a context
    manager."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        code: str = "",
        environment: Environment | None = None,
        failure: Callable[[str], HoldfastError] = _not_started,
    ) -> None:
        """`code` is the folder of the bundle with the functions of user code. `failure` makes the error of a process
        that does not start, from the reason."""
        self._rewards, self._code, self._environment, self._failure = rewards, code, environment, failure
        self._child: _Child | None = None

    def score(self, record: dict[str, Any], answer: str, given: Mapping[int, float] = MappingProxyType({})) -> Scored:
        """All rewards of one answer. `given` are those of reward models, by their numbers. Raises UserCodeError, or the
        error of `failure`, if the child process does not start."""
        values, errors = [], []
        for number, reward in enumerate(self._rewards):
            if reward.kind == "model":
                value, error = given[number], ""
                if not math.isfinite(value):
                    value, error = reward.on_failure, f"the reward model gives {value}"
            else:
                value, error = self._score(number, reward, record, answer)
            values.append(value)
            errors.append(error)
        return Scored(values, errors)

    def reply(self, record: dict[str, Any], turns: Sequence[str]) -> tuple[str | None, str]:
        """The reply of the environment to the turns of an answer, None if the answer ends; and why there is none, empty
        if the environment ends the answer. Raises UserCodeError as `score`."""
        assert self._environment is not None
        reply = self._ask({"record": record, "turns": list(turns)}, self._environment.timeout_seconds)
        if isinstance(reply, str):
            return None, reply
        return reply.get("text"), redact(str(reply.get("error", "")))

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _score(self, number: int, reward: Reward, record: dict[str, Any], answer: str) -> tuple[float, str]:
        reply = self._ask({"reward": number, "record": record, "answer": answer}, reward.timeout_seconds)
        if isinstance(reply, str):
            return reward.on_failure, reply
        if "error" in reply:
            return reward.on_failure, redact(str(reply["error"]))
        return float(reply["value"]), ""

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """The reply of the child process, or why there is none; the next request then starts another one."""
        if self._child is None:
            self._child = _Child(self._rewards, self._code, self._environment, self._failure)
        reply = self._child.ask(request, seconds)
        if isinstance(reply, str):
            self.close()
        return reply


class _Child:
    """One child process, with a separate session and folder."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        code: str,
        environment: Environment | None,
        failure: Callable[[str], HoldfastError],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-rewards-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._folder.name,
            start_new_session=True,
            env={name: os.environ[name] for name in VARIABLES if name in os.environ} | {"OMP_NUM_THREADS": "1"},
        )
        setup = {
            "rewards": [reward.model_dump(mode="json") for reward in rewards],
            "environment": None if environment is None else environment.model_dump(mode="json"),
            "code": code,
        }
        hello = self.ask(setup, START_SECONDS)
        if isinstance(hello, str):
            self.end()
            raise failure(hello)
        if not hello["isolated"]:
            log.warning("this system does not let rewards run without a network: they can reach it")

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """The reply, or why there is none."""
        line = self._exchange(json.dumps(request).encode() + b"\n", seconds)
        if line is None:
            return TimeoutReason(f"took more than {seconds:g} s")
        if not line.endswith(b"\n"):
            code = self._process.wait()
            return f"ended its process (code {code}); it may need more than memory_mib"
        try:
            return parse_json_object(line, "the reply of the reward")
        except DataError as error:
            return str(error)

    def end(self) -> None:
        """Kill the child and the processes of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._folder.cleanup()

    def _exchange(self, request: bytes, seconds: float) -> bytes | None:
        """Send a request. The next line, or None if it does not come in time. Without a line break if the child
        ended. A child that does not read is late, too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        source, target = self._process.stdout.fileno(), self._process.stdin.fileno()
        deadline, line = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            selector.register(target, selectors.EVENT_WRITE)
            while not line.endswith(b"\n") and len(line) < MAX_REPLY:
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if not ready:
                    return None
                if target in ready:
                    try:
                        request = request[os.write(target, request[:PIPE_BYTES]) :]
                    except BrokenPipeError:  # the missing reply shows it
                        request = b""
                    if not request:
                        selector.unregister(target)
                if source in ready:
                    part = os.read(source, 2**16)
                    if not part:
                        break
                    line += part
        return line
