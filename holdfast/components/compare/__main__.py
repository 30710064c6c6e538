"""`python -m holdfast.components.compare --spec S --dataset-id D --trials JSON`: compares the trials of a sweep."""

import json
import logging
import sys

from holdfast.components.compare.step import compare
from holdfast.scoring.comparison import Comparison, TrialList
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.steps.jobs import known_outcomes
from holdfast.store import Store, open_store

# Entry point of the compare step in a DAG, and its artifacts.

log = logging.getLogger("holdfast.compare")


def body(spec: Spec, url: str, *, dataset_id: str = "", trials: str, salt: str, job: str) -> StepResult:
    """Compare the trials of the execution `job`. `trials` is a `TrialList` as text. The result has the outcome, run
    and overrides of the best trial."""
    given = TrialList.from_text(trials)
    comparison = compare(
        spec,
        dataset_id,
        given.trials,
        open_store(url),
        salt,
        known_outcomes(job, store=url),
        given.search,
    )
    best = comparison.best
    _mirror(spec, comparison, open_store(url))
    for trial in comparison.failed:
        log.warning("not compared: %s", trial.text)
    log.info(
        "sweep %s: %d trials compared, %d failed", comparison.sweep_id, len(comparison.rows), len(comparison.failed)
    )
    result = {"word": best.word, "winner": best.run_id, "changes": list(best.changes)}
    return StepResult(result, {"comparison": Artifact(comparison.markdown)})


def _mirror(spec: Spec, made: Comparison, store: Store) -> None:
    """Show the sweep in MLflow, as the parent of its trials. Without MLflow it logs a warning, because the store has
    the record."""
    from holdfast.tracking import TrackingUnavailable
    from holdfast.tracking.tracker import SweepRun, mirror_sweep

    best = made.best
    figures = {f"best/{name}": value for name, value in best.figures.items()}
    sweep = SweepRun(
        sweep_id=made.sweep_id,
        name=made.name,
        runs=[each.run_id for trials in (made.rows, made.failed, made.stopped) for each in trials],
        tags={
            "holdfast.dataset_id": made.dataset_id,
            "holdfast.best_run_id": best.run_id,
            "holdfast.verdict": best.word,
            "holdfast.best_changes": json.dumps(best.changes),
        },
        metrics={**figures, "trials/compared": len(made.rows), "trials/failed": len(made.failed)},
        files={"comparison.md": made.markdown, "comparison.json": made.model_dump_json(indent=1)},
    )
    try:
        mirror_sweep(spec, sweep, store)
    except TrackingUnavailable as error:
        log.warning("the comparison is not in MLflow for now, it is safe in the store: %s", error)


if __name__ == "__main__":
    sys.exit(main("compare", body))
