"""The train step as a KFP component."""

from kfp import dsl
from kfp.dsl import Metrics, Model, Output

from holdfast.components.runtime.shell import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(
    spec: str,
    overrides: list,
    store: str,
    job: str,
    salt: str,
    dataset_id: str,
    model: Output[Model],
    metrics: Output[Metrics],
) -> str:
    """Train, or go on from the newest checkpoint that verifies. Returns the run id."""
    from holdfast.components.runtime.shell import point, run_component
    from holdfast.components.store import open_store
    from holdfast.components.store.jobs import recorder
    from holdfast.components.train import run

    def body(checked, url):  # type: ignore[no-untyped-def]
        result = run(checked, dataset_id, open_store(url), salt)
        point(model, url, result.export, run_id=result.run_id, dataset_id=dataset_id, checkpoint=result.checkpoint)
        metrics.log_metric("step", result.step)
        metrics.log_metric("training_loss", result.loss)
        return result.run_id

    return run_component("train", spec, overrides, store, body, recorder(job))
