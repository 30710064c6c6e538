"""Trial of micro-batches, for `training.micro_batch: auto`, by the gang of a launch that trains nothing.

Every candidate computes whole steps of the first batch, with an engine that is then thrown away. The candidates
ascend. The trial ends with the first one that does not fit into memory, or that is clearly slower than the fastest.
The weights are arbitrary and nothing is saved, so the training that follows begins as without a trial.
"""

import gc
import logging
import time
from contextlib import closing
from functools import partial
from itertools import chain

import torch

from holdfast.collectives import Gang
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine
from holdfast.health.compute import settle_on
from holdfast.launch.device import device_name
from holdfast.launch.micro_batch import MicroBatchChoice, begin_candidate, end_candidate, layout_key, record_choice
from holdfast.rank.setup import batches, build
from holdfast.runtime.exits import is_out_of_memory
from holdfast.spec.training import BatchRamp
from holdfast.store import Store

log = logging.getLogger("holdfast.train")

STEPS = 2  # that count, after one that allocates memory and chooses kernels
SLOWER = 1.1  # times the fastest candidate's seconds: no larger candidate is tried
EQUAL = 1.02  # times the fastest candidate's seconds: counts as equally fast
HEADROOM = 0.95  # share of an accelerator's memory that a candidate may reserve


def choose_micro_batch(
    spec: Assignment, dataset: Dataset, device: torch.device, gang: Gang, store: Store, launch: int
) -> MicroBatchChoice:
    """Try the candidates of the assignment, and record the choice of the run. A collective call. Raises the error of an
    allocation if the smallest candidate does not fit."""
    key = layout_key(spec.training, spec.parallel, spec.accelerator, spec.nodes)
    seconds: dict[int, float] = {}
    unfit = None
    for size in spec.micro_batch_candidates:
        may_begin = gang.from_rank_0(partial(begin_candidate, store, spec.run_id, key, size, launch), bool)
        taken = (
            try_candidate(spec, size, dataset, device, gang, required=not seconds) if may_begin or not seconds else None
        )
        if taken is None:
            unfit = size
            log.info("micro-batch %d does not fit into memory", size)
            break
        gang.from_rank_0(partial(end_candidate, store, spec.run_id, key, size))
        seconds[size] = taken
        log.info("micro-batch %d: a step takes %.3g s", size, taken)
        if taken > SLOWER * min(seconds.values()):
            break
    choice = MicroBatchChoice(micro_batch=fastest(seconds), seconds=seconds, unfit=unfit, device=device_name(device))
    return gang.from_rank_0(partial(record_choice, store, spec.run_id, key, choice), MicroBatchChoice)


def fastest(seconds: dict[int, float]) -> int:
    """The fastest micro-batch; of equally fast ones the largest."""
    return max(size for size, taken in seconds.items() if taken <= EQUAL * min(seconds.values()))


def try_candidate(
    spec: Assignment, size: int, dataset: Dataset, device: torch.device, gang: Gang, *, required: bool
) -> float | None:
    """The seconds of a step with micro-batches of `size`, on the slowest rank. None if it does not fit on some rank; a
    `required` one then raises. A collective call."""
    taken: float | None = None
    failure: BaseException | None = None
    try:
        taken = _measure(spec, size, dataset, device, gang)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error.with_traceback(None)  # its frames hold the engine
    gc.collect()
    on_accelerator = device.type != "cpu"
    if on_accelerator:
        memory = getattr(torch, device.type)
        total = memory.get_device_properties(device).total_memory
        if not required and memory.max_memory_reserved(device) > HEADROOM * total:
            taken = None
        memory.empty_cache()
        memory.reset_peak_memory_stats(device)
    if failure is not None and required:
        raise failure
    results = gang.all_gather(taken, float | None)
    return None if None in results else max(result for result in results if result is not None)


def _measure(spec: Assignment, size: int, dataset: Dataset, device: torch.device, gang: Gang) -> float:
    """The seconds of the fastest of some steps on this rank."""
    training = spec.training.model_copy(update={"micro_batch": size, "batch_ramp": BatchRamp()})
    tried = spec.model_copy(update={"training": training})
    source, mine = batches(tried, dataset, gang)
    rows = torch.from_numpy(source.batch(0, mine))
    settle, times = settle_on(device), []
    with closing(build(tried, dataset)) as engine:
        _fill(engine)
        engine.restored(0)
        for _ in range(1 + STEPS):
            settle()
            start = time.perf_counter()
            engine.step(rows, 0.0)
            settle()
            times.append(time.perf_counter() - start)
    return min(times[1:])


def _fill(engine: Engine) -> None:
    """Small random weights, norms of one, and moments of zero: no number is denormal, which would take longer."""
    with torch.no_grad():
        for box in chain(engine.frozen(), engine.boxes()):
            if box.name.startswith("optimizer.") or not box.data.is_floating_point():
                box.data.zero_()
            elif box.data.dim() > 1:
                box.data.normal_(std=0.02)
            else:
                box.data.fill_(1.0)
