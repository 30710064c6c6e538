"""The dataset and the model as KFP artifacts with their own addresses in the bucket.

An output of a step cannot have such an address: KFP's launcher uploads it, and refuses one outside of the pipeline's
root. An importer only enters the address. It reads that from an input of the DAG that it stands in, never from another
task, and tells no DAG that it has ended, as a container's launcher does. So the importers stand in a condition, which
is a DAG with inputs, and behind them a container that ends it: without one the UI would show the group as running for
ever. A folder has no address that KFP takes: there the condition is false, and the step's own artifact says where the
folder is. Nothing of it runs on one machine, where there is no UI. Sources: docs/kubeflow.md.
"""

from kfp import dsl
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.pipelines.backends.kubeflow.platform import place
from holdfast.runtime.outcomes import EXIT_HANDLER
from holdfast.runtime.step_runner import IMAGE
from holdfast.spec import Spec
from holdfast.steps import ARTIFACTS, PLACE, Step

SCHEME, URI = PLACE
IN_A_BUCKET = "s3"
SHOW = Step(ARTIFACTS, "Say where the dataset and the model are.", pod=EXIT_HANDLER)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def artifacts(dataset: str, model: str, addresses: dsl.Output[dsl.Markdown]) -> None:
    """Say where the dataset and the model are."""
    with open(addresses.path, "w", encoding="utf-8") as file:  # noqa: PTH123 - KFP carries these lines, no import
        file.write(f"- dataset: `{dataset}`\n- model: `{model}`\n")


def show_artifacts(preprocess: PipelineTask, train: PipelineTask, spec: Spec, image: str | None) -> None:
    """Enter what the two tasks made, inside of a pipeline and beside whatever comes next."""
    with dsl.If(train.outputs[SCHEME] == IN_A_BUCKET, name=f"if-in-{IN_A_BUCKET}"):
        uris = {"dataset": preprocess.outputs[URI], "model": train.outputs[URI]}
        kinds = {"dataset": dsl.Dataset, "model": dsl.Model}
        entered = [
            dsl.importer(artifact_uri=uri, artifact_class=kinds[name], reimport=False).set_display_name(name)
            for name, uri in uris.items()
        ]
        shown = artifacts(**uris).after(*entered)
        shown.set_caching_options(enable_caching=False)
        place(shown, SHOW, spec, image)
