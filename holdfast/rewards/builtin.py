"""Built-in rewards: checks of an answer against the record of its prompt. They run in the child process.

A check returns 1.0 or 0.0. A record without the key that the check reads raises ValueError, which is recorded.
"""

import ctypes
import json
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
BLOCK = re.compile(r"```(?:[A-Za-z]*)\n(.*?)```", re.DOTALL)
FILE_BYTES = 2**24  # the largest file that tested code may write
PROCESSES = 512  # of this user, at most, while tested code runs


def exact(value: Any, answer: str) -> float:
    """Whether the answer is the text, apart from blanks around it."""
    return float(answer.strip() == str(value).strip())


def number(value: Any, answer: str) -> float:
    """Whether the last number of the answer equals the last number of the value."""
    found, expected = _last_number(answer), _last_number(str(value))
    if expected is None:
        raise ValueError(f"the record has {value!r:.80}, which is no number")
    return float(found == expected)


def regex(value: Any, answer: str) -> float:
    """Whether the answer has a match of the pattern."""
    return float(re.search(str(value), answer) is not None)


def json_schema(value: Any, answer: str) -> float:
    """Whether the answer is JSON that fits the schema."""
    from jsonschema import Draft202012Validator

    schema = json.loads(value) if isinstance(value, str) else value
    try:
        document = json.loads(_code_of(answer))
    except ValueError:
        return 0.0
    return float(Draft202012Validator(schema).is_valid(document))


def tests(value: Any, answer: str) -> float:
    """Whether the code of the answer, followed by the tests, runs to its end without an error. It runs as another
    process in an empty folder, with the limits of this one. An answer that exits before the tests fails."""
    lines = value if isinstance(value, list) else [str(value)]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        script, reached = Path(folder, "answer.py"), Path(folder, secrets.token_hex(16))
        last = f"open({reached.name!r}, 'x').close()"
        script.write_text("\n".join([_code_of(answer), *map(str, lines), last]), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-I", "-B", script.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            preexec_fn=_limit_tested_code,
        )
        return float(done.returncode == 0 and reached.is_file())


CHECKS: Mapping[str, Callable[[Any, str], float]] = {
    "exact": exact,
    "number": number,
    "regex": regex,
    "json_schema": json_schema,
    "tests": tests,
}


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def _code_of(answer: str) -> str:
    """The last fenced block of an answer, or all of it."""
    blocks = BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit_tested_code() -> None:
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
