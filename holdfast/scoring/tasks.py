"""Downstream tasks in the format of lm-evaluation-harness, which that library runs on a Holdfast model.

A task is one YAML file and the data files next to it, in a folder or a bucket. A digest identifies its content. Nothing
is downloaded, and no Python of the file runs. The same model gives the same figures on the same hardware. The library
makes prompts, shots, metrics and their sums.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
import yaml
from blake3 import blake3

from holdfast.model.decoder import Decoder
from holdfast.model.generate import generate
from holdfast.rendering.process import Template
from holdfast.runtime.temporary import temporary_folder
from holdfast.scoring.score import ACTIVATION_BYTES, LOGITS_BYTES
from holdfast.scoring.verdict import TaskScore
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.identity import digest
from holdfast.spec.operations import Task
from holdfast.store import Store, open_store
from holdfast.telemetry import ConsoleProgress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Metrics of the library itself. The library would look up any other name on the Hub and run what it finds.
METRICS = tuple(
    """
    acc acc_all acc_bytes acc_mutual_info acc_norm bits_per_byte bleu brier_score byte_perplexity chrf chrf++
    exact_match f1 likelihood mcc perplexity ter word_perplexity
    """.split()
)
LOADERS = ("json", "csv", "parquet", "text")  # loaders of `datasets` that read files and download nothing
FOREIGN = ("include", "group", "class", "custom_dataset", "unsafe_code", "fewshot_config", "use_prompt")
DATA_BYTES = 2 * 2**30  # at most, for all data files of a task
CHUNK_BYTES = 4 * 2**20  # of a data file in memory at a time
TEXT_BYTES = 2**20  # of a task file at most
SEED = 1234
NEEDS_LIBRARY = "evaluation.tasks needs lm-evaluation-harness: pip install 'holdfast[tasks]'"
_TOKENS = 256  # of a generated answer, unless the task sets it


@dataclass(frozen=True)
class Content:
    """Size and digest of a data file when the task was read."""

    size: int  # bytes
    digest: str  # BLAKE3


@dataclass(frozen=True)
class TaskFiles:
    """A task and its files."""

    task: Task
    config: Mapping[str, Any]
    store: Store
    files: Mapping[str, Any]  # as `data_files` of the library: names in the folder
    contents: Mapping[str, Content]  # by file name
    digest: str  # of the task file and the content of its data

    @property
    def name(self) -> str:
        """The name in the task file."""
        return str(self.config["task"])


@dataclass(frozen=True)
class _Described:
    """The content of a task file, and the sizes of its data files."""

    config: Mapping[str, Any]
    store: Store
    files: Mapping[str, Any]
    sizes: Mapping[str, int]
    text: str


def require_tasks(tasks: Sequence[Task], context: int) -> None:
    """Check tasks before the training, for a model of this context, as far as that is possible without a model. Reads
    no data.

    Raises MissingError or DataError for a task that cannot be scored.
    """
    for task in tasks:
        _require_answer_length(_describe(task).config, task.uri, context)
    if tasks and find_spec("lm_eval") is None:
        raise MissingError(f"{NEEDS_LIBRARY} (there is no module lm_eval)")


def find_task(task: Task) -> TaskFiles:
    """Read a task file and hash its data. Raises MissingError, or DataError for an unsupported task."""
    described = _describe(task)
    contents = {
        name: Content(size, _digest_of(_chunks(described.store, name, size))) for name, size in described.sizes.items()
    }
    data = {name: [described_file.size, described_file.digest] for name, described_file in contents.items()}
    content = digest({"file": described.text, "data": data})
    return TaskFiles(task, described.config, described.store, described.files, contents, content)


def _describe(task: Task) -> _Described:
    folder, _, name = task.uri.rpartition("/")
    store = open_store(folder if "://" in folder else f"file://{Path(folder or '.').resolve()}")
    if (info := store.stat(name)) is None:
        raise MissingError(f"evaluation.tasks: there is no task file {task.uri}")
    if info.size > TEXT_BYTES:
        raise DataError(f"evaluation.tasks: {task.uri} has {info.size:,} bytes, a task file has {TEXT_BYTES:,} at most")
    raw = store.get(name)
    try:
        config = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number with thousands of digits
        raise DataError(
            f"evaluation.tasks: {task.uri} is no plain YAML ({str(error).splitlines()[0]}): `!function` runs Python "
            "that the file brings, so it is refused; write the prompt as a template"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("task"), str):
        raise DataError(f"evaluation.tasks: {task.uri} has no `task`, the name of the task")
    for field in FOREIGN:
        if config.get(field):
            raise DataError(f"evaluation.tasks: {task.uri}: `{field}` is not run here; write one whole task")
    if config.get("dataset_path") not in LOADERS:
        raise DataError(
            f"evaluation.tasks: {task.uri}: dataset_path is {config.get('dataset_path')!r}; local data are read by one "
            f"of {', '.join(LOADERS)}, with dataset_kwargs: {{data_files: ...}}"
        )
    for metric in config.get("metric_list") or ():
        if not isinstance(metric, dict) or metric.get("hf_evaluate") or metric.get("metric") not in METRICS:
            raise DataError(
                f"evaluation.tasks: {task.uri}: metric {metric!r} is none of the library's own, and another one would "
                f"be fetched and run; use one of {', '.join(METRICS)}"
            )
    metrics = [metric["metric"] for metric in config.get("metric_list") or ()]
    if metrics and task.metric not in metrics:
        raise DataError(f"evaluation.tasks: {task.uri} has no metric {task.metric!r}; it has {', '.join(metrics)}")
    kwargs = config.get("dataset_kwargs") or {}
    if set(kwargs) != {"data_files"} or not kwargs["data_files"]:
        raise DataError(f"evaluation.tasks: {task.uri}: dataset_kwargs must have data_files, and nothing else")
    files = kwargs["data_files"]
    return _Described(
        config, store, files, _sizes(store, sorted(set(_names(files))), task.uri), raw.decode(errors="backslashreplace")
    )


def _require_answer_length(config: Mapping[str, Any], uri: str, context: int) -> None:
    """Raise DataError if a task wants longer generated answers than a context of tokens, or an invalid length."""
    settings = config.get("generation_kwargs") or {}
    if not isinstance(settings, dict):
        raise DataError(f"evaluation.tasks: {uri}: generation_kwargs is {str(settings)[:40]!r}; use fields and values")
    tokens = settings.get("max_gen_toks", 1)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= context:
        is_long = isinstance(tokens, int) and tokens.bit_length() > 128  # Python refuses to print the longest ones
        shown = "too large" if is_long else str(tokens)[:40]
        raise DataError(
            f"evaluation.tasks: {uri}: generation_kwargs.max_gen_toks is {shown}; "
            f"use a whole number from 1 to {context:,}, the model's context"
        )


def _names(files: Any) -> Iterator[str]:
    if isinstance(files, str):
        yield files
    elif isinstance(files, list | dict):
        for entry in files.values() if isinstance(files, dict) else files:
            yield from _names(entry)
    else:
        raise DataError(f"evaluation.tasks: data_files has {files!r}: name files, in a list or by split")


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


def score_tasks(decoder: Decoder, tokenizer: Tokenizer, tasks: Sequence[TaskFiles]) -> tuple[TaskScore, ...]:
    """The figure of each task. Raises DataError when the library cannot run one."""
    return tuple(_score(decoder, tokenizer, task) for task in tasks)


def _score(decoder: Decoder, tokenizer: Tokenizer, found: TaskFiles) -> TaskScore:
    try:
        from lm_eval import evaluator, simple_evaluate, utils
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingError(f"{NEEDS_LIBRARY} ({error})") from error
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    task, name = found.task, found.name
    _require_answer_length(found.config, task.uri, decoder.shape.context)
    utils.env = cast("Any", _Environment(f"evaluation.tasks: {task.uri}"))
    cast("Any", evaluator).add_env_info = lambda results: None  # noqa: ARG005 - it runs `pip list` while ranks wait
    with temporary_folder("task") as folder, ConsoleProgress() as progress:
        local = {file_name: _fetch(found, file_name, Path(folder)) for file_name in found.contents}
        kwargs = {"data_files": _placed(found.files, local), "cache_dir": str(Path(folder) / "cache")}
        model = _model(decoder, tokenizer, partial(progress, f"task {name}"))
        try:
            results = simple_evaluate(
                model=model,
                tasks=[{**found.config, "dataset_kwargs": kwargs}],
                task_manager=TaskManager(include_defaults=False),
                num_fewshot=task.shots,
                limit=task.examples,
                bootstrap_iters=0,
                log_samples=False,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
            )
        except (DataError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise DataError(f"evaluation.tasks: {task.uri}: {type(error).__name__}: {error}") from error
    assert results is not None  # the library returns None only on ranks other than 0
    figures = {key.partition(",")[0]: value for key, value in results["results"][name].items()}
    if not isinstance(figures.get(task.metric), int | float):
        metrics = ", ".join(sorted(key for key, value in figures.items() if isinstance(value, float)))
        raise DataError(f"evaluation.tasks: {task.uri} has no metric {task.metric!r}; it has {metrics}")
    return TaskScore(
        task=name,
        digest=found.digest,
        metric=task.metric,
        shots=task.shots,
        value=float(figures[task.metric]),
        higher_is_better=bool(results["higher_is_better"][name].get(task.metric, True)),
        examples=int(results["n-samples"][name]["effective"]),
    )


class _Environment:
    """The template environment of the library. A task file is data, so a child process renders its templates."""

    def __init__(self, name: str) -> None:
        """`name`: the task, for messages."""
        self._name = name
        self._templates: dict[str, _Rendered] = {}

    def from_string(self, text: str) -> _Rendered:
        """Like Jinja's `Environment.from_string`."""
        return self._templates.setdefault(text, _Rendered(Template(self._name, "task", text)))


