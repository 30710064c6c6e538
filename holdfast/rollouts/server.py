"""Answers of a server with OpenAI's completions API, which loads the weights of each step from a folder.

The folder of some weights, and the model that the server is asked for, are named by the digest of the weights. Each run
has its own folder of them. A server without that model has stale weights, and is asked again until it has them. Its
answers are recorded before a gradient reads them, so a run is exact given its records, although a server answers anew
each time.
"""

import contextlib
import http.client
import json
import re
import shutil
import time
import uuid
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
WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # no server's defaults
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds
ABANDONED = 600.0  # seconds without a new file, after which the rank that wrote a partial folder was killed
_DIGEST = re.compile(r"[0-9a-f]{32}")  # of weights: the name of their folder
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{32}")  # a folder of weights that are being written


class _Choice(BaseModel):
    token_ids: list[int] = Field(max_length=2**20)
    finish_reason: str


class _Completion(BaseModel):
    model: str
    choices: list[_Choice]


class StaleWeightsError(Exception):
    """The server has other weights than those of this step."""


def publish(folder: Path, policy: str, decoder: Decoder, tokenizer_json: str, end_of_text: str) -> None:
    """Write the weights in the Hugging Face layout to the folder of a run, into one that their digest names, whole or
    not at all. The folders of other weights are removed, except the newest one, which a server may be reading."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / policy
    if not target.exists():
        weights = decoder.state_dict()
        partial = folder / f".{policy}.{uuid.uuid4().hex}"
        partial.mkdir()
        _remove_abandoned(folder, partial.stat().st_mtime)
        try:
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
            _rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    _remove_older(folder, target)


class PolicyServer:
    """The server of `training.grpo.server`."""

    def __init__(self, source: AnswerSource, folder: Path, sampling: Sampling, vocabulary: int) -> None:
        """`folder`: where this run publishes weights. The answers have tokens below `vocabulary`."""
        self._source, self._folder, self._sampling, self._vocabulary = source, folder, sampling, vocabulary
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
                **WHOLE_DISTRIBUTION,
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
                f"{policy}; let the server load them from {self._folder / policy}, or raise "
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
            if choice.finish_reason not in (STOP, LENGTH):
                raise DataError(
                    f"training.grpo.server: {url} ended an answer with finish_reason {choice.finish_reason!r:.80}, and "
                    f"{STOP!r} or {LENGTH!r} are learned from; see the server's log"
                )
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


def _rename(partial: Path, target: Path) -> None:
    """Give a whole folder its name, unless another attempt has created the same one meanwhile."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove the partial folders of killed ranks. `now`: a new folder's time of change, by the same clock as theirs."""
    for partial in [each for each in folder.iterdir() if _PARTIAL.fullmatch(each.name)]:
        with contextlib.suppress(OSError):
            if now - partial.stat().st_mtime > ABANDONED:
                shutil.rmtree(partial)


def _remove_older(folder: Path, current: Path) -> None:
    """Remove all folders of weights but the current one and the newest other one."""
    names = [each for each in folder.iterdir() if _DIGEST.fullmatch(each.name) and each != current]
    for old in sorted(names, key=lambda each: each.stat().st_mtime)[:-1]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
