"""Functions of user code: what is in their digest, what a check without import sees, and how they are loaded."""

import ast
from pathlib import Path

import pytest

from holdfast.code.closure import role_digest
from holdfast.code.load import check_function, describe, load_function
from holdfast.spec.errors import MissingError, UserCodeError

MINE = '''\
"""Mine."""
import math
import torch
from helper import scale
from parts import words

EPS = 1e-6
UNUSED = 3

def inner(x):
    return x + EPS

def focal(logits, targets, *, gamma: float = 2.0):
    return scale(inner(logits)) ** gamma

@torch.no_grad()
def accuracy(model, batches):
    return words.count(model)

if __name__ == "__main__":
    print(focal(1, 2))
'''
FILES = {
    "mine.py": MINE,
    "helper.py": "from deep import factor\n\ndef scale(x):\n    return x * factor\n",
    "deep.py": "factor = 2\n",
    "parts/__init__.py": "from . import words\n",
    "parts/words.py": "def count(x):\n    return 1\n",
    "other.py": "x = 1\n",
}


def _changed(path: str, old: str, new: str) -> str:
    assert old in FILES[path]
    return role_digest({**FILES, path: FILES[path].replace(old, new)}, "mine.py:focal")


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("mine.py", "** gamma", "* gamma"),
        ("mine.py", "1e-6", "1e-5"),
        ("mine.py", "x + EPS", "x - EPS"),
        ("mine.py", "gamma: float = 2.0", "gamma: float = 3.0"),
        ("helper.py", "x * factor", "x / factor"),
        ("deep.py", "2", "3"),
    ],
)
def test_source_that_a_function_reaches_is_in_its_digest(path: str, old: str, new: str) -> None:
    assert _changed(path, old, new) != role_digest(FILES, "mine.py:focal")


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("mine.py", '"""Mine."""', '"""Ours."""\n# a comment'),
        ("mine.py", "UNUSED = 3", "UNUSED = 4\nMORE = {1: 2}\n"),
        ("mine.py", "words.count(model)", "words.count(batches)"),
        ("mine.py", "print(focal(1, 2))", "print(focal(2, 2))"),
        ("parts/words.py", "return 1", "return 2"),
        ("other.py", "x = 1", "x = 2"),
    ],
)
def test_other_source_is_not(path: str, old: str, new: str) -> None:
    assert _changed(path, old, new) == role_digest(FILES, "mine.py:focal")


@pytest.mark.parametrize(
    "clever",
    [
        "exec('EPS = 1')",
        "globals()['EPS'] = 1",
        "from os.path import *",
        "inner.x = 1",
        "print('import')",
        "focal = accuracy(1, 2)",
        "for name in 'ab': pass",
        "@inner\ndef decorated(): pass",
        "class Held:\n    value = inner(1)",
        "def late(x=inner(1)): pass",
        "int = float",
        "kept = list(map(inner, [1]))",
        "class Held:\n    def __init_subclass__(cls): pass",
        "class Kind(type): pass\nclass Held(metaclass=Kind): pass",
        "if __name__ == '__main__': pass\nelse: print(1)",
        "if __name__ == 'mine': pass",
    ],
)
def test_a_file_that_does_more_than_define_names_counts_as_a_whole(clever: str) -> None:
    text = f"{MINE}\n{clever}\n"
    files = {**FILES, "mine.py": text}
    assert role_digest(files, "mine.py:focal") != role_digest(
        {**files, "mine.py": text.replace("UNUSED = 3", "UNUSED = 4")}, "mine.py:focal"
    )


def test_an_import_that_is_not_reached_counts_where_it_has_effects() -> None:
    files = {**FILES, "parts/words.py": "import torch\ntorch.manual_seed(3)\n"}
    reseeded = {**files, "parts/words.py": "import torch\ntorch.manual_seed(4)\n"}
    assert role_digest(files, "mine.py:focal") != role_digest(reseeded, "mine.py:focal")


@pytest.mark.parametrize(
    "reaching",
    [
        "from importlib import import_module\n\ndef focal(x):\n    return import_module('other').x",
        "from sys import modules\n\ndef focal(x):\n    return modules",
        "from helper import by_name\n\ndef focal(x):\n    return by_name('other')",
    ],
)
def test_all_files_count_where_source_does_not_name_what_it_imports(reaching: str) -> None:
    helper = "import runpy\n\ndef by_name(x):\n    return runpy.run_module(x)\n"
    files = {**FILES, "mine.py": reaching, "helper.py": helper}
    other = {**files, "other.py": "x = 2\n"}
    assert role_digest(files, "mine.py:focal") != role_digest(other, "mine.py:focal")


