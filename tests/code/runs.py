"""Trainings with user code: without a stop, and with a SIGKILL and a second launch."""

import logging
import signal
from pathlib import Path
from typing import Any

from holdfast.code.resolve import publish_code
from holdfast.collectives import Gang, noticing_lost_peers
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.worker import work
from holdfast.spec import Spec
from holdfast.spec.errors import LostPeerError
from holdfast.spec.functions import code_arguments, rank_functions
from holdfast.store import Store, open_store
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Stopper, identity_of, join, launch, trained
from tests.train.tiny_run import new_store

KILLED_AFTER = 7  # steps


def functions_of(spec: Spec) -> str:
    """The functions of user code that the command line of a rank names."""
    return code_arguments(spec.code, rank_functions(spec))[-1]


def calm_and_killed(spec: Spec, folder: Path, size: int = 1) -> tuple[Store, dict[str, Any], dict[str, Any]]:
    """Train with `size` ranks, once without a stop and once with a kill of rank 0. Returns the second run's store, and
    the values of both runs that must be equal."""
    results = []
    for name, kills in (("calm", (None,)), ("killed", (KILLED_AFTER, None))):
        store = new_store(folder / name)
        publish_code(spec, store)
        for kill in kills:
            ended = in_ranks(size, _train, store.url, folder / f"ranks-{name}-{kill}", spec, kill)
            assert ended == (["trained"] * size if kill is None else [None, *["lost a peer"] * (size - 1)])
        results.append(trained(store, spec))
    return store, results[0], results[1]


def _train(rank: int, size: int, url: str, folder: Path, spec: Spec, killed_after: int | None) -> str:
    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    training = logging.getLogger("holdfast.train")
    training.setLevel(logging.INFO)
    training.addHandler(Stopper(killed_after, signal.SIGKILL))  # only rank 0 logs its progress
    store = open_store(url)
    number = Gang().broadcast(launch(store, spec) if rank == 0 else None, int | None)
    assert number is not None
    try:
        with noticing_lost_peers():
            work(store, identity_of(spec), number, PreemptionSignal(), None, spec.code, functions_of(spec))
    except LostPeerError:
        return "lost a peer"
    return "trained"
