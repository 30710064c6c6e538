"""Adapters of a step: a command line, for Argo and for people, and a KFP component.

Each is one call with the step's name and its body, a function of the checked spec, the store's URL and the step's
inputs. The outcome is recorded (see `holdfast.steps.runner`), and the process ends with an exit code of the
table. The exit handler's body gets the spec's text instead, which may be a refused one.
"""

import argparse
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from holdfast.runtime.environment import outcomes_folder, require_shared_store, require_tracking_server, store_url
from holdfast.runtime.retry import with_retries
from holdfast.spec.engine_text import escape_tree, from_struct, text_of, unescape, unescape_tree
from holdfast.spec.errors import ExitCode, SpecError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.load import parse_spec
from holdfast.spec.tree import Spec
from holdfast.steps.command_line import add_common, overrides_of, publish, spec_and_store
from holdfast.steps.jobs import recorder
from holdfast.steps.outcomes import EXIT_HANDLER
from holdfast.steps.parameter_overrides import changed_parameters
from holdfast.steps.runner import run_step
from holdfast.steps.step_logs import step_log
from holdfast.steps.table import (
    ENDS_ALL_TRIALS,
    FIELDS,
    PARAMETERS,
    PLACE,
    STEPS,
    TRIAL,
    Artifact,
    StepResult,
    producer_of,
)

Body = Callable[..., StepResult]

# Arguments that the engine writes itself. `--escaped` does not apply to them.
_OF_THE_ENGINE = ("status", "failures", "message", "job")

log = logging.getLogger("holdfast.steps")


