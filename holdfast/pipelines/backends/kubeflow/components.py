"""The steps as KFP components.

KFP reads a function's signature and copies its source into the pod. So both are generated here from the table of steps:
every function only calls its step's adapter.
"""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from holdfast.steps import COMMON, FIELDS, PARAMETERS, PLACE, STEPS, TRIAL, Step
from holdfast.steps.outcomes import EXIT_HANDLER
from holdfast.steps.runner import IMAGE

_SOURCE = '''def {name}({signature}) -> {returns}:
    """{purpose}"""
    from holdfast.components.{name}.entrypoint import body
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
    more = [f'("{step.items}", list)'] if step.items else []
    more += [f'("{name}", {kind})' for name, kind in step.others.items()]
    more += [f'("{name}", str)' for name in PLACE] if step.shown else []
    returns = f'NamedTuple("Outputs", [("Output", str), {", ".join(more)}])' if more else "str"
    return _SOURCE.format(name=step.name, purpose=step.purpose, signature=", ".join(parameters), returns=returns)
