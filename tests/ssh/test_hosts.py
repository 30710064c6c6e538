"""The file of hosts, and the frames of a node."""

import io
from pathlib import Path

import pytest

from holdfast.launch.ssh.hosts import Host, hosts_file, read_hosts, require_enough
from holdfast.launch.ssh.launcher import _is_passed
from holdfast.launch.ssh.node import EVENT, LONGEST_FRAME, LONGEST_NOISE, OUTPUT, FrameWriter, frames_of
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import SpecError


def test_a_machine_is_a_line_with_an_optional_address(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# machines\n\ngpu-1\nme@gpu-2 address=10.0.0.2  # the second\n")
    assert read_hosts(tmp_path / "hosts") == (Host("gpu-1", ""), Host("me@gpu-2", "10.0.0.2"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no machine"),
        ("gpu-1\ngpu-1\n", r"hosts:2: is there twice.*gpu-1"),
        ("gpu-1 slots=8\n", r"hosts:1: is unknown.*slots=8"),
        ("-oProxyCommand=touch\n", r"is no name of a machine"),  # ssh would take it as an option
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(SpecError, match=words):
        read_hosts(tmp_path / "hosts")


def test_a_missing_file_and_too_few_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_HOSTS", raising=False)
    with pytest.raises(SpecError, match=r"HOLDFAST_HOSTS.*is not set"):
        hosts_file()
    with pytest.raises(SpecError, match="cannot be read"):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(SpecError, match=r"cluster.nodes.min.*more than the 1 machines"):
        require_enough(Cluster.model_validate({"nodes": {"min": 2, "max": 2}}), (Host("a", ""),))


def test_frames_survive_the_text_of_a_login_shell_and_end_with_a_torn_one() -> None:
    stream = io.BytesIO()
    writer = FrameWriter(stream)
    stream.write(b"Welcome!\nno end of line")
    writer.greet("token")
    writer.write(OUTPUT, b"a\nb")
    writer.write(EVENT, b"")
    writer.write(OUTPUT, b"torn")
    whole = stream.getvalue()
    assert list(frames_of(io.BytesIO(whole[:-1]), "token")) == [(OUTPUT, b"a\nb"), (EVENT, b"")]
    assert list(frames_of(io.BytesIO(whole), "another token")) == []


def test_a_stream_of_another_program_is_bounded() -> None:
    with pytest.raises(ValueError, match="before the node's greeting"):
        list(frames_of(io.BytesIO(b"x" * (2 * LONGEST_NOISE)), "token"))
    with pytest.raises(ValueError, match="longer than"):
        FrameWriter(io.BytesIO()).write(OUTPUT, b"x" * (LONGEST_FRAME + 1))
    with pytest.raises(ValueError, match="longer than"):
        list(frames_of(io.BytesIO(b"holdfast node t\no\xff\xff\xff\xff"), "t"))


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        ("AWS_SECRET_ACCESS_KEY", True),
        ("HOLDFAST_HOME", True),
        ("https_proxy", True),
        ("PATH", False),
        ("CUDA_VISIBLE_DEVICES", False),  # of the accelerators here
        ("HOLDFAST_LAUNCHER", False),
        ("AWS_CONFIG_FILE", False),  # a path of this machine
        ("AZURE_STORAGE_ACCOUNT_KEY", True),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", False),
    ],
)
def test_ranks_get_what_they_need_of_the_environment(name: str, passed: bool) -> None:
    assert _is_passed(name) is passed
