"""Every engine resumes to the same bits, loads the state of every other engine, and computes the same steps."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.checkpoint import (
    Attempt,
    Checkpointer,
    Retention,
    StateDigest,
    TensorBox,
    digest_of,
    read_manifest,
)
from holdfast.collectives import Gang
from holdfast.engines.interface import Engine
from holdfast.engines.weights import SeededState
from holdfast.model.initialise import parameter_shapes
from holdfast.spec import Spec, run_id
from holdfast.store import Store, open_store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.once import once
from tests.train.ranks import Runs, join, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

pytestmark = pytest.mark.slow  # the fixture trains

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
BOTH = [(strategy, "fp32") for strategy in STRATEGIES] + [(strategy, "bf16") for strategy in ("ddp", "fsdp", "zero3")]


def overrides(strategy: str, precision: str = "fp32", processes: int = 2) -> tuple[str, ...]:
    return (
        f"parallel.strategy={strategy}",
        f"training.precision={precision}",
        f"parallel.processes={processes}",
        "training.steps=8",
    )


def salt_of(strategy: str, kind: str = "undisturbed") -> str:
    """The salt of a layout's run. Without a salt, all of them would be one run."""
    return f"{strategy} {kind}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store in which two ranks have trained every engine."""
    return open_store(f"file://{once(tmp_path_factory, 'engines', _train_every_engine) / 'store'}")


def _train_every_engine(folder: Path) -> None:
    """Train undisturbed, and again with a stop by SIGTERM and a resume in other processes."""
    store = new_store(folder / "store")
    first: Runs = []
    for strategy, precision in BOTH:
        fields = overrides(strategy, precision)
        first += [(fields, salt_of(strategy), None), (fields, salt_of(strategy, "stopped"), 4)]
    assert train_in_ranks(2, store.url, folder / "first", first) == ["", "PreemptedError"] * len(BOTH)
    stopped_at = read_manifest(store, run_id(tiny_spec(*overrides("ddp")), DATASET_ID, salt_of("ddp", "stopped")), 5)
    assert stopped_at.step == 5
    second: Runs = [(overrides(*case), salt_of(case[0], "stopped"), None) for case in BOTH]
    assert train_in_ranks(2, store.url, folder / "second", second) == [""] * len(BOTH)


def losses(store: Store, spec: Spec, salt: str = "") -> np.ndarray:
    """The loss of every step of the undisturbed run of the spec's layout, or of the run with `salt`."""
    salt = salt or salt_of(spec.parallel.strategy)
    return np.array([row["loss"] for row in read_history(store, run_id(spec, DATASET_ID, salt))], np.float32)


def ulps(one: np.ndarray, other: np.ndarray) -> int:
    """The largest distance between two positive fp32 arrays, in units in the last place."""
    return int(np.abs(one.view(np.int32).astype(np.int64) - other.view(np.int32)).max())


@pytest.mark.parametrize(("strategy", "precision"), BOTH)
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    store: Store, strategy: str, precision: str
) -> None:
    spec = tiny_spec(*overrides(strategy, precision))
    assert trained(store, spec, salt_of(strategy, "stopped")) == trained(store, spec, salt_of(strategy))


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_every_engine_walks_down_the_same_loss_curve(store: Store, strategy: str) -> None:
    reference = losses(store, tiny_spec(*overrides("ddp")))
    assert ulps(losses(store, tiny_spec(*overrides(strategy))), reference) <= 64
    assert reference[-1] < reference[0]


def test_deepspeed_runs_no_compiler(tmp_path: Path) -> None:
    """DeepSpeed's compiled extensions are not needed. A rank that is killed while it compiles would block all other
    ranks.
    """
    assert in_ranks(2, _without_a_compiler, tmp_path, seconds=300) == [[], []]


def _without_a_compiler(rank: int, size: int, folder: Path) -> list[object]:
    from holdfast.engines.interface import build_engine

    programs: list[object] = []
    sys.addaudithook(lambda event, given: programs.append(given[0]) if event == "subprocess.Popen" else None)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")  # nothing is built yet
    join(folder, rank, size, always=True)
    fields = (*overrides("zero3"), "parallel.offload=parameters")
    build_engine(tiny_assignment(*fields), VOCABULARY, 0)
    return [program for program in programs if program not in ("file", "numactl")]  # it asks these about the machine


def _no_first_state(boxes: object) -> None:
    raise AssertionError("there is a checkpoint to load")