class Output(Protocol):
    """The used part of a KFP output artifact."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str:
        """Path of its file."""


def component(step: str, body: Body, given: Mapping[str, Any]) -> Any:
    """Run `body` as the KFP component `step`, with the arguments `given`. Returns its first output. If the table
    defines more outputs, it also returns the list for the next step and those. On failure it ends the process.
    Arguments and outputs are escaped (`holdfast.spec.engine_text`).

    A sweep trial that fails alone returns an empty output instead, and the steps after it return nothing. KFP has no
    task in the middle of a DAG that runs after a failed one (docs/sweeps.md), and the comparison waits for all trials.
    """
    given = {name: _default(name) if value is None else unescape_tree(value) for name, value in given.items()}
    given["spec"] = from_struct(given["spec"])
    trial = str(given.get(TRIAL) or "")
    if trial and any(producer_of(name) and not given[name] for name in STEPS[step].inputs):
        log.warning("trial %s: %s is left out: the step before it failed", trial, step)
        return _empty_outputs(step)
    places: list[str] = []

    def work(begun: Callable[[str], None]) -> StepResult:
        url = given["store"]
        overrides = [*_changes(step, given, given["compiled"]), *given["overrides"]]
        if step == EXIT_HANDLER:
            status = given["status"]
            inputs = {name: given[name] for name in ("store", *_inputs(step))}
            done = body(
                spec=text_of(given["spec"]),
                **inputs,
                overrides=overrides,
                status=status.state,
                message=status.error_message or "",
            )
        else:
            spec = parse_spec(given["spec"], overrides)
            url = _begin(spec, url or store_url(spec), begun)
            inputs = {name: given[name] for name in _inputs(step)}
            done = _with_summary(step, _run_with_retries(step, lambda: body(spec, url, **inputs), spec, given["job"]))
        for name in STEPS[step].artifacts:
            _fill(given[name], done.artifacts[name], url)
        places.append(url)
        return done

    part = _part(step, given)
    logs = step_log(given["job"], step, part, lambda: given["store"] or _store_of(given["spec"], given["overrides"]))
    done, code = run_step(step, work, recorder(given["job"]), part, logs)
    if code is not ExitCode.OK and step != EXIT_HANDLER:
        if not trial or code in ENDS_ALL_TRIALS:
            raise SystemExit(int(code))
        log.warning("trial %s failed, and is left out of the comparison", trial)
        return _empty_outputs(step)
    table = STEPS[step]
    first = "" if done is None or not table.outputs else escape_tree(str(done.result[table.outputs[0]]))
    if done is None or not (table.items or table.others or table.shown):
        return first
    lists = [done.result[table.items]] if table.items else []
    place = _place(places[0], done.artifacts[table.shown].key) if table.shown else ()
    return (first, *map(escape_tree, (*lists, *(done.result[name] for name in table.others), *place)))


def main(step: str, body: Body, argv: Sequence[str] | None = None) -> ExitCode:
    """Run `body` as a command with the arguments `argv`, and publish the result as they specify. Returns the exit
    code."""
    arguments = parser_of(step).parse_args(argv)
    if arguments.escaped:
        for name, value in vars(arguments).items():
            if isinstance(value, str) and name not in _OF_THE_ENGINE:
                setattr(arguments, name, unescape(value))

    def work(begun: Callable[[str], None]) -> StepResult:
        inputs = {name: getattr(arguments, name) for name in _inputs(step)}
        changes = _changes(step, vars(arguments), parse_json_object(arguments.compiled, "--compiled"))
        if step == EXIT_HANDLER:
            file = arguments.spec
            text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
            text = unescape(text) if arguments.escaped else text
            ending = {"status": arguments.status, "failures": arguments.failures, "message": arguments.message}
            done = body(
                spec=text,
                overrides=[*changes, *overrides_of(arguments)],
                store=arguments.store,
                **inputs,
                **ending,
            )
        else:
            spec, url = spec_and_store(arguments, changes)
            _begin(spec, url, begun)
            done = _with_summary(step, _run_with_retries(step, lambda: body(spec, url, **inputs), spec, arguments.job))
        publish(dict(done.result), arguments.output, arguments.outputs, escaped=arguments.escaped)
        if arguments.artifacts is not None:
            arguments.artifacts.mkdir(parents=True, exist_ok=True)
            for name, artifact in done.artifacts.items():
                if artifact.text:
                    (arguments.artifacts / name).write_text(artifact.text, encoding="utf-8")
        return done

    def fallback() -> str:
        file = arguments.spec
        text = file.read_text(encoding="utf-8") if file else ""
        return arguments.store or _store_of(text, overrides_of(arguments))

    part = _part(step, vars(arguments))
    logs = step_log(arguments.job, step, part, fallback)
    code = run_step(step, work, recorder(arguments.job), part, logs)[1]
    return ExitCode.OK if step == EXIT_HANDLER else code  # its failure is in the log; the DAG keeps its own outcome


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows non-empty defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def parser_of(step: str) -> argparse.ArgumentParser:
    """The command line parser of a step."""
    parser = argparse.ArgumentParser(
        prog=f"python -m holdfast.components.{step}",
        description=STEPS[step].purpose,
        formatter_class=_Help,
    )
    add_common(parser, spec_required=step != EXIT_HANDLER)
    for name, field in FIELDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"override of {field}, before --overrides")
    parser.add_argument("--compiled", default="{}", metavar="JSON", help="which values of those count as not given")
    parser.add_argument("--artifacts", type=Path, help="also write the documents among the artifacts to this folder")
    for name in STEPS[step].inputs:
        option = f"--{name.replace('_', '-')}"
        if name in STEPS[step].optional:
            parser.add_argument(option, default="", help="what the DAG gives, if it does")
        elif name == STEPS[step].item:
            parser.add_argument(option, required=True, help="one of the list that an earlier step gave")
        elif name not in PARAMETERS:
            parser.add_argument(option, required=True, help="output of an earlier step")
        elif isinstance(PARAMETERS[name].default, bool):
            parser.add_argument(option, type=_truth, nargs="?", const=True, default=False, help=PARAMETERS[name].help)
        else:
            parser.add_argument(option, default=PARAMETERS[name].default, help=PARAMETERS[name].help)
    if STEPS[step].per_trial:
        parser.add_argument(f"--{TRIAL}", default="", help="of a sweep: the number of the trial that it is for")
    if step == EXIT_HANDLER:
        parser.add_argument("--status", required=True, help="how the DAG ended: succeeded, failed or cancelled")
        parser.add_argument("--message", default="", help="error message of the failed step")
        parser.add_argument("--failures", default="", metavar="JSON", help="what Argo's workflow.failures says")
    return parser


def _store_of(spec: str | Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The store of a step that ended before it opened one. It comes from the spec with its overrides, or without
    them if they are refused. Else it is HOLDFAST_STORE, or empty."""
    for changes in (overrides, ()):
        with suppress(SpecError):
            if spec and (store := parse_spec(spec, changes).store):
                return store
    return os.environ.get("HOLDFAST_STORE", "")


