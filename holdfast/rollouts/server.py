"""Answers of a server with OpenAI's completions API, which loads the weights of each step from a folder.

The folder of some weights, and the model that the server is asked for, are named by the digest of the weights. A server
without that model has stale weights, and is asked again until it has them. Its answers are recorded before a gradient
reads them, so a run is exact given its records, although a server answers anew each time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from holdfast.model.decoder import Decoder
from holdfast.model.export import export_files
from holdfast.rollouts.generation import LENGTH, STOP, Generated, Sampling
from holdfast.runtime import deadlines, heartbeat
from holdfast.runtime.retry import retried
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.rollout import AnswerSource

MAX_BYTES = 64 * 2**20  # of a response
REQUESTS = 16  # at the same time
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds
_DIGEST = re.compile(r"[0-9a-f]{32}")  # of weights: the name of their folder


class _Choice(BaseModel):
    token_ids: list[int] = Field(max_length=2**20)
    finish_reason: str


class _Completion(BaseModel):
    model: str
    choices: list[_Choice]


class StaleWeightsError(Exception):
    """The server has other weights than those of this step."""


def publish(folder: Path, policy: str, decoder: Decoder, tokenizer_json: str, end_of_text: str) -> None:
    """Write the weights in the Hugging Face layout to the folder that their digest names, whole or not at all. The
    folders of other weights are removed, except the newest one, which a server may be reading."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / policy
    if not target.exists():
        weights = decoder.state_dict()
        partial = folder / f".{policy}.{os.getpid()}"
        partial.mkdir(exist_ok=True)
        files = export_files(
            decoder.shape,
            decoder.vocabulary,
            lambda name, first=0, last=None: iter([weights[name][first:last].float().cpu()]),
            tokenizer_json=tokenizer_json,
            end_of_text=end_of_text,
        )
        for file in files:
            with (partial / file.name).open("wb") as stream:
                stream.writelines(file.content())
        partial.rename(target)
    _remove_older(folder, target)


class PolicyServer:
    """The server of `training.grpo.server`."""

    def __init__(self, source: AnswerSource, sampling: Sampling, vocabulary: int) -> None:
        """The answers have tokens below `vocabulary`."""
        self._source, self._sampling, self._vocabulary = source, sampling, vocabulary
        self._url = f"{source.url.rstrip('/')}/completions"
        self.start_step()

    def start_step(self) -> None:
        """Give the lots of another step `timeout_seconds` together."""
        self._left = self._source.timeout_seconds

    def lot(self, policy: str, prompts: Sequence[Sequence[int]]) -> list[list[Generated]]:
        """The answers to each prompt, of the weights with the digest `policy`. Raises MissingError if the server does
        not answer with them in the time that is left of the step's, and DataError for an answer that is none."""
        if self._left <= 0:
            raise self._no_answer("the earlier lots of the step took all of it")
        began = time.monotonic()
        limit = began + self._left
        try:
            with heartbeat.here.requesting(self._left), ThreadPoolExecutor(REQUESTS) as pool:
                return list(pool.map(lambda prompt: self._answers(policy, prompt, limit), prompts))
        finally:
            self._left -= time.monotonic() - began

    def _answers(self, policy: str, prompt: Sequence[int], limit: float) -> list[Generated]:
        url = self._url
        body = json.dumps(
            {
                "model": policy,
                "prompt": list(prompt),
                "n": self._sampling.answers,
                "max_tokens": self._sampling.most_tokens,
                "temperature": self._sampling.temperature,
                "stop_token_ids": [self._sampling.end_of_text],
                "return_token_ids": True,
            }
        ).encode()

        def ask(_: int) -> _Completion:
            status, raw = _post(url, body, max(1.0, limit - time.monotonic()))
            if status == 404:
                raise StaleWeightsError("has no model of that name")
            if status in (408, 429) or status >= 500:
                raise OSError(f"status {status}")
            if status != 200:
                raise DataError(
                    f"training.grpo.server: {url} refuses a request (status {status}): "
                    f"{raw[:200].decode(errors='replace')}"
                )
            completion = self._parsed(raw, url)
            if completion.model != policy:
                raise StaleWeightsError(f"answers as the model {completion.model!r:.80}")
            return completion

        try:
            seconds = limit - time.monotonic()
            completion = retried(ask, _passes, first=PAUSE, longest=LONGEST_PAUSE, seconds=seconds)
        except StaleWeightsError as error:
            raise MissingError(
                f"training.grpo.server: {url} has other weights than this step: it {error}, and the step's are named "
                f"{policy}; let the server load them from {Path(self._source.weights) / policy}, or raise "
                "timeout_seconds"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        return self._generated(completion, url)

    def _no_answer(self, why: object) -> MissingError:
        return MissingError(
            f"training.grpo.server: {self._url} gave no answer within {self._source.timeout_seconds:g} s, the limit of "
            f"a step on a rank ({why}); start the server or raise timeout_seconds, then run the same command again: "
            "recorded answers are used"
        )

    def _parsed(self, raw: bytes, url: str) -> _Completion:
        if len(raw) > MAX_BYTES:
            raise DataError(f"training.grpo.server: {url} answers with more than {MAX_BYTES:,} bytes; lower group")
        try:
            return _Completion.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the response"
            raise DataError(
                f"training.grpo.server: {url}: {where}: {first['msg']}; use a server whose completions have "
                "`token_ids` with return_token_ids, such as vLLM"
            ) from None

    def _generated(self, completion: _Completion, url: str) -> list[Generated]:
        """The answers. A server may leave out the end-of-text token of an answer that the model ended."""
        wanted, end, answers = self._sampling.answers, self._sampling.end_of_text, []
        if len(completion.choices) != wanted:
            raise DataError(
                f"training.grpo.server: {url} gave {len(completion.choices)} answers and not {wanted}; use a server "
                "that supports `n`"
            )
        for choice in completion.choices:
            tokens = choice.token_ids
            if choice.finish_reason == STOP and tokens[-1:] != [end]:
                tokens = [*tokens, end]
            most = self._sampling.most_tokens
            if not 0 < len(tokens) <= most or not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise DataError(
                    f"training.grpo.server: {url} gave an answer of {len(tokens)} tokens that are not 1 to {most} "
                    f"tokens below {self._vocabulary}; use a server with this model's tokenizer"
                )
            answers.append(Generated(tokens, STOP if tokens[-1] == end else LENGTH, None))
        return answers


def _passes(error: BaseException) -> bool:
    """Whether another request may succeed."""
    return isinstance(error, OSError | http.client.HTTPException | StaleWeightsError)


def _post(url: str, body: bytes, seconds: float) -> tuple[int, bytes]:
    """The status and the body of the response, which must come within `seconds`. Redirects are not followed."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = deadlines.bound_class(kind)(parts.netloc, timeout=seconds)
    with deadlines.within(seconds), contextlib.closing(connection):
        connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(MAX_BYTES + 1)


def _remove_older(folder: Path, current: Path) -> None:
    """Remove all folders of weights but the current one and the newest other one."""
    names = [each for each in folder.iterdir() if _DIGEST.fullmatch(each.name) and each != current]
    for old in sorted(names, key=lambda each: each.stat().st_mtime)[:-1]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
