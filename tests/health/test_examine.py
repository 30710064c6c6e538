"""Health checks of real ranks report a slow, a wrong and an absent rank, and report nothing of a sound gang."""

import os
from pathlib import Path

import pytest
import torch

from holdfast.health.verdict import Report
from holdfast.launch import Job, LocalLauncher
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.store import open_store
from tests.checkpoint.ranks import in_ranks, process_group
from tests.health import sick

CASES = ("sound", "slow", "wrong")
SICK = 1  # the faulty rank


def _examined(rank: int, size: int, folder: Path) -> list[tuple[str, str]]:
    """The report of each case as JSON, and the result of this rank after it."""
    from holdfast.collectives import Gang
    from holdfast.health.examine import examine, require_health

    os.environ["LOCAL_RANK"], os.environ["HOLDFAST_NODE_NAME"] = "0", f"node-{rank}"
    results = []
    with process_group(folder / "meeting", rank, size):
        gang, store = Gang(), open_store(f"file://{folder / 'store'}")
        for case in CASES:
            sick.by_looks(sick.SLOW if case == "slow" and rank == SICK else sick.SOUND)
            sick.flip(case == "wrong" and rank == SICK)
            report = examine(gang, torch.device("cpu"), store, "health/", folder / "disk", 0.0)
            try:
                require_health(report, rank)
                ending = ""
            except HoldfastError as error:
                ending = type(error).__name__
            results.append((report.model_dump_json(), ending))
    return results


def test_a_slow_and_a_wrong_rank_are_named_and_a_sound_gang_is_not(tmp_path: Path) -> None:
    results = in_ranks(3, _examined, tmp_path)
    assert results[0][0][0] == results[1][0][0] == results[2][0][0]
    reports = {case: Report.model_validate_json(text) for case, (text, _) in zip(CASES, results[0], strict=True)}
    endings = {case: [rank[index][1] for rank in results] for index, case in enumerate(CASES)}
    assert reports["sound"].findings == ()
    assert len(reports["sound"].links) == 3 and reports["sound"].ring
    assert {probe for report in reports["sound"].measured for probe in report.rates} == {
        "compute",
        "memory",
        "disk",
        "store",
    }
    failures = reports["slow"].failures
    assert {finding.probe for finding in failures} == {"compute", "memory", "link"}
    assert {finding.probe for finding in reports["slow"].findings} == {"compute", "memory", "link", "disk", "store"}
    assert {finding.ranks for finding in reports["slow"].findings} == {(SICK,)}
    assert reports["slow"].failed_nodes == ("node-1",)
    wrong = reports["wrong"].failures
    assert [(finding.probe, finding.ranks) for finding in wrong] == [("arithmetic", (SICK,))]
    assert "sums are exact" in wrong[0].words
    assert endings == {
        "sound": ["", "", ""],
        "slow": ["LostPeerError", "UnhealthyNodeError", "LostPeerError"],
        "wrong": ["LostPeerError", "UnhealthyNodeError", "LostPeerError"],
    }
    assert list(open_store(f"file://{tmp_path / 'store'}").list("")) == []  # the probes leave nothing in the store
    assert list((tmp_path / "disk").iterdir()) == []


def _meet(rank: int, size: int, folder: Path) -> str:
    from holdfast.collectives import Gang

    with process_group(folder / "meeting", rank, size):
        gang, message = Gang(), ""
        if rank == 0:
            try:
                gang.meet(1.0, "in the health check")
            except HoldfastError as error:
                message = f"{type(error).__name__}: {error}"
            (folder / "ready").touch()
        while not (folder / "ready").exists():
            os.sched_yield()
        return message


def test_a_rank_missing_at_a_probe_is_reported(tmp_path: Path) -> None:
    message = in_ranks(2, _meet, tmp_path)[0]
    assert message.startswith("HungError: in the health check, ranks did not come within 1 s")
    assert "Ranks 1 " in message


@pytest.mark.slow
def test_the_program_ends_with_the_code_of_what_it_found_and_blames_the_node(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "logs")
    endings = []
    try:
        for number, defect in enumerate(("1:wrong", "-")):
            report = tmp_path / f"{number}.json"
            command = ["-m", "tests.health.sick", "--seconds", "0", "--report", str(report)]
            environment = {"HOLDFAST_TEST_SICK": defect, "HOLDFAST_HOME": str(tmp_path / "home")}
            ending = launcher.run(Job("job", "run", number, command, 2, 1, 20.0, Cluster(), environment=environment))
            failures = Report.model_validate_json(report.read_text()).failures
            endings.append(
                (ending.code, ending.rank, len(ending.blamed_nodes), {finding.ranks for finding in failures})
            )
    finally:
        launcher.close()
    assert endings[0] == (ExitCode.UNHEALTHY_NODE, 1, 1, {(1,)})
    assert (endings[1][0], endings[1][2:]) == (ExitCode.OK, (0, set()))
