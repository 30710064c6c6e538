"""Runs of generated answers whose rewards or whose store misbehave: the bits of a calm run, or a clear end."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.code.closure import role_digest, source_text
from holdfast.pipelines.chaos.proxy import FaultyProxy, answer, lose_reply, slow
from holdfast.rollouts.records import Answer, recorded_steps, records_of_step
from holdfast.spec import Spec
from holdfast.spec.errors import StoreUnreachableError
from holdfast.store import Store, open_store
from tests.checkpoint.ranks import in_ranks
from tests.rollouts.prompt_run import FIELDS, prompt_spec, train_with_code, write_prompts
from tests.train.ranks import Runs, identity_of, trained

LIMIT = 3  # seconds of a reward
STEPS = 3  # each of the twelve prompts once
COMMON = ("training.grpo.group=2", "training.global_batch=8", "training.micro_batch=2", f"training.steps={STEPS}")
FAULTY = f"""\
import time
from pathlib import Path

def reward(record, answer):
    if Path(__file__).with_name("changed").exists():
        return 7.0
    fault = record["prompt"]
    if fault == "A":
        time.sleep(1000)
    if fault == "B":
        time.sleep({LIMIT} + 0.5)  # and answers, late
    if fault == "C":
        raise RuntimeError("no judge")
    return len(answer) + ord(answer[:1] or "a") % 4
"""
CALM = """\
def reward(record, answer):
    return -1 if record["prompt"] in "ABC" else len(answer) + ord(answer[:1] or "a") % 4
"""
BROKEN = "import no_such_module\n\ndef reward(record, answer):\n    return 0\n"


FILES = {"faulty.py": FAULTY, "calm.py": CALM, "broken.py": BROKEN}


def with_reward(name: str) -> tuple[str, ...]:
    """The overrides of a run with the reward of a file. A file that reads others depends on all."""
    use = f"{name}:reward"
    digest = role_digest({file: source_text(text.encode()) for file, text in FILES.items()}, use)
    reward = f'{{use: "{use}", digest: "{digest}", timeout_seconds: {LIMIT}, on_failure: -1}}'
    return (*COMMON, f"training.grpo.rewards=[{reward}]")


def answers(store: Store, spec: Spec, salt: str = "") -> list[Answer]:
    """The answers of all steps."""
    run = identity_of(spec, salt)
    return [
        answer
        for step in recorded_steps(store, run)
        for record in records_of_step(store, run, step)
        for unit in record.units
        for answer in unit.answers
    ]


def _killed_with_rewards(rank: int, size: int, url: str, folder: Path, runs: Runs, code: Path) -> list[str]:
    """Train runs, as a rank that is killed in the last step of the last one: after its rewards, before its update."""
    from holdfast.rank.answer_batches import AnswerBatches

    load, calls = AnswerBatches._load, 0

    def dying(*given: Any, **named: Any) -> Any:
        nonlocal calls
        batch = load(*given, **named)
        calls += 1
        if calls == STEPS * 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    AnswerBatches._load = dying  # type: ignore[method-assign]
    return train_with_code(rank, size, url, folder, runs, code)


@pytest.mark.slow
def test_rewards_that_fail_count_the_same_before_and_after_a_kill(store: Store, tmp_path: Path) -> None:
    """One hangs, one answers late, one raises. Each counts as `on_failure`, and recorded rewards stay."""
    code = tmp_path / "code"
    code.mkdir()
    for name, text in FILES.items():
        (code / name).write_text(text, encoding="utf-8")
    faulty, calm, broken = map(with_reward, FILES)
    runs = [((*FIELDS, *faulty), "", None), ((*FIELDS, *calm), "", None), ((*FIELDS, *faulty), "killed", None)]
    assert in_ranks(1, _killed_with_rewards, store.url, tmp_path / "first", runs, code) == [None]
    (code / "changed").touch()
    rest: Runs = [
        ((*FIELDS, *faulty), "killed", None),
        ((*FIELDS, *broken), "", None),
    ]
    assert in_ranks(1, train_with_code, store.url, tmp_path / "second", rest, code) == [["", "UserCodeError"]]
    spec = prompt_spec(*faulty)
    assert trained(store, spec) == trained(store, prompt_spec(*calm)) == trained(store, spec, "killed")
    found = answers(store, spec)
    assert answers(store, spec, "killed") == found
    causes = [error for each in found for error in each.errors if error]
    assert causes.count(f"took more than {LIMIT} s") == 4
    assert sum("no judge" in cause for cause in causes) == 2
    assert len(causes) == 6
    assert [each.reward for each in found if any(each.errors)] == [-1] * 6


def _of_store(
    rank: int, size: int, url: str, folder: Path, runs: Runs, address: dict[str, str], deadline: float
) -> Any:
    """Train runs, as a rank that reaches its store at an address, with a deadline for each request."""
    from tests.train import ranks

    os.environ.update(address)
    ranks.open_store = partial(open_store, deadline=deadline)
    return ranks._train_all(rank, size, url, folder, runs, False, signal.SIGTERM)


@pytest.mark.slow
def test_a_slow_store_changes_no_bit_and_one_that_is_away_ends_the_run(
    tmp_path: Path, s3_endpoint: str, s3_url: str
) -> None:
    """Records come late, and their replies are lost. Without an answer, the run ends, and continues later."""
    store, spec = open_store(s3_url), prompt_spec(*COMMON)
    write_prompts(store)
    fields = (*FIELDS, *COMMON)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with FaultyProxy(s3_endpoint, seed=3) as proxy:
        address = environment | {"AWS_ENDPOINT_URL": proxy.url}
        late = proxy.inject(slow(0.4), path="rollouts/", times=None, chance=0.6)
        lost = proxy.inject(lose_reply(), method="PUT", path="rollouts/", times=None, chance=0.6)
        calm_and_slow: Runs = [(fields, "slow", None)]
        assert in_ranks(1, _of_store, store.url, tmp_path / "slow", calm_and_slow, address, 60.0) == [[""]]
        assert late.hits > 5
        assert lost.hits > 0
        proxy.heal()
        away = proxy.inject(answer(503, "SlowDown"), method="PUT", path="rollouts/000000002", times=None)
        runs: Runs = [(fields, "", None), (fields, "away", None)]
        run = identity_of(spec, "away")
        away.path = f"{run}/rollouts/000000002"
        endings = in_ranks(1, _of_store, store.url, tmp_path / "away", runs, address, 3.0)
        assert endings == [["", StoreUnreachableError.__name__]]
        assert recorded_steps(store, run) == [1]
        proxy.heal()
        assert in_ranks(1, _of_store, store.url, tmp_path / "rest", [(fields, "away", None)], address, 60.0) == [[""]]
    for salt in ("slow", "away"):
        assert trained(store, spec, salt) == trained(store, spec)
        assert answers(store, spec, salt) == answers(store, spec)
