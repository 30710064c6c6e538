"""Generated files of the steps: `component.yaml` and `README.md` in the folder of each, and the page of exit codes.

`python -m holdfast.pipelines.backends.kubeflow.component_files` writes them from the table of steps. Any KFP pipeline
can load a `component.yaml` with `kfp.components.load_component_from_file`. A test compares the files with the table.
"""

import linecache
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from kfp import dsl
from kfp.dsl.base_component import BaseComponent

import holdfast
from holdfast.pipelines.backends.kubeflow.compile import quiet
from holdfast.pipelines.documents import as_yaml
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import MEANINGS, ExitCode
from holdfast.steps import COMMON, FIELDS, PARAMETERS, PLACE, STEPS, TRIAL, Step, producer_of
from holdfast.steps.outcomes import EXIT_HANDLER
from holdfast.steps.runner import IMAGE

# The steps as KFP components.
#
# KFP reads a function's signature and copies its source into the pod. So both are generated here from the table of
# steps: every function only calls its step's adapter.

_SOURCE = '''def {name}({signature}) -> {returns}:
    """{purpose}"""
    from holdfast.components.{name}.__main__ import body
    from holdfast.steps.adapters import component

    return component("{name}", body, locals())
'''


@cache
def component_of(name: str) -> BaseComponent:
    """The component of the step `name`."""
    source = source_of(STEPS[name])
    file = f"<the component {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # where KFP reads the source
    names: dict[str, Any] = {"Output": dsl.Output, "PipelineTaskFinalStatus": dsl.PipelineTaskFinalStatus}
    names |= {"NamedTuple": NamedTuple}
    names |= {kind: getattr(dsl, kind) for kind in STEPS[name].artifacts.values()}
    exec(compile(source, file, "exec", dont_inherit=True), names)  # noqa: S102 - our own table
    return dsl.component(names[name], base_image=IMAGE, install_kfp_package=False)


def inputs_of(step: Step) -> list[str]:
    """The inputs that every task of a step must give: the spec, and outputs of earlier steps."""
    inputs = [name for name in step.inputs if name not in step.optional and name not in PARAMETERS]
    return ["spec", *inputs, *(["status"] if step.name == EXIT_HANDLER else [])]


def source_of(step: Step) -> str:
    """The source of the function that KFP copies into the pod of a step."""
    kinds = {name: type(parameter.default).__name__ for name, parameter in PARAMETERS.items()}
    kinds |= {"compiled": "dict", "status": "PipelineTaskFinalStatus"}
    required = inputs_of(step)
    optional = [*COMMON, *FIELDS, "compiled", "job", *step.inputs, *((TRIAL,) if step.per_trial else ())]
    parameters = [f"{name}: {kinds.get(name, 'str')}" for name in required]
    parameters += [f"{name}: Output[{kind}]" for name, kind in step.artifacts.items()]
    parameters += [f"{name}: {kinds.get(name, 'str')} = None" for name in optional if name not in required]
    outputs = [f'("{step.items}", list)'] if step.items else []
    outputs += [f'("{name}", {kind})' for name, kind in step.others.items()]
    outputs += [f'("{name}", str)' for name in PLACE] if step.shown else []
    returns = f'NamedTuple("Outputs", [("Output", str), {", ".join(outputs)}])' if outputs else "str"
    return _SOURCE.format(name=step.name, purpose=step.purpose, signature=", ".join(parameters), returns=returns)


FOLDER = Path(holdfast.__file__).parent / "components"
HEADER = "# Generated from the table of steps: python -m holdfast.pipelines.backends.kubeflow.component_files\n"

_KINDS = {"NUMBER_INTEGER": "integer", "NUMBER_DOUBLE": "number", "STRUCT": "object", "TASK_FINAL_STATUS": "set by KFP"}
_ENVIRONMENT = {
    "HOLDFAST_STORE": "Root of the store, where neither the `store` input nor the spec names one.",
    "MLFLOW_TRACKING_URI": "The MLflow server. `MLFLOW_TRACKING_USERNAME` and `_PASSWORD` where it asks for them.",
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL": "As for every S3 client; or a role of the pod.",
    "HOLDFAST_LOG": "`json` writes one JSON object for each log line.",
}


