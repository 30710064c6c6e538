"""constraints.txt: exactly what the extras of pyproject.toml install, each in one version.

    python .ci/constraints.py          say where the file and this environment differ; code 1 if they do
    python .ci/constraints.py --write  write the file from what is installed here (`make constraints`)

It queries no index: the installed packages state what they need.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
EXTRA = "dev"  # it includes all others but `bench`, whose peers are left open
HEAD = """\
# Exact versions of everything that `.[dev]` installs, known to work together on Python 3.11. Use it with
#   pip install -c constraints.txt -e '.[dev]'
# It turns minutes of resolving into seconds. `make constraints` adds what a new dependency brings and drops what is not
# needed any more; to move on to newer versions, empty this file first, and run the tests. A test compares it.
# The peers that the benchmarks compare with (extra `bench`) are left open: mosaicml-streaming, litdata,
# datasets, obstore, s3torchconnector.
"""
# What a torch built for an accelerator brings: another set for each build, fixed by torch's own version.
_OF_TORCH = re.compile(r"^(nvidia-(?!ml-py)|cuda-|triton|pytorch-triton|intel-|mkl|tbb$)")


def wanted(extra_of_all: str = EXTRA) -> dict[str, str]:
    """Name → version of all that `.[dev]`, or another extra, needs here, as it is installed. Raises LookupError for
    what is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own, extras = project["name"], project["optional-dependencies"]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    left = [Requirement(f"{own}[{extra_of_all}]"), Requirement("setuptools")]  # which builds the images
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name == own:
                needs: Iterable[str] = extras[extra] if extra else project["dependencies"]
                left += map(Requirement, needs)
                continue
            try:
                installed = distribution(requirement.name)
            except PackageNotFoundError:
                raise LookupError(f"{requirement} is needed and not installed: make dev") from None
            found[installed.metadata["Name"]] = installed.version.partition("+")[0]
            for need in map(Requirement, installed.requires or ()):
                applies = need.marker is None or need.marker.evaluate({"extra": extra})
                if applies and not _OF_TORCH.match(canonicalize_name(need.name)):
                    left.append(need)
    return found


def pinned() -> dict[str, str]:
    """Name → version, as constraints.txt has it."""
    lines = [line.strip() for line in FILE.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def differences(pins: dict[str, str], needs: dict[str, str]) -> list[str]:
    """What is wrong with `pins`, in words; empty when nothing is."""
    problems = [f"{name}=={needs[name]} is needed and not pinned" for name in needs.keys() - pins.keys()]
    problems += [f"{name}=={pins[name]} is pinned and no package needs it" for name in pins.keys() - needs.keys()]
    problems += [
        f"{name} is pinned to {pins[name]}, and {needs[name]} is installed"
        for name in pins.keys() & needs.keys()
        if pins[name] != needs[name]
    ]
    return sorted(problems, key=str.casefold)


def main() -> int:
    """Compare, or write."""
    needs = wanted()
    if "--write" in sys.argv[1:]:
        lines = [f"{name}=={version}" for name, version in sorted(needs.items(), key=lambda item: item[0].casefold())]
        FILE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
        return 0
    problems = differences(pinned(), needs)
    summary = "make constraints corrects it" if problems else f"{FILE.name} is what .[{EXTRA}] installs"
    print("\n".join([*problems, summary]))  # noqa: T201
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
