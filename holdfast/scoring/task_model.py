"""A model behind the interface of lm-evaluation-harness: likelihoods of texts, generated answers and chat turns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from holdfast.corpus.chat import ChatTemplate, ConversationError
from holdfast.corpus.model_template import TurnEnd, find_turn_end
from holdfast.model.decoder import Decoder
from holdfast.model.generate import generate
from holdfast.scoring.score import ACTIVATION_BYTES, LOGITS_BYTES
from holdfast.spec.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENS = 256  # of a generated answer, unless the task sets it


def library_model(decoder: Decoder, tokenizer: Tokenizer, progress: Any, template: ChatTemplate | None = None) -> Any:
    """The model behind the library's interface. The class is local because its base class is the library's.

    With a `template`, an answer also ends where the template ends a turn.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    if decoder.end_of_text is None:
        raise DataError(
            "evaluation.tasks: the model has no end-of-text token, with which a text without context begins"
        )
    context = decoder.shape.context
    turn_end = TurnEnd() if template is None else find_turn_end(template, tokenizer)

    class Model(TemplateLM):
        eot_token_id = decoder.end_of_text

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002
            return tokenizer.encode(string, add_special_tokens=False).ids

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return _conversation(template, chat_history, prompt=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002
            return "" if template is None else template.text

        @property
        def tokenizer_name(self) -> str:
            return ""

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
                ends = () if turn_end.token is None else (turn_end.token,)
                text = generate(decoder, tokenizer, prompt, tokens=tokens, temperature=0, ends=ends)
                for stop in ([until] if isinstance(until, str) else until) + [turn_end.text or ""]:
                    text = text.partition(stop)[0] if stop else text
                texts.append(text)
                progress(number + 1, len(requests))
            return texts

    return Model()


def _conversation(template: ChatTemplate | None, messages: list[dict[str, str]], *, prompt: bool) -> str:
    """The text of a conversation. Without `prompt`, it ends inside the last message, which an answer continues. Raises
    DataError for a conversation that the template refuses."""
    assert template is not None
    continued = None if prompt else messages[-1]["content"].rstrip()
    record = {"prompt": messages, "record": {}} if prompt else {"messages": messages}
    try:
        ((text, _, _),) = template.rendered(json.dumps(record, ensure_ascii=False))
    except ConversationError as error:
        raise DataError(f"evaluation.tasks: {error}") from None
    if continued is None:
        return text
    if continued not in text:
        raise DataError(
            "evaluation.tasks: the chat template changes the beginning of an answer (`gen_prefix`); leave it out"
        )
    return text[: text.rindex(continued) + len(continued)]


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
