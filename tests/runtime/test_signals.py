"""Signals that do not interrupt what the main thread waits for."""

import os
import subprocess
import sys

import pytest

from tests import warm

# A signal that another thread receives interrupts no wait of the main thread, as one just before the wait.
LATE = """
import signal, sys, threading, time
from contextlib import nullcontext
from holdfast.runtime.signals import WAKE, prompt_signals

before = signal.getsignal(WAKE)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

def late():
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

waits = {
    "sleep": lambda: time.sleep(3600),
    "event": threading.Event().wait,
}
try:
    with prompt_signals() if sys.argv[1] == "prompt" else nullcontext():
        threading.Thread(target=late, daemon=True).start()
        waits[sys.argv[2]]()
finally:
    assert signal.getsignal(WAKE) == before
    assert signal.set_wakeup_fd(-1) == -1
"""


@pytest.mark.parametrize("wait", ["sleep", "event"])
def test_a_signal_that_interrupts_no_wait_is_handled_immediately(wait: str) -> None:
    assert warm.run([sys.executable, "-c", LATE, "prompt", wait], os.environ).returncode == 143


REPLACED = """
import os, signal, sys, time
from holdfast.runtime.signals import WAKE, prompt_signals

signal.pthread_sigmask(signal.SIG_BLOCK, [WAKE])  # as a process may inherit it
signal.signal(signal.SIGTERM, lambda *_: None)
with prompt_signals():
    signal.signal(WAKE, signal.SIG_IGN)  # as code of a run may do
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
assert WAKE in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def test_the_context_ends_although_another_handler_replaced_its_own() -> None:
    assert warm.run([sys.executable, "-c", REPLACED], os.environ, timeout=60.0).returncode == 0


def test_without_it_the_wait_goes_on() -> None:
    with warm.popen([sys.executable, "-c", LATE, "plain", "sleep"], os.environ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3.0)
        process.kill()
