"""From an exception to the exit code of the table, with what went wrong said on standard error."""

from __future__ import annotations

import errno
from collections.abc import Callable

from holdfast.components.runtime.logs import log
from holdfast.components.spec.errors import ExitCode, HoldfastError


def code_of(error: BaseException) -> ExitCode:
    """The code that the table gives a failure."""
    if isinstance(error, HoldfastError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ExitCode.NO_SPACE if full else ExitCode.UNEXPECTED


def exit_code_of(body: Callable[[], object]) -> ExitCode:
    """Run `body`; say on standard error what went wrong, and return the code that the table gives it."""
    try:
        body()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever a step raises is said, and becomes a code
        code = code_of(error)
        if isinstance(error, HoldfastError):
            log.error("%s", error)
        elif code == ExitCode.INTERRUPTED:
            log.error("interrupted")
        elif isinstance(error, OSError) and code == ExitCode.NO_SPACE:
            log.error("%s: no space left; free some, then run the same command again", error.filename or "disk")
        else:
            log.exception("unexpected failure: please report it with this traceback")
        return code
    return ExitCode.OK
