"""images/lock.txt: every file that an image may install, by its sha256, and which extras need it.

    python .ci/lock.py                    say where the lock and this environment differ; code 1 if they do
    python .ci/lock.py --write            write the lock from what is installed and the index (`make constraints`)
    python .ci/lock.py torch REQUIREMENT  print the lock of a torch and of the libraries that it alone brings

The index is PIP_INDEX_URL, or PyPI; it is written nowhere. Torch is not in the lock: each build of it comes from
another index and brings other libraries. `torch` asks pip on the machine where it runs, with pip's own settings, which
package has which version. A lock has all files of these versions for images, if the index has the file that pip chose.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "images/lock.txt"
PIP = re.compile(r"^pip_version=(\S+)", re.MULTILINE)
EXTRAS = tuple("preprocess dvc train deepspeed tracking pipelines tasks metrics nvml otel ray".split())
BUILDER = "builder"  # of the stage that installs, and of no image
HEAD = """\
# What the images install: for each package the files of its one version, by sha256, and the extras that need it.
# images/install.sh takes the lines of its extras and installs them with --require-hashes. Written by `make constraints`
# from what is installed and the index's answers; a test compares them. Wheels for Linux on x86_64 and aarch64, of
# Python 3.11 and 3.12; where there is none, the source. Torch and the libraries of its accelerator are not here:
# docs/images.md.
"""
HEAD_OF_TORCH = """\
# A torch, and the libraries that it alone brings, by sha256: what lock.txt leaves out. Written by
#   python .ci/lock.py torch {}
# on the platform of an image, with the index that has this build. A test compares the version with constraints.txt.
"""
_LINE = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>\S+)(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)  # (?P<extras>[\w,]+)"
)
_PYTHONS = re.compile(r"cp31[12]|py3|py2\.py3|py31[0-2]|py3[0-9]")
_MACHINES = ("x86_64", "aarch64")


def _constraints() -> Any:
    found = importlib.util.spec_from_file_location("constraints", ROOT / ".ci/constraints.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def wanted() -> dict[tuple[str, str], set[str]]:
    """Name and version → the extras of images that need it. Torch is left out."""
    tool, needs = _constraints(), {}  # type: Any, dict[tuple[str, str], set[str]]
    for extra in EXTRAS:
        for name, version in tool.wanted(extra).items():
            if canonicalize_name(name) != "torch":
                needs.setdefault((name, version), set()).add(extra)
    pip = PIP.search((ROOT / "images/install.sh").read_text(encoding="utf-8"))
    assert pip is not None
    needs["pip", pip[1]] = {BUILDER}
    return needs


def locked() -> dict[tuple[str, str], set[str]]:
    """Name and version → extras, as the lock has them. Raises ValueError for a line of another form."""
    found = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"{FILE.name}: not NAME==VERSION --hash=sha256:...  # EXTRAS: {line[:100]}")
            found[match["name"], match["version"]] = set(match["extras"].split(","))
    return found


def fits(filename: str) -> bool:
    """Whether a file is a wheel for the Pythons and the machines of images."""
    try:
        tags = parse_wheel_filename(filename)[3]
    except InvalidWheelFilename:
        return False
    return any(_of_images(tag.interpreter, tag.abi, tag.platform) for tag in tags)


def _of_images(interpreter: str, abi: str, platform: str) -> bool:
    python = _PYTHONS.fullmatch(interpreter) or (abi == "abi3" and interpreter.startswith("cp3"))
    linux = platform.startswith(("manylinux", "linux")) and platform.endswith(_MACHINES)
    return bool(python) and (platform == "any" or linux)


def hashes_of(name: str, version: str, files: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sha256 of each file of a version that images may install, from an index's answer. Raises LookupError."""
    spelling = canonicalize_name(name).replace("-", "[-_.]+")
    spelled = re.compile(rf"{spelling}-{re.escape(version)}(?:-.*\.whl|\.tar\.gz|\.zip)", re.IGNORECASE)
    own = [one for one in files if spelled.fullmatch(str(one["filename"]))]
    sources = [one for one in own if not one["filename"].endswith(".whl")]
    chosen = [one for one in own if fits(one["filename"])] or sources
    digests = sorted({str(one["hashes"]["sha256"]) for one in chosen if "sha256" in one["hashes"]})
    if not digests:
        raise LookupError(f"{name}=={version}: the index names no file for images, or gives no sha256")
    return digests


def ask_index(name: str, index: str = "") -> list[dict[str, Any]]:
    """The files of a package, as the index's JSON lists them."""
    index = (index or os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")).rstrip("/")
    request = urllib.request.Request(  # noqa: S310 - the index of pip
        f"{index}/{canonicalize_name(name)}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return list(json.loads(answer.read())["files"])


def write() -> None:
    """Write the lock."""
    needs = sorted(wanted().items(), key=lambda item: item[0][0].casefold())
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask_index, [name for (name, _), _ in needs]))
    lines = []
    for ((name, version), extras), files in zip(needs, answers, strict=True):
        hashes = "".join(f" --hash=sha256:{digest}" for digest in hashes_of(name, version, files))
        lines.append(f"{name}=={version}{hashes}  # {','.join(sorted(extras))}")
    FILE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def lock_of_torch(
    report: Mapping[str, Any], known: Iterable[str], listed: Callable[[str], Iterable[Mapping[str, Any]]] = ask_index
) -> list[str]:
    """Lines for what pip would install with a torch, by pip's report, without the packages that the lock has. `listed`
    gives the files of a package in the index."""
    have, lines = {canonicalize_name(name) for name in known}, []
    for one in report["install"]:
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if canonicalize_name(name) in have:
            continue
        if digest is None:
            raise LookupError(f"{name}=={version}: pip's report has no sha256")
        digests = [digest]
        with suppress(LookupError, HTTPError, ValueError):  # the index does not have this version, or answers in HTML
            digests = hashes_of(name, version, listed(name))
        if digest not in digests:  # the index has another build of it
            digests = [digest]
        lines.append(f"{name}=={version}" + "".join(f" --hash=sha256:{one}" for one in digests))
    return sorted(lines, key=str.casefold)


def differences(have: Mapping[tuple[str, str], set[str]], needs: Mapping[tuple[str, str], set[str]]) -> list[str]:
    """What is wrong with a lock, in words; empty when nothing is."""
    problems = [
        f"{name}=={version} is needed by {','.join(sorted(needs[name, version]))}, and the lock says "
        f"{','.join(sorted(have.get((name, version), {'nothing'})))}"
        for name, version in needs
        if have.get((name, version)) != needs[name, version]
    ]
    problems += [f"{name}=={version} is locked, and no image needs it" for name, version in have.keys() - needs.keys()]
    return sorted(problems, key=str.casefold)


def main() -> int:
    """Compare, write, or print the lock of a torch."""
    match sys.argv[1:]:
        case ["torch", requirement, *options]:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--dry-run",
                "--ignore-installed",
                "--report",
                "-",
            ]
            done = subprocess.run([*command, *options, requirement], check=True, capture_output=True, text=True)
            print(HEAD_OF_TORCH.format(requirement), end="")  # noqa: T201
            index = next((value for option, value in pairwise(options) if option == "--index-url"), "")
            known = [name for name, _ in locked()]
            print("\n".join(lock_of_torch(json.loads(done.stdout), known, partial(ask_index, index=index))))  # noqa: T201
        case ["--write"]:
            write()
        case _:
            problems = differences(locked(), wanted())
            summary = "make constraints writes it again" if problems else f"{FILE.name} is complete"
            print("\n".join([*problems, summary]))  # noqa: T201
            return 1 if problems else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
