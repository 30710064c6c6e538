"""The DAG as batch jobs: the arguments of sbatch, and the content of the scripts."""

import shlex
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm.backend import Slurm
from holdfast.pipelines.backends.slurm.emit import Chain, options_of
from holdfast.spec import Spec, SpecError, parse_spec
from tests.train.tiny_run import tiny_spec

RUN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))


def jobs_of(*overrides: str, spec: Spec | None = None, **fields: Any) -> dict[str, dict[str, Any]]:
    """The jobs by step, each with the options of sbatch as a dictionary."""
    request = RunRequest(spec or tiny_spec(*overrides), "s3://bucket/x", run_id=RUN, **fields)
    by_step = {}
    for job in Slurm("s3://bucket/x").objects(request):
        options = dict(option.removeprefix("--").partition("=")[::2] for option in job["sbatch"])
        by_step[job["job"]] = {**job, "options": options}
    return by_step


def arguments(script: str) -> list[str]:
    """The arguments of the last command of a script."""
    return shlex.split(script[script.index("exec ") :])


def test_each_step_waits_for_the_one_before_and_notify_for_all_however_they_ended() -> None:
    jobs = jobs_of()
    assert list(jobs) == ["preprocess", "train", "evaluate", "register", "notify"]
    dependencies = {step: job["options"]["dependency"] for step, job in jobs.items()}
    assert dependencies == {
        "preprocess": "singleton", "train": "afterok:1,singleton", "evaluate": "afterok:2,singleton",
        "register": "afterok:3,singleton", "notify": "afterany:1:2:3:4",
    }  # fmt: skip
    assert ["hold" in job["options"] for job in jobs.values()] == [True, False, False, False, False]
    assert all("kill-on-invalid-dep" in job["options"] for job in jobs.values())
    assert "--when=evaluate=blessed" in arguments(jobs["register"]["script"])
    assert "--needs=dataset_id=preprocess" in arguments(jobs["train"]["script"])
    assert "--needs=division=divide" not in arguments(jobs["preprocess"]["script"])


SLOTS = ("cluster.slurm.slot_minutes=30",)
SWEEP = {"trials": (("training.seed=1",), ("training.seed=2",))}


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [((), {}), (("data.fan_out=4",), {}), ((), SWEEP), (("cluster.slurm.slot_minutes=30",), {})],
)
def test_every_job_is_requeued_after_a_node_loss_and_appends_to_its_log(
    overrides: tuple[str, ...], fields: dict[str, Any]
) -> None:
    jobs = jobs_of(*overrides, **fields)
    assert len(jobs) >= 5
    for step, job in jobs.items():
        assert "requeue" in job["options"], step
        assert "no-requeue" not in job["options"], step
        assert job["options"]["open-mode"] == "append", step
        assert job["options"]["kill-on-invalid-dep"] == "yes", step
        assert job["options"]["dependency"], step
    assert [step for step, job in jobs.items() if "signal" in job["options"]] == ["train"]


def test_a_corpus_that_is_divided_is_tokenised_by_an_array() -> None:
    jobs = jobs_of("data.fan_out=4")
    assert list(jobs)[:3] == ["divide", "tokenise", "preprocess"]
    assert jobs["tokenise"]["options"]["array"] == "0-3"
    assert jobs["tokenise"]["options"]["dependency"] == "afterok:1"  # tasks of one name would wait for each other
    assert "--tasks=4" in arguments(jobs["tokenise"]["script"])
    assert jobs["preprocess"]["options"]["dependency"] == "afterok:2,singleton"
    assert "--needs=division=divide" in arguments(jobs["preprocess"]["script"])


def test_the_training_gets_the_nodes_and_a_warning_ahead_of_its_limit_and_the_steps_get_theirs() -> None:
    jobs = jobs_of(
        "cluster.nodes={min: 2, max: 2}", "cluster.accelerator=nvidia", "parallel.processes=1",
        "cluster.resources={cpu: 6, memory: 20Gi}", "checkpoint.grace_seconds=100",
        "cluster.steps.evaluate={cpu: 3, memory: 5Gi, accelerators: 1}",
        "cluster.slurm={partition: long, account: lab, qos: high, constraint: h100, slot_minutes: 240}",
    )  # fmt: skip
    train, evaluate = jobs["train"]["options"], jobs["evaluate"]["options"]
    names = ("nodes", "cpus-per-task", "mem", "gres", "constraint", "time", "signal")
    assert {name: train[name] for name in names} == {
        "nodes": "2", "cpus-per-task": "6", "mem": "20480M", "gres": "gpu:1", "constraint": "h100", "time": "240",
        "signal": "B:TERM@130",
    }  # fmt: skip
    assert (evaluate["nodes"], evaluate["cpus-per-task"], evaluate["mem"], evaluate["gres"]) == (
        "1", "3", "5120M", "gpu:1",
    )  # fmt: skip
    for job in jobs.values():
        assert [job["options"][name] for name in ("partition", "account", "qos")] == ["long", "lab", "high"]


def test_the_training_gets_the_range_of_its_nodes_under_one_switch_and_none_that_is_bad() -> None:
    under_one_switch = ("cluster.topology={placement: prefer, tier: 2}",)
    spec = tiny_spec("training.determinism=elastic", "cluster.nodes={min: 1, max: 2}", *under_one_switch)
    chain = replace(Chain.of(RunRequest(spec, "s3://bucket/x", run_id=RUN)), excluded_nodes=frozenset({"n2", "n1"}))
    assert {"--nodes=1-2", "--switches=2@0", "--exclude=n1,n2"} <= set(options_of(chain, "train", {}))
    with pytest.raises(SpecError, match=r"cluster\.spares.*cannot be on Slurm"):
        Chain.of(
            RunRequest(tiny_spec("cluster.spares=1", "cluster.nodes={min: 2, max: 2}"), "s3://bucket/x", run_id=RUN)
        )


