"""Answers of Slurm's commands where no Slurm runs."""

import shutil
from pathlib import Path

import pytest

from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.states import message_of
from holdfast.spec.errors import MissingError


@pytest.mark.skipif(shutil.which("squeue") is None, reason="not installed (Debian: slurm-client)")
def test_a_machine_without_slurm_configuration_gets_a_remedy_and_no_spec_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("SlurmctldPort=1\n")  # a missing file is retried for a minute
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    with pytest.raises(MissingError, match="run this on a login node, or set SLURM_CONF"):
        client.jobs_of()


def test_a_machine_without_slurm_commands_gets_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="such as a login node"):
        client.jobs_of()


@pytest.mark.parametrize(
    ("printed", "logged"),
    [
        ("sacct: unrecognized option '--starttime=now-30days'", True),
        ("Slurm accounting storage is disabled", False),
    ],
)
def test_a_refusal_of_sacct_is_logged_once_and_disabled_accounting_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, printed: str, logged: bool
) -> None:
    client._warn_sacct_refused.cache_clear()
    for name, script in (("squeue", "true"), ("sacct", f'echo "{printed}" >&2; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for _ in range(2):
        assert client.jobs_of() == []
    assert caplog.text.count("sacct refuses access: " + printed) == logged


@pytest.mark.parametrize("waited_for", ["Dependency", "None"])
def test_a_job_purged_between_two_queries_is_read_from_the_accounting(
    waited_for: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker, job = tmp_path / "moved", f"7|holdfast-x-train|CANCELLED|{waited_for}|0:0|0|tiny x-6"
    for name, script in (("squeue", f"touch {marker}"), ("sacct", f'test -e {marker} && echo "{job}"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (entry,) = client.jobs_of()
    assert (entry.id, entry.comment) == (7, "tiny x-6")
    assert message_of(entry) == "not begun: a step before it did not succeed"


def test_the_controller_takes_precedence_over_the_accounting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queue_line = "7|N/A|holdfast-x-train|RUNNING|None|0|1|0:05|tiny x-6|"  # restarted after the end in the accounting
    accounting_line = "7|holdfast-x-train|NODE_FAIL|None|0:0|9|tiny x-6"
    for name, line in (("squeue", queue_line), ("sacct", accounting_line)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{line}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [(job.id, job.state, job.restarts) for job in client.jobs_of()] == [(7, "RUNNING", 1)]
