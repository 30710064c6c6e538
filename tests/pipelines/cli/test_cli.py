"""Guarantees of the command line to users and scripts: messages, exit codes, and a fast start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from tests import warm

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "examples/quickstart.yaml")
COMMANDS_AT_MOST = 28  # a user can learn these
OF_NEW_WORK = {"chat", "data", "rollouts", "serve", "shell"}  # what issues named after that bound was set
HEAVY = {"torch", "kfp", "mlflow", "tokenizers", "pyarrow", "dvc", "boto3"}


def holdfast(
    home: Path, *arguments: str, cwd: Path | None = None, installed: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command; with `installed` in a fresh interpreter, by its name on the path."""
    environment = {**os.environ, "HOLDFAST_HOME": str(home), "COLUMNS": "200", "NO_COLOR": "1"}
    for name in ("HOLDFAST_STORE", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    if installed:
        command = [str(Path(sys.executable).with_name("holdfast")), *arguments]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    return warm.run([sys.executable, "-m", "holdfast.pipelines.cli", *arguments], environment, cwd)


def commands(command: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command as a path, such as ("checkpoints", "list")."""
    below = getattr(command, "commands", None)
    if below is None:
        return [words]
    return [path for name, child in below.items() for path in commands(child, (*words, name))]


def imports_of(commands: list[list[str]], modules: set[str], environment: dict[str, str]) -> dict[str, list[str]]:
    """The commands, run one after another in one new process, that import some of the modules, and those modules."""
    code = (
        "import json, sys; from holdfast.pipelines.cli import main\n"
        "found = {}\n"
        f"for command in {commands!r}:\n"
        "    sys.argv, before = ['holdfast', *command], set(sys.modules)\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        f"    if new := sorted({modules!r} & (set(sys.modules) - before)): found[' '.join(command)] = new\n"
        "print(json.dumps(found), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(result.stderr.strip().splitlines()[-1]))


def test_help_teaches_with_an_example(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "--help", installed=True)
    assert result.returncode == 0
    assert "holdfast run examples/quickstart.yaml" in result.stdout
    assert "(10 bad spec, 11 bad data, 12 diverged," in result.stdout, "the exit codes are one paragraph"


@pytest.mark.parametrize("command", sorted(" ".join(command) for command in commands(typer.main.get_command(app))))
def test_every_command_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert f"Example: holdfast {command}" in result.stdout


def test_an_unknown_target_is_refused_with_those_that_exist() -> None:
    result = CliRunner().invoke(app, ["compile", QUICKSTART, "--target", "nomad"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'nomad' is no target; use one of kfp, argo, pytorchjob, trainjob, volcano, slurm" in result.output


def test_the_command_line_has_few_verbs() -> None:
    names = {command[0] for command in commands(typer.main.get_command(app))}
    assert names >= OF_NEW_WORK
    assert len(names - OF_NEW_WORK) <= COMMANDS_AT_MOST


def test_sentences_of_the_help_break_where_the_terminal_does(tmp_path: Path) -> None:
    sentence = "at steps that the seed decides. Prints the schedule, each fault, the goodput and the result."
    assert sentence in holdfast(tmp_path, "chaos", "--help").stdout


def test_a_backend_that_does_not_exist_is_refused_by_every_command_that_takes_one(tmp_path: Path) -> None:
    for command in (["run", QUICKSTART], ["runs"], ["doctor"]):
        result = holdfast(tmp_path, *command, "--backend", "slrum")
        assert (result.returncode, result.stdout) == (2, ""), command
        assert "use one of local, kubeflow, argo, slurm" in result.stderr


def test_compiled_yaml_has_no_anchors(tmp_path: Path) -> None:
    served = ["--set", "store=s3://bucket/prefix", "--set", "serving.kserve={}"]
    for target in ("kserve", "argo"):
        result = holdfast(tmp_path, "compile", QUICKSTART, "--target", target, "--output", "-", *served)
        assert result.returncode == 0, result.stderr
        assert "&id001" not in result.stdout


def test_compile_shows_the_deepspeed_configuration(tmp_path: Path) -> None:
    for strategy, expected in (("zero3", 0), ("fsdp", 10)):
        options = ["--set", f"parallel.strategy={strategy}", "--set", "training.clip_norm=0.5"]
        options += ["--set", "parallel.offload=parameters"] if expected == 0 else []
        result = holdfast(tmp_path, "compile", QUICKSTART, "--target", "deepspeed", *options)
        assert result.returncode == expected, result.stderr
        if expected == 0:
            config = json.loads(result.stdout)
            assert (config["zero_optimization"]["stage"], config["gradient_clipping"]) == (3, 0.5)
            zero = config["zero_optimization"]
            assert (zero["overlap_comm"], zero["offload_param"]["device"]) == (False, "cpu")
            assert zero["offload_optimizer"] == zero["offload_param"]
            offload: tuple[str, ...] = ("--set", "parallel.offload_path=/nvme/swap")
            result = holdfast(tmp_path, "compile", QUICKSTART, "--target", "deepspeed", *options, *offload)
            zero = json.loads(result.stdout)["zero_optimization"]
            assert zero["offload_optimizer"].items() >= {"device": "nvme", "nvme_path": "/nvme/swap"}.items()
            assert zero["offload_param"]["device"] == "cpu"
            offload += ("--set", "parallel.offload=parameters_on_disk")
            result = holdfast(tmp_path, "compile", QUICKSTART, "--target", "deepspeed", *options, *offload)
            zero = json.loads(result.stdout)["zero_optimization"]
            assert (
                zero["offload_param"].items() >= {"device": "nvme", "nvme_path": "/nvme/swap", "max_in_cpu": 0}.items()
            )
        else:
            assert "use zero1, zero2 or zero3" in result.stderr


def test_validate_warns_of_a_source_that_matches_nothing(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "validate", QUICKSTART, "--set", "data.sources.0.uri=missing/*.txt")
    assert result.returncode == 0
    assert "warning: data.sources.0.uri: 'missing/*.txt' matches no file" in " ".join(result.stdout.split())


def test_validate_accepts_a_valid_spec(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "validate", QUICKSTART, "--set", "training.steps=50")
    assert (result.returncode, result.stderr) == (0, "")
    assert "50 steps" in result.stdout


def test_a_bad_spec_is_refused_with_field_value_and_remedy(tmp_path: Path) -> None:
    result = holdfast(
        tmp_path, "validate", QUICKSTART, "--set", "training.global_batch=17", "--set", "model.layers=many"
    )
    assert result.returncode == 10
    assert "model.layers" in result.stderr
    assert "'many'" in result.stderr
    assert "remedy" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_misspelt_key_gets_a_suggestion(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "validate", QUICKSTART, "--set", "training.stesp=4")
    assert result.returncode == 10
    assert "did you mean 'steps'?" in result.stderr


def test_a_refusal_imports_nothing_that_takes_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    result = holdfast(tmp_path, "validate", QUICKSTART, "--set", "training.stesp=4", installed=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "pydantic" in imported
    assert not imported & {"torch", "numpy", "mlflow", "kfp", "hera", "deepspeed", "ray", "boto3", "kubernetes"}


def test_a_spec_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "run", "nowhere.yaml", cwd=tmp_path)
    assert result.returncode == 15
    assert "nowhere.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_source_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "run", QUICKSTART, "--set", "data.sources.0.uri=nowhere/*.txt", cwd=tmp_path)
    assert result.returncode == 15
    assert "nowhere/*.txt" in result.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("arguments", [["walk"], ["run"], ["run", QUICKSTART, "--fast"], ["runs", "--store"]])
def test_a_wrong_command_line_is_a_usage_error(tmp_path: Path, arguments: list[str]) -> None:
    assert holdfast(tmp_path, *arguments).returncode == 2


def test_fresh_and_salt_exclude_each_other(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "run", QUICKSTART, "--fresh", "--salt", "abc")
    assert result.returncode == 2
    assert "--fresh" in result.stderr


def test_a_run_of_several_machines_is_not_trained_on_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    changes = ("data.sources=[{uri: text.txt}]", "cluster.nodes={min: 2, max: 2}", "training.global_batch=32")
    overrides = [argument for change in changes for argument in ("--set", change)]
    result = holdfast(tmp_path, "run", QUICKSTART, *overrides, cwd=tmp_path)
    assert result.returncode == 10, result.stdout + result.stderr
    assert "cluster.nodes.max: is more than this one machine (value: 2)" in result.stderr


def test_without_deepspeed_a_strategy_of_it_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")  # as if not installed
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    changes = ("data.sources=[{uri: text.txt}]", "parallel.strategy=zero2")
    overrides = [argument for change in changes for argument in ("--set", change)]
    result = holdfast(tmp_path, "run", QUICKSTART, *overrides, cwd=tmp_path, installed=True)
    assert result.returncode == 15, result.stdout + result.stderr
    assert "parallel.strategy: zero2 needs DeepSpeed" in result.stderr
    assert "pip install 'holdfast[deepspeed]'" in result.stderr
    assert not (tmp_path / "store").exists()


def test_a_store_of_another_kind_is_refused(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "runs", "--store", "ftp://somewhere/else")
    assert result.returncode == 10
    assert "file://" in result.stderr


def test_the_schema_describes_the_examples(tmp_path: Path) -> None:
    schema = json.loads(holdfast(tmp_path, "validate", "--schema").stdout)
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    validator = kind(schema)
    for example in (ROOT / "examples").glob("*.yaml"):
        validator.validate(yaml.safe_load(example.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"name": "x", "data": {"sources": [{"uri": "a"}]}, "trainign": {}})


def test_an_empty_list_of_runs_has_the_command_that_starts_one(tmp_path: Path) -> None:
    result = holdfast(tmp_path, "runs")
    assert result.returncode == 0
    assert "holdfast run" in result.stdout


@pytest.mark.slow
def test_an_unknown_run_and_an_unknown_model_are_not_found(tmp_path: Path) -> None:
    assert holdfast(tmp_path, "show", "abcd").returncode == 15
    assert holdfast(tmp_path, "models", "generate", "abcd", "hello").returncode == 15


def test_the_ids_depend_on_the_weights_and_on_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one text, with enough words to be a document\n" * 20)
    common = ["validate", QUICKSTART, "--ids", "--set", "data.sources.0.uri=text.txt"]
    plain = holdfast(tmp_path, *common, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    same = holdfast(tmp_path, *common, "--set", "checkpoint.every_steps=7", cwd=tmp_path)
    other = holdfast(tmp_path, *common, "--set", "training.seed=1", cwd=tmp_path)
    salted = holdfast(tmp_path, *common, "--salt", "abc", cwd=tmp_path)
    assert same.stdout == plain.stdout
    assert other.stdout.splitlines()[0] == plain.stdout.splitlines()[0]  # the same dataset
    assert len({plain.stdout, other.stdout, salted.stdout}) == 3


def test_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
    environment.pop("HOLDFAST_STORE", None)
    light = [["--help"], ["validate", QUICKSTART], ["runs"], ["validate", "--schema"]]
    assert imports_of(light, HEAVY, environment) == {}


def broken(home: Path) -> subprocess.CompletedProcess[str]:
    """The command with a bug in it."""
    code = (
        "import sys, holdfast.pipelines.cli.entry as cli\n"
        "sys.argv = ['holdfast', 'runs']\n"
        "def broken(): raise ZeroDivisionError('of all things')\n"
        "cli.app = broken\n"
        "cli.main()"
    )
    environment = {**os.environ, "HOLDFAST_HOME": str(home)}
    return warm.run([sys.executable, "-c", code], environment)


def test_output_to_a_full_disk_ends_with_no_space(tmp_path: Path) -> None:
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "validate", "--schema"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 205
    assert "free some space" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


def test_a_terminal_without_columns_is_written_to(tmp_path: Path) -> None:
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path), "COLUMNS": "0", "LINES": "0"}
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "Usage:" in result.stdout


def test_messages_to_a_full_disk_change_no_exit_code(tmp_path: Path) -> None:
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "validate", str(tmp_path / "nothing.yaml")]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=full, check=False)
    assert result.returncode == 15


def test_an_unexpected_failure_without_a_place_for_its_traceback_shows_it_once(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    result = broken(tmp_path / "home")
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "cannot be written" in result.stderr
    assert "ZeroDivisionError: of all things" in result.stderr


def test_an_unexpected_failure_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    result = broken(tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    report = next((tmp_path / "logs").glob("crash-*.log"))
    assert str(report) in result.stderr
    assert "ZeroDivisionError: of all things" in report.read_text()
