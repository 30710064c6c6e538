"""A corpus, a spec and helpers that run `holdfast run`, so small that the whole DAG takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests import empty_mlflow, warm
from tests.faults.nodes import HOLDS

ROOT = Path(__file__).parents[2]
HELD_STEP = """import glob, sys
found = []

def hold(event, arguments):
    imported = event == "import" and arguments[0] == "holdfast.components.train.__main__"
    if imported and not found and glob.glob({after!r}):
        found.append(arguments[0])
        from tests.faults import held_training
        held_training.step.training_job = held_training.held_job

if "train" in sys.orig_argv:  # the interpreter of the step: of Slurm's
    hold("import", ["holdfast.components.train.__main__"])
else:  # its process may be forked from this one
    sys.addaudithook(hold)
"""
SPEC: dict[str, Any] = {
    "name": "small",
    "data": {
        "sources": [{"uri": "corpus/*.txt"}],
        "tokenizer": {"vocabulary": 300},
        "validation_fraction": 0.2,
        "workers": 1,
    },
    "model": {"layers": 2, "hidden": 32, "heads": 2, "context": 32},
    "training": {"steps": 10, "global_batch": 4, "micro_batch": 4, "log_every": 1},
    "checkpoint": {"every_steps": 4},
    "evaluation": {"max_tokens": 2000, "prompts": ["the"], "sample_tokens": 8},
}
TEXT = "the sea is wide and the ship sails on a long way over the dark water to an island far from here"


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Write short texts with a pattern, each a different one."""
    (folder / "corpus").mkdir(parents=True)
    vocabulary = TEXT.split()
    for number in range(documents):
        words_of_text = [vocabulary[(number + step * (number % 5 + 1)) % len(vocabulary)] for step in range(120)]
        (folder / f"corpus/{number:03d}.txt").write_text(f"story {number}\n{' '.join(words_of_text)}\n")


def write_spec(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write the spec to `folder`, with fields of some sections replaced or added."""
    spec = {**SPEC, **{name: {**SPEC.get(name, {}), **fields} for name, fields in sections.items()}}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def environment(home: Path, **more: str) -> dict[str, str]:
    """An environment in which nothing is written outside `home`."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("HOLDFAST_STORE", "MLFLOW_TRACKING_URI")
    }
    return {**inherited, "HOLDFAST_HOME": str(home), "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **more}


def held(folder: Path, steps: int, after: str = "") -> dict[str, str]:
    """Variables for a command whose training computes up to this step and waits there. With `after`, only a training
    that begins once the store has a matching object waits."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(
        HELD_STEP.format(after=str(folder / "home/store" / after) if after else "/")
    )
    hold(folder, steps)
    return {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", HOLDS: str(folder / "holds")}


def hold(folder: Path, steps: int) -> None:
    """Let a held training compute up to this step."""
    unfinished = folder / "holds.unfinished"
    unfinished.write_text(str(steps))
    unfinished.rename(folder / "holds")


def start(folder: Path, *arguments: str, command: str = "run", **more: str) -> subprocess.Popen[str]:
    """Start `holdfast COMMAND ...` in `folder`. Its home is `folder`/home, with an empty MLflow."""
    empty_mlflow.place(folder / "home")
    return warm.popen(
        [sys.executable, "-m", "holdfast.pipelines.cli", command, *arguments],
        environment(folder / "home", **more), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def holdfast(folder: Path, *arguments: str, command: str = "run", **more: str) -> subprocess.CompletedProcess[str]:
    """Run `holdfast COMMAND ...` in `folder` to its end."""
    process = start(folder, *arguments, command=command, **more)
    stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def register_champion(folder: Path) -> None:
    """Train, evaluate and register the model of `folder`/spec.yaml, each step as its own command, in a forked
    process."""
    empty_mlflow.place(folder / "home")
    output: dict[str, Any] = {}
    for name, needed in (("preprocess", ""), ("train", "dataset_id"), ("evaluate", "run_id"), ("register", "run_id")):
        command = [sys.executable, "-m", f"holdfast.components.{name}", "--spec=spec.yaml"]
        command += [f"--{needed.replace('_', '-')}={output[needed]}"] if needed else []
        result = warm.run(command, environment(folder / "home"), folder)
        assert result.returncode == 0, result.stdout + result.stderr
        output |= json.loads(result.stdout.splitlines()[-1])
    assert output["alias"] == "champion"


def objects(folder: Path, pattern: str) -> list[Path]:
    """Files of the store that match."""
    return sorted((folder / "home/store").glob(pattern))


def only(folder: Path, pattern: str) -> dict[str, Any]:
    """The only matching JSON object of the store."""
    (path,) = objects(folder, pattern)
    return dict(json.loads(path.read_text()))
