"""Answers of a batch: what a whole forward pass gives."""

import queue
import time
from collections.abc import Iterator

import pytest
import torch

from holdfast.inference.batch import AnswerBatch, AnswerJob, BusyError, End, TokenSampling, within_mass
from holdfast.model.decoder import Decoder
from holdfast.rollouts.generation import sample_tokens, uniforms
from tests.model.tiny_model import decoder, shape

Events = queue.Queue[int | End]
PROMPTS = [[5, 6, 7], [8], list(range(9, 80)), [20, 21]]


def submitted(batch: AnswerBatch, prompt: list[int], most: int = 12, **fields: object) -> tuple[AnswerJob, Events]:
    events: Events = queue.Queue()
    job = AnswerJob(prompt, most, fields.pop("sampling", TokenSampling(0)), events.put, **fields)  # type: ignore[arg-type]
    batch.submit(job)
    return job, events


def answer(events: Events) -> tuple[list[int], str]:
    tokens = []
    while not isinstance(event := events.get(timeout=60), End):
        tokens.append(event)
    return tokens, event.reason


@pytest.fixture(scope="module")
def built() -> Decoder:
    return decoder(shape(context=320, kv_heads=2)).eval()


@pytest.fixture
def batch(built: Decoder) -> Iterator[AnswerBatch]:
    running = AnswerBatch(built, 3, waiting=2)
    yield running
    running.close()


def expected(built: Decoder, prompt: list[int], count: int, sampling: TokenSampling) -> list[int]:
    text, numbers = list(prompt), uniforms(sampling.seed, 0, sampling.number, count)
    with torch.no_grad():
        for u in numbers:
            logits = built(torch.tensor([text]))[0, -1:]
            token = logits.argmax() if not sampling.temperature else sample_tokens(
                logits, torch.tensor([u], dtype=torch.float64), sampling.temperature
            )[0]  # fmt: skip
            text.append(int(token))
    return text[len(prompt) :]


@pytest.mark.parametrize("sampling", [TokenSampling(0), TokenSampling(0.8, seed=3, number=1)])
def test_tokens_are_those_of_whole_forward_passes(built: Decoder, batch: AnswerBatch, sampling: TokenSampling) -> None:
    waiting = [submitted(batch, prompt, sampling=sampling)[1] for prompt in PROMPTS]
    for prompt, events in zip(PROMPTS, waiting, strict=True):
        assert answer(events) == (expected(built, prompt, 12, sampling), "length")


def test_rows_see_no_further_back_than_the_windows_of_their_layers() -> None:
    windowed = decoder(shape(context=320, kv_heads=2, family="gpt_oss", sliding_window=4)).eval()
    batch, sampling = AnswerBatch(windowed, 3, waiting=2), TokenSampling(0.8, seed=3, number=1)
    waiting = [submitted(batch, prompt, sampling=sampling)[1] for prompt in PROMPTS]
    for prompt, events in zip(PROMPTS, waiting, strict=True):
        assert answer(events) == (expected(windowed, prompt, 12, sampling), "length")
    batch.close()


def test_a_request_has_the_same_tokens_alone_and_among_others(batch: AnswerBatch) -> None:
    """The caches grow while the request runs, and rows come and go."""
    sampling = TokenSampling(1.0, 0.9, seed=7)
    alone = answer(submitted(batch, PROMPTS[0], 200, sampling=sampling)[1])
    crowd = [submitted(batch, PROMPTS[2], 20, sampling=TokenSampling(1.3, seed=seed))[1] for seed in range(2)]
    shared = submitted(batch, PROMPTS[0], 200, sampling=sampling)[1]
    crowd.append(submitted(batch, list(range(240)), 60)[1])
    assert answer(shared) == alone
    assert {answer(events)[1] for events in crowd} == {"length"}


def test_a_stop_token_a_deadline_and_a_cancellation_end_an_answer(built: Decoder, batch: AnswerBatch) -> None:
    tokens = expected(built, PROMPTS[0], 12, TokenSampling(0))
    end = next(token for at, token in enumerate(tokens) if at > 1 and token not in tokens[:at])
    stopped = answer(submitted(batch, PROMPTS[0], stops=frozenset({end}))[1])
    assert stopped == (tokens[: tokens.index(end)], "stop")
    assert answer(submitted(batch, PROMPTS[0], deadline=time.monotonic() - 1)[1]) == ([], "deadline")
    job, events = submitted(batch, PROMPTS[0], 250)
    events.get(timeout=60)
    job.cancelled = True
    rest, reason = answer(events)
    assert reason == "cancelled"
    assert len(rest) < 249


def test_more_requests_than_rows_and_places_are_refused(batch: AnswerBatch) -> None:
    running = [submitted(batch, PROMPTS[0], 250) for _ in range(5)]
    with pytest.raises(BusyError):
        submitted(batch, PROMPTS[0])
    for job, _ in running:
        job.cancelled = True
    assert {answer(events)[1] for _, events in running} == {"cancelled"}
    assert answer(submitted(batch, PROMPTS[0])[1])[1] == "length"


def test_a_failure_ends_its_requests_and_the_next_ones_are_answered(
    built: Decoder, batch: AnswerBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(AnswerJob, "next_token", lambda *_: 1 / 0)
        events = submitted(batch, PROMPTS[0])[1]
        end = events.get(timeout=60)
    assert isinstance(end, End)
    assert (end.reason, end.message) == ("error", "ZeroDivisionError: division by zero")
    assert answer(submitted(batch, PROMPTS[0])[1])[0] == expected(built, PROMPTS[0], 12, TokenSampling(0))


def test_top_p_keeps_the_likeliest_tokens_with_this_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]]
    for mass, kept in ((0.4, [1]), (0.5, [1]), (0.6, [1, 3]), (0.9, [0, 1, 3]), (0.99, [0, 1, 2, 3])):
        assert within_mass(logits.double(), mass).isfinite().nonzero()[:, 0].tolist() == kept, mass
