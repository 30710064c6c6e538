"""Source of a rank's rows: batches of a dataset that are read ahead, or answers that the model generates."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol, cast

from numpy import int64
from numpy.typing import NDArray

from holdfast.code.resolve import entered_folder
from holdfast.collectives import Gang
from holdfast.dataset import Dataset, Prefetcher, Rows
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import AnsweringEngine, Engine
from holdfast.rank.answer_batches import AnswerBatches
from holdfast.rank.setup import batches, rows_of_rank
from holdfast.rewards.process import RewardProcess
from holdfast.store import Store

NumberedRows = Iterable[tuple[int, NDArray[int64]]]


class RowSource(Protocol):
    """The rows of each step on this rank."""

    rows: Rows  # of a global batch
    answers: AnswerBatches | None  # None: the rows are those of the dataset

    def adopt(self, start: int, scalars: Mapping[str, float | int]) -> None:
        """Continue from the state after `start` steps, which has these scalars. A collective call."""

    def steps(self, start: int, stop: int) -> AbstractContextManager[NumberedRows]:
        """The steps from `start` with the rows of each."""

    def where(self, step: int) -> str:
        """A description of where the rows of a step come from."""


class _OfDataset:
    """See RowSource."""

    answers: AnswerBatches | None = None

    def __init__(self, spec: Assignment, dataset: Dataset, gang: Gang) -> None:
        self._training, self.rows = batches(spec, dataset, gang)
        self.where = partial(dataset.where, self._training)

    def adopt(self, start: int, scalars: Mapping[str, float | int]) -> None:
        """See RowSource. There is no state."""

    def steps(self, start: int, stop: int) -> AbstractContextManager[NumberedRows]:
        """See RowSource."""
        return Prefetcher(self._training, self.rows, start, stop=stop)


class _OfAnswers:
    """See RowSource."""

    def __init__(self, spec: Assignment, gang: Gang, answers: AnswerBatches) -> None:
        self.answers: AnswerBatches | None = answers
        self.rows: Rows = rows_of_rank(spec, gang)
        self._answers, self.where = answers, answers.where

    def adopt(self, start: int, scalars: Mapping[str, float | int]) -> None:
        """See RowSource."""
        self._answers.adopt(start, scalars, self.rows)

    def steps(self, start: int, stop: int) -> AbstractContextManager[NumberedRows]:
        """See RowSource."""
        return nullcontext(self._answers.steps(start, stop, self.rows))


@contextmanager
def row_source(spec: Assignment, dataset: Dataset, gang: Gang, engine: Engine, store: Store) -> Iterator[RowSource]:
    """The rows of this rank under the objective of the spec."""
    if spec.objective != "grpo":
        yield _OfDataset(spec, dataset, gang)
        return
    answering = cast(AnsweringEngine, engine)  # the rules refuse prompts with another one
    settings = spec.training.grpo
    with RewardProcess(settings.rewards, entered_folder(), settings.environment) as rewards:
        yield _OfAnswers(spec, gang, AnswerBatches(spec, dataset, gang, answering, store, rewards))
