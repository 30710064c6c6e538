"""What a run on one machine opens, and what a stranger achieves there while its ranks train together: nothing."""

from __future__ import annotations

import base64
import ipaddress
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from holdfast.spec.errors import ExitCode
from tests.whole.attacks import KEYS, attack, replace_the_state
from tests.whole.listeners import family, listening, open_to_others, shared_files, unix_listeners
from tests.whole.small import held, hold, objects, only, start, write_corpus, write_spec
from tests.whole.submitting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 300.0  # seconds
STEPS = 10
COMMAND = ("spec.yaml", "--set", "parallel.processes=2")
LAST = f"runs/*/checkpoints/step-{STEPS:09d}.json"


@dataclass(frozen=True)
class Attacked:
    """A run of two ranks that strangers attacked, and the same run without them."""

    addresses: set[tuple[str, int]]
    sockets: set[str]
    files: set[Path]
    mark: Path
    code: int
    output: str
    digest: str
    undisturbed: str


def prepare(folder: Path) -> Path:
    write_corpus(folder)
    write_spec(folder, training={"micro_batch": 2}, checkpoint={"every_steps": 2})
    return folder


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = prepare(tmp_path_factory.mktemp("attacked"))
    calm = prepare(tmp_path_factory.mktemp("calm"))
    mark = folder / "executed"
    with start(folder, *COMMAND, **held(folder, 3)) as process, start(calm, *COMMAND) as other:
        deadline = time.monotonic() + PATIENCE
        while not objects(folder, "runs/*/checkpoints/step-*.json"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        members = family(psutil.Process(process.pid))
        addresses, sockets, files = listening(members), unix_listeners(members), shared_files(members)
        files = {path for path in files if not path.is_relative_to(folder)}  # of the home and the store: by the umask
        strangers = attack({port for _, port in addresses}, mark)
        hold(folder, STEPS)
        output = "".join(process.communicate(timeout=PATIENCE))
        for stranger in strangers:
            stranger.close()
        said = "".join(other.communicate(timeout=PATIENCE))
    assert other.returncode == ExitCode.OK, said
    yield Attacked(
        addresses, sockets, files, mark, process.returncode, output,
        str(only(folder, LAST)["state_digest"]) if objects(folder, LAST) else "", str(only(calm, LAST)["state_digest"]),
    )  # fmt: skip


def test_a_gang_on_one_machine_listens_on_loopback_alone(attacked: Attacked) -> None:
    assert attacked.addresses, "two ranks that meet over gloo listen somewhere"
    assert {address for address, _ in attacked.addresses if not ipaddress.ip_address(address).is_loopback} == set()


def test_sockets_and_temporary_files_of_a_run_are_reached_by_its_user_alone(attacked: Attacked) -> None:
    assert {name for name in attacked.sockets if not name.startswith("/") or open_to_others(Path(name))} == set()
    assert {path for path in attacked.files if open_to_others(path)} == set()


def test_strangers_at_every_port_execute_nothing_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    attacked: Attacked,
) -> None:
    assert not attacked.mark.exists()
    assert attacked.code == ExitCode.OK, attacked.output
    assert attacked.digest == attacked.undisturbed


def test_the_attack_on_a_store_replaces_what_an_open_store_of_torch_holds(tmp_path: Path) -> None:
    """Else the one above would prove nothing."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set(KEYS[0], "honest")
    replace_the_state(store.port, tmp_path / "executed")
    until(lambda: store.get(KEYS[0]) != b"honest", PATIENCE)
    pickle.loads(base64.b64decode(store.get(KEYS[0])))
    assert (tmp_path / "executed").exists()