@pytest.mark.drill
def test_a_state_in_the_memory_of_the_host_has_the_bits_of_one_that_is_not_but_for_how_gradients_are_clipped(
    tmp_path: Path,
) -> None:
    """Tested as far as possible on a rank without an accelerator: fetched data comes from its own memory."""
    store = new_store(tmp_path / "store")
    clip = "training.clip_norm=0.1"  # below every norm
    on_device = {strategy: (*overrides(strategy), clip) for strategy in ("zero1", "zero2", "zero3", "fsdp")}
    away = {
        f"{strategy} optimizer": (*on_device[strategy], "parallel.offload=optimizer")
        for strategy in ("zero1", "zero2", "zero3")
    }
    away["fsdp parameters"] = (*on_device["fsdp"], "parallel.offload=parameters")
    away["zero3 parameters"] = (*on_device["zero3"], "parallel.offload=parameters")
    away["zero3 bf16"] = (*overrides("zero3", "bf16"), clip, "parallel.offload=parameters")
    every = on_device | {"zero3 in bf16": overrides("zero3", "bf16")} | away
    unclipped: Runs = [((*fields, "training.clip_norm=null"), name, None) for name, fields in every.items()]
    ends = ("zero2 optimizer", "zero3 parameters", "fsdp parameters")
    clipped: Runs = [(every[name], name, None) for name in ("zero2", "zero3", "fsdp", *ends)]
    stopped: Runs = [(away[name], f"{name} stopped", 4) for name in ends]
    stopped.append((on_device["zero3"], "zero3 stopped", 4))
    endings = train_in_ranks(2, store.url, tmp_path / "first", unclipped + clipped + stopped)
    assert endings == [""] * (len(every) + 6) + ["PreemptedError"] * 4
    resumed: Runs = [(away[name], f"{name} stopped", None) for name in ends]
    assert train_in_ranks(2, store.url, tmp_path / "second", resumed) == [""] * 3

    for name, fields in away.items():
        plain = "zero3 in bf16" if name == "zero3 bf16" else name.split()[0]
        spec = tiny_spec(*fields, "training.clip_norm=null")
        assert np.array_equal(losses(store, spec, name), losses(store, spec, plain)), name
        assert trained(store, spec, name)["digest"] == trained(store, spec, plain)["digest"], name
    for name in ends:
        spec = tiny_spec(*away[name])
        assert trained(store, spec, f"{name} stopped") == trained(store, spec, name)
        assert ulps(losses(store, spec, name), losses(store, spec, name.split()[0])) <= 64, name

    switched: Runs = [(away["zero3 parameters"], "zero3 stopped", None)]
    assert train_in_ranks(2, store.url, tmp_path / "third", switched) == ["PlanChangedError"]
    assert train_in_ranks(2, store.url, tmp_path / "fourth", switched, replan=True) == [""]
    spec = tiny_spec(*away["zero3 parameters"])
    assert ulps(losses(store, spec, "zero3 stopped"), losses(store, spec, "zero3")) <= 64


def test_offloading_keeps_weights_on_the_host_and_buffers_on_the_device(tmp_path: Path) -> None:
    """Tested as far as possible on a rank without an accelerator, with tensors that have a device and no elements."""
    assert in_ranks(1, _places, tmp_path) == [({"meta"}, {"meta"}, False, {"cpu"}, {"meta"}, True)]


