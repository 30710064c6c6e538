"""Arguments of a Workflow: its own parameters, and the defaults of its template."""

from __future__ import annotations

from holdfast.launch.kubernetes.client import Object
from holdfast.pipelines.backends.explain import store_named_by
from holdfast.spec.engine_text import unescape
from holdfast.spec.json_parsing import parse_json_value
from holdfast.steps.parameter_overrides import changed_parameters


class Arguments:
    """The parameters of a Workflow with the defaults of its template, unescaped."""

    def __init__(self, workflow: Object) -> None:
        stored = workflow.get("status", {}).get("storedWorkflowTemplateSpec") or {}
        self._compiled, own = _values(stored), _values(workflow["spec"])
        self._given = {**self._compiled, **own}

    @property
    def spec(self) -> str:
        """The text of the spec: the Workflow's, otherwise the template's default."""
        return self._given.get("spec", "")

    @property
    def overrides(self) -> list[str]:
        """All changes to the spec, including those by parameters for single fields. Raises SpecError and DataError."""
        fields = {name: text for name, text in self._given.items() if text != self._compiled.get(name)}
        listed = parse_json_value(self._given.get("overrides") or "[]", "overrides")
        return [*changed_parameters(fields, {}), *map(str, listed if isinstance(listed, list) else ())]

    @property
    def salt(self) -> str:
        """The salt, which separates runs of the same inputs."""
        return self._given.get("salt", "")

    @property
    def store(self) -> str:
        """The root of the store; empty where neither a parameter nor the spec names one."""
        return self._given.get("store", "") or store_named_by(self)


def _values(spec: Object) -> dict[str, str]:
    """The parameters of a Workflow or of its template, unescaped."""
    listed = spec.get("arguments", {}).get("parameters") or ()
    return {one["name"]: unescape(str(one.get("value") or "")) for one in listed}
