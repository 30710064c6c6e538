"""Rules of the objective grpo: what it needs, and what it does not support."""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from holdfast.spec.errors import Problem
from holdfast.spec.parallel import Parallel
from holdfast.spec.redaction import HIDDEN, carries_secret
from holdfast.spec.rollout import Reward
from holdfast.spec.tree import Spec

MAX_RECORD = 32 * 2**20  # bytes of a lot, at 8 for each token


def check_grpo(spec: Spec) -> Iterator[Problem]:
    """Prompts have rewards, whole groups of answers, and room for an answer. No field of `training.grpo` is set for
    other data."""
    settings, training = spec.training.grpo, spec.training
    if spec.data.kind != "prompts":
        yield from _unused(spec)
        return
    yield from _rewards(settings.rewards)
    if training.global_batch % settings.group:
        remedy = f"use a multiple of {settings.group}, or change training.grpo.group"
        problem = f"answers are not whole groups of training.grpo.group = {settings.group}"
        yield Problem("training.global_batch", training.global_batch, problem, remedy)
    if settings.answer_tokens >= spec.model.context + 1:
        remedy = f"use less than {spec.model.context}, or raise model.context"
        yield Problem("training.grpo.answer_tokens", settings.answer_tokens, "leave no room for a prompt", remedy)
    lot = min(settings.lot, max(1, training.global_batch // settings.group))
    size = lot * settings.group * (8 * settings.answer_tokens + 512 * (1 + len(settings.rewards)))
    if size > MAX_RECORD:
        problem = f"may give a record of {size:,} bytes, and {MAX_RECORD:,} are read"
        yield Problem("training.grpo.lot", settings.lot, problem, "use fewer, or lower training.grpo.answer_tokens")
    if settings.lag and settings.updates > 1:
        remedy = "use 0, or training.grpo.updates: 1"
        yield Problem("training.grpo.lag", settings.lag, "is not supported with several updates", remedy)
    if settings.kl_weight and spec.model.init_from is None:
        remedy = "name weights, or use training.grpo.kl_weight: 0"
        yield Problem("model.init_from", None, "is missing, and the divergence is measured from it", remedy)
    yield from _unanswered(spec)
    yield from _unsupported(spec)


def _rewards(rewards: Sequence[Reward]) -> Iterator[Problem]:
    """There are rewards, and each has the fields of its kind."""
    if not rewards:
        remedy = "name a reward, such as exact or mine.py:reward"
        yield Problem("training.grpo.rewards", None, "are missing, and answers are learned from them", remedy)
    for number, reward in enumerate(rewards):
        field = f"training.grpo.rewards.{number}"
        if reward.kind == "own" and not reward.use:
            yield Problem(f"{field}.use", None, "is missing", "name a function, or another `kind` of reward")
        if reward.kind != "own" and reward.use:
            yield Problem(f"{field}.kind", reward.kind, "is not used with a function", "remove `kind`, or `use`")
        if reward.kind == "model":
            yield from _reward_model(field, reward)
        elif reward.model is not None:
            yield Problem(f"{field}.model", reward.model, f"is not used by kind {reward.kind}", "use kind: model")
        if reward.use and reward.field:
            yield Problem(f"{field}.field", reward.field, "is not used by a function", "remove it")


def _reward_model(field: str, reward: Reward) -> Iterator[Problem]:
    """A reward model has weights, and no field of the other kinds."""
    if reward.model is None:
        yield Problem(f"{field}.model", None, "is missing", "name a folder with weights, or another `kind` of reward")
    for name in ("field", "timeout_seconds", "memory_mib"):
        if (value := getattr(reward, name)) != Reward.model_fields[name].default:
            yield Problem(f"{field}.{name}", value, "is not used by a reward model", "remove it")


def _unanswered(spec: Spec) -> Iterator[Problem]:
    """What a server does not answer."""
    if (server := spec.training.grpo.server) is None:
        return
    if spec.training.grpo.environment is not None:
        yield Problem("training.grpo.server", None, "is not supported with an environment", "remove one of them")
    if spec.training.lora.rank is not None:
        yield Problem("training.grpo.server", None, "is not supported with training.lora", "remove one of them")
    if not _is_address(server.url):
        shown = HIDDEN if carries_secret(server.url) else server.url
        yield Problem("training.grpo.server.url", shown, "has no valid host and port", "write http://HOST:8000/v1")
    minutes = spec.cluster.collective_timeout_minutes
    if spec.world_size > 1 and server.timeout_seconds >= 60 * minutes:
        problem = f"is not below cluster.collective_timeout_minutes = {minutes:g}, for which other ranks wait"
        remedy = "lower it, or raise cluster.collective_timeout_minutes"
        yield Problem("training.grpo.server.timeout_seconds", server.timeout_seconds, problem, remedy)


def _is_address(url: str) -> bool:
    """Whether a request can be sent to it."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        return bool(parts.hostname) and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:  # the port is no number up to 65535, or the host has an empty part
        return False


def _unused(spec: Spec) -> Iterator[Problem]:
    """Fields that are for prompts only."""
    evaluation = ("max_prompts", "answers", "solved_reward", "min_pass_at_1", "min_pass_at_k")
    sections = (
        ("training.grpo", spec.training.grpo, tuple(type(spec.training.grpo).model_fields)),
        ("evaluation", spec.evaluation, evaluation),
    )
    for prefix, section, names in sections:
        for name in names:
            if (value := getattr(section, name)) != type(section).model_fields[name].default:
                shown = value if isinstance(value, int | float | str) else None  # a section may have a secret
                remedy = "remove it, or use data.kind: prompts"
                yield Problem(f"{prefix}.{name}", shown, f"is not used by data.kind: {spec.data.kind}", remedy)


def _generates_from_copy(parallel: Parallel) -> bool:
    """Whether answers are generated by a copy of the model."""
    several = parallel.tensor * parallel.pipeline * parallel.context * parallel.expert > 1
    return several or parallel.strategy == "fsdp"


def _unsupported(spec: Spec) -> Iterator[Problem]:
    training, why = spec.training, "is not supported with data.kind: prompts"
    fields: tuple[tuple[str, object, bool, str], ...] = (
        ("training.determinism", training.determinism, training.determinism == "off", "use exact or elastic"),
        ("training.precision", training.precision, training.precision == "fp8", "use bf16"),
        ("training.compile", training.compile, training.compile, "use false"),
        ("training.anomalies.action", "rewind", training.anomalies.action == "rewind", "use skip or stop"),
        ("training.micro_batch", "auto", training.auto_micro_batch, "write a number"),
        ("parallel.auto", True, spec.parallel.auto, "give the layout yourself"),
        ("training.batch_ramp.start", training.batch_ramp.start, training.batch_ramp.start is not None, "remove it"),
        ("data.shuffle.kind", spec.data.shuffle.kind, spec.data.shuffle.kind != "global", "use global"),
        ("model.head", spec.model.head, spec.model.head == "scalar", "use tokens"),
        ("training.lora.base", "nf4", training.lora.base == "nf4" and _generates_from_copy(spec.parallel), "use bf16"),
    )
    for field, value, refused, remedy in fields:
        if refused:
            yield Problem(field, value, why, remedy)
    for number, source in enumerate(spec.data.sources):
        if source.format not in ("auto", "jsonl"):
            yield Problem(f"data.sources.{number}.format", source.format, why, "use jsonl")
        if source.fields is not None:
            yield Problem(f"data.sources.{number}.fields", None, why, "write `prompt` or `messages` in each record")
        if source.weight is not None:
            yield Problem(f"data.sources.{number}.weight", source.weight, why, "remove it")
