"""Steps run in this process. Its logging and signal handlers are restored afterwards."""

import logging
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is() -> Iterator[None]:
    handlers, handler = logging.getLogger().handlers[:], signal.getsignal(signal.SIGTERM)
    yield
    logging.getLogger().handlers[:] = handlers
    signal.signal(signal.SIGTERM, handler)
