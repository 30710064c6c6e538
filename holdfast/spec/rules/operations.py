"""Rules of `evaluation`, `serving`, `store`, `telemetry` and `schedule`, and of secrets in URLs.

They refuse a field that has no effect, and a metric, task or tracker that is listed twice. They also refuse a value
that would fail later: an unsupported scheme, an unknown resource, an invalid cron expression or time zone. One rule
covers the whole spec: no URL contains credentials.
"""

import ipaddress
import re
from collections.abc import Iterator
from zoneinfo import ZoneInfo, available_timezones

from holdfast.spec.cluster import amount
from holdfast.spec.cron import CronError, expand
from holdfast.spec.errors import Problem
from holdfast.spec.operations import Evaluation, ServingPods
from holdfast.spec.redaction import HIDDEN, carries_secret
from holdfast.spec.tree import Spec

# Rules of `evaluation`.


def check_own_metrics(spec: Spec) -> Iterator[Problem]:
    """Metrics have different names. One without a function needs the command that writes it, and a command has a
    file. A class or function for scripts is not given without one."""
    evaluation = spec.evaluation
    if evaluation.timeout_minutes != Evaluation.model_fields["timeout_minutes"].default and not evaluation.command:
        message = "is not used without evaluation.command"
        yield Problem(
            "evaluation.timeout_minutes", evaluation.timeout_minutes, message, "remove it, or add the command"
        )
    names = [metric.label for metric in evaluation.metrics]
    for number, (metric, name) in enumerate(zip(evaluation.metrics, names, strict=True)):
        field = f"evaluation.metrics.{number}"
        if not name:
            remedy = "give use (a function of your code), or name (a number that evaluation.command writes)"
            yield Problem(field, metric.model_dump(exclude_defaults=True), "has neither use nor name", remedy)
        elif name in names[:number]:
            yield Problem(f"{field}.name", name, "is the name of two metrics", "give one of them another name")
        elif metric.use is None and not evaluation.command:
            remedy = "add evaluation.command, or give the metric a function: use"
            yield Problem(f"{field}.name", name, "is written by no command", remedy)
        if metric.versus_champion != "ignore" and evaluation.versus_champion == "ignore":
            message = "is not used by evaluation.versus_champion: ignore, which looks at no champion"
            yield Problem(f"{field}.versus_champion", metric.versus_champion, message, "remove one of them")
    if spec.train.script is not None:
        return
    for field, function in (("evaluation.load", evaluation.load), ("registration.serve", spec.registration.serve)):
        if function is not None:
            yield Problem(field, function.use, "is only used with train.script", "remove it")


def check_pause(spec: Spec) -> Iterator[Problem]:
    """A pause has a held-out loss, and its launch reaches it."""
    without_loss = "has no held-out loss with {}"
    refused = {
        "data.kind: prompts": (spec.data.kind == "prompts", without_loss),
        "training.lora": (spec.training.lora.rank is not None, without_loss),
        "evaluation.stop_after": (spec.evaluation.stop_after is not None, "may not be reached with {}"),
    }
    for what, (given, text) in refused.items():
        if spec.training.pauses and given:
            message = text.format(what)
            yield Problem("training.pause_at", spec.training.pause_at, message, "remove one of them")


def check_evaluation(spec: Spec) -> Iterator[Problem]:
    """Fields for a comparison or for samples are not given without one. No task is listed twice."""
    evaluation = spec.evaluation
    if evaluation.champion_tolerance and evaluation.versus_champion != "not_worse":
        yield Problem(
            "evaluation.champion_tolerance",
            evaluation.champion_tolerance,
            f"is not used by versus_champion: {evaluation.versus_champion}",
            "remove it, or use not_worse",
        )
    questions = [(task.uri, task.metric) for task in evaluation.tasks]
    for index, question in enumerate(questions):
        if question in questions[:index]:
            yield Problem(
                f"evaluation.tasks.{index}.uri",
                question[0],
                f"is listed twice with the metric {question[1]}",
                "keep one of them, because results are identified by task and metric",
            )
    yield from _check_turns(spec)
    yield from _check_step_evaluation(spec)
    for name in ("sample_tokens", "temperature"):
        value = getattr(evaluation, name)
        if not evaluation.prompts and value != type(evaluation).model_fields[name].default:
            yield Problem(
                f"evaluation.{name}", value, "is not used without prompts", "remove it, or give evaluation.prompts"
            )


