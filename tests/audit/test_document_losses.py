"""The losses of the documents of a past step: they are those of the step, and name the document that made a spike."""

import json
import math
import os
from itertools import chain
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

import numpy as np
import pytest

from holdfast import api
from holdfast.audit.document_losses import losses_of, require_token_losses
from holdfast.audit.token_losses import BatchLosses, TokenLosses, read_losses
from holdfast.corpus import prepare
from holdfast.corpus.batch import Batch, Passage, Row
from holdfast.engines.assignment import Assignment
from holdfast.pipelines.paths import load_spec
from holdfast.spec import Spec, parse_spec, run_id
from holdfast.spec.errors import ExitCode, SpecError
from holdfast.store import layout, open_store
from tests.checkpoint.ranks import in_ranks
from tests.pipelines.cli.test_runs import holdfast
from tests.train.ranks import join_exactly
from tests.train.test_preferences import PAIRS
from tests.train.test_reference import END, RATE, global_batch
from tests.train.tiny_run import VOCABULARY, tiny_assignment, tiny_spec

STEPS = 12
ONE = ("parallel.processes=1",)
LAYOUTS: dict[int, tuple[tuple[str, ...], ...]] = {
    4: (
        ("parallel.strategy=fsdp", "parallel.context=2", "parallel.tensor=2", "data.document_masks=true"),
        ("parallel.strategy=ddp", "parallel.pipeline=2", "parallel.schedule=1f1b"),
    ),
    3: (("parallel.strategy=fsdp", "training.determinism=elastic", "training.micro_batch=2"),),  # with spare grains
}


@pytest.mark.slow
def test_the_losses_of_all_ranks_are_those_of_one_process_in_every_layout(tmp_path: Path) -> None:
    """Rows and positions of a batch are all different, so that a misplaced loss differs by far."""
    runs = {1: (ONE, ("data.document_masks=true",)), **LAYOUTS}
    for size, specs in runs.items():
        losses = in_ranks(size, _step, tmp_path / str(size), specs)[0]
        for number, (overrides, loss) in enumerate(zip(specs, losses, strict=True)):
            context = tiny_spec().model.context
            found = read_losses(tmp_path / str(size) / str(number), len(global_batch(0)), context)
            masked = "data.document_masks=true" in overrides
            expected = read_losses(tmp_path / "1" / str(int(masked)), len(global_batch(0)), context)
            if "parallel.tensor=2" in overrides:  # its parts of a sum are added in another order
                off = np.abs(found.losses - expected.losses)
                assert (off <= 2.0**-24 * math.sqrt(VOCABULARY) * expected.losses).all()
            else:
                assert np.array_equal(found.losses, expected.losses)
            assert np.array_equal(found.counted, expected.counted)
            assert 0 < found.counted.sum() < found.counted.size
            assert not found.losses[~found.counted].any()
            assert math.isclose(found.losses[found.counted].mean(dtype=np.float64), loss, rel_tol=1e-6)


def _step(rank: int, size: int, folder: Path, specs: tuple[tuple[str, ...], ...]) -> list[float]:
    """Write the token losses of a step of each spec. Returns the losses of the steps."""
    from holdfast.collectives import Gang
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import SeededState
    from tests.train.ranks import steps_of

    join_exactly(folder, rank, size, always=any("elastic" in field for field in chain(*specs)))
    losses = []
    for number, overrides in enumerate(specs):
        spec, token_losses = tiny_assignment(*overrides, f"parallel.processes={size}"), TokenLosses()
        engine = build_engine(spec, VOCABULARY, END, token_losses)
        SeededState(spec.model, spec.training.seed).fill(engine.boxes())
        engine.restored(0)
        ((curve, _),) = (steps_of(engine, spec, rank, size, [global_batch(0)], RATE),)
        losses.append(curve[0][0])
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        token_losses.write(own, spec, Gang(), len(global_batch(0)))
    Gang().barrier()
    return losses


