"""A managed session in this process: what `holdfast.script.process` does around a script, without a launcher."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import read_manifest
from holdfast.checkpoint.lineage import newest_step
from holdfast.launch.exits import RankRecord
from holdfast.launch.launches import claim_launch
from holdfast.rank.preemption import PreemptionSignal
from holdfast.script import session as sessions
from holdfast.script.assignment import ScriptAssignment
from holdfast.spec.checkpoint import Checkpoint
from holdfast.spec.operations import Telemetry
from holdfast.store import open_store


def run_script(
    url: str,
    run_id: str,
    script: Callable[..., Any],
    *arguments: Any,
    stop_at: int | None = None,
    dataset_id: str = "",
    inputs: Mapping[str, Path] = {},
    **checkpoint: Any,
) -> bool:
    """Run a script as a separate launch. Returns whether it ended, and did not stop before."""
    store, leave = open_store(url), PreemptionSignal()
    assignment = ScriptAssignment(
        run_id=run_id,
        determinism="exact",
        restart_on="lost",
        log_every=10,
        processes=1,
        threads=1,
        nodes=1,
        accelerator="cpu",
        checkpoint=Checkpoint(**{"every_steps": 100, **checkpoint}),
        telemetry=Telemetry(),
        stop_at=stop_at,
        dataset_id=dataset_id,
    )
    launch = claim_launch(store, run_id, assignment.model_dump(mode="json"))
    sessions._session = None
    sessions.launched = sessions.Launched(store, launch, 0.0, False, assignment, "", leave, RankRecord(), inputs)
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    error: BaseException | None = None
    try:
        with suppress(sessions.StopExit):
            script(*arguments)
        session = sessions.current()
        assert isinstance(session, sessions.ManagedSession)
        session.finish()
    except sessions.PreemptionExit as left:
        error = left
    finally:
        session = sessions.current()
        if isinstance(session, sessions.ManagedSession):
            session.close(None)
        sessions.launched = None
        sessions._session = None
        torch.use_deterministic_algorithms(deterministic)  # other tests of this process expect torch's defaults
        torch.set_num_threads(threads)
    return error is None


def ask_to_leave() -> None:
    """Do what SIGTERM does."""
    assert sessions.launched is not None
    sessions.launched.leave._want()


def digest_of_run(url: str, run_id: str) -> tuple[int, str]:
    """The step and the state digest of the newest checkpoint."""
    store = open_store(url)
    step = newest_step(store, run_id)
    assert step is not None
    return step, read_manifest(store, run_id, step).state_digest
