"""Arguments and options that several commands share, and how commands speak."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a field, such as training.steps=50. Repeat it for more.",
        show_default=False,
    ),
]  # fmt: skip
StoreRoot = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="file:///path, s3://bucket/prefix or a folder. Default: the spec's, "
        "HOLDFAST_STORE, or a folder under HOLDFAST_HOME.", show_default=False,
    ),
]  # fmt: skip
Salt = Annotated[str, typer.Option(help="Go on with the run that --fresh started under this salt.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever was done before. Deletes nothing.")]
Image = Annotated[str, typer.Option(help="Image of every step.", show_default=False)]


def one_of_fresh_and_salt(fresh: bool, salt: str) -> str:
    """The salt of a run: a new one for --fresh, else what --salt says. Raises BadParameter for both."""
    if fresh and salt:
        raise typer.BadParameter("--fresh draws a new salt; give one of --fresh and --salt")
    from secrets import token_hex

    return token_hex(4) if fresh else salt


def out(text: str) -> None:
    """Print a result."""
    sys.stdout.write(text + "\n")


def err(text: str) -> None:
    """Print what is not the result: an error, or a note."""
    sys.stderr.write(text + "\n")
