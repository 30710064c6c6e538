"""`holdfast health`, with real ranks on this machine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.health import Finding, Link, Measured, Report
from holdfast.pipelines.cli import entry
from holdfast.pipelines.cli.machines import print_report


@pytest.mark.slow
def test_this_machine_is_probed_and_the_report_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    arguments = ["health", "--processes", "1", "--seconds", "0.1", "--store", str(tmp_path / "store"), "--json"]
    result = CliRunner().invoke(entry.app, arguments)  # one rank has no peers that could be slower at the moment
    assert result.exit_code == 0, result.output
    report = Report.model_validate(json.loads(result.stdout))
    assert (
        [measurement.rank for measurement in report.measured] == [0]
        and report.measured[0].right
        and not report.failures
    )
    assert set(report.measured[0].rates) == {"compute", "memory", "disk", "store"}


@pytest.mark.slow
def test_a_missing_accelerator_ends_with_its_exit_code_and_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["health", "--accelerator", "nvidia", "--processes", "1", "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(entry.app, [*arguments, "--json"])
    assert result.exit_code == 15
    assert "needs 1 devices, this machine has 0" in result.output
    assert json.loads(result.stdout)["error"]["code"] == 15


def test_a_report_shows_ranks_links_what_was_found_and_what_was_not_looked_at() -> None:
    ranks = [
        Measured(rank=0, node="a", device="board", kind="cuda", rates={"compute": 4e14, "disk": 2e9}, clock_ahead=0.1,
                 clock_error=1.0, versions={"torch": "2", "device": "board"}, notes=("counters: no",)),
        Measured(rank=1, node="b", device="board", kind="cuda", rates={"compute": 4e13}, clock_ahead=-7.0),
    ]  # fmt: skip
    finding = Finding(probe="compute", severity="failed", ranks=(1,), nodes=("b",), words="rank 1 on b: compute: slow")
    report = Report(began=0.0, seconds=4.2, measured=tuple(ranks), links=(Link(first=0, second=1, rate=3e9),),
                    ring=2e9, findings=(finding,))  # fmt: skip
    assert print_report(report).splitlines() == [
        "rank  node  device  compute      memory  disk    store  clock",
        "0     a     board   400 TFLOP/s  -       2 GB/s  -      with the store's",
        "1     b     board   40 TFLOP/s   -       -       -      -7.0 s",
        "links: 1 pairs, 3 GB/s at least and 3 GB/s in the median; all in a ring 2 GB/s",
        "torch 2",
        "not looked at: counters: no",
        "failed: rank 1 on b: compute: slow",
        "FAILED on b; 2 ranks in 4.2 s",
    ]
