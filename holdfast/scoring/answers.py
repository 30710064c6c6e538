"""Answers of an exported model to held-out prompts: pass@1, pass@k and the mean reward."""

from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.rewards.process import RewardProcess
from holdfast.rollouts.generation import LotGenerator, sampling_of
from holdfast.rollouts.reward_models import RewardModels
from holdfast.rollouts.turns import LiveReplies, Texts
from holdfast.scoring.models import ExportedModel
from holdfast.spec.tree import Spec

SEED = 0  # of the sampled answers: the same numbers for every model


def score_answers(
    spec: Spec, model: ExportedModel, dataset: Dataset, code: str, first_weights: str = ""
) -> dict[str, float]:
    """The fields of `Measured` from the rewards of sampled answers to the first held-out prompts. `code` is the folder
    of the bundle of user code. `first_weights` has the digests of the weights that the run read. Raises DataError for a
    prompt that leaves no room for an answer, and for a reward model with other weights."""
    settings, evaluation = spec.training.grpo, spec.evaluation
    prompts = dataset.prompts("validation")
    length = prompts.require_room(settings.answer_tokens, spec.model.context)
    end = dataset.end_of_text
    texts = Texts(load_tokenizer(dataset.tokenizer_json()), end)
    sampling = sampling_of(settings, evaluation.answers, SEED, end)
    count, solved, solved_prompts, total = min(len(prompts), evaluation.max_prompts), 0, 0, 0.0
    environment, device = settings.environment, model.decoder.model.embed_tokens.weight.device
    models = RewardModels(spec.training, dataset, length + settings.answer_tokens, device, first_weights)
    generator = LotGenerator(model.decoder)
    with RewardProcess(settings.rewards, code, environment) as rewards:
        for first in range(0, count, settings.lot):
            lot = [prompts[number] for number in range(first, min(first + settings.lot, count))]
            places = [prompt.number for prompt in lot]
            replies = None
            if environment is not None:
                replies = LiveReplies(rewards, [prompt.record for prompt in lot], texts, environment.turns)
            generated = generator.generate([prompt.tokens for prompt in lot], places, sampling, replies)
            for prompt, answers in zip(lot, generated, strict=True):
                values = []
                for answer in answers:
                    given = models.values(prompt.tokens, answer.tokens)
                    scored = rewards.score(*texts.scored(prompt.record, answer.tokens, answer.replies), given)
                    values.append(scored.total(settings.rewards))
                right = sum(value >= evaluation.solved_reward for value in values)
                solved, solved_prompts, total = solved + right, solved_prompts + (right > 0), total + sum(values)
    asked = count * evaluation.answers
    return {"pass_at_1": solved / asked, "pass_at_k": solved_prompts / count, "mean_reward": total / asked}
