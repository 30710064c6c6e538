"""Files of downstream tasks, in the format of lm-evaluation-harness: one task, or a group of tasks, with their data.

All files are in one folder, or below it. A digest identifies their content. Nothing is downloaded, and no Python of a
file runs. `task_configs` reads the YAML; this module reads the data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from holdfast.scoring.task_configs import TaskConfigs, read_configs
from holdfast.spec.errors import DataError, MissingError, shown
from holdfast.spec.identity import digest
from holdfast.spec.operations import Task
from holdfast.store import Store, open_store

DATA_BYTES = 2 * 2**30  # at most, for all data files of a task
CHUNK_BYTES = 4 * 2**20  # of a data file in memory at a time
NEEDS_LIBRARY = "evaluation.tasks needs lm-evaluation-harness: pip install 'holdfast[tasks]'"


@dataclass(frozen=True)
class Content:
    """Size and digest of a data file when the task was read."""

    size: int  # bytes
    digest: str  # BLAKE3


@dataclass(frozen=True)
class TaskFiles:
    """A task, or a group of tasks, and their files."""

    task: Task
    configs: TaskConfigs
    store: Store
    contents: Mapping[str, Content]  # by file name
    digest: str  # of the task files, the content of their data, and how the model is asked

    @property
    def name(self) -> str:
        """The name in the task file."""
        return self.configs.name


@dataclass(frozen=True)
class _Described:
    """The content of the task files, and the sizes of their data files."""

    configs: TaskConfigs
    store: Store
    sizes: Mapping[str, int]


def require_tasks(tasks: Sequence[Task], context: int) -> None:
    """Check tasks before the training, for a model of this context, as far as that is possible without a model. Reads
    no data.

    Raises MissingError or DataError for a task that cannot be scored.
    """
    for task in tasks:
        require_answer_length(_describe(task).configs, task.uri, context)
    if tasks and find_spec("lm_eval") is None:
        raise MissingError(f"{NEEDS_LIBRARY} (there is no module lm_eval)")


def find_task(task: Task) -> TaskFiles:
    """Read a task file and hash its data. Raises MissingError, or DataError for an unsupported task."""
    described = _describe(task)
    contents = {
        name: Content(size, _digest_of(_chunks(described.store, name, size))) for name, size in described.sizes.items()
    }
    data = {name: [described_file.size, described_file.digest] for name, described_file in contents.items()}
    content = digest({**described.configs.identity(), "data": data})
    if options := task.question:
        content = digest({"content": content, "question": options})
    return TaskFiles(task, described.configs, described.store, contents, content)


def _describe(task: Task) -> _Described:
    folder, _, name = task.uri.rpartition("/")
    store = open_store(folder if "://" in folder else f"file://{Path(folder or '.').resolve()}")
    configs = read_configs(store, name, task)
    names = {name for config in configs.tasks for name in _names(config["dataset_kwargs"]["data_files"])}
    return _Described(configs, store, _sizes(store, sorted(names), task.uri))


def require_answer_length(configs: TaskConfigs, uri: str, context: int) -> None:
    """Raise DataError if a task wants longer generated answers than a context of tokens, or an invalid length."""
    for config in configs.tasks:
        _require_length(config.get("generation_kwargs") or {}, uri, context)


def _require_length(settings: Any, uri: str, context: int) -> None:
    if not isinstance(settings, dict):
        raise DataError(f"evaluation.tasks: {uri}: generation_kwargs is {shown(settings)}; use fields and values")
    tokens = settings.get("max_gen_toks", 1)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= context:
        raise DataError(
            f"evaluation.tasks: {uri}: generation_kwargs.max_gen_toks is {shown(tokens)}; "
            f"use a whole number from 1 to {context:,}, the model's context"
        )


def _names(files: Any) -> Iterator[str]:
    if isinstance(files, str):
        yield files
    elif isinstance(files, list | dict):
        for entry in files.values() if isinstance(files, dict) else files:
            yield from _names(entry)
    else:
        raise DataError(f"evaluation.tasks: data_files has {shown(files)}: name files, in a list or by split")


def _sizes(store: Store, names: Sequence[str], uri: str) -> dict[str, int]:
    """The size of each data file."""
    sizes: dict[str, int] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "://" in name:
            raise DataError(f"evaluation.tasks: {uri}: data file {name!r} must lie next to the task file")
        if (info := store.stat(name)) is None:
            raise MissingError(f"evaluation.tasks: {uri}: there is no data file {name}")
        sizes[name] = info.size
    if (total := sum(sizes.values())) > DATA_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise DataError(
            f"evaluation.tasks: {uri}: its data have {total:,} bytes, most of them in {largest}, and a task has "
            f"{DATA_BYTES:,} at most: give it fewer rows"
        )
    return sizes


def _chunks(store: Store, name: str, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of an object. Each chunk is overwritten by the next one."""
    buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for start in range(0, size, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, size - start)]
        store.read_into(name, start, chunk)
        yield chunk


def _digest_of(chunks: Iterable[memoryview]) -> str:
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def fetch(found: TaskFiles, name: str, folder: Path) -> str:
    """Copy a data file to this machine and return its path. Raises DataError when its content has changed."""
    path, wanted = folder / name, found.contents[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def written() -> Iterator[memoryview]:
            for chunk in _chunks(found.store, name, wanted.size):
                file.write(chunk)
                yield chunk

        if _digest_of(written()) != wanted.digest:
            raise DataError(
                f"evaluation.tasks: {found.task.uri}: {name} has changed since the evaluation began: let no process "
                "write it meanwhile, and evaluate again"
            )
    return str(path)


def placed(files: Any, local: Mapping[str, str]) -> Any:
    """Replace file names by their paths on this machine."""
    if isinstance(files, str):
        return local[files]
    if isinstance(files, dict):
        return {split: placed(entry, local) for split, entry in files.items()}
    return [placed(entry, local) for entry in files]
