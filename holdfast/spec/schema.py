"""The JSON Schema of the spec, for editors, docs/spec.schema.json, and its reference, docs/spec.md.

Promises that both agree with the models, because both are generated from them.
"""

import json
import sys
from typing import Any

from pydantic_core import PydanticUndefined

from holdfast.spec.fields import Leaf, allowed, default, leaves
from holdfast.spec.load import FROM
from holdfast.spec.section import Section
from holdfast.spec.training import AUTO
from holdfast.spec.tree import Spec

# Fields of `data` that are part of the run id directly. The rest of `data` is part of it through the dataset id.
READ_WITH_BATCHES = (
    "data.document_masks",
    "data.sources[].weight",
    "data.shuffle.kind",
    "data.shuffle.block_tokens",
    "data.shuffle.window",
)


SCHEMA_URL = "https://holdfast-ml.github.io/holdfast/spec.schema.json"  # its `$id`
MODELINE = "# yaml-language-server: $schema="  # of a spec, for editors; a URL or a path follows

FROM_MEANING = (
    "A model in the Hugging Face layout: a folder, s3:// or hf://owner/name[@revision][/folder]. The machine that "
    "submits a run replaces it by `init_from`, the shape, `context` and `data.tokenizer` of that model; "
    "`holdfast validate` prints them. The run id is that of a spec with those fields written out."
)


def json_schema() -> dict[str, Any]:
    """The schema of a spec file, draft 2020-12."""
    schema = _without_titles(Spec.model_json_schema())
    parallel = schema["properties"]["parallel"]
    schema["$defs"]["Model"]["properties"][FROM] = {"type": "string", "minLength": 1, "description": FROM_MEANING}
    sizes = schema["$defs"]["Training"]["properties"]
    sizes["micro_batch"] = {
        "anyOf": [{"const": AUTO}, {key: value for key, value in sizes["micro_batch"].items() if key != "description"}],
        "description": sizes["micro_batch"]["description"],
    }
    del schema["$defs"]["Data"]["properties"]["document_masks"]["default"]  # it depends on `data.kind`
    parallel["anyOf"] = [{"const": AUTO}, {"$ref": parallel.pop("$ref")}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_URL,
        "title": "Holdfast spec",
        **schema,
        "description": "One training run, from raw text to a registered model.",
    }


def identity_of(leaf: Leaf) -> str:
    """How a field is part of the run id: "yes", "through the dataset id", "plan" (in the plan only), or "no"."""
    if leaf.role != "identity":
        return "plan" if leaf.role == "plan" else "no"
    if leaf.path.startswith("data.") and leaf.path not in READ_WITH_BATCHES:
        return "through the dataset id"
    return "yes"


INTRODUCTION = """\
# The spec

One YAML file describes a training run. This page lists every field. `python -m
holdfast.spec.schema > docs/spec.md` generates it from the models in `holdfast/spec`. `holdfast validate --schema`
prints the same as JSON Schema, for editors.

The column *Run id* shows the effect of a change:

- **yes**: the field is part of the run's identity. A change creates a different run.
- *dataset*: the field is part of the dataset id, and therefore of the run's identity.
- *plan*: the field sets how the model is computed, for example its layout. It is not in the run id. Every checkpoint
  records it in the plan. A run with `training.determinism: exact` continues under a different plan only with
  `--replan` ([running.md](running.md)).
- *no*: the field cannot change the trained weights. It may change between two attempts of a run.

The values that a field *takes* are checked before anything is spent. An unknown field is refused.

## In your editor

An editor with a YAML language server completes fields, shows their description, and marks a misspelled one. It needs
one comment in the spec, with a path or a URL:

```text
# yaml-language-server: $schema=https://holdfast-ml.github.io/holdfast/spec.schema.json
```

Every spec in `examples/` names [spec.schema.json](spec.schema.json) this way, and `holdfast init` writes the comment.
For a schema of the version that you have installed: `holdfast validate --schema > spec.schema.json`, and
`$schema=spec.schema.json`. `python -m holdfast.spec.schema --json > docs/spec.schema.json` generates the file here.

Without the comment, tell the editor which files are specs. This is the entry for the catalog of SchemaStore, and the
same `fileMatch` fits VS Code's `yaml.schemas`:

```json
{
  "name": "Holdfast spec",
  "description": "One training run, from raw text to a registered model.",
  "fileMatch": ["*.holdfast.yaml", "*.holdfast.yml"],
  "url": "https://holdfast-ml.github.io/holdfast/spec.schema.json"
}
```
"""


def markdown() -> str:
    """The reference of every field: the content of docs/spec.md."""
    sections: dict[str, list[Leaf]] = {}
    for leaf in leaves():
        parts = leaf.path.split(".")
        for depth in range(len(parts)):  # a section comes before its subsections
            sections.setdefault(".".join(parts[:depth]), [])
        sections[".".join(parts[:-1])].append(leaf)
    lines = [INTRODUCTION]
    for path, group in sections.items():
        if group:
            lines += [f"## `{path}`" if path else "## Top level", "", _about(path, group[0].section), ""]
            lines += ["| Field | Takes | Default | Run id | Meaning |", "|---|---|---|---|---|"]
            first = [f"| `{FROM}` | text that is not empty | | **yes** | {FROM_MEANING} |"] if path == "model" else []
            lines += [*first, *map(_row, group), ""]
    return "\n".join(lines)


def _about(path: str, section: type[Section]) -> str:
    if not path:
        return "Fields outside the sections below."
    text = " ".join((section.__doc__ or "").split())
    return f"{text} Each item of the list has these fields." if path.endswith("[]") else text


def _row(leaf: Leaf) -> str:
    value = default(leaf.info)
    default_text = "*required*" if value is PydanticUndefined else f"`{json.dumps(value, ensure_ascii=False)}`"
    identity = {"yes": "**yes**", "no": "no", "plan": "*plan*"}.get(identity_of(leaf), "*dataset*")
    meaning = leaf.info.description or ""
    cells = (f"`{leaf.name}`", allowed(leaf.info), default_text, identity, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _without_titles(node: Any, *, names: bool = False) -> Any:
    """`node` without the titles that pydantic generates. With `names` its keys are names, and `title` may be one."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, names=key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title"
    }


def schema_text() -> str:
    """The content of docs/spec.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text() if sys.argv[1:] == ["--json"] else markdown(), end="")  # noqa: T201
