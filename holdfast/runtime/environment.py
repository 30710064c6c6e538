"""Locations that the spec does not set: Holdfast's few environment variables, resolved at the edge.

`HOLDFAST_HOME` (default `~/.holdfast`) holds the embedded defaults: a folder store, an SQLite MLflow, logs and caches.
`HOLDFAST_STORE` and `MLFLOW_TRACKING_URI` replace the first two with real servers. In the pod of a step they must: what
a pod keeps locally disappears with it.
"""

import math
import os
import pwd
from contextlib import suppress
from pathlib import Path

from holdfast.runtime.secrets import redact
from holdfast.spec.cluster import SETTINGS, amount
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.tree import Spec

IMAGE_VARIABLE = "HOLDFAST_IMAGE"  # the image that a rank runs in, set by its pod
MLFLOW_PAGE = "HOLDFAST_MLFLOW_UI"
CACHE_VARIABLE = "HOLDFAST_CACHE_GIB"
DEFAULT_CACHE_GIB = "32"
OUTCOMES = "HOLDFAST_OUTCOMES"  # the folder for outcomes of the steps, set by a runner on one machine


def home() -> Path:
    """The folder of the embedded defaults, absolute. Raises SpecError if no variable or user entry names it."""
    try:
        return Path(os.environ.get("HOLDFAST_HOME") or "~/.holdfast").expanduser().absolute()
    except RuntimeError:
        problem = Problem(
            "HOME",
            None,
            f"is not set, and user {os.getuid()} has no entry in the password database",
            "set HOME or HOLDFAST_HOME to a folder that this user may write",
        )
        raise SpecError([problem], "environment") from None


def give_home() -> None:
    """Set HOME from HOLDFAST_HOME if the system has no home for this user: libraries such as MLflow need it."""
    if os.environ.get("HOME"):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        if folder := os.environ.get("HOLDFAST_HOME"):
            os.environ["HOME"] = str(Path(folder).absolute())
        else:
            os.environ.pop("HOME", None)  # an empty one would name the root of the file system


def make_folder(folder: Path) -> None:
    """Make a folder and its parents. `home()` itself is accessible only to this user."""
    make_home_of(folder)
    folder.mkdir(parents=True, exist_ok=True)


def make_home_of(folder: Path) -> None:
    """Make `home()`, accessible only to this user, if `folder` is in it and it does not exist."""
    with suppress(SpecError):  # without a home, nothing is in it
        if folder.absolute().is_relative_to(root := home()) and not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                root.mkdir(mode=0o700)


def store_url(spec: Spec | None = None) -> str:
    """The root of the store: the spec's, else HOLDFAST_STORE (a URL, or the absolute path of a folder), else a folder
    under `home()`."""
    if spec is not None and spec.store:
        return spec.store
    root = os.environ.get("HOLDFAST_STORE") or (home() / "store").as_uri()
    return Path(root).expanduser().as_uri() if root.startswith(("/", "~")) else root


def tracking_uri() -> str:
    """The MLflow server: MLFLOW_TRACKING_URI, else an SQLite file under `home()`. Raises SpecError for a folder that no
    SQLite URL can name: MLflow reads one part of the URL quoted and another part unquoted."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    path = str(home() / "mlflow.db")
    if set("%?") & set(path):
        problem = Problem(
            "HOLDFAST_HOME", str(home()), "has a % or a ? in it", "name a folder without, or set MLFLOW_TRACKING_URI"
        )
        raise SpecError([problem], "environment")
    return f"sqlite:///{path}"


def tracking_page() -> str:
    """The URL of MLflow's UI for a browser: HOLDFAST_MLFLOW_UI, else the MLflow server; empty without a server."""
    page = os.environ.get(MLFLOW_PAGE) or (uri if (uri := tracking_uri()).startswith(("http:", "https:")) else "")
    return redact(page).rstrip("/")


def outcomes_folder() -> Path | None:
    """The folder that HOLDFAST_OUTCOMES names, if any."""
    value = os.environ.get(OUTCOMES)
    return Path(value) if value else None


def in_step_pod() -> bool:
    """Whether this is a step in its own pod. A whole run on one machine keeps its files there, also if the machine is a
    pod such as a notebook's."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and outcomes_folder() is None


def require_shared_store(spec: Spec, url: str) -> None:
    """Raises SpecError if the store at `url` is a folder that only this pod sees: later steps and ranks would find
    nothing."""
    if not in_step_pod() or not url.startswith("file:"):
        return
    folder = url.removeprefix("file://").rstrip("/") + "/"
    shared_folders = [volume.path.rstrip("/") + "/" for volume in spec.cluster.volumes if not volume.read_only]
    if any(folder.startswith(path) for path in shared_folders):
        return
    name = spec.cluster.settings or SETTINGS
    remedy = (
        f"set HOLDFAST_STORE=s3://bucket/prefix in the ConfigMap {name}, or put the folder on one of cluster.volumes"
    )
    problem = Problem("store", url, "is a folder of this pod, and goes with it", remedy)
    raise SpecError([problem], "environment")


def require_tracking_server(spec: Spec) -> None:
    """Raises SpecError if MLflow is a file that only this pod sees: the registered model would disappear with the
    pod."""
    uri = tracking_uri()
    scheme = uri.partition(":")[0].partition("+")[0].lower() if ":" in uri else ""
    if in_step_pod() and scheme in ("", "file", "sqlite"):
        config_map = spec.cluster.settings or SETTINGS
        remedy = f"set MLFLOW_TRACKING_URI=http://mlflow:5000, or your server, in the ConfigMap {config_map}"
        problem = Problem("MLFLOW_TRACKING_URI", redact(uri), "is a file of this pod, and goes with it", remedy)
        raise SpecError([problem], "environment")


def has_mlflow() -> bool:
    """Whether MLflow can have data: an SQLite file that does not exist has none. A server is not queried."""
    kind, _, path = tracking_uri().partition(":///")
    return not kind.startswith("sqlite") or Path(path.partition("?")[0]).exists()


def cache_dir() -> Path:
    """The cache of data from S3, under `home()`."""
    return home() / "cache"


def cache_bytes() -> int:
    """The size of this machine's cache of datasets in S3, in bytes: HOLDFAST_CACHE_GIB, in GiB. Raises SpecError."""
    text = os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE_GIB
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 <= size < 2**30:
        problem = Problem(CACHE_VARIABLE, text, "is no number of GiB", f"write a number, such as {DEFAULT_CACHE_GIB}")
        raise SpecError([problem], "environment")
    return int(size * 2**30)


def cache_gib(ephemeral_storage: str) -> str:
    """HOLDFAST_CACHE_GIB for a pod with this much disk (a Kubernetes quantity): three quarters of it. The rest is for
    logs, compiled kernels and temporary files."""
    return f"{float(amount(ephemeral_storage)) * 0.75 / 2**30:.3g}"


def log_dir(run_id: str) -> Path:
    """The folder for logs of a run on this machine, under `home()`."""
    return home() / "logs" / run_id
