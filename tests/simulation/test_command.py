"""`holdfast simulate`, used by a person and by a script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTER = str(Path(__file__).parents[2] / "examples" / "clusters" / "mixed-1000.yaml")


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_comparison_lists_the_policies_and_the_bound(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    process = simulate(CLUSTER, "synthetic:300:1.2", "-p", "fifo", "-p", "easy", "--report", str(page))
    assert process.returncode == 0, process.stderr
    lines = [line.split()[0] for line in process.stdout.splitlines() if line]
    assert lines[-3:] == ["(bound)", "fifo", "easy"]
    text = page.read_text()
    assert text.count("<polyline") == 4
    assert "mixed-1000" in text


def test_a_script_gets_the_figures_as_json_and_twice_the_same() -> None:
    first, second = (simulate(CLUSTER, "synthetic:200", "-p", "drf", "--json").stdout for _ in range(2))
    assert first == second
    assert json.loads(first)["policies"][0]["jobs"] == 200


@pytest.mark.slow
def test_an_unknown_policy_or_trace_is_a_wrong_command_line_or_not_found() -> None:
    unknown = simulate(CLUSTER, "synthetic:10", "-p", "magic")
    assert (unknown.returncode, "known are fifo" in unknown.stderr.replace("\n", " ")) == (2, True)
    assert simulate(CLUSTER, "synthetic:none").returncode == 2
    endless = simulate(CLUSTER, "synthetic:1:0.0009")
    assert (endless.returncode, "LOAD from 0.001" in " ".join(endless.stderr.split())) == (2, True)
    assert simulate(CLUSTER, "nowhere.csv").returncode == 15


@pytest.mark.slow
def test_emit_writes_a_policy_for_an_engine_with_its_expected_effect(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    process = simulate(CLUSTER, "synthetic:300:1.2", "-p", "priority", "--emit", "kueue", "--to", str(folder))
    assert process.returncode == 0, process.stderr
    assert {path.name for path in folder.iterdir()} == {"kueue.yaml", "settings.yaml", "effect.json"}
    effect = json.loads((folder / "effect.json").read_text())
    assert set(effect["expected"]) == {"fifo", "priority"}
    assert f"mean wait {effect['expected']['priority']['wait_mean']:.0f} s" in (folder / "kueue.yaml").read_text()
    assert "Kueue evicts the lowest priority first" in " ".join(process.stdout.split())
    refusal = simulate(CLUSTER, "synthetic:300", "-p", "easy", "--emit", "volcano", "--to", str(tmp_path / "none"))
    assert refusal.returncode == 10
    assert "no engine asks for an estimate" in " ".join(refusal.stderr.split())
    assert not (tmp_path / "none").exists()
    assert simulate(CLUSTER, "synthetic:300", "--emit", "kueue").returncode == 2
