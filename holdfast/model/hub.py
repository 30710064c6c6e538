"""The Hugging Face Hub as a source of weights, tokenizers and datasets: `hf://owner/name[@revision][/path]`.

All fetched files are of one commit. A repository is identified by the digests that the Hub keeps of its files, so
identifying weights fetches none of them. The Hub's address is HF_ENDPOINT, the token HF_TOKEN; the library reads both.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blake3 import blake3

from holdfast.runtime.environment import cache_dir
from holdfast.spec import Spec
from holdfast.spec.errors import AccessDeniedError, DataError, MissingError, Problem, StoreUnreachableError
from holdfast.spec.training import Training
from holdfast.store import in_bucket, open_store

SCHEME = "hf://"
_PLACE = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[\w.-]+|[\w.-]+))?(?:/(.+))?")


class Place(NamedTuple):
    """The parts of an hf:// URL."""

    repository: str
    revision: str | None
    path: str  # in the repository; empty: all of it


def is_hub(location: str) -> bool:
    """Whether a location is on the Hub."""
    return location.startswith(SCHEME)


def parse_place(location: str) -> Place:
    """Parse an hf:// URL. Raises DataError for anything else."""
    match = _PLACE.fullmatch(location)
    if match is None or ".." in location:
        raise DataError(f"{location}: is not hf://owner/name[@revision][/path]")
    return Place(match[1], match[2], match[3] or "")


def hub_file(location: str) -> Path | None:
    """A file of a repository, in the local cache; None when the repository has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    place = parse_place(location)
    with _speaking(location):
        try:
            path = hf_hub_download(place.repository, place.path, revision=place.revision, cache_dir=_cache())
        except LocalEntryNotFoundError:  # a subclass of EntryNotFoundError, for a Hub that was not queried
            raise
        except EntryNotFoundError:
            return None
    return Path(path)


def hub_folder(location: str, wanted: Sequence[str]) -> Path:
    """The files of a repository, or of a folder in it, that match one of the patterns `wanted`, in the local cache, all
    of one commit."""
    from huggingface_hub import snapshot_download

    place = parse_place(location)
    inside = f"{place.path.rstrip('/')}/" if place.path else ""
    patterns = [f"{inside}{pattern}" for pattern in wanted]
    with _speaking(location):
        snapshot = snapshot_download(
            place.repository, revision=place.revision, allow_patterns=patterns, cache_dir=_cache()
        )
    return Path(snapshot) / inside


def hub_digests(location: str, wanted: Callable[[str], bool]) -> list[str]:
    """The names, sizes and digests of the `wanted` files of a repository, or of a folder in it, in order. Fetches none
    of them."""
    from huggingface_hub import HfApi

    place = parse_place(location)
    inside = f"{place.path.rstrip('/')}/" if place.path else ""
    with _speaking(location):
        info = HfApi().model_info(place.repository, revision=place.revision, files_metadata=True)
    files = {
        file.rfilename.removeprefix(inside): file
        for file in info.siblings or []
        if file.rfilename.startswith(inside) and wanted(file.rfilename.removeprefix(inside))
    }
    return [
        f"{name} {file.size} {file.lfs.sha256 if file.lfs else file.blob_id}" for name, file in sorted(files.items())
    ]


class RepositoryFile(NamedTuple):
    """A file of a repository, as the Hub lists it."""

    path: str
    size: int  # bytes
    digest: str  # sha256 of a large file, else the hash that Git gives it


Kind = Literal["model", "dataset"]  # of a repository


def repository_files(repository: str, revision: str | None, kind: Kind) -> tuple[str, list[RepositoryFile]]:
    """The commit that a revision of a repository names now, and its files by name. Fetches none of them."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _speaking(_location(repository, kind)):
        if kind == "dataset":
            info: Any = api.dataset_info(repository, revision=revision, files_metadata=True)
        else:
            info = api.model_info(repository, revision=revision, files_metadata=True)
    files = [
        RepositoryFile(
            file.rfilename, file.size or 0, f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}"
        )
        for file in info.siblings or []
    ]
    return str(info.sha), sorted(files)


