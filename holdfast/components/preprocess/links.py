"""Links to a training, shown before it begins. A UI shows the artifacts of a step only after that step ends.

It never fails the step. It creates the MLflow run under the same claim as training if necessary, so the linked run is
the one that training writes to.
"""

import logging
import os
from collections.abc import Iterator, Sequence

from holdfast.launch.emitters.pod import RUN_LABEL
from holdfast.launch.kubernetes.client import PODS
from holdfast.launch.kubernetes.kinds import KINDS
from holdfast.launch.launches import newest_launch
from holdfast.model.hub import first_weights_digest
from holdfast.runtime.environment import tracking_uri
from holdfast.runtime.secrets import redact
from holdfast.spec import HoldfastError, Spec, run_id
from holdfast.store import Store, layout
from holdfast.tracking import RunTracker

NAMESPACE = "HOLDFAST_POD_NAMESPACE"
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"

log = logging.getLogger("holdfast.preprocess")


def links(
    spec: Spec, dataset_id: str, salt: str, store: Store, workflow: str, trials: Sequence[Sequence[str]] = ((),)
) -> str:
    """Markdown for the UI of Kubeflow or Argo, in which this step belongs to `workflow`. It has an entry for each of
    the `trials`, which are overrides of the spec. An entry has the run to be trained, its MLflow page, job, logs and
    store folder."""
    here = os.environ.get(NAMESPACE) or "default"
    lines = [f"Pods of the steps: {_code(f'kubectl -n {here} get {PODS} -l {WORKFLOW_LABEL}={workflow}')}"]
    for trial in trials:
        try:
            lines += ["", *_of_run(spec.with_overrides(trial), dataset_id, salt, store, trial, here)]
        except HoldfastError as error:  # training reports it too, with its exit code
            log.warning("where the training can be watched is not known: %s", redact(str(error)))
            lines += ["", f"Not known: {_code(redact(str(error)))}"]
    return "\n".join(lines) + "\n"


def _of_run(spec: Spec, dataset_id: str, salt: str, store: Store, trial: Sequence[str], here: str) -> Iterator[str]:
    identity = run_id(spec, dataset_id, salt, first_weights_digest(spec))
    job = f"holdfast-{identity}-{newest_launch(store, identity) + 1}"
    root, namespace = redact(store.url), spec.cluster.namespace or here
    objects = f"{KINDS[spec.cluster.job].resource},{PODS}"
    yield f"**{spec.name}** trains as run {_code(identity)}" + (f", with {_code(' '.join(trial))}" if trial else "")
    yield ""
    yield f"- loss, speed and figures, live: {_mlflow(spec, identity, dataset_id, store)}"
    yield f"- state: {_code(f'holdfast show {identity} --store {root}')}"
    yield f"- log of a rank, live and afterwards: {_code(f'holdfast logs {identity} --rank 0 --follow --store {root}')}"
    yield (
        f"- job: {_code(job)} in namespace {_code(namespace)}; each restart counts one up. "
        + _code(f"kubectl -n {namespace} get {objects} -l {RUN_LABEL}={identity}")
    )
    yield f"- checkpoints and everything else: {_code(f'{root}/{layout.run(identity)}')}"


def _mlflow(spec: Spec, identity: str, dataset_id: str, store: Store) -> str:
    if "mlflow" not in spec.telemetry.trackers:
        return "no MLflow: telemetry.trackers does not list it"
    try:
        page = RunTracker.open(spec, identity, dataset_id, store).page()
    except HoldfastError as error:
        log.warning("the run is not in MLflow yet: %s", error)
        return f"not in MLflow yet, the training tries it again: {_code(str(error))}"
    at = f"MLflow at {_code(redact(tracking_uri()))}, which has no address for browsers"
    return f"[MLflow]({page})" if page else at


def _code(text: str) -> str:
    """`text` as one line of code in Markdown."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"
