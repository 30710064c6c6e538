"""Every example on every system: compared with reviewed files, and checked against the official schemas.

To accept a change: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/launch/emitters/test_golden.py, and read the difference.
"""

from pathlib import Path
from typing import get_args

import pytest
import yaml

from holdfast.launch.emitters import Target, objects_for, render, training_job
from holdfast.launch.kubernetes.schemas import validate
from holdfast.spec import SpecError, load_spec
from tests.golden_files import assert_golden, difference, golden_of

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(ROOT.glob("examples/cluster-*.yaml"), key=lambda path: path.stem != "cluster-h100")  # the base first
GOLDEN = Path(__file__).parent / "golden"
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run", "uid": "0d3c", "controller": False}

REFUSED = {  # by the rules, since the target does not support what the example needs
    ("cluster-elastic", "trainjob"): "not elastic",
    ("cluster-elastic", "volcano"): "cannot place a Volcano Job",
    ("cluster-rack", "pytorchjob"): "rewrites the pod group",
    ("cluster-cpu", "volcano"): "cannot place a Volcano Job",
}
CASES = [(path, target) for path in EXAMPLES for target in get_args(Target)]
NAMES = [f"{path.stem}-{target}" for path, target in CASES]


@pytest.mark.parametrize(("example", "target"), CASES, ids=NAMES)
def test_an_example_becomes_its_golden_file_which_fits_the_schema_or_is_refused(example: Path, target: Target) -> None:
    spec = load_spec(example)
    if reason := REFUSED.get((example.stem, target)):
        with pytest.raises(SpecError, match=reason):
            render(spec, target, "0123456789abcdef", 3)
        return
    text = render(spec, target, "0123456789abcdef", 3)
    assert_golden(text, *golden_of(GOLDEN, f"{example.stem}.{target}", base=f"cluster-h100.{target}"))
    for manifest in yaml.safe_load_all(text):
        validate(manifest)


@pytest.mark.parametrize("values", [(1, True), (1, 1.0), (0, False)])
def test_a_change_of_type_is_a_difference(values: tuple[object, object]) -> None:
    before, after = ({"a": value} for value in values)
    assert difference(before, after)


def test_no_golden_file_is_left_over() -> None:
    expected = {f"{path.stem}.{target}" for path, target in CASES if (path.stem, target) not in REFUSED}
    assert {path.stem for path in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_launcher_objects_match_the_official_schema(example: Path) -> None:
    spec = load_spec(example)
    job = training_job(spec, "0123456789abcdef", 12, "s3://bucket/x", frozenset({"node-b", "node-a"}))
    for manifest in objects_for(job, OWNER):
        validate(manifest)
        assert manifest["metadata"]["ownerReferences"] == [OWNER]
