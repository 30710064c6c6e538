"""One server for the launches of several tests. Its imports are the same for all of them and take seconds."""

import os
import threading
from collections.abc import Mapping, Sequence

import pytest

from holdfast.launch import local
from holdfast.launch.processes import PRELOAD_VARIABLE, WarmServer


class KeptServer(WarmServer):
    """A launcher's server that stays for the next launcher."""

    kept: dict[tuple[str, ...], WarmServer] = {}  # noqa: RUF012 - of the process

    @classmethod
    def spawn(  # type: ignore[override]
        cls, modules: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> WarmServer:
        """A server dies with the thread that called this. Another thread than the main one gets a separate server."""
        variables = environment or os.environ
        key = (*modules, *(variables.get(name, "") for name in ("PYTHONPATH", PRELOAD_VARIABLE)))
        server = cls.kept.get(key)
        if server is not None and os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return server
        if threading.current_thread() is not threading.main_thread():
            return WarmServer.spawn(modules, environment)
        cls.kept[key] = super().spawn(modules, environment)
        return cls.kept[key]

    def close(self) -> None:
        """The server ends with the tests."""


@pytest.fixture
def launches_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launchers that the test creates in this process fork from that server."""
    monkeypatch.setattr(local, "WarmServer", KeptServer)
