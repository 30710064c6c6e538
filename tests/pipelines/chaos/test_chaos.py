"""`holdfast chaos`: a schedule by seed, faults that the run survives, and a reported difference."""

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.components.train.result import TrainingResult
from holdfast.pipelines.chaos import compare, disk, processes
from holdfast.pipelines.chaos import faults as catalogue
from holdfast.pipelines.chaos.fault_run import ChaosError, Planned, Run, Survived, schedule
from holdfast.pipelines.chaos.faults import FAULTS
from holdfast.pipelines.cli import app
from holdfast.spec.errors import DataError, ExitCode
from holdfast.store import open_store
from tests.checkpoint.tools.test_first_divergence import write
from tests.faults.nodes import HELD
from tests.whole.small import held, hold

AHEAD = 5  # steps

SPEC = """
name: small
data: {{sources: [{{uri: "{text}"}}], tokenizer: {{vocabulary: 300}}, validation_fraction: 0.2}}
model: {{layers: 1, hidden: 32, heads: 2, context: 16}}
training: {{steps: 400, global_batch: 8, micro_batch: 2}}
parallel: {{processes: 2}}
evaluation: {{max_tokens: 1000, max_perplexity: 1.0e6}}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"text {number} of many " * 20}) + "\n" for number in range(200)))
    (tmp_path / "spec.yaml").write_text(SPEC.format(text=text))
    return tmp_path / "spec.yaml"


def test_a_seed_decides_the_order_and_the_steps_and_each_fault_happens_once() -> None:
    plan = schedule(list(FAULTS), 200, 7)
    assert plan == schedule(list(FAULTS), 200, 7) != schedule(list(FAULTS), 200, 8)
    assert sorted(entry.fault for entry in plan) == sorted(FAULTS)
    steps = [entry.step for entry in plan]
    assert steps == sorted(steps)
    assert steps[0] > 0 and steps[-1] < 180
    assert all(before.step < before.by <= after.step for before, after in pairwise(plan)), "each makes room in time"
    assert plan[-1].by < 200
    assert schedule(["rank-killed"], 10, 1)[0].step >= 1
    with pytest.raises(DataError, match="rank-kiled: is not known; use some of rank-killed"):
        compare.known_faults("rank-kiled,store-away")


def test_unavailable_faults_are_skipped_with_the_reason(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left_out(*overrides: str) -> dict[str, str]:
        return compare._left_out(compare.Chaos(spec, overrides, 60, 1, 0.0, list(FAULTS)), proxied=True)

    spec.write_text(spec.read_text().replace("global_batch: 8, micro_batch: 2", "global_batch: 16"))
    assert "memory-limit" not in left_out()
    assert "another layout" in left_out("parallel.auto=true")["memory-limit"]
    assert left_out("parallel.processes=1").keys() >= {"network-cut"}
    monkeypatch.delattr("psutil.Process.rlimit")
    assert "prlimit" in left_out()["memory-limit"]
    monkeypatch.setattr(disk, "_tried", lambda: ((), "no namespaces"))
    assert left_out()["disk-full"] == "no namespaces"


def script(folder: Path, body: str) -> Run:
    """A run whose command is a few lines of Python, with the number of earlier starts in `times`."""
    count = f"from pathlib import Path; import os, sys; p = Path({str(folder / 'times')!r}); "
    count += "times = int(p.read_text()) if p.exists() else 0; p.write_text(str(times + 1))\n"
    return Run([sys.executable, "-c", count + body], folder / "home", {}, folder / "log.txt")


def test_a_command_is_repeated_while_its_exit_code_is_retryable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "HOLDFAST_WEBHOOK"):
        monkeypatch.setenv(name, "http://mine")
    (again := tmp_path / "again").mkdir()
    run = script(again, "print(os.environ.get('MLFLOW_TRACKING_URI'), os.environ.get('HOLDFAST_WEBHOOK'))\n"
                 "sys.exit((137, 204, 3)[times])")  # fmt: skip
    assert run.go([], None, 0, lambda _: None) == []
    assert (run.commands, run.code) == (3, ExitCode.NOT_BLESSED)
    assert run.log.read_text() == "None None\n" * 3, "nothing of the user's is touched"
    (bad := tmp_path / "bad").mkdir()
    with pytest.raises(ChaosError, match=r"permanently with code 11\n.*no such text") as error:
        script(bad, "print('no such text'); sys.exit(11)").go([], None, 0, lambda _: None)
    assert error.value.exit_code == ExitCode.BAD_DATA
    (never := tmp_path / "never").mkdir()
    with pytest.raises(ChaosError, match="4 times the command"):
        script(never, "sys.exit(137)").go([], None, 0, lambda _: None)


def test_a_difference_is_named_and_what_the_runs_left_is_kept(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(experiment: compare.Chaos, site: compare._Site, salt: str, *_: object) -> tuple[object, ...]:
        folder, url = site.folder, site.url
        assert url == (tmp_path / "store" / folder.name).as_uri()  # the user's folders are not used
        side = write(open_store(url), salt, [3, 6], *([] if salt == "calm" else [5]))
        result = TrainingResult(
            run_id=salt, dataset_id="d", step=6, loss=1.0, tokens=1, parameters=1, checkpoint="", export="",
                export_digest="",
            state_digest=salt, attempts=1, seconds=1.0 if salt == "calm" else 4.0,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        return side.run_id, result, [], 1

    monkeypatch.setattr(compare, "_trained", trained)
    cli_result = CliRunner().invoke(app, ["chaos", str(spec), "--store", str(tmp_path / "store"), "--seed", "3"])
    assert isinstance(cli_result.exception, ChaosError)
    assert cli_result.exception.exit_code == ExitCode.MISMATCH
    (kept,) = (tmp_path / "home" / "chaos").iterdir()
    assert str(kept) in str(cli_result.exception)
    for text in ("left out: store-slow", "goodput 25 %", "part at step 5", "that of step 6", "[2, 3]"):
        assert text in cli_result.stdout, text


@pytest.mark.parametrize(("storms", "code"), [(1, ExitCode.USAGE), (2, ExitCode.OK)])
def test_a_fault_for_which_there_was_no_time_may_come_in_another_storm(
    storms: int, code: ExitCode, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(
        _experiment: compare.Chaos, site: compare._Site, salt: str, planned: Any, *_: Any
    ) -> tuple[object, ...]:
        folder = site.folder
        result = TrainingResult(
            run_id=salt, dataset_id="d", step=6, loss=1.0, tokens=1, parameters=1, checkpoint="", export="",
                export_digest="",
            state_digest="the same", attempts=1, seconds=1.0,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        happened = planned[:1] if salt == "storm-0" else planned
        return salt, result, [Survived(fault.fault, fault.step, "it came", 1.0) for fault in happened], 1

    clock = iter([0.0, *(1.0 for _ in range(storms - 1)), 100.0])
    monkeypatch.setattr(compare, "_trained", trained)
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: next(clock), strftime=time.strftime,
                                                         gmtime=time.gmtime))  # fmt: skip
    faults = ["--faults", "rank-killed,command-killed", "--minutes", "1"]
    cli_result = CliRunner().invoke(
        app, ["chaos", str(spec), "--store", str(tmp_path / "store"), "--seed", "3", *faults]
    )
    missed = schedule(["rank-killed", "command-killed"], 60, 3)[1].fault
    assert f"over before: {missed}\n" in cli_result.stdout
    assert getattr(cli_result.exception, "exit_code", ExitCode.OK) == code, cli_result.exception
    assert code == ExitCode.OK or missed in str(cli_result.exception)


@pytest.fixture
def followed(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training never gets far ahead of the faults; the undisturbed one is not held."""
    for name, value in held(spec.parent, AHEAD).items():
        monkeypatch.setenv(name, value)
    original_go: Any = Run.go

    def led(run: Run, planned: Sequence[Planned], *others: Any) -> list[Survived]:
        *leading, report = others

        def recorded(what: Planned | Survived | int) -> None:
            report(what)
            if planned and isinstance(what, int):
                hold(spec.parent, what + AHEAD)

        hold(spec.parent, AHEAD if planned else sys.maxsize)
        return original_go(run, planned, *leading, recorded)

    monkeypatch.setattr(Run, "go", led)
    monkeypatch.setattr(processes, "WORKERS", (HELD,))


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("followed")
def test_a_whole_pipeline_survives_process_and_store_faults_with_the_same_bits(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "AWAY_SECONDS", 1.0)
    faults = "pipeline-killed,command-killed,store-full"  # the rest: tests/faults/test_mixtures.py...
    if not disk.refused():
        faults += ",disk-full"  # ...where only the training is on the disk
    arguments = ["chaos", str(spec), "--seed", "5", "--steps", "120", "--faults", faults, "--json"]
    cli_result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert cli_result.exit_code == ExitCode.OK, cli_result.output
    result = json.loads(cli_result.stdout)
    (storm,) = result["storms"]
    assert storm["equal"] and storm["state_digest"] == result["calm"]["state_digest"]
    assert sorted(fault["fault"] for fault in storm["faults"]) == sorted(faults.split(","))
    assert storm["commands"] >= 3
    assert not list((spec.parent / "home" / "chaos").iterdir()), "nothing is left behind"
