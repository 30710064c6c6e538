"""Keeper of a node's checkpoint agent: starts it, restarts it when it dies or is silent, and drains it at the end.

Copies that a dead rank left in memory are therefore still committed. `python -m holdfast.launch.node.agent PATH` is the
agent itself; the node's wrapper forks it from the process that has torch imported. It dies with the wrapper, never with
a rank.
"""

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.agent import service
from holdfast.checkpoint.agent.buffers import SharedMemory
from holdfast.checkpoint.agent.protocol import Connection, Drain, Drained, Watch
from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.launch.processes import WarmProcess, WarmServer, die_with_parent
from holdfast.runtime.logs import configure_logging
from holdfast.spec.errors import NoSpaceError

log = logging.getLogger("holdfast.launch")

MODULE = "holdfast.launch.node.agent"
SILENCE = 20.0  # seconds without a message after which the agent counts as hung
START_SECONDS = 120.0  # until it listens: without a warm process it imports torch, possibly from a slow disk
DRAIN_SECONDS = 60.0  # to commit what is complete in memory when the ranks have ended
_PAUSE = 0.05  # seconds before a restart; doubles while restarted agents do not last
_LONGEST_PAUSE = 5.0
_LONGEST_PATH = 107  # bytes: unix(7)


class AgentKeeper:
    """Keeps an agent running for the ranks that this process starts."""

    def __init__(self, server: WarmServer | None, folder: Path, module: str = MODULE, silence: float = SILENCE) -> None:
        """Start an agent, forked by `server` if given. It listens in `folder`, which only this user may enter. It
        counts as hung after `silence` seconds. Raises ValueError if no socket can be made there, or no shared
        memory."""
        self._server, self._module, self._silence = server, module, silence
        self.path = folder / "checkpoint-agent"  # of the agent's socket
        self._lock, self._ending = threading.Lock(), False
        if len(os.fsencode(self.path)) > _LONGEST_PATH:
            raise ValueError(f"{self.path} is too long for a socket; set TMPDIR to a shorter one")
        if not hasattr(os, "memfd_create"):
            raise ValueError(f"{sys.platform} shares no memory without a name")
        try:
            SharedMemory.create(1).close()
        except NoSpaceError as error:
            raise ValueError(f"memory without a name is refused here: {error}") from error
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="checkpoint agent", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the current agent."""
        return self._process.pid

    def drain(self, seconds: float = DRAIN_SECONDS, latest: Callable[[], float] = lambda: math.inf) -> None:
        """Let the agent commit what is complete, after the ranks have ended, then kill it without waiting for its exit.

        Waits at most `seconds`. `latest` returns the deadline in monotonic seconds. It is called every second, because
        the node may have to stop meanwhile.
        """
        with self._lock:
            self._ending = True
        start = time.monotonic()
        try:
            connection = self._connected()
            given = max(0.0, min(seconds, latest() - start))
            connection.send(Drain(seconds=given))
            while not isinstance(message := connection.receive()[0], Drained) and time.monotonic() < latest():
                pass
            if not isinstance(message, Drained):
                log.warning("this node has to go: what was in flight is saved by the next attempt")
            elif message.left:
                log.warning("not saved within %g s: %s", given, "; ".join(message.left))
            elif (duration := time.monotonic() - start) > 1.0:
                log.info("the checkpoint agent had %.1f s of work left", duration)
        except (EOFError, OSError) as error:
            log.warning("the checkpoint agent is gone (%s): what was in flight is saved by the next attempt", error)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def _start(self) -> WarmProcess | subprocess.Popen[bytes]:
        environment = {**os.environ, PARENT: str(os.getpid())}
        if self._server is not None:
            try:
                return self._server.start(self._module, [str(self.path)], environment)
            except OSError:  # it was killed, and the ranks with it
                log.warning("the checkpoint agent imports torch itself")
        command = [sys.executable, "-m", self._module, str(self.path)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _watch(self) -> None:
        """Follow the agent and its replacements until the launch ends."""
        pause = _PAUSE
        while True:
            start = time.monotonic()
            reason = self._followed()
            with self._lock:
                ending = self._ending
            if ending:
                self._process.wait()
                return
            self._kill()
            log.warning("the checkpoint agent %s: another one takes over", reason)
            pause = _PAUSE if time.monotonic() - start > _LONGEST_PAUSE else min(_LONGEST_PAUSE, 2 * pause)
            time.sleep(pause)
            with self._lock:
                if self._ending:
                    return
                try:
                    self._process = self._start()
                except OSError as error:  # too many processes; the old agent counts as dead, and the next try follows
                    log.warning("no checkpoint agent can be started: %s", error)

    def _followed(self) -> str:
        """Listen to the agent until it ends or is silent. Returns the reason."""
        connection: Connection | None = None
        try:
            connection = self._connected()
            connection.send(Watch())
            while True:
                connection.receive()
        except TimeoutError:
            return f"sent nothing for {self._silence:g} s"
        except (EOFError, OSError):
            return "died"
        finally:
            if connection is not None:
                connection.close()

    def _connected(self) -> Connection:
        """A connection, once the agent listens. Raises TimeoutError, or ConnectionError if it has died."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.settimeout(self._silence)
                end.connect(str(self.path))
                return Connection(end, self._silence)
            except OSError as error:
                end.close()
                if time.monotonic() > deadline:
                    raise TimeoutError from error
                if self._process.poll() is not None:
                    raise ConnectionError("it died before it listened") from error
            time.sleep(0.005)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def main(serve: Callable[[Path], None] = service.serve) -> None:
    """Run the agent. It ignores signals, which are for the ranks: they save and leave. It ends when it is drained."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    serve(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads may be in the middle of requests to an unavailable store


if __name__ == "__main__":
    main()
