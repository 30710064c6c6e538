"""Handlers of signals: in a separate thread, and immediately although the main thread waits.

Python calls the handler of a signal in the main thread, between two bytecodes. A signal interrupts a system call, but
not one that begins a moment later. The handler then waits for the end of that call, which may be a sleep of minutes.
"""

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

WAKE = signal.SIGURG  # interrupts a wait and means nothing: it is ignored by default
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two attempts
_END = b"\0"  # no signal has this number


@contextmanager
def prompt_signals() -> Iterator[None]:
    """Within the context, handlers of signals run immediately, even if the main thread waits. Main thread only.

    After each signal, another thread sends WAKE until the handler of WAKE has run. The handler of the signal ran before
    it: Python calls waiting handlers in the order of their numbers, and WAKE has a higher one than those that stop a
    process.
    """
    handled: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put: it takes no lock
    ended = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    arguments = (reading, handled, ended)
    waker = threading.Thread(target=_wake_after_signals, args=arguments, name="prompt signals", daemon=True)
    waker.start()
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [WAKE])
    handler = signal.signal(WAKE, lambda *_: handled.put(True))
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        os.set_blocking(writing, True)
        os.write(writing, _END)  # closing is not enough: a forked process may hold the pipe open
        waker.join()
        os.close(writing)
        os.close(reading)
        signal.signal(WAKE, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wake_after_signals(reading: int, handled: queue.SimpleQueue[bool], ended: threading.Event) -> None:
    """Wake the main thread after each signal whose number arrives on `reading`, until the end."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    while (number := os.read(reading, 1)) != _END:
        if number[0] == WAKE:
            continue
        with suppress(queue.Empty):  # of earlier signals
            while True:
                handled.get_nowait()
        pause, is_handled = _FIRST_PAUSE, False
        while not is_handled and not ended.is_set():
            signal.pthread_kill(main_thread, WAKE)
            with suppress(queue.Empty):
                is_handled = handled.get(timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and Ctrl-C within the context. Has no effect outside the main thread.

    `stop` runs in a separate thread: a signal handler runs between any two bytecodes, so it must not take a lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def stop_on_signal() -> None:
        while arrived.get():
            stop()

    thread = threading.Thread(target=stop_on_signal, name="signals", daemon=True)
    thread.start()
    former = {number: signal.signal(number, lambda *_: arrived.put(True)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        arrived.put(False)
        thread.join()