def _check_turns(spec: Spec) -> Iterator[Problem]:
    """Fields of a task in turns are used, and its model can have a chat template."""
    for index, task in enumerate(spec.evaluation.tasks):
        field = f"evaluation.tasks.{index}"
        for name in ("system", "fewshot_as_multiturn"):
            value = getattr(task, name)
            if not task.chat_template and value != type(task).model_fields[name].default:
                yield Problem(
                    f"{field}.{name}", value, "is not used without a chat template", "set chat_template: true"
                )
        starts_plain = spec.data.kind == "text" and (task.while_training or spec.model.init_from is None)
        if task.chat_template and starts_plain:
            message = "needs a model with a chat template, and data.kind: text gives it none"
            remedy = "use data.kind: chat" + (", or remove while_training" if task.while_training else "")
            yield Problem(f"{field}.chat_template", True, message, remedy)


def _check_step_evaluation(spec: Spec) -> Iterator[Problem]:
    """Decisions and tasks while training need evaluations, of a model that one checkpoint holds whole."""
    evaluation = spec.evaluation
    if evaluation.every_steps is None:
        unused = {"keep_best": evaluation.keep_best, "stop_after": evaluation.stop_after}
        unused |= {f"tasks.{index}.while_training": task.while_training for index, task in enumerate(evaluation.tasks)}
        for name, value in unused.items():
            if value:
                yield Problem(f"evaluation.{name}", value, "has no evaluations", "give evaluation.every_steps")
        return
    if evaluation.every_steps > spec.training.steps:
        message = f"is above training.steps = {spec.training.steps}, so nothing is evaluated"
        yield Problem("evaluation.every_steps", evaluation.every_steps, message, f"use {spec.training.steps} at most")
    if spec.data.kind == "prompts":
        message = "is not supported with data.kind: prompts, whose held-out text has no targets"
        yield Problem("evaluation.every_steps", evaluation.every_steps, message, "remove it")
    if spec.training.lora.rank is not None:
        message = "is not supported with adapters (training.lora), whose checkpoints hold no whole model"
        yield Problem("evaluation.every_steps", evaluation.every_steps, message, "remove it, or remove training.lora")


# Rules of `serving`, and of `store`.


def check_store(spec: Spec) -> Iterator[Problem]:
    """The store has a supported scheme."""
    if spec.store is not None and not re.match(r"file:///|(s3|gs|az)://[^/]", spec.store):
        location = "(hidden)" if carries_secret(spec.store) else spec.store
        remedy = "use file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        yield Problem("store", location, "is neither file:/// nor a bucket", remedy)


def check_serving(spec: Spec) -> Iterator[Problem]:
    """What serves the champion finds the weights in a bucket, and its pods request resources that exist."""
    serving = spec.serving
    for section, settings in (("serving.kserve", serving.kserve), ("serving.deployment", serving.deployment)):
        if settings is not None:
            yield from _problems_with_pods(spec, section, settings)
    kserve = serving.kserve
    if kserve is None:
        return
    if kserve.min_replicas > kserve.max_replicas:
        yield Problem(
            "serving.kserve.min_replicas",
            kserve.min_replicas,
            f"is above max_replicas = {kserve.max_replicas}",
            f"use at most {kserve.max_replicas}",
        )
    if kserve.runtime is not None and kserve.vllm is not None:
        yield Problem(
            "serving.kserve.runtime", kserve.runtime, "and serving.kserve.vllm are two servers", "remove one of them"
        )


