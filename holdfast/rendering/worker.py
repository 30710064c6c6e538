"""Child process that renders templates: reads requests from its input, writes replies to its output.

It ends with its input, and so with its parent. A request is REQUEST and its payload; a reply is REPLY and its payload.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

from holdfast.rendering.chat import ChatProgram
from holdfast.rendering.limits import Limiter, TooLongError
from holdfast.rendering.task import TaskProgram

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
                given = requests.read(size).decode("utf-8", "surrogatepass")
                if operation == LOAD:
                    kind, *arguments = json.loads(given)
                    programs[number] = PROGRAMS[kind](*arguments)
                else:
                    made = programs[number].run(given)
                    payload = json.dumps(made, ensure_ascii=False).encode("utf-8", "surrogatepass")
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