def _places(rank: int, size: int, folder: Path) -> tuple[object, ...]:
    """The devices of weights and of tables, and whether weights are pinned, without and with offload, for ranks that
    compute on a device like meta.
    """
    from holdfast.engines.mesh import Mesh
    from holdfast.engines.torch.parallelize import Topology, device_mesh, parallelize
    from holdfast.model.decoder import Decoder

    join(folder, rank, size, always=True)
    places: list[object] = []
    pinned: list[torch.Tensor] = []  # without an accelerator, torch cannot pin memory

    def pin(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    torch.Tensor.pin_memory = pin  # type: ignore[method-assign,assignment]
    for offload in ("none", "parameters"):
        spec = tiny_spec(*overrides("fsdp", processes=size), f"parallel.offload={offload}")
        decoder, mesh = Decoder.empty(spec.model, VOCABULARY, "meta"), Mesh.of(spec.parallel, size)
        ranks, meta = device_mesh(mesh, torch.device("cpu")), torch.device("meta")
        parallelize(decoder, spec.training, spec.parallel, Topology(mesh, meta, ranks), grid=None)
        groups = (decoder.parameters(), decoder.buffers())
        places += [*({tensor.device.type for tensor in tensors} for tensors in groups), bool(pinned)]
    return tuple(places)


def test_a_state_transfers_between_engines_bit_for_bit(tmp_path: Path) -> None:
    for digests in in_ranks(3, _hand_on, f"file://{tmp_path / 'store'}", tmp_path, seconds=300):
        assert len(digests) >= len(STRATEGIES)
        assert len(set(digests)) == 1


def _hand_on(rank: int, size: int, url: str, folder: Path) -> list[str]:
    """Save a random state with one engine, and load it with each further engine. Returns the digests."""
    from holdfast.engines.interface import build_engine
    from holdfast.rank.randomness import make_deterministic

    join(folder, rank, size, always=True)
    make_deterministic("exact", 1)
    store, identity = open_store(url), "handed-on"
    layouts = [(strategy, "none") for strategy in (*STRATEGIES, "ddp")]
    layouts[-1:-1] = [("zero2", "optimizer"), ("zero3", "parameters"), ("fsdp", "parameters")]
    for number, (strategy, offload) in enumerate(layouts, start=1):
        fields = (*overrides(strategy, processes=size), "training.global_batch=6", f"parallel.offload={offload}")
        engine = build_engine(tiny_assignment(*fields), VOCABULARY, 0)
        describe = {"dataset_id": DATASET_ID, "layout": engine.layout, "random": {}}
        checkpointer = Checkpointer(store, Attempt(identity, number), Retention(9), describe=describe)
        first_state = _random_state if number == 1 else _no_first_state
        engine.restored(checkpointer.restore(engine.boxes(), first_state))
        checkpointer.save(number, engine.saved(), {"optimizer.step": 0})
        checkpointer.wait()
        _require_that_nothing_changes_before_it_may(engine, size)
    Gang().barrier()  # only rank 0 has waited for the last commit
    return [read_manifest(store, identity, number).state_digest for number in range(1, number + 1)]


def _require_that_nothing_changes_before_it_may(engine: Engine, size: int) -> None:
    """A step announces once that it will change the state, while the saved state is still unchanged."""
    digests: list[StateDigest] = []
    rows = torch.arange(6 // size * 17).view(-1, 17) % VOCABULARY
    before = digest_of(engine.saved())
    engine.step(rows, 0.01, lambda: digests.append(digest_of(engine.saved())))
    assert digests == [before]
    assert digest_of(engine.saved()) != before


def _random_state(boxes: Sequence[TensorBox]) -> None:
    torch.manual_seed(3)
    for box in boxes:
        box.data.normal_()


def test_zero_loads_and_saves_its_own_shards_without_a_tensor_larger_than_one_parameter(tmp_path: Path) -> None:
    results = in_ranks(2, _load_and_save, tmp_path, seconds=300)
    for state, part, parameter, largest, _ in results:
        assert parameter < part < state
        assert largest["zero1"] <= 4 and largest["zero2"] <= 4  # the step number
        assert largest["zero3"] <= parameter  # a parameter that DeepSpeed keeps whole is gathered
    assert sum(part for _, part, _, _, _ in results) == results[0][0]
    first_losses = np.array([loss for *_, losses_ in results for loss in losses_], np.float32)
    assert ulps(first_losses, first_losses[:1]) <= 64


def _load_and_save(rank: int, size: int, folder: Path) -> tuple[int, int, int, dict[str, int], list[float]]:
    """The bytes of the whole state, of this rank's part and of the largest parameter; by strategy, the bytes of the
    largest tensor that loading and saving create; and the loss of the first step with each.
    """
    from holdfast.engines.interface import build_engine
    from holdfast.rank.randomness import make_deterministic

    join(folder, rank, size, always=True)
    make_deterministic("exact", 1)
    largest, first_losses = {}, []
    # In ZeRO 3, DeepSpeed shards tensors of 100,000 elements and more.
    model_fields = ("model.hidden=352", "model.layers=1")
    for strategy in ("zero1", "zero2", "zero3"):
        assignment = tiny_assignment(*overrides(strategy), *model_fields)
        engine, allocations = build_engine(assignment, VOCABULARY, 0), _Allocations()
        with allocations:
            boxes = engine.boxes()
        SeededState(assignment.model, 3).fill(boxes)
        with allocations:
            engine.restored(3)
            saved_boxes = engine.saved()
        assert [box.data.data_ptr() for box in saved_boxes] == [box.data.data_ptr() for box in boxes]
        largest[strategy] = allocations.largest
        part = sum(box.data.nbytes for box in saved_boxes)
        rows = torch.arange(4 * 17).view(4, 17) % VOCABULARY
        first_losses.append(float(engine.step(rows, 0.1).loss))
    sizes = [4 * math.prod(shape) for shape in parameter_shapes(assignment.model, VOCABULARY).values()]
    return 3 * sum(sizes), part, max(sizes), largest, first_losses


class _Allocations(TorchDispatchMode):
    """Records the largest storage, in bytes, that an operation has created."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in before:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


def test_one_process_computes_what_two_compute_and_small_batches_what_large_ones_do(
    store: Store, tmp_path: Path
) -> None:
    alone, zero = overrides("ddp", processes=1), overrides("zero1", processes=1)
    whole = (*alone, "training.micro_batch=8")
    masked = (*alone, "data.document_masks=true")
    shown = (*alone, "training.log_every=3", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
    cases = {"alone": alone, "whole": whole, "masked": masked, "zero": zero, "shown": shown}
    runs: Runs = [(fields, name, None) for name, fields in cases.items()]
    assert train_in_ranks(1, store.url, tmp_path, runs) == [""] * 5
    curves = {name: losses(store, tiny_spec(*fields), name) for name, fields in cases.items()}
    reference = curves["alone"]
    assert ulps(reference, losses(store, tiny_spec(*overrides("ddp")))) <= 64
    assert ulps(curves["whole"], reference) <= 64
    assert ulps(curves["zero"], reference) <= 64
    assert curves["zero"][0] == reference[0]  # in the first step, only the computing rank differs
    assert not np.array_equal(curves["masked"], reference)
    assert trained(store, tiny_spec(*shown), "shown") == trained(store, tiny_spec(*alone), "alone")