def test_a_token_has_the_loss_of_the_document_that_it_belongs_to() -> None:
    """The second document is cut over two rows. The last token of a row is the first one of the next."""
    rows = (
        Row(0, 0, "s", 0, (5, 6, 0, 7, 8), 4, "", (Passage((0, 3), "a", (0, 3)), Passage((3, 5), "b", (0, 2)))),
        Row(1, 0, "s", 4, (8, 0, 9, 9, 0), 4, "", (Passage((0, 2), "b", (1, 3)), Passage((2, 5), "c", (0, 3)))),
        Row(2, 1, "s", 8, (0, 4, 4, 4, 0), 3, "", (Passage((0, 1), "c", (2, 3)), Passage((1, 5), "d", (0, 4)))),
    )
    losses = np.array([[1, 2, 4, 8], [16, 32, 64, 128], [0, 1, 1, 1]], np.float32)
    counted = np.ones((3, 4), np.bool_)
    counted[2, 0] = False
    total = 15 + 240 + 3
    batch = Batch(3, "dataset", rows, "")
    found = losses_of(batch, BatchLosses(losses, counted), total / 11, str)
    assert [(d.where, d.row, d.counted, d.loss, d.text) for d in found.documents] == [
        ("c", 1, 3, 224 / 3, "[9, 9, 0]"),
        ("b", 1, 1, 16.0, "[8, 0]"),
        ("b", 0, 2, 6.0, "[7, 8]"),
        ("a", 0, 2, 1.5, "[5, 6, 0]"),
        ("d", 2, 3, 1.0, "[4, 4, 4, 0]"),
    ]
    assert (found.agrees, found.counted, found.loss) == (True, 11, total / 11)
    assert math.isclose(math.fsum(document.share or 0.0 for document in found.documents), 1.0)
    assert not losses_of(batch, BatchLosses(losses, counted), total / 11 * (1 + 2e-6), str).agrees

    losses[1, 0] = np.inf
    spike = losses_of(batch, BatchLosses(losses, counted), None, str)
    first = spike.documents[0]
    assert (first.where, first.row, first.loss, spike.loss, spike.agrees) == ("b", 1, None, None, True)
    assert not losses_of(batch, BatchLosses(losses, counted), 3.0, str).agrees


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ((*PAIRS, "model.init_from=base"), "dpo"),
        (("training.objective=mine.py:focal",), "mine.py:focal"),
    ],
)
def test_a_run_without_losses_of_tokens_is_refused_by_name(overrides: tuple[str, ...], field: str) -> None:
    with pytest.raises(SpecError, match=rf"(?s)training.objective.*{field}.*audit batch"):
        require_token_losses(tiny_spec(*overrides))


def test_a_script_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"train.script.*Holdfast does not see the loss of each token"):
        require_token_losses(load_spec(Path(__file__).parents[2] / "examples" / "scripts" / "loop" / "spec.yaml"))


@pytest.mark.parametrize("arguments", [("--sample", "1"), ("r", "--steps", "2-3")])
def test_losses_are_those_of_one_step(arguments: tuple[str, ...]) -> None:
    refused = holdfast("audit", "replay", *arguments, "--losses")
    assert (refused.exit_code, "--losses" in refused.output) == (ExitCode.USAGE, True)


@pytest.mark.slow
def test_a_planted_document_of_random_letters_comes_first_and_all_of_them_make_up_the_recorded_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(3)
    planted = "".join(random.choices(ascii_letters, k=120))
    texts = [f"the same words come again and again, {number} " * 6 for number in range(12)]
    texts[5] = planted
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_STORE", f"file://{tmp_path}/store")
    spec = parse_spec(f"""
        name: spike
        data:
          sources: [{{uri: "{tmp_path}/text.jsonl"}}]
          tokenizer: {{vocabulary: 300}}
        model: {{layers: 1, hidden: 32, heads: 2, context: 64}}
        training:
          steps: {STEPS}
          global_batch: 8
          micro_batch: 2
          log_every: 1
          optimizer: {{learning_rate: 0.02}}
          schedule: {{warmup_steps: 1}}
        checkpoint: {{every_steps: 4, keep_last: 9}}
    """)
    store = open_store(f"file://{tmp_path}/store")
    dataset_id = prepare(spec, store).dataset_id
    identity = run_id(spec, dataset_id)
    document = {"spec": spec.model_dump(mode="json"), "dataset_id": dataset_id}
    store.put(layout.run(identity, "run.json"), json.dumps(document).encode())
    in_ranks(1, _train, tmp_path, store.url, spec, identity, dataset_id)
    run = api.Run(identity, store.url)
    where = f"{tmp_path}/text.jsonl:6"
    step = max(step for step in range(6, STEPS + 1) if where in places(run.batch(step)))

    output = holdfast("audit", "replay", identity, "--steps", str(step), "--losses", "--json")
    assert output.exit_code == ExitCode.OK, output.output
    report: dict[str, Any] = json.loads(output.stdout)
    losses = report["losses"]
    recorded = {row["step"]: row["loss"] for row in run.history()}[step]
    assert (report["equal"], losses["agrees"], losses["recorded"]) == (True, True, recorded)
    documents = losses["documents"]
    assert sum(document["counted"] for document in documents) == losses["counted"] == 8 * 64
    mean = math.fsum(document["loss"] * document["counted"] for document in documents) / losses["counted"]
    assert math.isclose(mean, recorded, rel_tol=1e-6)
    assert documents[0]["where"] == where
    assert documents[0]["text"].removesuffix("<|endoftext|>")[:20] in planted
    assert documents[0]["loss"] > 1.5 * documents[-1]["loss"]


def places(batch: Batch) -> set[str]:
    return {passage.where for row in batch.rows for passage in row.passages if passage.tokens[1] > 1}


def _train(rank: int, size: int, folder: Path, url: str, spec: Spec, identity: str, dataset_id: str) -> None:
    from holdfast.launch.launches import claim_launch
    from holdfast.rank.preemption import PreemptionSignal
    from holdfast.rank.worker import work
    from tests.train.ranks import join

    join(folder, rank, size, always=False)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the launcher of the replay sets it: it is part of the plan
    store, assignment = open_store(url), Assignment.of(spec, identity, dataset_id)
    number = claim_launch(store, identity, assignment.model_dump(mode="json"), replan=False)
    leave = PreemptionSignal()
    leave.listen()
    work(store, identity, number, leave)
