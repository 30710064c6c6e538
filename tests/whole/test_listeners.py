"""The attacks work: each of them hurts an unprotected target. In test_whole_run.py they hit a run and have no
effect."""

import base64
import pickle
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from tests.whole.attacks import KEYS, replace_the_state
from tests.whole.submitting import until


def test_the_attack_on_a_store_replaces_what_an_open_store_of_torch_holds(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set(KEYS[0], "honest")
    replace_the_state(("127.0.0.1", store.port), tmp_path / "executed")
    until(lambda: store.get(KEYS[0]) != b"honest", 300.0)
    pickle.loads(base64.b64decode(store.get(KEYS[0])))
    assert (tmp_path / "executed").exists()
