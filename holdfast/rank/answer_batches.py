"""Batches of answers for the training loop: generated with the current weights, or replayed from the store.

Ranks take whole lots. A lot whose record is in the store is replayed, so a resumed run learns from the same answers.
The first such lot of an attempt is also generated again: other tokens mean that something is not deterministic. Then
every rank gets all records, and computes the rows that it learns from.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.checkpoint import StateDigest, digest_of
from holdfast.collectives import Gang
from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset, Rows
from holdfast.dataset.prompts import Prompt, prompt_numbers
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import AnsweringEngine
from holdfast.launch.device import device_name, local_device
from holdfast.model.decoder import Decoder
from holdfast.model.hub import reward_models
from holdfast.rewards.process import RewardProcess
from holdfast.rollouts.advantages import filler_word, has_signal, has_whole_rows, rows_of, scored_rows, widened
from holdfast.rollouts.generation import LENGTH, Generated, LotGenerator, sampling_of
from holdfast.rollouts.records import (
    Answer,
    LotRecord,
    Unit,
    find_record,
    logprobs_key,
    parse_record,
    record_key,
    records_of_step,
)
from holdfast.rollouts.reward_models import RewardModels
from holdfast.rollouts.server import PolicyServer, publish
from holdfast.rollouts.turns import LiveReplies, RecordedReplies, Texts
from holdfast.spec.errors import DataError, MissingError, WrongArithmeticError
from holdfast.spec.identity import GENERATOR_VERSION
from holdfast.spec.rollout import AnswerSource
from holdfast.store import Store
from holdfast.telemetry import phases

OPTIMIZER = "optimizer."  # prefix of the boxes that are no weights
POLICY = "grpo.policy."  # scalars with parts of the digest of the weights that generated the current answers
PARTS = 4
SERVER_VERSION = 1  # of the records of a server's answers


@dataclass(frozen=True)
class _Batch:
    """The answers of some steps, on every rank."""

    policy: str  # digest of the weights that generated them
    words: Tensor  # [answers, width], see `rows_of`
    advantages: Tensor
    logprobs: Tensor | None  # before the first update on them; None if there is only one
    metrics: dict[str, float]


class AnswerBatches:
    """The rows of each step under the objective grpo. All methods are collective calls."""

    def __init__(
        self,
        spec: Assignment,
        dataset: Dataset,
        gang: Gang,
        engine: AnsweringEngine,
        store: Store,
        rewards: RewardProcess,
    ) -> None:
        """Raises DataError without prompts, or if one is too long, held-out prompts included."""
        self._spec, self._gang, self._engine, self._store, self._rewards = spec, gang, engine, store, rewards
        self._settings = spec.training.grpo
        self._dataset, self._prompts, self._end = dataset, dataset.prompts(), dataset.end_of_text
        self._sampling = sampling_of(self._settings, self._settings.group, spec.training.seed, self._end)
        source = self._settings.server
        self._server = None
        if source is not None:
            self._server = PolicyServer(source, self._weights(source), self._sampling, dataset.vocabulary)
        self._texts = Texts(load_tokenizer(dataset.tokenizer_json()), self._end)
        self._count = spec.training.global_batch // self._settings.group  # prompts of a batch
        self._width = spec.model.context + 1 if has_whole_rows(spec.parallel) else 0  # of a row at least
        self._batch: _Batch | None = None
        self._next: _Batch | None = None  # with `lag: 1`, the answers of the next step
        self._verified = False
        tokens, context = self._settings.answer_tokens, spec.model.context
        length = self._prompts.require_room(tokens, context)
        held_out = 0  # without held-out prompts only the evaluation fails
        if dataset.tokens("validation"):
            held_out = dataset.prompts("validation").require_room(tokens, context)  # the evaluation answers them
        if reward_models(spec.training):  # they also score the answers of the evaluation
            length = max(length, held_out)
        longest, device = length + tokens, local_device(spec.accelerator)
        self._reward_models = RewardModels(spec.training, dataset, longest, device, spec.first_weights)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the answers of the current step, by name."""
        return {} if self._batch is None else self._batch.metrics

    def scalars(self) -> dict[str, int]:
        """The scalars of the state that name the current answers. Empty if each step has new ones."""
        named = self._next if self._settings.lag else self._batch
        if named is None or (self._settings.updates == 1 and not self._settings.lag):
            return {}
        policy = named.policy
        return {f"{POLICY}{part}": int(policy[8 * part : 8 * part + 8], 16) for part in range(PARTS)}

    def adopt(self, start: int, scalars: Mapping[str, float | int], rows: Rows) -> None:
        """Load the answers of a state after `start` steps that names them: one between two updates on them, or, with
        `lag: 1`, one whose next step learns from older answers. Raises MissingError if their records are gone."""
        lags = self._settings.lag and 0 < start < self._spec.training.steps
        if start % self._settings.updates == 0 and not lags:
            return
        policy = "".join(f"{int(scalars[f'{POLICY}{part}']):08x}" for part in range(PARTS))
        batch = self._load(start, policy, rows, generates=False)
        if lags:
            self._next = batch
        else:
            self._batch = batch

    def steps(self, start: int, stop: int, rows: Rows) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(step, this rank's rows of its batch) for each step from `start`: int64 [rows, width, 2]. The next item is
        computed when it is taken, with the weights of that moment."""
        for step in range(start, stop):
            batch = self._batch_of(step, stop, rows)
            advantages = widened(batch.advantages, self._width)
            logprobs = None if batch.logprobs is None else widened(batch.logprobs, self._width)
            scored = scored_rows(self._engine_words(batch.words), advantages, logprobs)
            yield step, scored[self._own(rows)].numpy()

    def _batch_of(self, step: int, stop: int, rows: Rows) -> _Batch:
        """The answers that `step` learns from. With `lag: 1`, those of the next step are generated before its
        update."""
        if self._settings.lag:
            self._batch = self._next or self._load(step, self._policy(), rows, generates=True)
            following = step + 1
            self._next = self._load(following, self._policy(), rows, generates=True) if following < stop else None
        elif self._batch is None or step % self._settings.updates == 0:
            self._batch = self._load(step, self._policy(), rows, generates=True)
        return self._batch

    def where(self, step: int) -> str:
        """A description of the prompts of a step."""
        numbers = ", ".join(str(prompt.number) for prompt in self._prompts_of(step))
        return f"answers to the prompts {numbers}; see `holdfast rollouts`"

    def _engine_words(self, words: Tensor) -> Tensor:
        """The words as wide as the layout needs them. Records are not: a run may continue in another layout."""
        return widened(words, self._width, filler_word(self._end))

    def _own(self, rows: Rows) -> slice | NDArray[np.int64]:
        return rows(self._spec.training.global_batch) if callable(rows) else rows

    def _prompts_of(self, step: int) -> list[Prompt]:
        first = step // self._settings.updates * self._count
        numbers = prompt_numbers(len(self._prompts), self._spec.training.seed, first, self._count)
        return [self._prompts[number] for number in numbers.tolist()]

    def _policy(self) -> str:
        """The digest of the weights, without the optimizer's state."""
        own = digest_of(box for box in self._engine.saved() if not box.name.startswith(OPTIMIZER))
        return str(sum(self._gang.all_gather(own, StateDigest), StateDigest()))

    def _load(self, step: int, policy: str, rows: Rows, *, generates: bool) -> _Batch:
        """The answers for the step `step`, whose weights have the digest `policy` if they may be generated."""
        phases.enter("generate", step)
        if self._server is not None:
            self._server.start_step()
        prompts, size = self._prompts_of(step), self._settings.lot
        lots = range(-(-len(prompts) // size))
        with self._engine.generating() if generates else nullcontext() as decoder:
            if decoder is not None and self._settings.server is not None:
                self._publish(self._settings.server, policy, decoder)
            generator = None if decoder is None else LotGenerator(decoder)
            own = [
                self._lot(step, lot, policy, prompts[lot * size : (lot + 1) * size], generator)
                for lot in lots[self._gang.rank :: self._gang.size]
            ]
        del decoder, generator  # copies of the model need not live longer
        records: list[LotRecord] = []
        for number in range(-(-len(lots) // self._gang.size)):  # one lot of each rank, as messages have a limit
            record = own[number].dump().decode() if number < len(own) else ""
            texts = self._gang.all_gather(record, str)
            records += [parse_record(text, "another rank's record") for text in texts if text]
        units = [unit for record in sorted(records, key=lambda record: record.lot) for unit in record.units]
        words, advantages = rows_of(
            units,
            [prompt.tokens for prompt in prompts],
            self._settings.scale_rewards,
            self._spec.model.context,
            self._end,
        )
        logprobs = None
        if self._settings.updates > 1 or self._settings.lag:
            logprobs = self._logprobs(step, policy, words, rows, computes=generates)
        phases.enter("data", step)
        return _Batch(policy, words, advantages, logprobs, self._metrics_of(units))

    def _lot(
        self, step: int, lot: int, policy: str, prompts: Sequence[Prompt], generator: LotGenerator | None
    ) -> LotRecord:
        """The record of a lot: the one in the store, or a new one. Without a `generator` it must exist."""
        first_step = step - step % self._settings.updates + 1
        first = step // self._settings.updates * self._count + lot * self._settings.lot
        places = range(first, first + len(prompts))
        key = record_key(self._spec.run_id, first_step, lot, policy, self._generator(places))
        found = find_record(self._store, key)
        if generator is None:
            if found is None:  # another plan has generated it
                for record in records_of_step(self._store, self._spec.run_id, first_step):
                    found = record if (record.lot, record.policy) == (lot, policy) else found
            if found is None:
                raise MissingError(
                    f"{self._store.url}/{key}: the answers that step {step + 1} learns from are gone; {self._remedy}"
                )
            return found
        if found is not None and (self._verified or self._server is not None):
            return found  # a server answers anew
        live = self._live_replies(prompts)
        replies = live if found is None or live is None else RecordedReplies(found.units)
        tokens = [prompt.tokens for prompt in prompts]
        if self._server is not None:
            phases.enter("generate")  # the watchdog's limit is that of a lot
            generated = self._server.lot(policy, tokens)
        else:
            generated = generator.generate(tokens, places, self._sampling, replies)
        if found is None:
            made = LotRecord(
                step=first_step,
                lot=lot,
                policy=policy,
                units=[
                    self._unit(number, prompt, places[number], generated[number], live)
                    for number, prompt in enumerate(prompts)
                ],
            )
            if self._store.put_if_absent(key, made.dump()):
                return made
            return self._lot(step, lot, policy, prompts, generator)  # another attempt has created it meanwhile
        self._verified = True
        if found.tokens != [[answer.tokens for answer in answers] for answers in generated]:
            raise WrongArithmeticError(
                f"{self._store.url}/{key}: holds other answers than this rank generates with the same weights and "
                f"seed at step {step + 1}; one of the two machines computes wrong, or runs other libraries"
            )
        return found

    @property
    def _remedy(self) -> str:
        if self._settings.lag:
            return "start the run again with --fresh"
        return f"continue from a checkpoint at a multiple of training.grpo.updates = {self._settings.updates}"

    def _live_replies(self, prompts: Sequence[Prompt]) -> LiveReplies | None:
        if (environment := self._settings.environment) is None:
            return None
        return LiveReplies(self._rewards, [prompt.record for prompt in prompts], self._texts, environment.turns)

    def _weights(self, source: AnswerSource) -> Path:
        """The folder of this run's weights for the server. Another run may share the folder around it."""
        return Path(source.weights) / self._spec.run_id

    def _publish(self, source: AnswerSource, policy: str, decoder: Decoder) -> None:
        """Give the weights to the server. A collective call."""
        tokenizer, end = self._dataset.tokenizer_json(), self._dataset.manifest.tokenizer.end_of_text

        def write() -> bool:
            try:
                publish(self._weights(source), policy, decoder, tokenizer, end)
            except OSError as error:
                raise DataError(f"training.grpo.server.weights: {error}; name a folder that can be written") from None
            return True

        self._gang.from_rank_0(write, bool)

    def _generator(self, places: range) -> dict[str, Any]:
        """What determines the tokens of a lot in addition to the weights and the identity of the run."""
        if (source := self._settings.server) is not None:
            return {"version": SERVER_VERSION, "places": [places.start, len(places)], "server": source.software}
        return {
            "version": GENERATOR_VERSION,
            "places": [places.start, len(places)],
            "torch": torch.__version__,
            "device": device_name(local_device(self._spec.accelerator)),
            "threads": self._spec.parallel.threads,
        }

    def _unit(
        self, number: int, prompt: Prompt, place: int, answers: Sequence[Generated], live: LiveReplies | None
    ) -> Unit:
        """The rewards of the answers to one prompt. `number` is its number in the lot."""
        scored, failed = [], {} if live is None else live.errors
        for each, answer in enumerate(answers):
            given = self._reward_models.values(prompt.tokens, answer.tokens)
            rewards = self._rewards.score(*self._texts.scored(prompt.record, answer.tokens, answer.replies), given)
            scored.append(
                Answer(
                    tokens=answer.tokens,
                    ending="length" if answer.ending == LENGTH else "stop",
                    entropy=answer.entropy,
                    rewards=rewards.values,
                    errors=rewards.errors,
                    reward=rewards.total(self._settings.rewards),
                    replies=answer.replies,
                    environment_error=failed.get((number, each), ""),
                )
            )
        return Unit(prompt=prompt.number, place=place, answers=scored)

    def _logprobs(self, step: int, policy: str, words: Tensor, rows: Rows, *, computes: bool) -> Tensor:
        """The log-probabilities of the answers before the first update on them: fp32, like `words`. They are recorded
        before a gradient reads them, under a key with the digest of the weights and of the answers."""
        key = logprobs_key(self._spec.run_id, step - step % self._settings.updates + 1, policy, words)
        size = 4 * len(words) * (words.shape[1] - 1)
        exists = self._gang.from_rank_0(lambda: self._store.stat(key) is not None, bool)
        if not exists and computes:
            own = np.arange(len(words))[self._own(rows)]
            losses = self._engine.losses(self._engine_words(words[own]))[:, : words.shape[1] - 1]
            encoded = base64.b64encode(losses.numpy().astype("<f4").tobytes()).decode()
            parts = self._gang.all_gather((own.tolist(), encoded), tuple[list[int], str])
            whole = np.zeros((len(words), words.shape[1] - 1), "<f4")
            for numbers, text in parts:
                whole[numbers] = np.frombuffer(base64.b64decode(text), "<f4").reshape(len(numbers), -1)
            raw = whole.tobytes()
            exists = self._gang.from_rank_0(lambda: self._store.put_if_absent(key, raw) or True, bool)
        if not exists:
            raise MissingError(f"{self._store.url}/{key}: is gone; {self._remedy}")
        found = self._store.get(key, most=size + 1)
        if len(found) != size:
            raise DataError(f"{self._store.url}/{key}: has not {size} bytes; delete it, and {self._remedy}")
        losses = torch.from_numpy(np.frombuffer(found, "<f4").copy())
        logprobs = torch.zeros(words.shape)
        logprobs[:, 1:] = -losses.view(len(words), -1)
        return logprobs

    def _metrics_of(self, units: Sequence[Unit]) -> dict[str, float]:
        answers = [answer for unit in units for answer in unit.answers]

        def mean(values: Sequence[float]) -> float:
            return sum(values) / len(values)

        metrics = {
            "reward": mean([answer.reward for answer in answers]),
            "answer_tokens": mean([len(answer.tokens) for answer in answers]),
            "truncated_share": mean([answer.ending == LENGTH for answer in answers]),
            "no_signal_share": mean([not has_signal(unit) for unit in units]),
            "reward_failures": float(sum(bool(error) for answer in answers for error in answer.errors)),
        }
        if entropies := [answer.entropy for answer in answers if answer.entropy is not None]:
            metrics["entropy"] = mean(entropies)
        if len(rewards := self._settings.rewards) > 1:
            for number, reward in enumerate(rewards):
                metrics[f"reward.{number}.{reward.title}"] = mean([answer.rewards[number] for answer in answers])
        return metrics
