"""Downstream tasks in the format of lm-evaluation-harness, which that library runs on a Holdfast model.

The same model gives the same figures on the same hardware. The library makes prompts, shots, metrics and their sums.
`task_files` reads the files, and `task_model` is the model behind the library's interface.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import yaml

from holdfast.corpus.chat import ChatTemplate
from holdfast.model.decoder import Decoder
from holdfast.rendering.process import Template
from holdfast.rewards.process import RewardProcess, TimeoutReason
from holdfast.runtime.logs import log
from holdfast.runtime.temporary import temporary_folder
from holdfast.scoring.task_configs import PASSED_TESTS
from holdfast.scoring.task_files import NEEDS_LIBRARY, TaskFiles, fetch, placed, require_answer_length
from holdfast.scoring.task_model import library_model
from holdfast.scoring.verdict import TaskScore
from holdfast.spec.errors import DataError, HoldfastError, MissingError, UnhealthyNodeError
from holdfast.spec.rollout import Reward
from holdfast.telemetry import ConsoleProgress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 1234
ANSWER = "<answer>"  # in the target of a task with tests: the place of the answer. Default: before the tests
TESTS = Reward(kind="tests", timeout_seconds=10.0)  # of one answer


def score_tasks(
    decoder: Decoder, tokenizer: Tokenizer, tasks: Sequence[TaskFiles], template: ChatTemplate | None = None
) -> tuple[TaskScore, ...]:
    """The figure of each task. `template` is the chat template of the model. Raises DataError when the library cannot
    run a task, and for a task in turns without a chat template."""
    with RewardProcess([TESTS], failure=_tests_failed) as tests:
        return tuple(_score(decoder, tokenizer, task, template, tests) for task in tasks)


def _score(
    decoder: Decoder, tokenizer: Tokenizer, found: TaskFiles, template: ChatTemplate | None, tests: RewardProcess
) -> TaskScore:
    try:
        from lm_eval import evaluator, simple_evaluate, utils
    except ImportError as error:
        raise MissingError(f"{NEEDS_LIBRARY} ({error})") from error
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    task, name = found.task, found.name
    if not task.chat_template:
        template = None
    elif template is None:
        raise DataError(
            f"evaluation.tasks: {task.uri}: the model has no chat template; set chat_template: false, or train it on "
            "conversations"
        )
    require_answer_length(found.configs, task.uri, decoder.shape.context)
    utils.env = cast("Any", _Environment(f"evaluation.tasks: {task.uri}"))
    cast("Any", evaluator).add_env_info = lambda results: None  # noqa: ARG005 - it runs `pip list` while ranks wait
    _register_tests(tests)
    with temporary_folder("task") as folder, ConsoleProgress() as progress:
        manager, wanted = _library_tasks(found, Path(folder))
        model = library_model(decoder, tokenizer, partial(progress, f"task {name}"), template)
        try:
            results = simple_evaluate(
                model=model,
                tasks=[wanted],
                task_manager=manager,
                num_fewshot=task.shots,
                limit=task.examples,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=template is not None,
                system_instruction=task.system,
                fewshot_as_multiturn=template is not None and task.fewshot_as_multiturn,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
            )
        except (HoldfastError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise DataError(f"evaluation.tasks: {task.uri}: {type(error).__name__}: {error}") from error
    if _PASSED.timeouts:
        log.warning(
            f"evaluation.tasks: {task.uri}: {_PASSED.timeouts:,} of {_PASSED.answers:,} answers took more than "
            f"{TESTS.timeout_seconds:g} s with their tests; they count as wrong"
        )
    assert results is not None  # the library returns None only on ranks other than 0
    return TaskScore(
        task=name,
        digest=found.digest,
        metric=task.metric,
        shots=task.shots,
        value=_figure(results["results"].get(name, {}), found),
        higher_is_better=found.configs.higher_is_better,
        examples=sum(int(counts["effective"]) for counts in results["n-samples"].values()),
    )


def _library_tasks(found: TaskFiles, folder: Path) -> tuple[Any, Any]:
    """The library's index of the tasks, and the task or the name of the group to run. The data are copied to
    `folder`."""
    from lm_eval.tasks import TaskManager

    local = {file_name: fetch(found, file_name, folder / "data") for file_name in found.contents}
    configs = []
    for config in found.configs.tasks:
        files = placed(config["dataset_kwargs"]["data_files"], local)
        configs.append({**config, "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}})
    if not found.configs.groups:
        return TaskManager(include_defaults=False), configs[0]
    index = folder / "index"
    index.mkdir()
    for number, config in enumerate([*found.configs.groups, *configs]):
        (index / f"{number}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return TaskManager(include_path=str(index), include_defaults=False), found.name


def _figure(results: dict[str, Any], found: TaskFiles) -> float:
    """The value of the metric, from figures by `METRIC,FILTER`. Raises DataError if there is none."""
    task = found.task
    wanted = {key: value for key, value in results.items() if task.filter in (None, key.partition(",")[2])}
    figures = {key.partition(",")[0]: value for key, value in wanted.items()}
    if not isinstance(figures.get(task.metric), int | float):
        metrics = ", ".join(
            sorted({key.partition(",")[0] for key, value in results.items() if isinstance(value, float)})
        )
        of_filter = "" if task.filter is None else f" of filter {task.filter!r}"
        raise DataError(f"evaluation.tasks: {task.uri} has no metric {task.metric!r}{of_filter}; it has {metrics}")
    return float(figures[task.metric])


def _tests_failed(reason: str) -> HoldfastError:
    return UnhealthyNodeError(
        f"evaluation.tasks: the process that runs the tests of {PASSED_TESTS} failed: {reason}; look at its error "
        "above and at the memory, disk and processes of this machine, and evaluate again"
    )


class _PassedTests:
    """The metric `pass_at_1`: whether the code of an answer passes the tests in the target. They run in `process`."""

    process: RewardProcess
    answers = 0
    timeouts = 0  # answers that exceed the time of TESTS

    def __call__(self, references: Sequence[Any], predictions: Sequence[str], **_: Any) -> float:
        """1.0 or 0.0, for one answer. Raises UnhealthyNodeError if the tests cannot run."""
        before, place, after = str(references[0]).partition(ANSWER)
        tests, program = (after, before + predictions[0]) if place else (before, predictions[0])
        try:
            scored = self.process.score({TESTS.key: tests}, program)
        except OSError as error:  # no process, or no folder
            raise _tests_failed(str(error)) from error
        reason = scored.errors[0]
        if reason and not isinstance(reason, TimeoutReason):
            raise _tests_failed(reason)
        self.answers += 1
        self.timeouts += bool(reason)
        return scored.values[0]


_PASSED = _PassedTests()


def _register_tests(process: RewardProcess) -> None:
    """Give the library the metric `pass_at_1`."""
    from lm_eval.api import registry

    _PASSED.process, _PASSED.answers, _PASSED.timeouts = process, 0, 0
    registry.get_metric("acc")  # imports its own metrics first
    registry.metric_registry.register(PASSED_TESTS, target=_PASSED)
    registry.higher_is_better_registry.register(PASSED_TESTS, target=True)
    registry.metric_agg_registry.register(PASSED_TESTS, target=registry.get_aggregation("mean"))


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
