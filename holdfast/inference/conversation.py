"""A conversation with a model on one machine, or the continuation of texts by a model without a chat template."""

import queue
from collections.abc import Iterator
from dataclasses import replace

from holdfast.inference.batch import AnswerBatch, AnswerJob, End, TokenSampling
from holdfast.inference.model import AnsweringModel, PromptError, TextStream
from holdfast.spec.errors import DataError


class Conversation:
    """The messages so far. The same messages, sampling and seed give the same answers."""

    def __init__(self, model: AnsweringModel, *, system: str = "", most_tokens: int, sampling: TokenSampling) -> None:
        """`most_tokens` is the limit of an answer. Raises DataError for `system` without a chat template."""
        if system and model.template is None:
            raise DataError("this model has no chat template, so it reads no system message; leave --system out")
        self.forgotten = 0  # messages that no longer fit into the context
        self._model, self._sampling, self._most = model, sampling, most_tokens
        self._messages = [{"role": "system", "content": system}] if system else []
        self._kept = len(self._messages)  # never forgotten
        self._answers = 0
        self._batch = AnswerBatch(model.decoder, 1)

    @property
    def continues_text(self) -> bool:
        """Whether the model has no chat template, and continues texts instead."""
        return self._model.template is None

    def reply(self, text: str) -> Iterator[str]:
        """The parts of the answer to a message, as they are generated. An answer that is not read to its end is kept as
        far as it was read. Raises PromptError for a message that does not fit into the context."""
        model = self._model
        if self.continues_text:
            prompt, ends = model.text_prompt(text), model.text_ends
        else:
            self._messages.append({"role": "user", "content": text})
            prompt, ends = self._fitting_prompt(), model.turn_ends
        events: queue.Queue[int | End] = queue.Queue()
        most = min(self._most, model.context - len(prompt))
        job = AnswerJob(prompt, most, replace(self._sampling, number=self._answers), events.put, ends.tokens)
        stream, answer = TextStream(model.tokenizer, ends.text), ""
        self._answers += 1
        self._batch.submit(job)
        event: int | End = 0
        try:
            while isinstance(event := events.get(), int):
                part = stream.add(event)
                answer += part
                yield part
                if stream.stopped:
                    break
            if isinstance(event, End) and event.reason == "error":
                raise DataError(f"the model cannot answer: {event.message}")
            rest = stream.finish()
            answer += rest
            yield rest
        finally:
            job.cancelled = True
            while not isinstance(event, End):
                event = events.get()
            if not self.continues_text:
                self._messages.append({"role": "assistant", "content": answer})

    def close(self) -> None:
        """Stop the thread of the model."""
        self._batch.close()

    def _fitting_prompt(self) -> list[int]:
        """The tokens of the conversation. The oldest exchanges are forgotten until it fits."""
        while True:
            try:
                return self._model.conversation_prompt(self._messages)
            except PromptError:
                if len(self._messages) < self._kept + 3:
                    self._messages.pop()
                    raise
                del self._messages[self._kept : self._kept + 2]
                self.forgotten += 2
