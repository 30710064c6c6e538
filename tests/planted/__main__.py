"""Plant each bug in a copy of the tree, run the tests that must notice it, and print the score.

`python -m tests.planted` plants all bugs, which takes an hour or two. `python -m tests.planted schedule` plants those
with the word in their file or reason.

A bug whose text does not occur exactly once is refused before anything runs. The exit code is 1 if a bug survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.planted.bug import BUGS, Bug

ROOT = Path(__file__).parents[2]
FAILED, PASSED = 1, 0  # exit codes of pytest; any other code means that it could not run
SECONDS = 1200  # time limit for the tests of a bug, so that a hang counts too


def misfits(bugs: Sequence[Bug], root: Path = ROOT) -> list[str]:
    """The bugs that do not apply to the tree, in words."""
    problems = []
    for bug in bugs:
        path = root / bug.file
        times = path.read_text(encoding="utf-8").count(bug.old) if path.is_file() else 0
        if times != 1:
            problems.append(f"{bug.file}: {bug.old!r} stands there {times} times, not once ({bug.why})")
        problems += [f"{bug.file}: there is no {test} to notice that {bug.why}" for test in bug.tests.split()
                 if not (root / test.partition("::")[0]).exists()]  # fmt: skip
    return problems


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the files that Git tracks, and new files that it does not ignore."""
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def is_caught(bug: Bug, tree: Path) -> bool:
    """Whether a test fails with the bug in `tree`. The tree is restored afterwards."""
    path = tree / bug.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(bug.old, bug.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", *bug.tests.split()]
    # The copy precedes the installed tree on the path.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(sound, encoding="utf-8")
    if process.returncode not in (FAILED, PASSED, 2):  # 2: a module could not be imported
        raise RuntimeError(f"{bug.file}: pytest could not run: {process.stdout[-2000:]}{process.stderr[-2000:]}")
    return process.returncode != PASSED


def main(words: Sequence[str]) -> int:
    """See the module."""
    if wrong := misfits(BUGS):
        print("\n".join(wrong))
        return 2
    chosen = [bug for bug in BUGS if all(word in f"{bug.file} {bug.why}" for word in words)]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = copy_of_the_tree(Path(folder))
        for bug in chosen:
            caught = is_caught(bug, tree)
            survivors += [] if caught else [bug]
            print(f"{'caught  ' if caught else 'SURVIVED'} {bug.file}: {bug.why}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