def dataset_file(repository: str, commit: str, path: str) -> Path:
    """A file of a dataset's repository at a commit, in the local cache. Raises MissingError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    location = f"hf://datasets/{repository}@{commit}/{path}"
    with _speaking(location):
        try:
            return Path(hf_hub_download(repository, path, revision=commit, repo_type="dataset", cache_dir=_cache()))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise MissingError(f"{location}: the Hub no longer has it; name another revision") from None


def fetch_files(place: Place, names: Sequence[str], kind: Kind) -> Path:
    """The files `names` of the folder `place.path`, at a commit, in the local cache: their folder. If `place.path` is a
    file, its path."""
    from huggingface_hub import snapshot_download

    with _speaking(_location(place.repository, kind)):
        inside = place.path.rstrip("/")
        patterns = [inside, *(f"{inside}/{name}" for name in names)] if inside else list(names)
        snapshot = snapshot_download(
            place.repository,
            revision=place.revision,
            repo_type=kind,
            allow_patterns=[glob.escape(pattern) for pattern in patterns],
            cache_dir=_cache(),
        )
    return Path(snapshot) / inside


def _location(repository: str, kind: Kind) -> str:
    return f"{SCHEME}{'datasets/' if kind == 'dataset' else ''}{repository}"


def hub_commit(location: str, field: str) -> str:
    """The commit that a repository's revision, or its main branch, names now. `field` of a spec names the location.
    Raises MissingError with the problem of that field."""
    from huggingface_hub import HfApi

    place = parse_place(location)
    with _speaking(location, field):
        return str(HfApi().model_info(place.repository, revision=place.revision).sha)


@contextmanager
def _speaking(location: str, field: str = "") -> Iterator[None]:
    """Turn the library's errors into Holdfast's. `field` of a spec names the location."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise AccessDeniedError(f"{location}: asks for an agreement; give it on the Hub, and set HF_TOKEN") from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        message = "the Hub has no such repository or revision"
        remedy = "check the name, and whether HF_TOKEN may see it"
        error = MissingError(f"{location}: {message}; {remedy}")
        if field:
            error.problem = Problem(field, location, f"is missing: {message}", remedy)
        raise error from None
    except LocalEntryNotFoundError as error:
        raise StoreUnreachableError(f"{location}: the Hub does not answer: {error}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise AccessDeniedError(f"{location}: the Hub refuses it ({status}); set HF_TOKEN") from None
        raise StoreUnreachableError(f"{location}: the Hub answers {status}") from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):  # its client's errors
            raise
        raise StoreUnreachableError(f"{location}: the Hub cannot be reached: {error}") from None


def _cache() -> Path:
    return cache_dir() / "hub"


# Identity of imported weights (`model.init_from`): their content, not their location.
#
# Needs no torch, because identifying a run must be quick.


def is_weight_file(name: str) -> bool:
    """Whether a file of a Hugging Face folder determines the weights."""
    return "/" not in name and (
        name.endswith(".safetensors") or name in ("config.json", "model.safetensors.index.json")
    )


TEACHER_FIELD = "training.distillation.teacher"
REWARDS_FIELD = "training.grpo.rewards"


def first_weights_digest(spec: Spec) -> str:
    """The digests of the weights that a run reads, for `run_id`, with a plus between them: of `model.init_from`, of
    `training.distillation.teacher`, and of each reward model. Empty without any."""
    teacher = weights_digest(spec.training.distillation.teacher, TEACHER_FIELD)
    rewards = [
        weights_digest(model, f"{REWARDS_FIELD}.{number}.model") for number, model in reward_models(spec.training)
    ]
    return "+".join([weights_digest(spec.model.init_from), teacher, *rewards]).rstrip("+")


def reward_models(training: Training) -> list[tuple[int, str]]:
    """The numbers and places of the rewards that are reward models."""
    rewards = enumerate(training.grpo.rewards)
    return [(number, reward.model) for number, reward in rewards if reward.model is not None]


def weights_digest(location: str | None, field: str = "model.init_from") -> str:
    """A digest of the weights in a field of a spec. Empty without such weights.

    It covers the content of a folder, the object versions on S3, or the file digests of the Hub. So nothing is
    downloaded. Raises MissingError if no weights are found.
    """
    if location is None:
        return ""
    if is_hub(location):
        lines = hub_digests(location, is_weight_file)
    elif in_bucket(location):
        objects = [info for info in open_store(location).list("") if is_weight_file(info.key)]
        lines = [f"{info.key} {info.size} {info.version}" for info in objects]
    else:
        folder = Path(location.removeprefix("file://")).expanduser()
        files = sorted(path for path in folder.glob("*") if is_weight_file(path.name))
        lines = [f"{path.name} {blake3().update_mmap(path).hexdigest()}" for path in files]
    if not any(".safetensors " in line for line in lines):
        message, remedy = "has no .safetensors", "name a folder in the Hugging Face layout"
        error = MissingError(f"{field}: {location} {message}; {remedy}")
        error.problem = Problem(field, location, message, remedy)
        raise error
    return blake3("\n".join(lines).encode()).hexdigest()


def require_weights(location: str, named: str, field: str = "model.init_from") -> None:
    """Raises DataError unless the weights at `location` have the digest `named` from the run's identity."""
    if (actual := weights_digest(location, field)) != named:
        raise DataError(
            f"{field}: {location} holds other weights ({actual[:16]}) than those the run id was made from "
            f"({named[:16]}). Put them back, or run the same command again, which names another run"
        )


def require_weights_once(location: str, named: str, field: str = "model.init_from") -> None:
    """The same in a rank: local rank 0 compares for all ranks that read the same disk."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        require_weights(location, named, field)
