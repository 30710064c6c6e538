"""Child process that renders templates: reads requests from its input, writes replies to its output.

It ends with its input, and so with its parent. A request is REQUEST and its payload; a reply is REPLY and its payload.
"""

import json
import re
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

from holdfast.rendering.chat import ChatProgram
from holdfast.rendering.limits import Limiter, RefusedError, TooLongError, require_length

# Templates of lm-evaluation-harness as that library renders them, in Jinja's sandbox. Runs in the child process.


class TaskProgram:
    """One template of a task file."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._template: Any = None

    def run(self, request: str) -> str:
        """Render the template with the fields of the document in `request`, a JSON object. Raises RefusedError and
        TooLongError."""
        try:
            if self._template is None:
                self._template = _environment().from_string(self._text)
            text = self._template.render(**json.loads(request))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise RefusedError(f"{type(error).__name__}: {error}") from None
        return require_length(text)


def _environment() -> Any:
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = _regex_replace
    return environment


def _regex_replace(string: str, pattern: str, repl: str, count: int = 0) -> str:
    """The filter that the library adds."""
    return re.sub(pattern, repl, string, count=count)


REQUEST = struct.Struct("<QIdc")  # bytes of the payload, number of the template, seconds of CPU time, operation
REPLY = struct.Struct("<Qc")  # bytes of the payload, status
LOAD, RUN = b"L", b"R"
DONE, REFUSED, MEMORY, LONG = b"+", b"-", b"M", b"T"
PROGRAMS: dict[str, Callable[..., Any]] = {"chat": ChatProgram, "task": TaskProgram}


def main() -> None:
    """Answer requests until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the parent, with which this process ends
        signal.signal(number, signal.SIG_IGN)
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401 - a later import would count against the template's limits

    requests, replies, limiter, programs = sys.stdin.buffer, sys.stdout.buffer, Limiter(), dict[int, Any]()
    replies.write(REPLY.pack(0, DONE))
    replies.flush()
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        size, number, seconds, operation = REQUEST.unpack(header)
        status, payload = DONE, b""
        try:
            with limiter.limited(size, seconds):
                text = requests.read(size).decode("utf-8", "surrogatepass")
                if operation == LOAD:
                    kind, *arguments = json.loads(text)
                    programs[number] = PROGRAMS[kind](*arguments)
                else:
                    result = programs[number].run(text)
                    payload = json.dumps(result, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            status, payload = MEMORY, b""
        except TooLongError:
            status, payload = LONG, b""
        except Exception as error:  # noqa: BLE001 - RefusedError, and errors of the library during compilation
            status, payload = REFUSED, _words(error)
        replies.write(REPLY.pack(len(payload), status))
        replies.write(payload)
        replies.flush()


def _words(error: Exception) -> bytes:
    try:
        return str(error)[:2000].encode("utf-8", "replace")
    except MemoryError:
        return b"an error without words"


if __name__ == "__main__":
    main()
