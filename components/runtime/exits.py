"""From an exception to the exit code of the table, with what went wrong said on standard error."""

from __future__ import annotations

import errno
from collections.abc import Callable

from holdfast.components.runtime.logs import log
from holdfast.components.spec.errors import ExitCode, HoldfastError


def exit_code_of(body: Callable[[], object]) -> ExitCode:
    """Run `body`; say on standard error what went wrong, and return the code that the table gives it."""
    try:
        body()
    except HoldfastError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted")
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            log.error("%s: no space left; free some, then run the same command again", error.filename or "disk")
            return ExitCode.NO_SPACE
        log.exception("unexpected failure: please report it with this traceback")
        return ExitCode.UNEXPECTED
    except Exception:  # noqa: BLE001 - whatever a step raises is said, and becomes a code
        log.exception("unexpected failure: please report it with this traceback")
        return ExitCode.UNEXPECTED
    return ExitCode.OK
