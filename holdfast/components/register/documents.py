"""Documents of a registered version: a model card (README.md), and a bill of materials (sbom.cdx.json, CycloneDX 1.6).

Both have the facts of the lineage and the verdict, and no clock: registering the same model again in the same
environment writes the same bytes.
"""

import json
import platform
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml

from holdfast.code.packages import installed_packages
from holdfast.dataset.manifest import Manifest
from holdfast.model.verified import ExportRecord
from holdfast.runtime.secrets import redact
from holdfast.spec import Spec
from holdfast.tracking.registrations import content_digest

CARD, BOM = "README.md", "sbom.cdx.json"
NAMESPACE = uuid.UUID("9b0a5c3e-7c34-5f0e-8c0d-6a3b1f2d4e10")  # of the serial numbers
Json = dict[str, Any]


@dataclass(frozen=True)
class ModelFacts:
    """What the documents of a version are written from."""

    spec: Spec
    run_id: str
    result: Mapping[str, Any]
    verdict: Mapping[str, Any]
    manifest: Manifest | None  # None for a script without data
    export: ExportRecord
    code: str = ""  # commit of the working tree, if known

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the verdict."""
        figures = self.verdict.get("metrics") or {}
        return {name: value for name, value in figures.items() if isinstance(value, int | float)}

    @property
    def base(self) -> str:
        """The model that was tuned; empty for one that was trained from random weights."""
        return redact(self.spec.model.init_from or "") if self.spec.train.script is None else ""

    @property
    def sources(self) -> list[tuple[str, str]]:
        """The training data: each address with its digest."""
        manifest = self.manifest
        return [] if manifest is None else [(redact(one.uri), one.lineage.digest) for one in manifest.sources]


def documents_of(facts: ModelFacts) -> dict[str, bytes]:
    """The documents by file name."""
    bom = json.dumps(bill_of_materials(facts), indent=1, ensure_ascii=False, sort_keys=True)
    return {CARD: model_card(facts).encode(), BOM: bom.encode()}


def digests_of(documents: Mapping[str, bytes]) -> dict[str, str]:
    """The digest of each document, as records reference it."""
    return {name: content_digest(data) for name, data in documents.items()}


def model_card(facts: ModelFacts) -> str:
    """The card in Markdown, with the front matter that the Hub reads."""
    spec, license_ = facts.spec, facts.spec.registration.license
    hub_name = facts.base.removeprefix("hf://").partition("@")[0] if facts.base.startswith("hf://") else ""
    front = {
        "library_name": "transformers" if spec.train.script is None else "holdfast",
        "tags": ["holdfast"],
        **({"license": license_.lower()} if license_ else {}),
        **({"base_model": hub_name} if hub_name else {}),
    }
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).rstrip(),
        "---",
        f"# {spec.registered_model}",
        "",
        f"Trained by Holdfast, run `{facts.run_id}`, {facts.result['step']} steps.",
        "",
        "## Licence",
        "",
        license_ or "Not stated: `registration.license` of the spec names it.",
        *([f"It was tuned from `{facts.base}`, whose own licence also applies."] if facts.base else []),
        "",
        "## Data",
        "",
        *[f"- `{uri}` (digest `{digest}`)" for uri, digest in facts.sources],
        *([] if facts.sources else ["The training script read its own data."]),
        "",
        "## Evaluation",
        "",
        *[f"- {name}: {value:.6g}" for name, value in sorted(facts.metrics.items())],
        *[f"- {redact(str(reason))}" for reason in facts.verdict.get("reasons") or ()],
        "",
        "## Lineage",
        "",
        f"- dataset: `{facts.result.get('dataset_id') or 'none'}`",
        f"- state: `{facts.result['state_digest']}`",
        f"- export: `{facts.result['export_digest']}`",
        f"- code: `{spec.code or facts.code or 'none'}`",
        f"- bill of materials: `{BOM}`",
    ]
    return "\n".join(lines) + "\n"


def bill_of_materials(facts: ModelFacts) -> Json:
    """The model, its files, its data, and the packages of the environment that registered it, as CycloneDX."""
    digest, license_ = str(facts.result["export_digest"]), facts.spec.registration.license
    data = [
        {"type": "data", "bom-ref": f"data-{index}", "name": uri, "version": source_digest}
        for index, (uri, source_digest) in enumerate(facts.sources)
    ]
    base = [{"type": "machine-learning-model", "bom-ref": "base", "name": facts.base}] if facts.base else []
    files: list[Json] = [
        {
            "type": "file",
            "bom-ref": f"file-{name}",
            "name": name,
            "properties": [
                {"name": "holdfast:digest", "value": file.digest},
                {"name": "holdfast:bytes", "value": str(file.size)},
            ],
        }
        for name, file in sorted(facts.export.files.items())
    ]
    packages = list(_packages())
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": facts.spec.registered_model,
        "version": str(facts.result["state_digest"]),
        **({"licenses": [{"expression": license_}]} if license_ else {}),
        "modelCard": {
            "modelParameters": {"datasets": [{"ref": one["bom-ref"]} for one in data]},
            "quantitativeAnalysis": {
                "performanceMetrics": [
                    {"type": name, "value": repr(value)} for name, value in sorted(facts.metrics.items())
                ]
            },
        },
        "properties": [
            {"name": "holdfast:run", "value": facts.run_id},
            {"name": "holdfast:export_digest", "value": digest},
        ],
    }
    references = [str(one["bom-ref"]) for one in (*base, *data, *files, *packages)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, digest)}",
        "version": 1,
        "metadata": {"component": model},
        "components": [*base, *data, *files, *packages],
        "dependencies": [{"ref": "model", "dependsOn": references}],
    }


def _packages() -> Iterator[Json]:
    """The interpreter and the installed packages, by name."""
    packages = (package.partition("==") for package in installed_packages())
    installed = {name.lower().replace("_", "-"): version for name, _, version in packages}
    python = platform.python_version()
    yield {"type": "platform", "bom-ref": "python", "name": "python", "version": python}
    for name, version in sorted(installed.items()):
        url = f"pkg:pypi/{quote(name)}@{quote(version)}"
        yield {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
