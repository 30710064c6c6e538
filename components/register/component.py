"""The register step as a KFP component."""

from kfp import dsl
from kfp.dsl import Model, Output

from holdfast.components.runtime.shell import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(spec: str, overrides: list, store: str, job: str, run_id: str, registered: Output[Model]) -> str:
    """Register the blessed model with its lineage. Returns the version."""
    from holdfast.components.register import run
    from holdfast.components.runtime.shell import point, run_component
    from holdfast.components.store import layout, open_store
    from holdfast.components.store.jobs import recorder

    def body(checked, url):  # type: ignore[no-untyped-def]
        registration = run(checked, run_id, open_store(url))
        point(
            registered, url, layout.run(run_id), run_id=run_id, model=registration.model, version=registration.version
        )
        return str(registration.version)

    return run_component("register", spec, overrides, store, body, recorder(job))
