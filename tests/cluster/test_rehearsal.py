"""The page docs/cluster.md, word for word: one spec through every emitter, and on the emulated cluster to a model."""

import json
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import load_spec
from tests.cluster.rehearsal import rehearse
from tests.envtest.control_plane import ControlPlane, needs_assets
from tests.whole.small import write_corpus

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster-cpu.yaml"


@pytest.mark.parametrize("target", ["kfp", "argo", "pytorchjob", "trainjob", "slurm"])
def test_the_example_compiles_for_every_target_it_can_have(target: str, tmp_path: Path) -> None:
    output_file = tmp_path / "out"
    result = CliRunner().invoke(app, ["compile", str(EXAMPLE), "--target", target, "--output", str(output_file)])
    assert result.exit_code == 0, result.output
    assert "s3://holdfast/store" in output_file.read_text()


@pytest.mark.parametrize(
    "plane",
    [pytest.param("in this process", marks=pytest.mark.drill), pytest.param("real", marks=needs_assets)],
    indirect=True,
)
def test_a_node_killed_in_training_causes_a_restart_and_the_model_is_registered(
    plane: ControlPlane | None, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    store = f"s3://rehearsal-{uuid.uuid4().hex}/store"  # moto's buckets belong to the whole process
    small = [
        f"store={store}",
        f"data.sources.0.uri={tmp_path}/corpus/*.txt", "data.tokenizer.vocabulary=300", "data.validation_fraction=0.2",
        "data.workers=1", "model={layers: 2, hidden: 32, heads: 2, context: 32}", "training.steps=60",
        "training.log_every=5", "parallel.processes=1", "checkpoint.every_steps=5", "evaluation.max_perplexity=null",
    ]  # fmt: skip
    rehearsal = rehearse(with_absolute_paths(load_spec(EXAMPLE, small)), tmp_path / "rehearsal", kill=True, plane=plane)
    assert rehearsal.workflow.phase == "Succeeded", rehearsal.workflow.log
    assert rehearsal.killed is not None
    phases = {name: node.phase for name, node in rehearsal.workflow.nodes.items()}
    assert phases == dict.fromkeys(["preprocess", "train", "evaluate", "register", "onExit"], "Succeeded")
    run_id = rehearsal.workflow.nodes["train"].outputs["run-id"]
    assert rehearsal.jobs == [f"holdfast-{run_id}-2"]
    assert int(rehearsal.workflow.nodes["register"].outputs["version"]) == 1
    assert ": registered as models:/" in json.dumps(rehearsal.workflow.nodes["onExit"].log)
