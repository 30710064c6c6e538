"""Content-addressed identity: the same inputs are the same run.

The run id is a digest of the requested model. It covers the fields that define the model, the dataset id, and the
version of the data plane's arithmetic. The plan is how the model is computed (layout, micro-batch, accelerator). A run
records its plan and may change it. Neither contains where things are stored, how often the state is saved, or how the
model is evaluated.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from blake3 import blake3
from pydantic import BaseModel

from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.functions import Function
from holdfast.spec.rollout import Grpo
from holdfast.spec.section import Role, Section, role_of
from holdfast.spec.training import Ema
from holdfast.spec.tree import Spec

# Raise it by hand whenever a change of the code changes the resulting bits of a run.
DATA_PLANE_VERSION = 5  # 5: kernels of compiled losses and whole rows; 4: two sums in the backward of whole rows
# The same for the answers that ranks generate: part of the id of runs that learn from them.
GENERATOR_VERSION = 3  # 3: packed matrices on the CPU, and sums of blocks in the search of a token
ID_LENGTH = 16  # hexadecimal digits: 64 bits


class Versions(NamedTuple):
    """The versions of Holdfast's results that run ids contain."""

    data_plane: int
    generator: int


def current_versions() -> Versions:
    """The versions of this Holdfast."""
    return Versions(DATA_PLANE_VERSION, GENERATOR_VERSION)


def earlier_versions(spec: Spec) -> Iterator[Versions]:
    """The versions before this Holdfast's under which the run of a spec had another id, the newest first."""
    now = current_versions()
    if spec.train.script is None:
        generators = range(now.generator, 0, -1) if _generator(spec, now.generator) else (now.generator,)
        yield from (
            Versions(data_plane, generator)
            for data_plane in range(now.data_plane, 0, -1)
            for generator in generators
            if (data_plane, generator) != now
        )


