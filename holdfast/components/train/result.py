"""Result of a finished training for the later steps: `runs/<run-id>/result.json`."""

from pydantic import BaseModel

from holdfast.spec.errors import MissingError
from holdfast.spec.plan import Segment
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json


class TrainingResult(BaseModel, frozen=True):
    """The final checkpoint of a run, and its exported model."""

    run_id: str
    dataset_id: str
    step: int
    loss: float  # of the last step, in nats per token
    tokens: int  # trained on
    parameters: int
    checkpoint: str  # key of the manifest
    export: str  # key prefix of the Hugging Face layout
    export_digest: str  # of its files: holdfast/model/verified.py
    state_digest: str  # equal for equal bits, at any layout
    attempts: int
    seconds: float  # from the first attempt to the end
    segments: tuple[Segment, ...] = ()  # the plans of the run, in order
    first_weights: str = ""  # digests of the weights that it read, as in the run id


class ScriptResult(BaseModel, frozen=True):
    """The final checkpoint of a training script, and what it exported."""

    run_id: str
    code: str  # digest of its bundle
    dataset_id: str = ""  # empty: it reads its own data
    step: int
    loss: float | None = None  # of the last step, if the script reports one
    checkpoint: str = ""  # key of the manifest; empty for a script without a session
    export: str = ""  # key prefix of its files; empty without an export
    export_digest: str = ""
    state_digest: str = ""
    attempts: int = 0
    seconds: float = 0.0  # from the first attempt to the end
    segments: tuple[Segment, ...] = ()


def read_script_result(store: Store, run_id: str) -> ScriptResult | None:
    """The result of a finished script, or None if it has none yet."""
    try:
        return read_json(store, layout.result(run_id), ScriptResult)
    except MissingError:
        return None


def read_result(store: Store, run_id: str) -> TrainingResult | None:
    """The result of a run, or None if it has none yet."""
    key = layout.result(run_id)
    try:
        return read_json(store, key, TrainingResult)
    except MissingError:
        return None
