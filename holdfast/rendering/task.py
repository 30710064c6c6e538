"""Templates of lm-evaluation-harness as that library renders them, in Jinja's sandbox. Runs in the child process."""

from __future__ import annotations

import json
import re
from typing import Any

from holdfast.rendering.limits import RefusedError, require_length


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
