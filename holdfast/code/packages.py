"""Packages that user code needs: its lock is compared with what is installed, wherever the code runs.

A lock is a file `requirements.lock` in the folder of the code, as `pip freeze` and `uv pip compile` write it. Nothing
is installed when a job starts. A job with other packages ends before its ranks meet, and names each difference.
"""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from holdfast.runtime.secrets import redact
from holdfast.spec.errors import Problem, SpecError

LOCK_FILE = "requirements.lock"
_EXACT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([A-Za-z0-9.+!-]+)")


@cache
def installed_packages() -> tuple[str, ...]:
    """All packages of this environment as `name==version`, sorted. They are read once: it takes a second."""
    found = (one.metadata for one in distributions())
    return tuple(sorted({f"{metadata['Name']}=={metadata['Version']}" for metadata in found if metadata["Name"]}))


def locked_packages(text: str) -> tuple[dict[str, str], list[Problem]]:
    """The versions by name that a lock requires, and a problem for each line that names no exact version. Options,
    hashes and lines with a marker (`; python_version < "3.12"`) are left out."""
    versions: dict[str, str] = {}
    problems: list[Problem] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", raw).strip().removesuffix("\\").strip()
        line = line.split(" --hash", 1)[0].strip()
        if not line or line.startswith("-") or ";" in line:
            continue
        if (match := _EXACT.fullmatch(line)) is None:
            remedy = "write name==version, as `pip freeze` does"
            problems.append(Problem("code", f"{LOCK_FILE}, line {number}: {line}", "names no exact version", remedy))
        else:
            versions[match[1]] = match[2]
    return versions, problems


def requirements_of(text: str) -> dict[str, str]:
    """The lines of a lock for pip by the name of their package, without comments and hashes: pip would demand hashes
    of all other packages as well. Options such as `--extra-index-url` are lines under their own text."""
    found: dict[str, str] = {}
    for raw in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*|\s+--hash[= ]\S+", "", raw).strip()
        if line:
            name = line if line.startswith("-") else re.split(r"[\[=;\s]", line, maxsplit=1)[0].lower()
            found[name] = redact(line)
    return found


def require_packages(folder: Path) -> None:
    """Raises SpecError, with every difference, if the lock in a folder of code requires other packages than those of
    this environment. A folder without a lock requires none."""
    lock = folder / LOCK_FILE
    if not lock.is_file():
        return
    versions, problems = locked_packages(lock.read_text(encoding="utf-8-sig", errors="replace"))
    for name, wanted in versions.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = ""
        # A lock without a local part, such as +cpu, accepts every build of the version.
        if (installed if "+" in wanted else installed.partition("+")[0]) != wanted:
            message = f"is required, and {'version ' + installed if installed else 'no version'} is installed"
            remedy = "use an image with it (images/extend.Dockerfile), or correct the lock"
            problems.append(Problem("code", f"{name}=={wanted}", message, remedy))
    if problems:
        raise SpecError(problems, LOCK_FILE)