class _Rendered:
    """A template with the interface that the library calls."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def render(self, **document: Any) -> str:
        """Like Jinja's `Template.render`. Values that JSON cannot hold become text."""
        return str(self._template.run(json.dumps(document, ensure_ascii=False, default=str)))


def _fetch(found: TaskFiles, name: str, folder: Path) -> str:
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


def _placed(files: Any, local: Mapping[str, str]) -> Any:
    """Replace file names by their paths on this machine."""
    if isinstance(files, str):
        return local[files]
    if isinstance(files, dict):
        return {split: _placed(entry, local) for split, entry in files.items()}
    return [_placed(entry, local) for entry in files]


def _model(decoder: Decoder, tokenizer: Tokenizer, progress: Any) -> Any:
    """The model behind the library's interface. The class is local because its base class is the library's."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    if decoder.end_of_text is None:
        raise DataError(
            "evaluation.tasks: the model has no end-of-text token, with which a text without context begins"
        )
    context = decoder.shape.context

    class Model(TemplateLM):
        eot_token_id = decoder.end_of_text

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002
            return tokenizer.encode(string, add_special_tokens=False).ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return list(
                likelihoods(decoder, [(context, continuation) for _, context, continuation in requests], progress)
            )

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
            totals = []
            for (text,) in (request.args for request in requests):
                windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, context, 1)
                parts = [make_disjoint_window(window) for window in windows]
                totals.append(math.fsum(nats for nats, _ in likelihoods(decoder, parts, progress)))
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
            texts = []
            for number, (prompt, settings) in enumerate(request.args for request in requests):
                if settings.get("do_sample") and settings.get("temperature", 1) > 0:
                    raise DataError("a task that samples has no one answer: set do_sample: false")
                until = settings.get("until") or []
                tokens = int(settings.get("max_gen_toks", _TOKENS))
                text = generate(decoder, tokenizer, prompt, tokens=tokens, temperature=0)
                for stop in [until] if isinstance(until, str) else until:
                    text = text.partition(stop)[0] if stop else text
                texts.append(text)
                progress(number + 1, len(requests))
            return texts

    return Model()


@torch.inference_mode()
def likelihoods(
    decoder: Decoder, requests: Sequence[tuple[Sequence[int], Sequence[int]]], progress: Any = lambda *_: None
) -> Iterator[tuple[float, bool]]:
    """For each (context, continuation) of token ids: the continuation's log-likelihood in nats, and whether it is
    greedy.

    Greedy means that each of its tokens is the most likely one. A text that is longer than the model's context keeps
    its end. Rows of similar length form one batch; the batches depend on the requests alone.
    """
    device = decoder.model.embed_tokens.weight.device
    rows = [[*context, *continuation][-decoder.shape.context - 1 :] for context, continuation in requests]
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), index))
    answers: dict[int, tuple[float, bool]] = {}
    while order:
        width = len(rows[order[0]]) - 1
        most = max(1, ACTIVATION_BYTES // (4 * decoder.shape.ffn_width) // max(1, width))
        batch, order = order[:most], order[most:]
        inputs = torch.zeros(len(batch), width, dtype=torch.int64)
        for place, index in enumerate(batch):
            inputs[place, : len(rows[index]) - 1] = torch.tensor(rows[index][:-1])
        hidden = decoder.hidden(inputs.to(device))
        for place, index in enumerate(batch):
            continuation = torch.tensor(requests[index][1], device=device)[-(len(rows[index]) - 1) :]
            end = len(rows[index]) - 1
            answers[index] = _continuation(decoder, hidden[place, end - len(continuation) : end], continuation)
        progress(len(answers), len(rows))
    return (answers[index] for index in range(len(rows)))


def _continuation(decoder: Decoder, positions: torch.Tensor, wanted: torch.Tensor) -> tuple[float, bool]:
    """Log-likelihood of the tokens `wanted` [n], given the hidden state before each of them [n, D], and whether all are
    greedy.
    """
    most, nats, greedy = max(1, LOGITS_BYTES // (4 * decoder.vocabulary)), 0.0, True
    for part, targets in zip(positions.split(most), wanted.split(most), strict=True):
        logits = decoder.head(part).float()
        nats -= float(F.cross_entropy(logits, targets, reduction="none").double().sum())
        greedy = greedy and bool((logits.argmax(-1) == targets).all())
    return nats, greedy
