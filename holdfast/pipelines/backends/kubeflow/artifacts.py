"""The dataset and the model as KFP artifacts with their own addresses in the bucket.

A step's output cannot have such an address: KFP's launcher uploads it, and refuses one outside the pipeline's root. An
importer only enters the address. It reads the address from an input of the DAG that contains it, never from another
task. Unlike a container's launcher, it never reports to a DAG that it has ended.

So the importers stand in a condition, which is a DAG with inputs. A container after them ends that DAG; without it the
UI would show the group as running forever. A folder has no address that KFP accepts: the condition is false, and the
step's own artifact names the folder. On one machine there is no UI, and nothing of this runs. Sources:
docs/kubeflow.md.
"""

from kfp import dsl
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.pipelines.backends.kubeflow.platform import place
from holdfast.spec import Spec
from holdfast.steps import ARTIFACTS, PLACE, Step
from holdfast.steps.outcomes import EXIT_HANDLER
from holdfast.steps.runner import IMAGE

SCHEME, URI = PLACE
IN_A_BUCKET = "s3"
SHOW = Step(ARTIFACTS, "Say where the dataset and the model are.", pod=EXIT_HANDLER)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def artifacts(dataset: str, model: str, addresses: dsl.Output[dsl.Markdown]) -> None:
    """Say where the dataset and the model are."""
    with open(addresses.path, "w", encoding="utf-8") as file:  # noqa: PTH123 - KFP carries these lines, no import
        file.write(f"- dataset: `{dataset}`\n- model: `{model}`\n")


def show_artifacts(preprocess: PipelineTask, train: PipelineTask, spec: Spec, image: str | None) -> None:
    """Enter the outputs of the two tasks as artifacts, in parallel to the rest of the pipeline."""
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
