"""The faces of a step: a command line, which Argo and people call, and a KFP component.

Each is one call with the step's name and its body, a function of the checked spec, the store's URL and the step's
inputs. Promises that the outcome is left behind (see `holdfast.components.runtime.shell`) and that the process ends
with the table's code. The exit handler's body gets the spec's text instead, which may be one that was refused.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from holdfast.components.runtime.argv import add_common, overrides_of, publish, spec_and_store
from holdfast.components.runtime.environment import store_url
from holdfast.components.runtime.outcomes import EXIT_HANDLER
from holdfast.components.runtime.shell import run_step
from holdfast.components.spec.errors import ExitCode
from holdfast.components.spec.load import parse_spec
from holdfast.components.steps.result import Artifact, Done
from holdfast.components.steps.table import COMMON, PARAMETERS, STEPS
from holdfast.components.store.jobs import recorder

Body = Callable[..., Done]


class Output(Protocol):
    """The part of a KFP output artifact that is filled in here."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str:
        """Where its file goes."""


def component(step: str, body: Body, given: Mapping[str, Any]) -> str:
    """Run `body` as the KFP component `step`, called with the arguments `given`. Returns its first output; on failure
    ends the process."""

    def work(begun: Callable[[str], None]) -> Done:
        url = given["store"]
        if step == EXIT_HANDLER:
            status = given["status"]
            inputs = {name: given[name] for name in (*COMMON, "job", *STEPS[step].inputs)}
            done = body(**inputs, status=status.state, message=status.error_message or "")
        else:
            spec = parse_spec(given["spec"], given["overrides"])
            url = url or store_url(spec)
            begun(url)
            done = _told(step, body(spec, url, **{name: given[name] for name in STEPS[step].inputs}))
        for name in STEPS[step].artifacts:
            _fill(given[name], done.artifacts[name], url)
        return done

    done, code = run_step(step, work, recorder(given["job"]))
    if code is not ExitCode.OK and step != EXIT_HANDLER:
        raise SystemExit(int(code))
    return "" if done is None or not STEPS[step].outputs else str(done.result[STEPS[step].outputs[0]])


def main(step: str, body: Body, argv: Sequence[str] | None = None) -> ExitCode:
    """Run `body` as a command with the arguments `argv`; the result is published as they say. Returns the code."""
    arguments = parser_of(step).parse_args(argv)

    def work(begun: Callable[[str], None]) -> Done:
        inputs = {name: getattr(arguments, name) for name in STEPS[step].inputs}
        if step == EXIT_HANDLER:
            file = arguments.spec
            text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
            ending = {"status": arguments.status, "failures": arguments.failures, "message": arguments.message}
            done = body(
                spec=text, overrides=overrides_of(arguments), store=arguments.store, job=arguments.job,
                **inputs, **ending,
            )  # fmt: skip
        else:
            spec, url = spec_and_store(arguments)
            begun(url)
            done = _told(step, body(spec, url, **inputs))
        publish(dict(done.result), arguments.output, arguments.outputs)
        if arguments.artifacts is not None:
            arguments.artifacts.mkdir(parents=True, exist_ok=True)
            for name, artifact in done.artifacts.items():
                if artifact.text:
                    (arguments.artifacts / name).write_text(artifact.text, encoding="utf-8")
        return done

    code = run_step(step, work, recorder(arguments.job))[1]
    return ExitCode.OK if step == EXIT_HANDLER else code  # its failure is in the log; the DAG's own outcome stands


def parser_of(step: str) -> argparse.ArgumentParser:
    """The command line of a step."""
    parser = argparse.ArgumentParser(
        prog=f"python -m holdfast.components.{step}",
        description=STEPS[step].purpose,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_common(parser, spec_required=step != EXIT_HANDLER)
    parser.add_argument("--artifacts", type=Path, help="also write the documents among the artifacts to this folder")
    for name in STEPS[step].inputs:
        option = f"--{name.replace('_', '-')}"
        if name not in PARAMETERS:
            parser.add_argument(option, required=True, help="output of an earlier step")
        elif isinstance(PARAMETERS[name].default, bool):
            parser.add_argument(option, type=_truth, nargs="?", const=True, default=False, help=PARAMETERS[name].help)
        else:
            parser.add_argument(option, default=PARAMETERS[name].default, help=PARAMETERS[name].help)
    if step == EXIT_HANDLER:
        parser.add_argument("--status", required=True, help="how the DAG ended: succeeded, failed or cancelled")
        parser.add_argument("--message", default="", help="what the failed step said")
        parser.add_argument("--failures", default="", metavar="JSON", help="what Argo's workflow.failures says")
    return parser


def _told(step: str, done: Done) -> Done:
    """With its first output as what the exit handler is told, where the body says nothing else."""
    return done if done.said else replace(done, said=str(done.result[STEPS[step].outputs[0]]))


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", ""):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _fill(output: Output, artifact: Artifact, url: str) -> None:
    """Make a KFP artifact what `artifact` says. What lies in the store is pointed to: Holdfast itself put it there."""
    metadata = {"store": url, "key": artifact.key, **artifact.metadata} if artifact.key else dict(artifact.metadata)
    infinite = [name for name, value in metadata.items() if isinstance(value, float) and not math.isfinite(value)]
    for name in infinite:  # the UI cannot show NaN
        del metadata[name]
    output.metadata.update(metadata)
    if artifact.key:
        Path(output.path).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    elif artifact.text:
        Path(output.path).write_text(artifact.text, encoding="utf-8")
