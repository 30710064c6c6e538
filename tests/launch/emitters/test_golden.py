"""What every example becomes on every system: compared with files under review, and held against the official schemas.

To accept a change: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/launch/emitters/test_golden.py, and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest
import yaml

from holdfast.launch.emitters import Target, objects_for, render, training_job
from holdfast.launch.kubernetes.schemas import validate
from holdfast.spec import SpecError, load_spec

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(ROOT.glob("examples/cluster-*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run", "uid": "0d3c", "controller": False}

REFUSED = {  # by the rules, since the target cannot do what the example asks for
    ("cluster-elastic", "trainjob"): "not elastic",
    ("cluster-elastic", "volcano"): "cannot place a Volcano Job",
    ("cluster-rack", "pytorchjob"): "rewrites the pod group",
    ("cluster-cpu", "volcano"): "cannot place a Volcano Job",
}
CASES = [(path, target) for path in EXAMPLES for target in get_args(Target)]
NAMES = [f"{path.stem}-{target}" for path, target in CASES]


def as_data(text: str) -> object:
    """The objects, which do not depend on how the YAML is written."""
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize(("example", "target"), CASES, ids=NAMES)
def test_an_example_becomes_its_golden_file_or_is_refused_with_the_reason(example: Path, target: Target) -> None:
    spec = load_spec(example)
    golden = GOLDEN / f"{example.stem}.{target}.yaml"
    if reason := REFUSED.get((example.stem, target)):
        with pytest.raises(SpecError, match=reason):
            render(spec, target, "0123456789abcdef", 3)
        assert not golden.exists()
        return
    text = render(spec, target, "0123456789abcdef", 3)
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert as_data(text) == as_data(golden.read_text(encoding="utf-8"))


def test_no_golden_file_is_left_over() -> None:
    expected = {f"{path.stem}.{target}.yaml" for path, target in CASES if (path.stem, target) not in REFUSED}
    assert {path.name for path in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_golden_object_fits_the_official_schema(golden: Path) -> None:
    for thing in yaml.safe_load_all(golden.read_text(encoding="utf-8")):
        validate(thing)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_a_launcher_creates_fits_the_official_schema(example: Path) -> None:
    spec = load_spec(example)
    job = training_job(spec, "0123456789abcdef", 12, "s3://bucket/x", frozenset({"node-b", "node-a"}))
    for thing in objects_for(job, OWNER):
        validate(thing)
        assert thing["metadata"]["ownerReferences"] == [OWNER]
