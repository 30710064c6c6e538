"""For a missing package, the first line of the error names the extra that installs it."""

import ast
import functools
import importlib
import logging
import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from holdfast.launch.choose import choose_launcher
from holdfast.runtime.exits import exit_code_of
from holdfast.spec import ExitCode, parse_spec
from holdfast.spec.errors import EXTRAS, MissingError, missing_package
from tests.spec.conftest import text_with

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


@functools.cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(module: str) -> set[str]:
    return {name.lower().replace("_", "-") for name in installed().get(module, [module])}


def imported() -> set[str]:
    """The top-level modules that the code imports."""
    packages = set()
    for path in (ROOT / "holdfast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                packages.add(node.module.partition(".")[0])
    return packages - set(sys.stdlib_module_names) - {"holdfast"}


def test_every_package_that_only_an_extra_installs_is_in_the_table() -> None:
    always, optional = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    extras = {
        name: names(requirements)
        for name, requirements in optional.items()
        if name not in ("local", "dev", "docs", "bench")
    }
    for module in imported():
        packages = distributions(module)
        if packages & always or not any(packages & requirements for requirements in extras.values()):
            continue
        assert module in EXTRAS, f"{module} is installed by {[name for name in extras if packages & extras[name]]}"
    for module, extra in EXTRAS.items():
        having = {name for name in extras if distributions(module) & extras[name]}  # none: another package installs it
        assert extra in (having or extras), (module, extra)


@pytest.mark.parametrize("module", ["deepspeed", "ray", "lm_eval", "kfp", "hera", "mlflow", "dvc", "moto"])
def test_a_step_that_lacks_a_package_names_the_extra_and_is_not_tried_again(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with caplog.at_level(logging.ERROR):
        assert exit_code_of(lambda: importlib.import_module(f"{module}.anything")) == ExitCode.NOT_FOUND
    (record,) = caplog.records
    assert f"pip install 'holdfast[{EXTRAS[module]}]'" in record.getMessage().splitlines()[0]
    assert record.exc_info is None


def test_a_module_that_another_version_lacks_is_no_missing_package() -> None:
    assert missing_package(ModuleNotFoundError("no", name="ray.nothing")) is None
    assert missing_package(ModuleNotFoundError("no", name="holdfast.nothing")) is None


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_an_engine_that_is_not_installed_is_refused_before_a_launch(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LAUNCHER", launcher)
    monkeypatch.setattr("holdfast.spec.errors.find_spec", lambda _: None)
    with pytest.raises(MissingError, match=r"parallel.strategy: zero3 .*'holdfast\[deepspeed\]'"):
        choose_launcher(parse_spec(text_with(**{"parallel.strategy": "zero3"})), tmp_path)
