"""Arguments and options that several commands share, and the output functions of all commands."""

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

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec: a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field of the spec, such as training.steps=50. Repeat the "
        "option for more fields.", show_default=False,
    ),
]  # fmt: skip
StoreRoot = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="Root of the store: file:///path, s3://bucket/prefix or a folder. Default: "
        "`store` of the spec, else HOLDFAST_STORE, else a folder under HOLDFAST_HOME.", show_default=False,
    ),
]  # fmt: skip
Salt = Annotated[
    str,
    typer.Option(
        help="Salt of the run id: another salt makes another run. The salt of a --fresh run continues that run.",
        show_default=False,
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start a new run of the same spec, with a random salt. Deletes nothing.")
]
Image = Annotated[str, typer.Option(help="Container image of every step.", show_default=False)]


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Replan = Annotated[
    bool,
    typer.Option(
        "--replan",
        help="Continue the run under a plan that differs from that of its earlier attempts. See docs/running.md.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the objects as YAML, and send nothing.")]
Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint", metavar="URL", help="Address of the KFP API. Default: KFP_ENDPOINT, else the API of this pod's "
        "cluster, else that of the current kubectl context. For Ray: address of the Jobs API; default: "
        "RAY_API_SERVER_ADDRESS.", show_default=False,
    ),
]  # fmt: skip
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Kubeflow: your profile, if Kubeflow has several users; default: KFP_NAMESPACE. "
        "Argo: namespace of the Workflows; default: the current one.", show_default=False,
    ),
]  # fmt: skip
ServiceAccount = Annotated[
    str,
    typer.Option(
        help="Service account of the pipeline's pods. Default: the one of the installation.", show_default=False
    ),
]  # fmt: skip


def one_of_fresh_and_salt(fresh: bool, salt: str) -> str:
    """The salt of a run: a random one for --fresh, else the value of --salt. Raises BadParameter if both are given."""
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
    """Print a result. For a terminal, control sequences are removed, because parts of the text may be foreign."""
    sys.stdout.write((without_controls(text) if sys.stdout.isatty() else text) + "\n")


def err(text: str) -> None:
    """Print an error or a note on standard error, without secrets."""
    text = redact(text)
    sys.stderr.write((without_controls(text) if sys.stderr.isatty() else text) + "\n")
