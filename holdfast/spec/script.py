"""The `train` section: a training script of the user, in place of Holdfast's loop."""

import json
from typing import Literal

from pydantic import Field, field_validator

from holdfast.spec.section import Section, runtime_field


class ScriptInput(Section):
    """Files that a training script needs, under a name. `session.input(name)` returns their path."""

    name: str = Field(..., pattern=r"^[a-z][a-z0-9_-]{0,63}$", description="The name, as in `session.input(name)`.")
    uri: str = runtime_field(
        ...,
        "A file or a folder: a path relative to the spec, s3://bucket/key or prefix, hf://owner/name, or "
        "hf://datasets/owner/name, both with [@revision][/path]. Submission replaces a revision by its commit.",
        min_length=1,
        max_length=2000,
    )
    digest: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="Digest of the content. Holdfast fills it in; leave it out.",
    )


class Script(Section):
    """A training script of your own, in place of Holdfast's training loop."""

    script: str | None = Field(
        None,
        pattern=r"^[^:]+\.py$",
        description="The script: a Python file, relative to the folder of the spec. The `*.py` files of its folder "
        "travel with it. It uses `holdfast.session()`, see [Your own code](your-own-code.md).",
    )
    arguments: tuple[str, ...] = Field((), max_length=1000, description="Arguments of the script.")
    include: tuple[str, ...] = Field(
        (), max_length=100, description="Patterns of more files in the folder of the script that travel with it."
    )
    inputs: tuple[ScriptInput, ...] = Field(
        (),
        max_length=100,
        description="Files that the script needs, fetched to each node before the script starts. Their content is part "
        "of the run id.",
    )
    determinism: Literal["off", "exact"] = Field(
        "off",
        description="`exact`: deterministic kernels, and random numbers that depend only on the seed, the step and the "
        "rank. `off` promises nothing about the bits of a script.",
    )
    restart_on: Literal["lost", "any"] = runtime_field(
        "lost",
        "`lost`: a launch is repeated after a lost process, node or connection. `any`: also after an exception of the "
        "script, within `cluster.restarts`.",
    )
    log_every: int = runtime_field(10, "Steps between two progress lines.", ge=1)
    verify_steps: int = runtime_field(
        4,
        "With `determinism: exact`, the script is verified once before its first launch: it makes this many steps, "
        "also with a stop and a resume, and the bits are compared. The same code in the same environment is verified "
        "once. 0: not verified. See [Your own code](your-own-code.md).",
        ge=0,
        le=1000,
    )
    preload: tuple[str, ...] = runtime_field(
        (),
        "Modules that are imported once on each node, before ranks are forked, such as `transformers.trainer`. Ranks "
        "then start without these imports. A module that cannot be imported is left out with a warning.",
        max_length=20,
    )

    @field_validator("verify_steps")
    @classmethod
    def _at_least_a_step_before_and_after_a_stop(cls, value: int) -> int:
        if value == 1:
            raise ValueError("1 step cannot be stopped in the middle; give 2 or more, or 0")
        return value

    @field_validator("inputs")
    @classmethod
    def _distinct_names(cls, value: tuple[ScriptInput, ...]) -> tuple[ScriptInput, ...]:
        names = [each.name for each in value]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{min(repeated)!r} is the name of two inputs; give each another name")
        return value

    @field_validator("preload")
    @classmethod
    def _names_of_modules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is no name of a module")
        return value

    @property
    def input_arguments(self) -> list[str]:
        """The arguments of a rank that name its inputs. They are on its command line, so that a record in the store
        cannot name other files."""
        if not self.inputs:
            return []
        places = {each.name: {"uri": each.uri, "digest": each.digest} for each in self.inputs}
        return ["--inputs", json.dumps(places, sort_keys=True, separators=(",", ":"))]
