"""A managed session: what it refuses, and a run that is stopped, killed and resumed with the bits of a calm one."""

import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast
from holdfast.api import Run
from holdfast.api.submission import Location, request, resume
from holdfast.checkpoint import list_attempts
from holdfast.code import make_bundle, publish
from holdfast.code.resolve import is_submitted, keep_submitted
from holdfast.components.train.script import _finish, train_script
from holdfast.components.train.step import GangError
from holdfast.launch.launches import read_exits
from holdfast.launch.node.hangs import LONG
from holdfast.pipelines.backends.record import find_record, keep, record_of
from holdfast.pipelines.cli import app
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.view.catalog import find_run
from holdfast.pipelines.view.report import print_run
from holdfast.runtime.exits import code_of
from holdfast.script.process import _failure
from holdfast.script.tree import StateError
from holdfast.spec import ExitCode, Spec, parse_spec
from holdfast.spec.errors import DivergedError, MissingError, PlanChangedError, SpecError
from holdfast.spec.load import dump_spec, dump_written
from holdfast.store import Store, layout
from holdfast.telemetry import phases, read_events, read_history, recording
from holdfast.telemetry.run_metadata import write_run_metadata
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import opened
from tests.script.launched import ask_to_leave, digest_of_run, run_script
from tests.telemetry.trainer_server import trainer_server


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in a folder."""
    return f"file://{tmp_path / 'store'}"


def loop(stop: int = 6, leave: int = -1, first: int | None = None, export: str = "") -> list[int]:
    """A loop of `stop` steps with dropout, which gets a stop request in step `leave`."""
    session = holdfast.session(seed=3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    start = session.restore(model=model, optimizer=optimizer, steps=stop)
    for step in range(start if first is None else first, stop):
        if step == leave:
            ask_to_leave()
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step(step + 1, loss=loss)
    if export:
        session.export(Path(export))
    return [start]


def test_a_script_runs_without_a_launch_as_it_would_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.script import session as sessions

    sessions._session = None
    assert loop() == [0]
    assert not holdfast.session().managed
    sessions._session = None


def test_a_loss_with_a_gradient_is_logged_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    session = holdfast.Session()
    session.restore()
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), caplog.at_level("INFO", "holdfast.script"):
            warnings.simplefilter("error")
            for step in range(1, 11):
                session.step(step, loss=torch.ones((), requires_grad=True) * 2, rate=0.5)
    finally:
        torch.set_warn_always(always)
    assert "step 10  loss 2  rate 0.5" in caplog.text


def test_a_step_that_is_early_repeated_or_skipped_is_refused() -> None:
    session = holdfast.Session()
    with pytest.raises(StateError, match=r"before session\.restore"):
        session.step(1)
    session.restore()
    session.step(1)
    for step in (1, 3):
        with pytest.raises(StateError, match=rf"session\.step\({step}\) follows step 1; the next one is 2"):
            session.step(step)


def test_a_script_that_leaves_resumes_with_the_bits_of_an_undisturbed_run(url: str) -> None:
    assert run_script(url, "calm", loop)
    assert not run_script(url, "left", loop, 6, 2)
    assert digest_of_run(url, "left")[0] == 4  # all ranks agree one step later
    assert run_script(url, "left", loop)
    assert digest_of_run(url, "left") == digest_of_run(url, "calm")
    calm, left = (read_history(opened(url), run) for run in ("calm", "left"))
    assert [(row["step"], row["loss"]) for row in calm] == [(row["step"], row["loss"]) for row in left]


def test_a_loop_that_stops_by_a_flag_exports_nothing_before_its_last_step(url: str) -> None:
    def flagged(leave: int) -> None:
        session = holdfast.session(seed=3)
        model = nn.Linear(1, 1)
        for step in range(session.restore(model=model, steps=6), 6):
            session.step(step + 1)
            if step + 1 == leave:
                ask_to_leave()
            if session.should_stop():
                break
        session.export(model)

    run_script(url, "flagged", flagged, 2)
    exported = layout.run("flagged", "export/")
    assert not list(opened(url).list(exported))
    assert run_script(url, "flagged", flagged, -1)
    assert digest_of_run(url, "flagged")[0] == 6
    assert list(opened(url).list(exported))


def test_a_loop_that_starts_over_is_refused_with_the_line_to_write(url: str) -> None:
    run_script(url, "left", loop, 6, 2)
    with pytest.raises(StateError, match=r"session\.step\(1\) follows step 4.*start = session\.restore"):
        run_script(url, "left", loop, 6, -1, 0)


def test_a_script_that_never_reports_a_step_is_named(url: str) -> None:
    with pytest.raises(StateError, match=r"ended without session\.step"):
        run_script(url, "silent", lambda: holdfast.session().restore(model=nn.Linear(1, 1)))


def test_a_script_that_trains_without_reporting_steps_is_named_while_it_runs_and_is_in_no_phase_with_a_limit(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def unreported(updates: int, steps: int) -> None:
        session = holdfast.session(seed=1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = session.restore(model=model, optimizer=optimizer, steps=1)
        for _ in range(updates):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        assert phases.place().phase == "script"
        assert math.isinf(LONG["script"])
        for step in range(start, steps):
            session.step(step + 1)
            assert phases.place().phase == "forward"
            optimizer.step()
            assert phases.place().phase == "optimizer"

    words = "100 optimizer steps after session.restore without session.step"
    run_script(url, "reported", unreported, 99, 1)
    assert words not in caplog.text
    with pytest.raises(StateError, match=r"ended without session\.step"):
        run_script(url, "unreported", unreported, 101, 0)
    assert caplog.text.count(words) == 1


def test_a_package_that_differs_on_one_rank_is_named(url: str, tmp_path: Path) -> None:
    messages = in_ranks(2, _with_own_packages, url, tmp_path)
    assert all("Rank 1 has odd-package==2, and rank 0 has odd-package==1 instead" in one for one in messages)


def _with_own_packages(rank: int, size: int, url: str, folder: Path) -> str:
    metadata = folder / f"packages-{rank}" / "odd_package.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: odd-package\nVersion: {rank + 1}\n")
    sys.path.append(str(metadata.parents[1]))
    with process_group(folder / "meeting", rank, size), pytest.raises(PlanChangedError) as error:
        run_script(url, "odd", loop)
    return str(error.value)


@pytest.mark.parametrize("wrong", [2, 0])
def test_a_step_that_is_skipped_or_repeated_is_refused(url: str, wrong: int) -> None:
    def miscounting() -> None:
        session = holdfast.session(seed=1)
        session.restore(model=nn.Linear(1, 1))
        session.step(wrong)

    with pytest.raises(StateError, match=rf"session\.step\({wrong}\) follows step 0; the next one is 1"):
        run_script(url, "miscounting", miscounting)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(url: str) -> None:
    def diverging() -> None:
        session = holdfast.session(seed=1)
        model = nn.Linear(1, 1)
        for step in range(session.restore(model=model, steps=9), 9):
            session.step(step + 1, loss=float("nan") if step == 4 else 1.0)

    with pytest.raises(DivergedError, match="step 5: loss nan"):
        run_script(url, "diverging", diverging, every_steps=2)
    assert digest_of_run(url, "diverging")[0] == 4


def test_metrics_that_are_logged_for_a_step_are_in_its_row(url: str) -> None:
    def logging_loop() -> None:
        session = holdfast.session(seed=1)
        model = nn.Linear(1, 1)
        for step in range(session.restore(model=model, steps=2), 2):
            session.log(step + 1, early=torch.tensor(step))
            session.step(step + 1)
            if step == 0:
                session.log(1, late=0.5)
        session.log(1, too_late=1.0)
        with pytest.raises(StateError, match=r"the metric 'time' has a name"):
            session.log(3, time=1.0)

    run_script(url, "logging", logging_loop)
    rows = read_history(opened(url), "logging")
    assert [(row["step"], row["early"], row.get("late"), row.get("too_late")) for row in rows] == [
        (1, 0.0, 0.5, None),
        (2, 1.0, None, None),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is empty"),
        (b"\x80\x04N.", "is pickled"),
        ("/etc/hostname", "is no plain file"),
        ("/etc", "is no plain file"),
    ],
)
def test_an_export_without_files_or_with_pickles_is_refused(
    url: str, tmp_path: Path, content: bytes | str | None, message: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    if isinstance(content, bytes):
        (folder / "model.bin").write_bytes(content)
    elif content:
        (folder / "config.json").write_text("{}")
        (folder / "model").symlink_to(content)
    with pytest.raises(StateError, match=message):
        run_script(url, "exporting", loop, 2, -1, None, str(folder))
    assert not list(opened(url).list(layout.run("exporting", "export/")))


SCRIPT = """
import os, pathlib, signal, sys
import holdfast, torch
from torch import nn
from parts import build

