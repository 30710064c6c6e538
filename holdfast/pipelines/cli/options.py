"""Arguments and options that several commands share, and how commands speak."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.runtime.output import without_controls
from holdfast.runtime.secrets import redact

if TYPE_CHECKING:
    from holdfast.store import Store

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


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for a script.")]
Replan = Annotated[
    bool,
    typer.Option("--replan", help="Go on although the plan is not that of the attempts before. See docs/running.md."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the objects as YAML and send none of them.")]
Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint", metavar="URL", help="Where KFP answers. Default: KFP_ENDPOINT, else the cluster we are in, else "
        "that of the current kubectl context. Of Ray's Jobs API: default RAY_API_SERVER_ADDRESS.", show_default=False,
    ),
]  # fmt: skip
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Yours, where Kubeflow has several (default: KFP_NAMESPACE); of Argo's Workflows "
        "(default: the current one).", show_default=False,
    ),
]  # fmt: skip
ServiceAccount = Annotated[
    str,
    typer.Option(help="Service account of the pipeline's pods. Default: that of the installation.", show_default=False),
]  # fmt: skip


def one_of_fresh_and_salt(fresh: bool, salt: str) -> str:
    """The salt of a run: a new one for --fresh, else what --salt says. Raises BadParameter for both."""
    if fresh and salt:
        raise typer.BadParameter("--fresh draws a new salt; give one of --fresh and --salt")
    from secrets import token_hex

    return token_hex(4) if fresh else salt


def open_chosen(store: str) -> Store:
    """The store that --store names, else the default one."""
    from holdfast.pipelines.paths import store_root
    from holdfast.runtime.environment import store_url
    from holdfast.store import open_store

    return open_store(store_root(store) if store else store_url())


def print_json(value: Any) -> None:
    """Print a result as JSON; dataclasses become objects."""
    import json

    out(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def print_yaml(documents: Iterable[object]) -> None:
    """Print objects as YAML documents."""
    from holdfast.pipelines.documents import as_yaml

    out(as_yaml(*documents).rstrip("\n"))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def out(text: str) -> None:
    """Print a result. On a terminal it is shown and never obeyed: a part of it may be from others."""
    sys.stdout.write((without_controls(text) if sys.stdout.isatty() else text) + "\n")


def err(text: str) -> None:
    """Print what is not the result: an error, or a note. It holds no secret."""
    text = redact(text)
    sys.stderr.write((without_controls(text) if sys.stderr.isatty() else text) + "\n")
