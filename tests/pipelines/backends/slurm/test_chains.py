"""Status of a chain whose first jobs Slurm has forgotten, as a Slurm without accounting does during the training."""

from pathlib import Path

import pytest

from holdfast.pipelines.backends.slurm.backend import Slurm
from holdfast.pipelines.backends.slurm.emit import folder_of, store_mark
from holdfast.spec import dump_spec, parse_spec
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store

JOB = "{number}|N/A|holdfast-{key}-{step}|{state}|None|0|0|1:00|tiny {key}-6|"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def knows(home: Path, *lines: str) -> None:
    """Set the output of squeue, without accounting."""
    for name, script in (("squeue", "cat <<END\n" + "\n".join(lines) + "\nEND"), ("sacct", "exit 1")):
        (home / name).write_text(f"#!/bin/sh\n{script}\n")
        (home / name).chmod(0o755)


def test_a_training_stays_visible_after_slurm_forgets_the_preceding_step(home: Path) -> None:
    url = (home / "store").as_uri()
    key = f"abc-{store_mark(url)}"
    others = {"train": "RUNNING", "evaluate": "PENDING", "register": "PENDING", "notify": "PENDING"}
    lines = [
        JOB.format(number=number, key=key, step=step, state=state)
        for number, (step, state) in enumerate(others.items(), 7)
    ]
    knows(home, *lines)
    outcome = Outcome("preprocess", 1, 5.0, 8.0, 0, result="a-dataset")
    open_store(url).put(layout.job(f"{key}-6", "preprocess"), outcome.as_json())
    folder_of(key).mkdir(parents=True)
    for log in ("preprocess-2", "preprocess-6", "preprocess-12", "train-7"):
        (folder_of(key) / f"{log}.log").write_text(f"printed by {log}\n")
    slurm = Slurm(url)
    status = slurm.status("abc")
    assert (status.id, status.state) == (f"{key}-6", "RUNNING")
    assert [(step.name, step.state) for step in status.steps] == [
        ("preprocess", "SUCCEEDED"), ("train", "RUNNING"), ("evaluate", "PENDING"), ("register", "PENDING"),
        ("notify", "PENDING"),
    ]  # fmt: skip
    assert list(slurm.logs("abc")) == [("preprocess", "printed by preprocess-6"), ("train", "printed by train-7")]
    assert [run.id for run in slurm.list()] == [f"{key}-6"]


def test_two_chains_of_one_run_are_distinguished_without_their_first_jobs(home: Path) -> None:
    lines = [
        JOB.format(number=7, key="abc-0", step="notify", state="COMPLETED"),
        JOB.format(number=12, key="abc-0", step="train", state="RUNNING").replace("abc-0-6", "abc-0-11"),
        JOB.format(number=13, key="abc-0", step="notify", state="PENDING").replace("abc-0-6", "abc-0-11"),
    ]
    knows(home, *lines)
    url = (home / "store").as_uri()
    open_store(url).put(layout.job("abc-0-6", "register"), Outcome("register", 1, 5.0, 8.0, 0, "", "1").as_json())
    assert [(run.id, run.state) for run in Slurm(url).list()] == [
        ("abc-0-11", "RUNNING"), ("abc-0-6", "SUCCEEDED"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("codes", "state", "message"),
    [
        ({"preprocess": 0}, "CANCELED", "train: is not known to have begun, and Slurm has forgotten it"),
        ({"preprocess": 0, "train": 0}, "CANCELED", "evaluate: is not known to have begun, and Slurm has forgotten it"),
        ({"preprocess": 0, "train": 11}, "FAILED", "train: no text"),
        ({"preprocess": 0, "train": 0, "evaluate": 0, "register": 0}, "SUCCEEDED", ""),
        ({}, "CANCELED", "preprocess: is not known to have begun, and Slurm has forgotten it"),
    ],
    ids=["cancelled while it waited", "evaluation never began", "failed", "ended well", "no report"],
)
def test_a_run_known_by_its_exit_handler_alone_succeeds_only_if_all_outcomes_do(
    home: Path, codes: dict[str, int], state: str, message: str
) -> None:
    url = (home / "store").as_uri()
    key = f"abc-{store_mark(url)}"
    knows(home, JOB.format(number=10, key=key, step="notify", state="COMPLETED"))
    for start, (step, code) in enumerate(codes.items()):
        outcome = Outcome(step, 1, float(start), start + 1.0, code, "no text" if code else "", "done")
        open_store(url).put(layout.job(f"{key}-6", step), outcome.as_json())
    status = Slurm(url).status("abc")
    assert (status.state, status.message) == (state, message)
    assert [step.name for step in status.steps] == ["preprocess", "train", "evaluate", "register", "notify"]
    assert [run.state for run in Slurm(url).list()] == [state]


def test_a_listing_reads_the_outcomes_of_steps_even_if_the_first_job_is_known(home: Path) -> None:
    url = (home / "store").as_uri()
    first = JOB.format(number=6, key="abc-0", step="preprocess", state="COMPLETED").replace("abc-0-6", "abc-0")
    knows(home, first, JOB.format(number=10, key="abc-0", step="notify", state="COMPLETED"))
    assert [run.state for run in Slurm(url).list()] == ["CANCELED"]
    open_store(url).put(layout.job("abc-0-6", "register"), Outcome("register", 1, 5.0, 8.0, 0, "", "1").as_json())
    assert [run.state for run in Slurm(url).list()] == ["SUCCEEDED"]


def test_a_step_before_a_started_one_counts_as_succeeded(home: Path) -> None:
    lines = [
        JOB.format(number=number, key="abc-0", step=step, state="COMPLETED")
        for number, step in enumerate(("evaluate", "register", "notify"), 8)
    ]
    knows(home, *lines)
    assert [run.state for run in Slurm((home / "store").as_uri()).list()] == ["SUCCEEDED"]


def test_a_chain_that_is_being_made_has_no_step_that_was_forgotten(home: Path) -> None:
    knows(home, JOB.format(number=6, key="abc-0", step="preprocess", state="PENDING").replace("abc-0-6", "abc-0"))
    status = Slurm((home / "store").as_uri()).status("abc")
    assert (status.state, [step.name for step in status.steps]) == ("PENDING", ["preprocess"])


@pytest.mark.parametrize("comment", ["tiny {key}", ""])
def test_a_chain_of_a_script_begins_with_its_training_and_misses_no_other_step(home: Path, comment: str) -> None:
    url = (home / "store").as_uri()
    key = f"abc-{store_mark(url)}"
    first = JOB.format(number=6, key=key, step="train", state="COMPLETED").replace(f"tiny {key}-6", "{}")
    last = JOB.format(number=7, key=key, step="notify", state="COMPLETED")
    last = last if comment else last.replace(f"tiny {key}-6", "")
    knows(home, first.format(comment.format(key=key)), last)
    folder_of(key).mkdir(parents=True)
    spec = parse_spec({"name": "tiny", "code": f"blake3:{'0' * 64}", "train": {"script": "train.py"}})
    (folder_of(key) / "spec-1.yaml").write_text(dump_spec(spec))
    status = Slurm(url).status("abc")
    assert (status.id, status.state) == (f"{key}-6", "SUCCEEDED")
    assert [(step.name, step.state) for step in status.steps] == [("train", "SUCCEEDED"), ("notify", "SUCCEEDED")]