def test_every_script_is_one_that_bash_reads_and_shellcheck_likes(tmp_path: Any) -> None:
    for step, job in jobs_of("data.fan_out=4", 'cluster.environment={ODD: "it\'s $HOME"}').items():
        script = tmp_path / f"{step}.sh"
        script.write_text(job["script"])
        subprocess.run(["bash", "-n", str(script)], check=True)
        if shellcheck := shutil.which("shellcheck"):
            subprocess.run([shellcheck, "--severity=style", str(script)], check=True)


def test_names_and_comments_carry_the_run_and_another_store_is_another_chain() -> None:
    options = jobs_of()["train"]["options"]
    assert options["job-name"].startswith(f"holdfast-{RUN}-")
    assert options["job-name"].endswith("-train")
    assert options["comment"].startswith(f"tiny {RUN}-")
    request = RunRequest(tiny_spec(), "s3://bucket/y", run_id=RUN)
    other = next(argument for argument in Slurm().objects(request)[1]["sbatch"] if argument.startswith("--job-name="))
    assert other != f"--job-name={options['job-name']}"


def test_no_secret_of_the_environment_is_in_a_script_or_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-show")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "do-not-show")
    assert "do-not-show" not in repr(jobs_of())


def test_values_with_quotes_reach_the_step_unchanged() -> None:
    value = """it's "$HOME" `id` \\ & ; end"""
    spec = tiny_spec()
    section = spec.cluster.model_copy(update={"environment": {"ODD": value}})
    script = jobs_of(spec=spec.model_copy(update={"cluster": section}))["train"]["script"]
    line = next(line for line in script.splitlines() if line.startswith("export ODD="))
    assert shlex.split(line) == ["export", f"ODD={value}"]


def test_only_the_training_has_a_deadline() -> None:
    jobs = jobs_of("cluster.deadline_hours=0.5")
    limited = {step for step, job in jobs.items() if "--deadline=1800" in arguments(job["script"])}
    assert limited == {"train"}
    assert "--deadline" not in jobs_of()["train"]["script"]


def test_a_spec_is_never_seen_half_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain.of(RunRequest(tiny_spec(), "s3://bucket/x", run_id=RUN))
    chain.write()
    whole = chain.spec_file.read_text()
    original = type(chain.spec_file).write_text

    def half(path: Any, text: str, **more: Any) -> None:
        original(path, text[:10], **more)
        raise OSError("no space left on the device")

    monkeypatch.setattr(type(chain.spec_file), "write_text", half)
    with pytest.raises(OSError, match="no space"):
        chain.write()
    assert chain.spec_file.read_text() == whole


def test_the_trials_of_a_sweep_are_arrays_whose_steps_wait_for_each_other_trial_by_trial() -> None:
    trials = (("training.seed=1",), ("training.seed=2",), ("training.seed=3",))
    jobs = jobs_of(trials=trials, concurrent_trials=2)
    assert list(jobs) == ["preprocess", "train", "evaluate", "compare", "register", "notify"]
    dependencies = {step: job["options"]["dependency"] for step, job in jobs.items()}
    assert dependencies == {
        "preprocess": "singleton", "train": "afterok:1", "evaluate": "aftercorr:2",
        "compare": "afterok:1,afterany:3,singleton", "register": "afterok:4,singleton", "notify": "afterany:1:2:3:4:5",
    }  # fmt: skip
    assert {job["options"].get("array") for step, job in jobs.items() if step in ("train", "evaluate")} == {"1-3%2"}
    assert jobs["train"]["options"]["output"].endswith("/train-%A_%a.log")
    command = arguments(jobs["register"]["script"])
    assert "--best-of=compare" in command
    assert not [argument for argument in command if argument.startswith("--needs")]
    assert "HOLDFAST_RUN_ID" not in jobs["train"]["script"]  # an array has many runs


def test_trials_of_different_sizes_are_no_array() -> None:
    spec = tiny_spec("parallel.processes=1", "cluster.accelerator=nvidia")
    request = RunRequest(
        spec, "s3://bucket/x", run_id=RUN, trials=(("parallel.processes=1",), ("parallel.processes=2",))
    )
    with pytest.raises(SpecError, match=r"parallel\.processes=2"):
        Chain.of(request)


@pytest.mark.parametrize(("name", "written"), [("a b", "a b"), ("100%job", "100%%job"), ("%%A", "%%%%A")])
def test_the_name_of_the_home_folder_is_no_pattern_of_slurms(
    monkeypatch: pytest.MonkeyPatch, name: str, written: str
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", f"/h/{name}")
    chain = Chain.of(RunRequest(parse_spec("{name: a, data: {sources: [{uri: python:stdlib}]}}")))
    options = options_of(chain, "train", {})
    assert f"--output=/h/{written}/slurm/{chain.key}/train-%j.log" in options
    assert f"--chdir=/h/{name}/slurm/{chain.key}" in options


def test_a_home_folder_with_a_backslash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", "/h/a\\b")
    with pytest.raises(SpecError, match=r"HOLDFAST_HOME: has a backslash"):
        Chain.of(RunRequest(parse_spec("{name: a, data: {sources: [{uri: python:stdlib}]}}")))