def _problems_with_pods(spec: Spec, section: str, settings: ServingPods) -> Iterator[Problem]:
    if spec.store is not None and spec.store.startswith("file:"):
        yield Problem(section, "(given)", f"cannot read from store = {spec.store}", "use a store in S3, or remove it")
    if settings.accelerators and spec.cluster.accelerator == "cpu":
        yield Problem(
            f"{section}.accelerators",
            settings.accelerators,
            "is not possible with cluster.accelerator: cpu",
            "use 0, or name an accelerator",
        )
    for name in ("cpu", "memory"):
        if not amount(getattr(settings, name)):
            yield Problem(f"{section}.{name}", getattr(settings, name), "requests nothing", "request more than zero")


# Rules of `telemetry`.


def check_trackers(spec: Spec) -> Iterator[Problem]:
    """No tracker is listed twice."""
    trackers = spec.telemetry.trackers
    for index, name in enumerate(trackers):
        if name in trackers[:index]:
            yield Problem(f"telemetry.trackers.{index}", name, "is listed twice", "keep one of them")


def check_collector_address(spec: Spec) -> Iterator[Problem]:
    """In a pod, metrics are served at an address that can be reached from outside. This rule is only for specs that run
    in pods, which the spec itself does not state."""
    telemetry = spec.telemetry
    if telemetry.metrics_port is not None and _is_loopback(telemetry.metrics_host):
        yield Problem(
            "telemetry.metrics_host",
            telemetry.metrics_host,
            f"is inside the pod, where Prometheus cannot reach it (telemetry.metrics_port: {telemetry.metrics_port})",
            "use 0.0.0.0, or remove telemetry.metrics_port",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Rules of `schedule`.


def check_schedule(spec: Spec) -> Iterator[Problem]:
    """The cron expression and the time zone are valid, and only one kind of schedule is given."""
    schedule = spec.schedule
    if schedule.cron is not None and schedule.every_minutes is not None:
        yield Problem(
            "schedule.every_minutes",
            schedule.every_minutes,
            "is given together with schedule.cron",
            "keep one of the two",
        )
    if schedule.cron is not None:
        try:
            expand(schedule.cron)
        except CronError as error:
            yield Problem("schedule.cron", schedule.cron, str(error), error.remedy)
    try:
        ZoneInfo(schedule.timezone)
    except (KeyError, ValueError, OSError):
        from difflib import get_close_matches

        close = get_close_matches(schedule.timezone, sorted(available_timezones()), 1)
        yield Problem(
            "schedule.timezone",
            schedule.timezone,
            "is not an IANA time zone",
            f"did you mean {close[0]!r}?" if close else "use a name such as 'Europe/Berlin'",
        )


def check_no_secrets_in_urls(spec: Spec) -> Iterator[Problem]:
    """No URL of the spec contains credentials."""
    registry = spec.serving.model_registry
    urls = [
        ("store", spec.store),
        ("serving.model_registry.url", registry.url if registry else None),
        ("model.init_from", spec.model.init_from),
        ("training.distillation.teacher", spec.training.distillation.teacher),
        ("training.grpo.server.url", spec.training.grpo.server.url if spec.training.grpo.server else None),
        ("data.tokenizer.path", spec.data.tokenizer.path),
        ("data.chat.template", spec.data.chat.template),
    ]
    for index, source in enumerate(spec.data.sources):
        urls += [(f"data.sources.{index}.uri", source.uri), (f"data.sources.{index}.repo", source.repo)]
    rewards = enumerate(spec.training.grpo.rewards)
    urls += [(f"training.grpo.rewards.{number}.model", reward.model) for number, reward in rewards]
    urls += [(f"train.inputs.{index}.uri", given.uri) for index, given in enumerate(spec.train.inputs)]
    urls += [(f"evaluation.tasks.{index}.uri", task.uri) for index, task in enumerate(spec.evaluation.tasks)]
    if (checked := spec.data.cleaning.decontaminate) is not None:
        urls += [(f"data.cleaning.decontaminate.tasks.{index}", uri) for index, uri in enumerate(checked.tasks)]
    for field, url in urls:
        if url and carries_secret(url):
            yield Problem(
                field,
                HIDDEN,
                "contains credentials or a query",
                "remove them; credentials come from the environment",
            )