def component_text(name: str) -> str:
    """The `component.yaml` of a step: IR YAML for `kfp.components.load_component_from_file`."""
    from kfp import compiler

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "component.yaml"
        compiler.Compiler().compile(component_of(name), str(file))
        ir = yaml.safe_load(file.read_text(encoding="utf-8"))
    quiet(ir)
    return HEADER + as_yaml(ir)


def readme_text(name: str) -> str:
    """The README of a step."""
    step = STEPS[name]
    inputs = [
        (f"`{input_name}`", _kind(name, input_name), _need(step, input_name), _input(step, input_name))
        for input_name in _names(name)
    ]
    outputs = [(f"`{output}`", text) for output, text in _outputs(step).items()]
    artifacts = [(f"`{artifact}`", f"`system.{kind}`") for artifact, kind in step.artifacts.items()]
    codes = [(str(int(code)), code.name, MEANINGS[code], "yes" if code.retryable else "no") for code in _codes(step)]
    pod = getattr(Cluster().steps, step.pod or name)
    resources = [
        ("CPU", f"`{pod.cpu}`", f"`cluster.steps.{step.pod or name}.cpu`"),
        ("memory", f"`{pod.memory}`", f"`cluster.steps.{step.pod or name}.memory`"),
        ("disk", f"`{pod.ephemeral_storage}`", f"`cluster.steps.{step.pod or name}.ephemeral_storage`"),
    ]
    return "\n".join(
        [
            f"<!-- {HEADER.strip('# ').strip()} -->",
            f"# {name}",
            "",
            step.purpose,
            "",
            f"Image: `{IMAGE}` (`images/Dockerfile`). Command line: `python -m holdfast.components.{name} --help`.",
            "",
            "```python",
            f'{name} = kfp.components.load_component_from_file("holdfast/components/{name}/component.yaml")',
            "```",
            "",
            "- Retries: call `set_retry` on the task. A repeated step resumes its work.",
            "- `job`: pass `dsl.PIPELINE_JOB_ID_PLACEHOLDER` to keep the log and the outcome of the task in the store.",
            "- Cache: call `set_caching_options(False)`. A step finds its finished work in the store by a digest.",
            *_table("Inputs", ("input", "type", "required", "meaning"), inputs),
            *_table("Outputs", ("output", "meaning"), outputs),
            *_table("Artifacts", ("artifact", "type"), artifacts),
            *_table("Exit codes", ("code", "name", "meaning", "retryable"), codes),
            *_table(
                "Environment",
                ("variable", "meaning"),
                [(f"`{variable}`", text) for variable, text in _ENVIRONMENT.items()],
            ),
            *_table("Resources", ("resource", "default", "field of the spec"), resources),
            "",
        ]
    )


def codes_text() -> str:
    """The page of all exit codes."""
    rows = [(str(int(code)), code.name, MEANINGS[code], "yes" if code.retryable else "no") for code in ExitCode]
    return "\n".join(
        [
            f"<!-- {HEADER.strip('# ').strip()} -->",
            "# Exit codes",
            "",
            "Every Holdfast process ends with one of these codes. Codes 1 to 127 are permanent: a retry changes",
            "nothing. Codes from 128 are retryable: the same command may succeed. PyTorchJob's `ExitCode` restart",
            "policy follows the same rule. [Retries](retries.md) lists who retries what.",
            *_table("", ("code", "name", "meaning", "retryable"), rows),
            "",
        ]
    )


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    texts = {FOLDER / name / "component.yaml": component_text(name) for name in STEPS}
    return texts | {FOLDER / name / "README.md": readme_text(name) for name in STEPS}


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [head, ("---",) * len(head), *rows]
    return [*(["", f"## {title}"] if title else []), "", *(f"| {' | '.join(line)} |" for line in lines)]


