"""Reward models as rewards: the number that a model with a scalar head gives the last token of an answer.

Each answer is computed alone, so no other answer and no number of ranks changes a bit.
"""

from collections.abc import Sequence

import torch

from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import token_ids
from holdfast.model.decoder import Decoder
from holdfast.model.files import TOKENIZER_BYTES, Files, read_bytes
from holdfast.model.hub import REWARDS_FIELD, require_weights_once, reward_models
from holdfast.model.hugging_face import empty_on, open_weights
from holdfast.runtime.environment import cache_dir
from holdfast.spec.errors import DataError
from holdfast.spec.identity import weights_of_digests
from holdfast.spec.training import Training


class RewardModels:
    """The reward models of `training.grpo.rewards`, in fp32."""

    def __init__(
        self, training: Training, dataset: Dataset, longest: int, device: torch.device, first_weights: str
    ) -> None:
        """`longest` is the number of tokens of the longest text. `first_weights` has the digests of the run id. Raises
        DataError for a model that does not fit or has other weights, and MissingError."""
        self._device = device
        self._models: dict[int, Decoder] = {}
        _, _, digests = weights_of_digests(first_weights)
        if reward_models(training) and not digests:
            raise DataError(f"{REWARDS_FIELD}: result.json has no digests of reward models; train again with --fresh")
        for place, (number, location) in enumerate(reward_models(training)):
            field = f"{REWARDS_FIELD}.{number}.model"
            require_weights_once(location, digests[place] if place < len(digests) else "", field)
            weights = open_weights(location, cache_dir())
            shape, vocabulary, different = weights.shape, dataset.vocabulary, _different_token(weights.files, dataset)
            for fits, problem, remedy in (
                (
                    shape.head == "scalar",
                    "predicts tokens",
                    "use a model with a scalar head (training.objective: reward)",
                ),
                (
                    weights.vocabulary == vocabulary,
                    f"has a vocabulary of {weights.vocabulary}, and the run one of {vocabulary}",
                    "use one with the tokenizer of data.tokenizer",
                ),
                (
                    not different,
                    f"does not have the tokenizer of the run: {different}",
                    "use one with the tokenizer of data.tokenizer",
                ),
                (
                    shape.context >= longest,
                    f"has a context of {shape.context}, and a prompt and its answer may have {longest} tokens",
                    "lower training.grpo.answer_tokens, or use another model",
                ),
            ):
                if not fits:
                    raise DataError(f"{field}: {location} {problem}; {remedy}")
            decoder = empty_on([device], shape, weights.vocabulary, weights.end_of_text)
            for name, tensor in decoder.state_dict().items():
                weights.fill(name, tensor)
            self._models[number] = decoder.eval()

    def values(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[int, float]:
        """The rewards of an answer, by their numbers."""
        row = torch.tensor([[*prompt, *answer]], device=self._device)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return {number: float(model.rewards(model.hidden(row))[0, -1]) for number, model in self._models.items()}


def _different_token(files: Files, dataset: Dataset) -> str:
    """How the tokenizer.json of a model, if it has one, differs from the run's: the first token with another id. Empty
    if all of the run's tokens are the same. The model may have more."""
    raw = read_bytes(files, "tokenizer.json", TOKENIZER_BYTES)
    if raw is None:
        return ""
    try:
        theirs = token_ids(raw.decode("utf-8", "replace"))
    except DataError as error:
        return str(error)
    for token, number in token_ids(dataset.tokenizer_json()).items():
        if theirs.get(token) != number:
            return (
                f"token {token!r} has the id {number} in the run, and {theirs.get(token, 'none')} in its tokenizer.json"
            )
    return ""
