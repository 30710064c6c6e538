"""Python interface of Holdfast: everything that the command `holdfast` does, with typed results.

    import holdfast

    run = holdfast.run("examples/quickstart.yaml", overrides={"training.steps": 50})
    run.history()[-1]["loss"]
    run.generate("def main(")

The command line formats what these functions return. Errors are those of `holdfast.spec.errors`: each has a message
with a remedy and an `exit_code`.

| module | what |
|---|---|
| `holdfast.api.submission` | requests, submissions; resume and stop |
| `holdfast.api.run_functions` | start, list and compare runs |
| `holdfast.api.run_handle` | one run: status, logs, history, ledger, cost, reports, audit |
| `holdfast.api.rank_shell` | the command line that runs a command where a rank is |
| `holdfast.api.checkpoints` | list, verify, compare, pin, collect, export and import checkpoints |
| `holdfast.api.specs` | ids, manifests for every system, triggers, Kubeflow's pipelines and schedules |
| `holdfast.api.planning` | layouts of a spec: what fits, how fast, at what cost |
| `holdfast.api.models` | registered models: list, promote, roll back, serve, generate |
| `holdfast.api.machines` | checks of clusters and machines, fault runs |
"""

from holdfast.api.run_functions import RunState, backend_runs, comparison, diff_runs, run, run_state, runs
from holdfast.api.run_handle import Checkpoint, Report, Run
from holdfast.api.submission import (
    ClusterOptions,
    Location,
    RunFailedError,
    Stopped,
    Submission,
    check_preview,
    default_backend,
    find_backend,
    load_spec,
    open_store_at,
    preview,
    request,
    resume,
    stop,
    submit,
)
from holdfast.search.method import Search
from holdfast.spec import Spec

__all__ = [
    "Checkpoint",
    "ClusterOptions",
    "Location",
    "Report",
    "Run",
    "RunFailedError",
    "RunState",
    "Search",
    "Spec",
    "Stopped",
    "Submission",
    "backend_runs",
    "check_preview",
    "comparison",
    "default_backend",
    "diff_runs",
    "find_backend",
    "load_spec",
    "open_store_at",
    "preview",
    "request",
    "resume",
    "run",
    "run_state",
    "runs",
    "stop",
    "submit",
]
