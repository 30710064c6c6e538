"""images/lock.txt: every file that an image may install, by its hash."""

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / ".ci/lock.py"))
NVIDIA = ROOT / "images/torch.nvidia.lock"
ABC, OTHER = "0a" * 32, "0b" * 32


def test_the_lock_has_the_files_of_all_that_the_images_install_and_of_nothing_else() -> None:
    """If this fails: make constraints"""
    pins = runpy.run_path(str(ROOT / ".ci/constraints.py"))["pinned"]()
    locked = TOOL["locked"]()
    assert locked == TOOL["wanted"]()
    assert {
        name: version for (name, version), extras in locked.items() if extras != {"builder"}
    }.items() <= pins.items()


def test_the_images_install_the_lines_of_their_extras() -> None:
    def names(extras: str) -> set[str]:
        command = ["sh", "install.sh", "locked", extras]
        result = subprocess.run(command, cwd=ROOT / "images", check=True, capture_output=True, text=True, timeout=60)
        assert all(" --hash=sha256:" in line for line in result.stdout.splitlines())
        return {line.split("==")[0] for line in result.stdout.splitlines()}

    assert names("builder") == {"pip"}
    train, ray = names("train"), names("train,ray")
    assert {"setuptools", "numpy", "tokenizers"} <= train
    assert "ray" in ray - train
    assert ray == train | names("ray")
    assert "pytest" not in names(",".join(TOOL["EXTRAS"]))


def test_image_wheels_of_the_index_are_locked_or_else_the_source() -> None:
    def file(name: str, digest: str) -> dict[str, Any]:
        return {"filename": name, "hashes": {"sha256": digest}}

    wheels = [
        file("some_thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "a"),
        file("some_thing-1.0-cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64.whl", "b"),
        file("Some.Thing-1.0-cp39-abi3-manylinux_2_28_x86_64.whl", "c"),
        file("some_thing-1.0-py2.py3-none-any.whl", "d"),
    ]
    others = [
        file("some_thing-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", "m"),
        file("some_thing-1.0-cp311-cp311-win_amd64.whl", "w"),
        file("some_thing-1.0-cp313-cp313-manylinux_2_28_x86_64.whl", "n"),
        file("some_thing-1.0.1-py3-none-any.whl", "o"),
        file("some_thing_else-1.0-py3-none-any.whl", "p"),
        file("some_thing-1.0.tar.gz", "s"),
    ]
    assert TOOL["hashes_of"]("some-thing", "1.0", [*wheels, *others]) == ["a", "b", "c", "d"]
    assert TOOL["hashes_of"]("some-thing", "1.0", others) == ["s"]
    with pytest.raises(LookupError, match=r"some-thing==2\.0: the index names no file"):
        TOOL["hashes_of"]("some-thing", "2.0", [*wheels, *others])


def test_the_lock_of_a_torch_has_it_and_what_it_alone_brings() -> None:
    def report(name: str, version: str, **hashes: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "version": version}, "download_info": {"archive_info": {"hashes": hashes}}}

    reports = [report("torch", "2.13.0", sha256=ABC), report("nvidia-nccl-cu13", "2.1", sha256=ABC)]
    installation = {"install": [*reports, report("Jinja2", "3", sha256=ABC)]}
    name = "{}-cp312-cp312-manylinux_2_28_aarch64.whl"

    def listed(package: str) -> list[dict[str, Any]]:
        """The index has the same build of torch for another platform, and another build of NCCL."""
        files = {"torch": ("torch-2.13.0", [ABC, OTHER]), "nvidia-nccl-cu13": ("nvidia_nccl_cu13-2.1", [OTHER])}
        stem, digests = files[package]
        return [{"filename": name.format(stem), "hashes": {"sha256": digest}} for digest in digests]

    assert TOOL["lock_of_torch"](installation, ["jinja2"], listed) == [
        f"nvidia-nccl-cu13==2.1 --hash=sha256:{ABC}",
        f"torch==2.13.0 --hash=sha256:{ABC} --hash=sha256:{OTHER}",
    ]
    assert f"torch==2.13.0 --hash=sha256:{ABC}" in TOOL["lock_of_torch"](installation, ["jinja2"], lambda _: [])
    with pytest.raises(LookupError, match="no sha256"):
        TOOL["lock_of_torch"]({"install": [report("torch", "2.13.0")]}, [], listed)


def test_the_lock_of_the_nvidia_torch_has_its_version_and_no_package_of_the_other_lock() -> None:
    """If the version differs: python .ci/lock.py torch torch==VERSION >images/torch.nvidia.lock"""
    lines = [line for line in NVIDIA.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    torch = runpy.run_path(str(ROOT / ".ci/constraints.py"))["pinned"]()["torch"]
    versions = dict(line.split(" ")[0].split("==") for line in lines)
    assert versions["torch"] == torch
    assert {"triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "cuda-toolkit"} <= versions.keys()
    assert not versions.keys() & {name.lower() for name, _ in TOOL["locked"]()}
    of_torch = next(line for line in lines if line.startswith("torch=="))
    assert of_torch.count("--hash") == 4, "two Pythons on two machines"

    def is_locked(variant: str, requirement: str) -> bool:
        command = ["sh", "install.sh", "torch_is_locked", variant, requirement]
        return subprocess.run(command, cwd=ROOT / "images", check=False, timeout=60).returncode == 0

    assert is_locked("nvidia", "") and is_locked("nvidia", f"torch=={torch}")
    assert not is_locked("nvidia", "torch==2.12.0"), "another torch than that of the lock is asked for"
    assert not is_locked("cpu", "")


def test_the_security_page_says_what_images_are_made_of_and_what_is_not_checked() -> None:
    page = " ".join((ROOT / "docs/security.md").read_text().split("## Images")[1].split())
    for lock in ("images/lock.txt", "images/torch.nvidia.lock"):
        assert f"`{lock}` | sha256 of each file" in page
        assert (ROOT / lock).exists()
    assert "The repository has no `images/torch.cpu.lock`" in page
    assert {path.name for path in (ROOT / "images").glob("torch.*.lock")} == {"torch.nvidia.lock"}
    assert "The repository has no digest of a base image" in page
    images = [line for path in (ROOT / "images").glob("*.Dockerfile") for line in path.read_text().splitlines()]
    assert not [line for line in images if line.startswith(("ARG BASE", "FROM")) and "@sha256" in line]
    assert "| images in `manifests/` | a tag" in page
    manifests = "".join(path.read_text() for path in (ROOT / "manifests").rglob("*.yaml"))
    assert not re.search(r"holdfast[\w-]*@sha256|digest: sha256", manifests)
