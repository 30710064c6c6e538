"""Renders the overlays as `kubectl apply -k` would, and walks the resulting objects."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "manifests"
PROFILE = "profile"  # for an existing namespace; other overlays create theirs
OVERLAYS = sorted({path.parent.name for path in MANIFESTS.glob("overlays/*/kustomization.yaml")} - {PROFILE})
Object = dict[str, Any]


@cache
def _text(folder: Path) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, so nothing can be rendered")
    process = subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=False, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr  # for example a deprecated field of kustomize
    return process.stdout


def render(overlay: str) -> list[Object]:
    """All objects of an overlay. Every call returns a new copy."""
    return list(yaml.safe_load_all(_text(MANIFESTS / "overlays" / overlay)))


def render_folder(folder: Path) -> list[Object]:
    """All objects of a kustomization in another folder."""
    return list(yaml.safe_load_all(_text(folder)))


def render_in(namespace: str, overlay: str, folder: Path) -> list[Object]:
    """All objects of a user's copy of an overlay in another namespace."""
    copy = folder / "manifests"
    if not copy.exists():
        shutil.copytree(MANIFESTS, copy)
    file = copy / "overlays" / overlay / "kustomization.yaml"
    file.write_text(re.sub(r"(?m)^namespace: .*", f"namespace: {namespace}", file.read_text()))
    return render_folder(file.parent)


def render_with(component: str, overlay: str, folder: Path, **more: Any) -> list[Object]:
    """All objects of a copy of an overlay with one more component, and with `more` in its kustomization."""
    copy = folder / "manifests"
    shutil.copytree(MANIFESTS, copy)
    file = copy / "overlays" / overlay / "kustomization.yaml"
    content = yaml.safe_load(file.read_text())
    components = [*content.get("components", []), f"../../components/{component}"]
    patches = [*content.get("patches", []), *more.pop("patches", [])]
    file.write_text(yaml.safe_dump({**content, **more, "components": components, "patches": patches}))
    return render_folder(file.parent)


def name_of(thing: Object) -> str:
    """Kind and name, for messages."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def pods(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """The objects that create pods: the name, the pods' metadata, and their spec."""
    for document in objects:
        spec = document.get("spec", {})
        if document["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield name_of(document), spec["template"]["metadata"], spec["template"]["spec"]
        elif document["kind"] == "CronJob":
            template = spec["jobTemplate"]["spec"]["template"]
            yield name_of(document), template["metadata"], template["spec"]
        elif document["kind"] in ("Sensor", "EventSource"):
            template = spec["template"]
            yield name_of(document), template["metadata"], {**template, "containers": [template["container"]]}
        elif document["kind"] == "EventBus":
            bus = spec["jetstream"]
            containers = [value for key, value in bus.items() if key.lower().endswith("containertemplate")]
            yield name_of(document), bus["metadata"], {**bus, "containers": containers}
