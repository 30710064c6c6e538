"""The server over HTTP: OpenAI's own client, and clients that send what they should not."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
import urllib3
import uvicorn

from holdfast.inference.adapters import read_adapter
from holdfast.inference.answers import Limits
from holdfast.inference.batch import AnswerBatch
from holdfast.inference.model import AnsweringModel
from holdfast.inference.server import API_KEY, AnswerServer, api_key_for
from holdfast.model.files import Folder
from holdfast.model.generate import generate
from holdfast.spec.errors import DataError, UsageError
from tests.inference.tiny import tiny_export, tiny_model

LIMITS = Limits(rows=3, waiting=2, body_bytes=20_000, body_seconds=1.0)
HELLO = [{"role": "user", "content": "def add"}]


@contextmanager
def serving(model: AnsweringModel, limits: Limits = LIMITS, key: str | None = None, **adapters: Any) -> Iterator[str]:
    """The server on its own thread; its address without a path."""
    batch = AnswerBatch(model.decoder, limits.rows, waiting=limits.waiting, adapters=adapters)
    app = AnswerServer(model, "tiny", batch, adapters=list(adapters), limits=limits, key=key).app()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    batch.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AnsweringModel:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def url(model: AnsweringModel) -> Iterator[str]:
    with serving(model) as address:
        yield address


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)


def test_models_are_listed(url: str) -> None:
    assert [model.id for model in client_of(url).models.list()] == ["tiny"]
    assert client_of(url).models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="use one of tiny"):
        client_of(url).models.retrieve("gpt-4")


def test_a_completion_is_what_the_model_generates(url: str, model: AnsweringModel) -> None:
    expected = generate(model.decoder, model.tokenizer, "def add", tokens=20, temperature=0)
    done = client_of(url).completions.create(model="tiny", prompt="def add", max_tokens=20, temperature=0)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (expected, "length")
    size = len(model.tokenizer.encode("def add").ids)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (size, 20)


def test_a_stream_has_the_text_of_the_whole_answer(url: str) -> None:
    client = client_of(url)
    wanted: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**wanted)
    texts, reasons, used = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}):
        used = chunk.usage or used
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert used == whole.usage
    texts = [c.choices[0].text for c in client.completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)]
    assert "".join(texts)


def test_concurrent_requests_get_the_answers_that_they_get_alone(url: str) -> None:
    def wanted(seed: int) -> dict[str, Any]:
        return {"model": "tiny", "messages": HELLO, "max_tokens": 40, "seed": seed, "top_p": 0.9}

    alone = [client_of(url).chat.completions.create(**wanted(seed)).choices[0].message.content for seed in range(5)]

    async def together() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**wanted(seed)) for seed in range(5)))
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(together()) == alone


def test_a_stop_sequence_ends_the_text_before_it(url: str) -> None:
    client = client_of(url)
    wanted: dict[str, Any] = {"model": "tiny", "prompt": "def", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**wanted).choices[0].text
    stop = text[10:13]
    stopped = client.completions.create(**wanted, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_an_adapter_is_selected_by_its_name(model: AnsweringModel, tmp_path: Path) -> None:
    """peft writes the adapter, and computes with it."""
    import peft  # takes seconds

    folder = tiny_export(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, settings)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([model.tokenizer.encode("def add").ids])
    outputs = adapted.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = model.tokenizer.decode(outputs[0, ids.shape[1] :].tolist())
    served = AnsweringModel.load(Folder(folder), torch.device("cpu"))
    adapter = read_adapter(Folder(tmp_path / "adapter"), served.decoder)
    with serving(served, poet=adapter) as url:
        wanted: dict[str, Any] = {"prompt": "def add", "max_tokens": 12, "temperature": 0}

        async def both() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                names = ("tiny", "poet")
                answers = await asyncio.gather(*(client.completions.create(model=name, **wanted) for name in names))
            return [answer.choices[0].text for answer in answers]

        texts = asyncio.run(both())
    assert texts == [generate(model.decoder, model.tokenizer, "def add", tokens=12, temperature=0), expected]
    assert texts[0] != texts[1]
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(DataError, match="use_dora cannot be served"):
        read_adapter(Folder(tmp_path / "adapter"), served.decoder)


def test_what_cannot_be_answered_is_refused_by_name(url: str) -> None:
    client = client_of(url)
    for fields, message in (
        ({"model": "other"}, "no model 'other'; use one of tiny"),
        ({"temperature": -1}, "temperature: "),
        ({"logprobs": True}, "logprobs is not implemented"),
        ({"messages": [{"role": "user", "content": "x " * 400}]}, "the model's context is 256"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "Input should be 'text'"),
        ({"n": 6}, "at most 5 answers are possible"),
    ):
        wanted: dict[str, Any] = {"model": "tiny", "messages": HELLO, **fields}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message):
            client.chat.completions.create(**wanted)


def test_what_clients_send_is_bounded(url: str) -> None:
    http = urllib3.PoolManager(retries=False)
    as_json = {"Content-Type": "application/json"}
    path = f"{url}/v1/chat/completions"
    assert http.request("POST", path, body=b"x" * 20_001, headers=as_json).status == 413
    assert http.request("POST", path, body=b"{", headers=as_json).status == 400
    assert http.request("POST", path, body=b"{}", headers={"Content-Type": "text/plain"}).status == 415
    assert http.request("GET", f"{url}/health", headers={"Host": "evil.example"}).status == 400
    assert http.request("GET", f"{url}/v1/nothing").status == 404
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        assert b" 408 " in slow.recv(100)


def test_a_full_queue_a_deadline_and_a_client_that_leaves(model: AnsweringModel) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "prompt": "def", "max_tokens": 250, "seed": 1}
    with serving(model, Limits(rows=1, waiting=0, seconds=0.005)) as url:
        client = client_of(url)
        with pytest.raises(openai.InternalServerError, match=r"not complete after 0\.005 s"):
            client.completions.create(**wanted, extra_body={"stop": ["\x00"]})
    with serving(model, Limits(rows=1, waiting=0)) as url:
        client = client_of(url)
        stream = client.completions.create(**wanted, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="too many requests"):
            client.completions.create(**wanted)
        stream.close()
        until = time.monotonic() + 20
        while True:  # its row is free again
            try:
                client.completions.create(model="tiny", prompt="def", max_tokens=1)
                break
            except openai.RateLimitError:
                assert time.monotonic() < until
                time.sleep(0.05)


def test_a_key_is_needed_for_all_but_the_health(model: AnsweringModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model, key="secret") as url:
        assert [one.id for one in client_of(url, "secret").models.list()] == ["tiny"]
        for path in ("v1/models", "metrics", "v1/models/tiny"):
            assert urllib3.request("GET", f"{url}/{path}", retries=False).status == 401
        with pytest.raises(openai.AuthenticationError):
            client_of(url, "wrong").completions.create(model="tiny", prompt="a")
        assert urllib3.request("GET", f"{url}/health").json() == {"status": "ok"}
    monkeypatch.delenv(API_KEY, raising=False)
    assert api_key_for("127.0.0.1") is None
    with pytest.raises(UsageError, match=f"set {API_KEY}"):
        api_key_for("0.0.0.0")
    monkeypatch.setenv(API_KEY, "k")
    assert api_key_for("0.0.0.0") == api_key_for("127.0.0.1") == "k"


def test_metrics_count_tokens(url: str) -> None:
    def tokens() -> float:
        text = urllib3.request("GET", f"{url}/metrics").data.decode()
        return float(
            next(line for line in text.splitlines() if line.startswith("holdfast_generated_tokens_total")).split()[1]
        )

    before = tokens()
    client_of(url).completions.create(model="tiny", prompt="def", max_tokens=7, temperature=0)
    assert tokens() == before + 7


def test_a_base_model_only_completes(tmp_path: Path) -> None:
    with serving(tiny_model(tmp_path / "base", template=False)) as url:
        assert client_of(url).completions.create(model="tiny", prompt="def", max_tokens=3).choices[0].text
        with pytest.raises(openai.BadRequestError, match="no chat template; use a completion"):
            client_of(url).chat.completions.create(model="tiny", messages=HELLO)  # type: ignore[arg-type]