def test_lines_are_counted_as_python_counts_them() -> None:
    text = "EPS = 1\n\x0c\n\x0c\nTEXT = '\u2028'\n\ndef focal(x):\n    y = 1\n    z = 2\n    return x * 3\n"
    files, other = {"mine.py": text}, {"mine.py": text.replace("x * 3", "x * 4")}
    assert role_digest(files, "mine.py:focal") != role_digest(other, "mine.py:focal")


def test_a_missing_function_has_no_digest() -> None:
    for use in ("mine.py:none", "none.py:focal"):
        with pytest.raises(MissingError, match="none"):
            role_digest(FILES, use)


SIGNATURES = """\
def loss(logits, targets, *, gamma=2.0, power): ...
def rest(*values, **named): ...
def one(a, /, b=1): ...
class Loss: ...
lambda_ = lambda a: a
"""


@pytest.mark.parametrize(
    ("use", "given", "arguments", "says"),
    [
        ("m.py:loss", 2, {"power": 1}, None),
        ("m.py:loss", 2, {"power": 1, "gamma": 2}, None),
        ("m.py:loss", 2, {}, "without power"),
        ("m.py:loss", 1, {"power": 1}, "without targets"),
        ("m.py:loss", 3, {"power": 1}, "takes 2"),
        ("m.py:loss", 2, {"power": 1, "gama": 1}, "'gama'.*gamma, power"),
        ("m.py:loss", 2, {"power": 1, "targets": 1}, "'targets'"),
        ("m.py:rest", 9, {"any": 1}, None),
        ("m.py:one", 1, {"b": 1}, None),
        ("m.py:one", 1, {"a": 1}, "'a'"),
        ("m.py:Loss", 1, {}, "is a class"),
        ("m.py:lambda_", 1, {}, "not defined with `def`"),
        ("m.py:los", 1, {}, "it defines loss, rest, one"),
        ("n.py:loss", 1, {}, "does not exist"),
        ("bad.py:loss", 1, {}, "line 2"),
    ],
)
def test_a_call_is_checked_without_import(use: str, given: int, arguments: dict[str, object], says: str | None) -> None:
    import re

    files = {"m.py": f"raise SystemExit('imported')\n{SIGNATURES}", "bad.py": "x = 1\ndef (:\n"}
    fault = check_function(files, use, given, arguments)
    assert fault is None if says is None else (fault and re.search(says, fault)), fault


def test_a_function_is_loaded_with_its_own_helpers_and_not_those_of_an_earlier_bundle(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helping.py").write_text(f"value = {number}\n")
        (folder / "named.py").write_text("import helping\n\ndef give():\n    return helping.value\n")
    assert load_function(tmp_path / "1", "named.py:give")() == 1
    assert load_function(tmp_path / "2", "named.py:give")() == 2
    assert not list(tmp_path.rglob("__pycache__")), "the folder has only the files of the bundle"


@pytest.mark.parametrize(
    ("text", "use", "says"),
    [
        ("import nowhere_to_be_found\n", "broken.py:f", r"ModuleNotFoundError.*broken.py, line 1"),
        ("f = 3\n", "broken.py:f", "defines no function f"),
        ("\nraise SystemExit(0)\n", "broken.py:f", r"cannot be imported: SystemExit: 0 \(broken.py, line 2\)"),
        ("", "gone.py:f", "no file gone.py"),
        ("", "../broken.py:f", "no file"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_its_line(tmp_path: Path, text: str, use: str, says: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    ast.parse(text)
    with pytest.raises(UserCodeError, match=says) as refused:
        load_function(tmp_path, use)
    assert refused.value.exit_code == 22


def test_the_line_of_an_error_is_named_where_the_folder_is_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "linked.py").write_text("def f():\n    return 1 / 0\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ZeroDivisionError) as error:
        load_function(tmp_path / "link", "linked.py:f")()
    assert describe(error.value, tmp_path / "link").endswith("(linked.py, line 2)")