def digest(value: object) -> str:
    """A digest of any JSON value, independent of key order. 64 bits in hexadecimal."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return blake3(canonical.encode()).hexdigest()[:ID_LENGTH]


def fields_of(section: BaseModel, role: Role = "identity") -> dict[str, Any]:
    """The fields of a section that have `role`, as JSON values. Fields inside a section or a list with an explicit role
    have that role."""
    fields: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        own: Role = role_of(type(section), name) if isinstance(section, Section) else role
        if isinstance(value, BaseModel) and own == "identity":
            if nested := fields_of(value, role):
                fields[name] = nested
        elif own != role:
            continue
        elif isinstance(value, tuple):
            fields[name] = [fields_of(item, role) if isinstance(item, BaseModel) else item for item in value]
        else:
            fields[name] = value
    return fields


def function_identity(field: str, function: Function) -> dict[str, Any]:
    """What determines the results of a function of user code: the source that it reaches, and its arguments. Raises
    SpecError if its source is unknown."""
    if function.digest is None:
        remedy = "load the spec from its file, next to the code"
        raise SpecError([Problem(field, function.use, "is a function whose code was not read", remedy)])
    return {"arguments": function.keywords, "digest": function.digest}


def run_id(
    spec: Spec, dataset_id: str, salt: str = "", first_weights: str = "", versions: Versions | None = None
) -> str:
    """The identity of a training run. `salt` (from `--fresh`) creates a different run with the same inputs.
    `first_weights` has the digests of the weights that `model.init_from`, `training.distillation.teacher` and reward
    models name (see `first_weights_digest`), and replaces their locations. `versions` are those of an earlier
    Holdfast."""
    versions = versions or current_versions()
    if spec.train.script is not None:
        return _script_run_id(spec, dataset_id, salt)
    fields, model = fields_of(spec), spec.model
    fields.pop("train")  # run ids are older than the field
    # A default that is written out makes no other run.
    fields["model"] |= {"kv_heads": model.key_value_heads, "head_dim": model.head_width, "ffn": model.ffn_width}
    fields["model"]["layer_pattern"] = list(model.layer_kinds)
    fields["model"]["dense_ffn"] = model.dense_ffn or model.ffn_width
    for name, default in (("rope_local_theta", model.rope_theta), ("query_scalar", model.head_width)):
        if getattr(model, name) == default:
            fields["model"][name] = None
    start, teacher, models = weights_of_digests(first_weights)
    if start:
        fields["model"]["init_from"] = start
    if teacher:
        fields["training"]["distillation"]["teacher"] = teacher
    if spec.training.distillation.temperature == 1:
        del fields["training"]["distillation"]["temperature"]  # run ids are older than the field
    if spec.training.optimizer.kind == "adamw":
        del fields["training"]["optimizer"]["kind"]  # it was the only kind when run ids were introduced
    _name_reward_models(fields["training"]["grpo"]["rewards"], models)
    _drop_unused(fields, spec)
    fields |= _generator(spec, versions.generator)
    objective = spec.training.objective
    fields["training"]["objective"] = objective.kind
    if objective.is_own:
        own = function_identity("training.objective", objective)
        fields["training"]["objective"] = {"kind": objective.kind, **own}
    if (factor := spec.training.schedule.factor) is not None:
        fields["training"]["schedule"]["factor"] = function_identity("training.schedule.factor", factor)
    else:
        del fields["training"]["schedule"]["factor"]  # run ids are older than the field
    fields.pop("data")  # the dataset id covers it, and the bytes as well...
    fields["document_masks"] = spec.data.document_masks  # ...except for what is applied when batches are read
    fields["shuffle"] = spec.data.shuffle.model_dump()
    fields["weights"] = [source.weight for source in spec.data.sources]
    if spec.training.gradient_compression == "topk":
        fields["topk_fraction"] = spec.training.topk_fraction  # without topk it has no meaning, and is not in the id
    if spec.training.determinism == "elastic":
        # Sums are made of micro-batches, which are the same at every layout.
        fields["grain"] = spec.training.micro_batch
        fields["loss_chunk"] = spec.training.loss_chunk
    return digest({"version": versions.data_plane, "dataset": dataset_id, "spec": fields, "salt": salt})


def weights_of_digests(first_weights: str) -> tuple[str, str, list[str]]:
    """The digests of `model.init_from`, of the teacher, and of each reward model, as `first_weights_digest` joins them.
    Empty where there are none."""
    start, teacher, *models = f"{first_weights}+".split("+")
    return start, teacher, [each for each in models if each]


def _name_reward_models(rewards: list[dict[str, Any]], digests: list[str]) -> None:
    """Replace the places of reward models by their digests, if there are any."""
    left = iter(digests)
    for reward in rewards:
        if reward["model"] is None:
            del reward["model"]  # run ids are older than the field
        else:
            reward["model"] = next(left, "") or reward["model"]


# Fields of `training` that are younger than run ids. At their defaults they are not in the id.
_YOUNGER: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("groups", "muon", "build"),
    "schedule": ("decay_steps", "decay_shape"),
    "grpo": ("environment", "lag", "server"),
}


def _drop_unused(fields: dict[str, Any], spec: Spec) -> None:
    training, evaluation = spec.training, spec.evaluation
    if (build := training.optimizer.build) is not None:
        fields["training"]["optimizer"]["build"] = function_identity("training.optimizer.build", build)
    if evaluation.decides:
        fields["evaluation"] |= {name: getattr(evaluation, name) for name in ("every_steps", "max_tokens")}
    else:
        del fields["evaluation"]
    for name, younger in _YOUNGER.items():
        section = getattr(training, name)
        for field in younger:
            if getattr(section, field) == type(section).model_fields[field].get_default(call_default_factory=True):
                del fields["training"][name][field]
    for number, reward in enumerate(training.grpo.rewards):
        if reward.use:
            identity = function_identity(f"training.grpo.rewards.{number}", reward)
            fields["training"]["grpo"]["rewards"][number] |= identity
    if (environment := training.grpo.environment) is not None:
        identity = function_identity("training.grpo.environment", environment)
        fields["training"]["grpo"]["environment"] |= identity
    if training.grpo == Grpo():
        del fields["training"]["grpo"]
    if training.ema == Ema():
        del fields["training"]["ema"]


def _generator(spec: Spec, version: int) -> dict[str, int]:
    """The version of the answers, if ranks generate answers to learn from: prompts have no other objective."""
    generates = spec.data.kind == "prompts" and spec.training.grpo.server is None
    return {"generator": version} if generates else {}


def _script_run_id(spec: Spec, dataset_id: str, salt: str) -> str:
    """The identity of a run of a training script: its code, its arguments, and the content of what it reads."""
    if spec.code is None:
        remedy = "load the spec from its file, next to the script"
        raise SpecError([Problem("train.script", spec.train.script, "is a script that was not read", remedy)])
    fields = fields_of(spec.train)
    del fields["inputs"]  # run ids are older than the field
    inputs = {}
    for number, each in enumerate(spec.train.inputs):
        if each.digest is None:
            remedy = "load the spec from its file, on a machine that can read the input"
            raise SpecError([Problem(f"train.inputs.{number}.uri", each.uri, "is an input that was not read", remedy)])
        inputs[each.name] = each.digest
    values: dict[str, Any] = {"script": fields, "code": spec.code, "salt": salt}
    if inputs:
        values["inputs"] = inputs
    if dataset_id:
        values |= {
            "dataset": dataset_id,
            "shuffle": spec.data.shuffle.model_dump(),
            "weights": [source.weight for source in spec.data.sources],
        }
    return digest(values)
