"""Arguments and options that several commands share, and the output functions of all commands."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from holdfast.api import Location, open_store_at
from holdfast.pipelines.backends import BACKENDS, VARIABLE
from holdfast.runtime.output import without_controls
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import UsageError

if TYPE_CHECKING:
    from holdfast.spec import Spec
    from holdfast.store import Store

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec: a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field of the spec, such as training.steps=50. Repeat the option for more fields.",
        show_default=False,
    ),
]
StoreRoot = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="URL",
        help="Root of the store: file:///path, s3://bucket/prefix or a folder. Default: "
        "`store` of the spec, else HOLDFAST_STORE, else a folder under HOLDFAST_HOME.",
        show_default=False,
    ),
]
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
        "--endpoint",
        metavar="URL",
        help="Address of the KFP API. Default: KFP_ENDPOINT, else the API of this pod's "
        "cluster, else that of the current kubectl context. For Ray: address of the Jobs API; default: "
        "RAY_API_SERVER_ADDRESS. For ssh: file of the machines; default: HOLDFAST_HOSTS. For Argo: context of the "
        "kubeconfig; default: cluster.contexts, else the current one.",
        show_default=False,
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        help="Kubeflow: your profile, if Kubeflow has several users; default: KFP_NAMESPACE. "
        "Argo: namespace of the Workflows; default: the current one.",
        show_default=False,
    ),
]
ServiceAccount = Annotated[
    str,
    typer.Option(
        help="Service account of the pipeline's pods. Default: the one of the installation.", show_default=False
    ),
]


BackendName = Annotated[
    str,
    typer.Option(
        "--backend", "-b", metavar="NAME", envvar=VARIABLE, help=f"{', '.join(BACKENDS)}.", show_default=False
    ),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run: its id, a prefix of the id, the backend's id, or its name.", show_default=False
    ),
]


@dataclass(frozen=True)
class SpecOptions:
    """The spec of a command, and its overrides."""

    path: SpecFile
    overrides: Overrides = None

    def load(self) -> Spec:
        """Read and check the spec. Raises what `load_spec` raises."""
        from holdfast.pipelines.paths import load_spec

        return load_spec(self.path, self.overrides or ())


@dataclass(frozen=True)
class BackendOptions:
    """The backend of a command, and where it and the store are."""

    backend: BackendName = ""
    store: StoreRoot = ""
    endpoint: Endpoint = ""
    namespace: Namespace = ""

    @property
    def location(self) -> Location:
        """The same for the API."""
        return Location(self.backend, self.store, self.endpoint, self.namespace)


@dataclass(frozen=True)
class RunOptions:
    """How a run or a sweep is started."""

    salt: Salt = ""
    replan: Replan = False
    image: Image = ""
    service_account: ServiceAccount = ""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each field of its options classes as a separate option, for Typer."""
    hints = get_type_hints(command, include_extras=True)
    classes: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in classes:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(classes[name], include_extras=True)
        for field in fields(classes[name]):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
                )
            )

    @functools.wraps(command)
    def collected(**given: Any) -> None:
        options = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in classes.items()
        }
        try:
            command(**options, **given)
        except UsageError as error:  # shown with the usage of the command
            bad_parameter = typer.BadParameter(error.text, param_hint=error.field or None)
            bad_parameter.field, bad_parameter.remedy = error.field, error.remedy  # type: ignore[attr-defined]
            raise bad_parameter from None

    collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    collected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return collected


def open_chosen(store: str) -> Store:
    """The store that --store names, else the default one."""
    return open_store_at(store)


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
    """Print an error or a note on standard error, without secrets. A full disk behind it changes no exit code."""
    text = redact(text)
    try:
        sys.stderr.write((without_controls(text) if sys.stderr.isatty() else text) + "\n")
        sys.stderr.flush()
    except OSError:
        with suppress(OSError, ValueError):  # the buffered rest goes there, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