def _changes(step: str, given: Mapping[str, Any], compiled: Mapping[str, Any]) -> list[str]:
    """Overrides from the changed parameters of the DAG. The exit handler ignores invalid ones and still reports the
    other steps, for which they are an error."""
    try:
        return changed_parameters(given, compiled)
    except SpecError:
        if step != EXIT_HANDLER:
            raise
        return []


def _begin(spec: Spec, url: str, begun: Callable[[str], None]) -> str:
    """Prepare the start of a step: require a store that other steps can reach, and record the start. Returns the
    URL."""
    require_shared_store(spec, url)
    begun(url)
    require_tracking_server(spec)
    return url


def _with_summary(step: str, done: StepResult) -> StepResult:
    """Use the first output as the summary for the exit handler, if the body gave none."""
    return done if done.summary else replace(done, summary=str(done.result[STEPS[step].outputs[0]]))


def _run_with_retries(step: str, work: Callable[[], StepResult], spec: Spec, job: str) -> StepResult:
    """The result of `work`. In an execution on a cluster (`job`) it is retried within the spec's budget. On one
    machine a person sees the failure, and repeats the same command."""
    if outcomes_folder() is not None or recorder(job) is None:
        return work()
    return with_retries(step, work, spec.cluster.retries)


def _inputs(step: str) -> tuple[str, ...]:
    """The names of the inputs of a step's body."""
    return (*STEPS[step].inputs, *(("job",) if STEPS[step].reads_job_outcomes else ()))


def _part(step: str, given: Mapping[str, Any]) -> str:
    """A key that distinguishes this execution of the step from others of it. It contains letters, digits, `.`, `_`
    and `-`."""
    name = STEPS[step].item or (TRIAL if STEPS[step].per_trial else "")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(given.get(name) or "")) if name else ""


def _default(name: str) -> Any:
    """The value of an input that the task does not set."""
    if name in FIELDS:
        return None  # the spec has the value
    return {} if name == "compiled" else PARAMETERS[name].default if name in PARAMETERS else ""


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", ""):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _empty_outputs(step: str) -> str | tuple[str, ...]:
    """The outputs of a trial's step that has no result."""
    return ("", *("" for _ in PLACE)) if STEPS[step].shown else ""


def _place(url: str, key: str) -> tuple[str, str]:
    """The values of `PLACE` for the folder in the store at `url` that contains `key`, or is `key`."""
    return url.partition(":")[0], f"{url.rstrip('/')}/{key.rpartition('/')[0]}"


def _fill(output: Output, artifact: Artifact, url: str) -> None:
    """Write `artifact` into a KFP artifact. Data in the store is only referenced, because Holdfast wrote it there."""
    metadata = {"store": url, "key": artifact.key, **artifact.metadata} if artifact.key else dict(artifact.metadata)
    infinite = [name for name, value in metadata.items() if isinstance(value, float) and not math.isfinite(value)]
    for name in infinite:  # the UI cannot show NaN
        del metadata[name]
    output.metadata.update(metadata)
    if artifact.key:
        Path(output.path).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    elif artifact.text:
        Path(output.path).write_text(artifact.text, encoding="utf-8")
