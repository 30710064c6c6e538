"""The trigger step as a KFP component: the first one of a pipeline that runs by itself."""

from kfp import dsl
from kfp.dsl import Markdown, Output

from holdfast.components.runtime.shell import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def trigger(spec: str, overrides: list, store: str, job: str, salt: str, decision: Output[Markdown]) -> str:
    """Decide whether a retraining is due. Returns the word: due or not_due."""
    from pathlib import Path

    from holdfast.components.runtime.shell import run_component
    from holdfast.components.store import open_store
    from holdfast.components.store.jobs import recorder
    from holdfast.components.trigger import run

    def body(checked, url):  # type: ignore[no-untyped-def]
        found = run(checked, open_store(url), salt)
        decision.metadata.update(word=found.word, run_id=found.run_id, dataset_id=found.dataset_id)
        Path(decision.path).write_text(f"**{found.word.replace('_', ' ')}**: {found.reason}\n", encoding="utf-8")
        return found.word

    return run_component("trigger", spec, overrides, store, body, recorder(job))
