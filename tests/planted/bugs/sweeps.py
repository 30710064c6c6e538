"""Bugs in what a sweep does with its trials, wherever they run."""

from tests.planted.bug import Bug

BUGS = [
    Bug(
        "holdfast/steps/adapters.py",
        'name = STEPS[step].item or (TRIAL if STEPS[step].per_trial else "")',
        "name = STEPS[step].item",
        "tests/steps/test_component.py",
        "trials of a sweep that run at once would overwrite each other's outcomes",
    ),
    Bug(
        "holdfast/steps/adapters.py",
        "if not trial or code in ENDS_ALL_TRIALS:",
        "if not trial:",
        "tests/steps/test_component.py",
        "a sweep that is ended would begin its next trial",
    ),
    Bug(
        "holdfast/components/compare/step.py",
        "one.step == step and one.part == part",
        "one.step == step",
        "tests/compare",
        "a trial of a sweep would be told to have failed as another one did",
    ),
    Bug(
        "holdfast/components/notify/sweep.py",
        'told = "failed" if failure is not None or found.failed else "succeeded"',
        'told = "succeeded"',
        "tests/notify/test_sweep.py",
        "nobody would hear that a trial of a sweep failed",
    ),
    Bug(
        "holdfast/tracking/sweep.py",
        "if math.isfinite(number) and there.metrics.get(name) != number:",
        "if math.isfinite(number):",
        "tests/tracking/test_sweep.py",
        "a sweep that is resumed would write its figures to MLflow again",
    ),
    Bug(
        "holdfast/launch/slurm_environment.py",
        'return f"{array}_{task}" if task and number == array else',
        "return",
        "tests/launch/test_slurm.py::test_a_job_is_called_so_that_no_other_job_is_meant",
        "one trial of a sweep that stops its ranks would stop those of the whole array",
    ),
    Bug(
        "holdfast/pipelines/backends/argo/sweep.py",
        "|| {0}.Errored || {0}.Omitted)",
        "|| {0}.Errored)",
        "tests/pipelines/backends/test_sweep.py",
        "a trial whose training failed would cost the sweep its comparison on Argo",
    ),
    Bug(
        "holdfast/pipelines/backends/kubeflow/submit.py",
        "finished=bool(wanted.run_id) and not wanted.trials",
        "finished=bool(wanted.run_id)",
        "tests/pipelines/backends/test_sweep_orders.py",
        "a trial of a sweep that failed on Kubeflow would never be tried again",
    ),
    Bug(
        "holdfast/pipelines/backends/request.py",
        'del found["overrides"]  # each trial has its own',
        "pass",
        "tests/pipelines/backends/test_sweep_orders.py",
        "Argo and KFP would refuse a parameter that the DAG of a sweep has not",
    ),
    Bug(
        "holdfast/pipelines/backends/slurm/emit.py",
        'kind = "aftercorr" if arrays',
        'kind = "afterok" if arrays',
        "tests/pipelines/backends/slurm/test_emit.py",
        "a trial that failed would cost a sweep on Slurm all evaluations",
    ),
]
