"""The preprocess step as a KFP component."""

from kfp import dsl
from kfp.dsl import Dataset, Output

from holdfast.components.runtime.shell import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def preprocess(spec: str, overrides: list, store: str, job: str, dataset: Output[Dataset]) -> str:
    """Turn the sources into token shards. Returns the dataset id."""
    from holdfast.components.preprocess import run
    from holdfast.components.runtime.shell import point, run_component
    from holdfast.components.store import layout, open_store
    from holdfast.components.store.jobs import recorder

    def body(checked, url):  # type: ignore[no-untyped-def]
        prepared = run(checked, open_store(url))
        point(dataset, url, layout.dataset(prepared.dataset_id), dataset_id=prepared.dataset_id)
        return prepared.dataset_id

    return run_component("preprocess", spec, overrides, store, body, recorder(job))