def _names(name: str) -> list[str]:
    return list(component_of(name).component_spec.inputs or {})


def _kind(name: str, one: str) -> str:
    kind = str((component_of(name).component_spec.inputs or {})[one].type)
    return _KINDS.get(kind, kind.lower())


def _need(step: Step, one: str) -> str:
    return "yes" if one in inputs_of(step) else "no"


def _input(step: Step, one: str) -> str:
    if one in PARAMETERS:
        return PARAMETERS[one].help
    if producer := producer_of(one):
        return f"Output of `{producer}`."
    return {
        "compiled": "Values of the fields at compile time. An input that equals its value changes nothing.",
        "job": "Id of the execution of the pipeline.",
        "trial": "Number of the trial of a sweep.",
        "trials": "The trials of a sweep, as JSON.",
        "status": "The status of the pipeline's tasks (`dsl.PipelineTaskFinalStatus`).",
        step.item: "One item of the list that the step before returns.",
    }[one]


def _outputs(step: Step) -> dict[str, str]:
    first = f"`{step.outputs[0]}` of the result." if step.outputs else "Empty."
    if step.outputs and step.outputs[0] == "word":
        first = f"The decision: {step.purpose.rpartition(': ')[2]}"
    outputs = {"Output": first}
    if step.items:
        outputs[step.items] = "A list. The next step runs once for each item."
    outputs |= {name: f"`{name}` of the result." for name in step.others}
    if step.shown:
        outputs |= dict(zip(PLACE, (f"Scheme of the URI of `{step.shown}`.", f"URI of `{step.shown}`."), strict=True))
    return outputs


def _codes(step: Step) -> list[ExitCode]:
    return sorted({*_COMMON, *_FURTHER.get(step.name, ())})


_COMMON = {
    *(ExitCode.OK, ExitCode.UNEXPECTED, ExitCode.USAGE, ExitCode.BAD_SPEC, ExitCode.BAD_DATA, ExitCode.NOT_FOUND),
    *(ExitCode.ACCESS_DENIED, ExitCode.STORE_REFUSED, ExitCode.INTERRUPTED, ExitCode.KILLED, ExitCode.TERMINATED),
    *(ExitCode.STORE_UNREACHABLE, ExitCode.NO_SPACE),
}
_CHAMPION = {ExitCode.UNSCORABLE_CHAMPION, ExitCode.FOREIGN_VERSION}
_FURTHER = {
    "tokenise": {ExitCode.HUNG, ExitCode.USER_CODE},
    "preprocess": {ExitCode.HUNG, ExitCode.USER_CODE},
    "train": {
        *(ExitCode.DIVERGED, ExitCode.NO_CHECKPOINT_VERIFIES, ExitCode.FENCED, ExitCode.CANCELLED),
        *(ExitCode.PLAN_CHANGED, ExitCode.OUT_OF_MEMORY, ExitCode.HUNG, ExitCode.LOST_PEER, ExitCode.PREEMPTED),
        *(ExitCode.UNSCHEDULABLE, ExitCode.CLUSTER_UNREACHABLE, ExitCode.WRONG_ARITHMETIC, ExitCode.RENDEZVOUS_TIMEOUT),
        *(ExitCode.UNHEALTHY_NODE, ExitCode.USER_CODE),
    },
    "evaluate": {*_CHAMPION, ExitCode.NO_CHECKPOINT_VERIFIES, ExitCode.OUT_OF_MEMORY, ExitCode.USER_CODE},
    "register": {ExitCode.CHAMPION_CHANGED, ExitCode.FOREIGN_VERSION, ExitCode.CLUSTER_UNREACHABLE},
    "trigger": _CHAMPION,
}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    (FOLDER.parents[1] / "docs" / "exit-codes.md").write_text(codes_text(), encoding="utf-8")
