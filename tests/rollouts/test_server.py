"""Answers of a server: recorded and replayed, of the right weights only, and a clear end without them."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.model.decoder import Decoder
from holdfast.model.hugging_face import open_weights
from holdfast.rollouts.generation import Sampling
from holdfast.rollouts.server import PolicyServer, _remove_older, _rename, publish
from holdfast.runtime import heartbeat
from holdfast.spec import SpecError
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.rollout import AnswerSource
from holdfast.store import layout, open_store
from tests.checkpoint.ranks import in_ranks
from tests.http_server import QuietHandler, running
from tests.rollouts.prompt_run import prompt_spec, turns_fields, write_prompts
from tests.rollouts.test_training import answers, overrides
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.tiny_run import END_OF_TEXT, VOCABULARY, _tokenizer, tiny_spec

PROMPTS, SAMPLING = [[60], [61, 62]], Sampling(answers=2, most_tokens=3, temperature=1.0, seed=0, end_of_text=0)


class Server(ThreadingHTTPServer):
    """Answers anew each time with random tokens, as any model whose folder exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.requests = folder, list[dict[str, Any]]()
        self.failures, self.stale, self.change = 0, 0, dict[str, Any]()  # of the next responses; of each choice
        self.weights: dict[str, float] = {}  # sums of the published weights
        self.seconds = 0.0  # of each response
        self.look: Callable[[], heartbeat.Seen] | None = None  # called during each request
        self.seen: list[heartbeat.Seen] = []  # its results

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(QuietHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.server.requests.append(body)
        name = body["model"]
        if self.server.look is not None:
            self.server.seen.append(self.server.look())
        time.sleep(self.server.seconds)
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
        elif (folder := next(self.server.folder.glob(f"*/{name}"), None)) is None:
            self.send_error(404)
        else:
            if name not in self.server.weights:
                weights = open_weights(str(folder), self.server.folder / "cache")
                (rows,) = weights.rows("model.norm.weight")
                self.server.weights[name] = float(rows.double().sum())
            if self.server.stale:
                self.server.stale -= 1
                name = "an older one"
            made = [self._choice(body) for _ in range(body["n"])]
            self.answer(200, {"model": name, "choices": made})

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        size = random.randint(1, body["max_tokens"])
        tokens = [random.randint(60, 120) for _ in range(size)]
        reason = "length" if size == body["max_tokens"] else "stop"
        return {"text": "", "token_ids": tokens, "finish_reason": reason, **self.server.change}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the folder `weights`."""
    server = Server(tmp_path / "weights")
    with running(server):
        yield server


def source(server: Server, seconds: float = 20) -> AnswerSource:
    """Its spec."""
    return AnswerSource(software="random", url=server.url, weights=str(server.folder), timeout_seconds=seconds)


def policy_server(server: Server, seconds: float = 20) -> PolicyServer:
    """The server, whose model `now` exists."""
    (server.folder / "run" / "now").mkdir(parents=True, exist_ok=True)
    server.weights["now"] = 0
    return PolicyServer(source(server, seconds), server.folder / "run", SAMPLING, VOCABULARY)


def test_answers_end_with_the_token_that_a_server_leaves_out(server: Server) -> None:
    lots = policy_server(server).lot("now", PROMPTS)
    assert [len(each) for each in lots] == [2, 2]
    for answer in (answer for each in lots for answer in each):
        assert (answer.tokens[-1] == 0) == (answer.ending == "stop")
        assert answer.entropy is None
    assert sorted(body["prompt"] for body in server.requests) == PROMPTS
    for body in server.requests:
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1, -1, 0, 1)


def test_requests_wait_for_a_server_that_fails_or_has_other_weights(server: Server) -> None:
    server.failures, server.stale = 3, 3
    assert len(policy_server(server).lot("now", PROMPTS)) == 2
    assert len(server.requests) == 8


def test_older_weights_are_refused(server: Server) -> None:
    server.stale = 10**6
    with pytest.raises(MissingError, match=r"this step: it answers as the model 'an older one'.*now"):
        policy_server(server, 0.5).lot("now", PROMPTS)
    with pytest.raises(MissingError, match="has no model of that name"):
        policy_server(server, 0.5).lot("later", PROMPTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [VOCABULARY]}, "not 1 to 3 tokens below"),
        ({"token_ids": []}, "not 1 to 3 tokens below"),
        ({"token_ids": [60] * 4}, "an answer of 4 tokens"),
        ({"token_ids": None}, "choices.0.token_ids"),
        ({"token_ids": [60], "finish_reason": "abort"}, "finish_reason 'abort'"),
    ],
)
def test_an_answer_that_is_none_is_an_error(server: Server, change: dict[str, Any], message: str) -> None:
    server.change = {"finish_reason": "length", **change}
    with pytest.raises(DataError, match=message):
        policy_server(server).lot("now", PROMPTS)


def test_a_server_that_is_away_ends_the_run_with_an_error(server: Server) -> None:
    away = AnswerSource(software="none", url="http://127.0.0.1:9/v1", weights="w", timeout_seconds=0.3)
    with pytest.raises(MissingError, match=r"gave no answer within 0\.3 s"):
        PolicyServer(away, Path("w"), SAMPLING, VOCABULARY).lot("now", PROMPTS)


def test_all_lots_of_a_step_have_one_limit(server: Server) -> None:
    server.seconds = 0.4
    limited = policy_server(server, 0.7)
    limited.lot("now", PROMPTS)
    with pytest.raises(MissingError, match=r"within 0\.7 s, the limit of a step on a rank"):
        for _ in range(3):
            limited.lot("now", PROMPTS)
    limited.start_step()
    limited.lot("now", PROMPTS)


def test_the_watchdog_sees_how_long_a_rank_waits_for_a_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "here", heartbeat.here)
    heartbeat.publish(tmp_path, begins=0, outside=[])
    page = heartbeat.HeartbeatReader(tmp_path / f"{os.getpid()}{heartbeat.SUFFIX}")
    server.look = page.read
    policy_server(server, 20).lot("now", PROMPTS)
    assert [(seen.requests, seen.allowed) for seen in server.seen] == [(1, 20.0)] * 2
    assert (page.read().requests, page.read().allowed) == (0, 0.0)


def test_ranks_wait_longer_for_each_other_than_for_a_server(server: Server) -> None:
    given = f"training.grpo.server={source(server, 600).model_dump_json()}"
    ranks = ("parallel.processes=2", "parallel.strategy=ddp")
    prompt_spec(given)
    prompt_spec(given, *ranks, "cluster.collective_timeout_minutes=10.1")
    with pytest.raises(SpecError, match=r"is not below cluster\.collective_timeout_minutes = 10"):
        prompt_spec(given, *ranks)


def test_a_server_answers_neither_an_environment_nor_adapters(server: Server, tmp_path: Path) -> None:
    given = f"training.grpo.server={source(server).model_dump_json()}"
    with pytest.raises(SpecError, match=r"not supported with training\.lora"):
        prompt_spec(given, "training.lora.rank=4")
    with pytest.raises(SpecError, match="not supported with an environment"):
        prompt_spec(given, *turns_fields(tmp_path / "code"))


@pytest.mark.parametrize("kind", ["prompts", "text"])
def test_the_address_of_a_server_has_no_credentials(server: Server, kind: str) -> None:
    secret = source(server).model_copy(update={"url": "http://me:hunter2@host/v1"})
    with pytest.raises(SpecError, match="contains credentials") as error:
        prompt_spec(f"training.grpo.server={secret.model_dump_json()}", f"data.kind={kind}")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://h:x/v1", "http://h:99999/v1", "http://:80/v1", "http://[h/v1", "http://h/v 1", "http://a..b/v1"]
)
def test_an_address_that_no_request_can_be_sent_to_is_refused(server: Server, url: str) -> None:
    wrong = source(server).model_copy(update={"url": url})
    with pytest.raises(SpecError, match=r"server\.url.*has no valid host and port"):
        prompt_spec(f"training.grpo.server={wrong.model_dump_json()}")


def publish_tiny(folder: Path, policy: str) -> None:
    """Publish weights of the model of `tiny_run`."""
    publish(folder, policy, Decoder(tiny_spec().model, VOCABULARY), _tokenizer().decode(), END_OF_TEXT)


def test_partial_folders_of_killed_ranks_are_removed(tmp_path: Path) -> None:
    policy, old, new = "a" * 32, f".{'b' * 32}.{'0' * 32}", f".{'b' * 32}.{'1' * 32}"
    for name in (old, new, ".other"):
        (tmp_path / name).mkdir()
    for name in (old, ".other"):
        os.utime(tmp_path / name, (0, 0))
    publish_tiny(tmp_path, policy)
    assert {path.name for path in tmp_path.iterdir()} == {policy, new, ".other"}


def test_weights_that_another_attempt_has_published_meanwhile_are_used(tmp_path: Path) -> None:
    target, partial = tmp_path / ("a" * 32), tmp_path / "partial"
    for folder in (target, partial):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    _rename(partial, target)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert (target / "file").read_text() == target.name


def test_only_folders_of_older_weights_are_removed(tmp_path: Path) -> None:
    names = [f"{number:032x}" for number in range(4)]
    for name in (*names, "b" * 31 + "x", "notes"):
        (tmp_path / name).mkdir()
    for age, name in enumerate(names):
        os.utime(tmp_path / name, (age, age))
    _remove_older(tmp_path, tmp_path / names[0])
    assert {path.name for path in tmp_path.iterdir()} == {names[0], names[3], "b" * 31 + "x", "notes"}


@pytest.mark.slow
def test_a_stopped_run_replays_the_answers_of_a_server(server: Server, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    given = overrides(f"training.grpo.server={source(server).model_dump_json()}")
    spec = prompt_spec(given[-1])
    assert train_in_ranks(1, store.url, tmp_path / "first", [(given, "", None)]) == [""]
    whole = answers(store, spec)
    assert len(server.requests) == 16, "each prompt is sent once"
    assert len(set(server.weights.values())) == 4, "each step has other weights"
    assert [len(list((server.folder / identity_of(spec)).iterdir()))] == [2], "each run has its own folder"
    for record in whole:
        assert record.policy in server.weights
    assert {answer.entropy for record in whole for unit in record.units for answer in unit.answers} == {None}
    run, again = identity_of(spec), identity_of(spec, "again")
    for info in list(store.list(layout.rollouts(run))):
        store.put(info.key.replace(run, again), store.get(info.key))
    assert train_in_ranks(1, store.url, tmp_path / "cut", [(given, "again", 1)]) == ["PreemptedError"]
    assert train_in_ranks(1, store.url, tmp_path / "rest", [(given, "again", None)]) == [""]
    assert len(server.requests) == 16, "recorded answers are not generated again"
    assert trained(store, spec, "again") == trained(store, spec)


@pytest.mark.slow
def test_a_server_answers_for_stages_with_the_weights_of_all_ranks(server: Server, tmp_path: Path) -> None:
    """Rank 0 publishes, and the last norm is on the other rank."""
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    given = overrides(
        f"training.grpo.server={source(server).model_dump_json()}", "parallel.processes=2", "parallel.pipeline=2",
        "parallel.strategy=fsdp", "training.precision=bf16",
    )  # fmt: skip
    runs: Runs = [(given, "", None), (given, "cut", 1), (given, "cut", None)]
    assert train_in_ranks(2, store.url, tmp_path / "ranks", runs) == ["", "PreemptedError", ""]
    assert len(server.requests) == 2 * 16, "each prompt is sent once"
    first, *later = server.weights.values()
    assert first == tiny_spec().model.hidden, "the norm begins with ones"
    assert len({first, *later}) == len(server.weights) == 7, "two runs of four steps begin with the same weights"


@pytest.mark.slow
def test_a_killed_run_asks_again_only_for_what_it_did_not_record(server: Server, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    given = overrides(f"training.grpo.server={source(server).model_dump_json()}")
    spec = prompt_spec(given[-1])
    in_ranks(1, _killed, store.url, tmp_path / "killed", given)
    assert len(server.requests) == 10, "five lots of two prompts"
    before = answers(store, spec)
    assert [(record.step, record.lot) for record in before] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert train_in_ranks(1, store.url, tmp_path / "rest", [(given, "", None)]) == [""]
    assert len(server.requests) == 16, "each prompt is sent once"
    assert answers(store, spec)[: len(before)] == before


def _killed(rank: int, size: int, url: str, folder: Path, given: tuple[str, ...]) -> None:
    """Train as a rank that is killed as soon as its fifth lot is recorded."""
    from holdfast.rank import answer_batches
    from holdfast.rank.answer_batches import AnswerBatches
    from tests.train import ranks

    answer_batches.GENERATOR_VERSION -= 1  # of answers that ranks generate; a server's records do not depend on it
    lot, left = AnswerBatches._lot, 5

    def counted(*arguments: Any) -> Any:
        nonlocal left
        made, left = lot(*arguments), left - 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    AnswerBatches._lot = counted  # type: ignore[method-assign,assignment]
    ranks._train_all(rank, size, url, folder, [(given, "", None)], False, signal.SIGTERM)