session = holdfast.session(seed=5)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
start = session.restore(model=model, optimizer=optimizer, steps=9)
trouble = pathlib.Path(os.environ["TROUBLE"])
for step in range(start, 9):
    for number, name in ((signal.SIGTERM, "term"), (signal.SIGKILL, "kill")):
        if step == {"term": 2, "kill": 6}[name] and (trouble / name).exists():
            (trouble / name).unlink()
            os.kill(os.getpid(), number)
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    session.step(step + 1, loss=loss)
if (trouble / "raise").exists():
    raise ValueError("the script is wrong")
session.export(model)
"""


def script_spec(folder: Path, store: Store, *more: str) -> Spec:
    """A spec with the script in `folder`, whose bundle is in the store."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "parts.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))\n"
    )
    digest = publish(store, make_bundle(folder))
    tree = {
        "name": "script",
        "code": digest,
        "train": {"script": "train.py", "determinism": "exact", "verify_steps": 0},
    }
    return parse_spec(tree, ["checkpoint.every_steps=3", *more])


def test_a_script_that_never_calls_the_session_ends_with_a_warning_that_nothing_was_saved(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    store = opened(url)
    spec = script_spec(tmp_path / "code", store)
    write_run_metadata(store, "fedcba9876543210", spec, "", "")
    with recording(store, "fedcba9876543210", "train"):
        _finish(spec, "fedcba9876543210", "", store)
    (event,) = read_events(store, "fedcba9876543210")
    assert event.is_news
    assert event.text.startswith("train.py saved nothing: it never called session.restore and session.step")
    record = find_run(store, "fedcba9876543210")
    print_run(record, store)
    printed = capsys.readouterr().out
    assert "step        0, in 0 attempts" in printed
    assert "checkpoints list" not in printed
    assert not [line for line in printed.splitlines() if line.strip() in ("dataset", "figures", "model")]


@pytest.mark.slow  # four launches
def test_a_run_that_is_stopped_and_killed_ends_with_the_bits_of_a_calm_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", str(tmp_path))
    store = opened(url)
    spec = script_spec(tmp_path / "code", store)
    with trainer_server(tmp_path) as server:
        calm = train_script(spec, "", store, salt="calm")
    progress = server.bodies[-1]["trainerStatus"]  # of the pod's TrainJob
    assert progress["progressPercentage"] == 100
    metrics = {one["name"]: float(one["value"]) for one in progress["metrics"]}
    assert metrics["step"] == 9
    assert metrics["loss"] == pytest.approx(read_history(store, calm.run_id)[-1]["loss"], rel=1e-5)  # six digits
    (tmp_path / "term").touch()
    (tmp_path / "kill").touch()
    result = train_script(spec, "", store)
    codes = [ending.code for _, ending in sorted(read_exits(store, result.run_id).items())]
    assert codes == [ExitCode.PREEMPTED, ExitCode.KILLED, ExitCode.OK]
    assert (result.step, result.state_digest) == (9, calm.state_digest)
    assert result.attempts == len(list_attempts(store, result.run_id)) == 3
    export = f"{result.export}model.safetensors"
    assert store.get(export) == store.get(f"{calm.export}model.safetensors")
    header = json.loads(store.get(export)[8 : 8 + int.from_bytes(store.get(export)[:8], "little")])
    assert sorted(header) == ["0.bias", "0.weight"]


@pytest.mark.slow  # a launch
def test_an_exception_of_the_script_ends_the_run_and_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", str(tmp_path))
    (tmp_path / "raise").touch()
    store = opened(url)
    spec = script_spec(tmp_path / "code", store)
    with pytest.raises(GangError, match=r"train\.py raised ValueError: the script is wrong") as error:
        train_script(spec, "", store)
    assert error.value.exit_code == ExitCode.USER_CODE


@pytest.mark.parametrize(
    ("error", "restart_on", "code"),
    [
        (ValueError("x"), "lost", ExitCode.USER_CODE),
        (ValueError("x"), "any", ExitCode.SCRIPT_FAILED),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer"), "lost", ExitCode.LOST_PEER),
        (MemoryError(), "any", ExitCode.OUT_OF_MEMORY),
    ],
)
def test_an_exception_of_the_script_has_the_code_that_decides_a_restart(
    error: Exception, restart_on: str, code: ExitCode
) -> None:
    assert code_of(_failure(error, Path("train.py"), restart_on)) == code


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.script=../train.py"], "is no path below the folder of the spec"),
        (["training.steps=9"], "training.steps: is not used by train.script"),
        (['telemetry.observers=["mine.py:watch"]'], "telemetry.observers: is not used by train.script"),
        (["parallel.tensor=2"], "parallel.tensor: is not used by train.script"),
        (["data.document_masks=true"], "data.document_masks: is not used by train.script"),
        (["data.sources=[{uri: x}]", "data.chat.template=x"], "data.chat.template: is not used by data.kind: text"),
        (["telemetry.trackers=[wandb,wandb]"], "telemetry.trackers.1: is listed twice"),
        (["cluster.steps.preprocess.memory=0"], "cluster.steps.preprocess.memory: requests nothing"),
        (["cluster.environment.HOLDFAST_CACHE_GIB='100000'"], "HOLDFAST_CACHE_GIB: is above cluster"),
        (
            [
                "cluster.scheduler=volcano",
                "cluster.queue=a",
                "cluster.job=pytorchjob",
                "cluster.topology.placement=require",
            ],
            "cluster.topology.placement: has no effect in Volcano",
        ),
        (["train.script=null", 'train.arguments=["a"]'], "train.arguments: is not used without train.script"),
    ],
)
def test_a_spec_with_a_script_says_which_fields_it_does_not_use(changes: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec({"name": "script", "train": {"script": "train.py"}}, changes)


@pytest.mark.parametrize(
    ("text", "ignored", "message"),
    [("def f(:\n", "", "is not valid Python: line 1"), ("x = 1\n", "train.py\n", r"left out of the code by \.holdf")],
)
def test_a_script_that_cannot_run_is_refused_where_its_spec_is_read(
    tmp_path: Path, text: str, ignored: str, message: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    (tmp_path / ".holdfastignore").write_text(ignored)
    (tmp_path / "spec.yaml").write_text("name: x\ntrain: {script: train.py}\n")
    with pytest.raises(SpecError, match=message):
        load_spec(tmp_path / "spec.yaml")


def test_a_spec_with_a_script_survives_its_own_dump() -> None:
    spec = parse_spec({"name": "script", "train": {"script": "train.py"}, "parallel": {"processes": 3}})
    assert parse_spec(spec.model_dump(mode="json")) == spec
    assert parse_spec(dump_written(spec)) == spec
    assert parse_spec(dump_written(parse_spec(dump_spec(spec)))) == spec, "as a fork is submitted"
    assert spec.with_overrides({"parallel.processes": 2}).parallel.processes == 2


def test_a_fork_begins_from_a_checkpoint_and_ends_with_the_bits_of_its_parent(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store = opened(url)
    spec = script_spec(tmp_path / "code", store)
    parent = request(spec, backend="slurm", store=url)
    run_script(url, parent.run_id, loop, every_steps=2)
    write_run_metadata(store, parent.run_id, parent.spec, "", "")
    keep(record_of(parent, "slurm", "x"), url)
    untrusted = Run(parent.run_id, url).fork(2)
    with pytest.raises(MissingError, match="was not bundled on this machine"):
        resume(untrusted.run_id, at=Location(store=url))
    keep_submitted(parent.executed)
    forked = Run(parent.run_id, url).fork(4, ['train.arguments=["6"]'])
    record = find_record(store, forked.run_id)
    assert record is not None
    assert is_submitted(record.request.executed)
    assert record.request.spec.train.arguments == ("6",)
    starts: list[int] = []
    run_script(url, forked.run_id, lambda: starts.extend(loop()), every_steps=2)
    assert starts == [4]
    assert digest_of_run(url, forked.run_id) == digest_of_run(url, parent.run_id)
    assert [row["step"] for row in read_history(store, forked.run_id)] == [1, 2, 3, 4, 5, 6]


def test_a_diff_compares_runs_of_a_script(url: str, tmp_path: Path) -> None:
    store = opened(url)
    spec = script_spec(tmp_path / "code", store)
    runs = [letter * 16 for letter in "ab"]
    for run, steps in zip(runs, (6, 4), strict=True):
        run_script(url, run, loop, steps, every_steps=2)
        write_run_metadata(store, run, spec, "", "")
    compared = CliRunner().invoke(app, ["audit", "diff", *runs, "--store", url])
    assert (compared.exit_code, compared.exception) == (0, None), compared.output
