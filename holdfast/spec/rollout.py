"""The `training.grpo` section: answers that the model generates, their rewards, and how it learns from them."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from holdfast.spec.functions import USE, Function
from holdfast.spec.section import Section, runtime_field

RewardKind = Literal["own", "exact", "number", "regex", "json_schema", "tests", "model"]


class Reward(Function):
    """A reward of an answer: a built-in check that gives 1 or 0, or a function `reward(record, answer)` of your own
    code that returns a number. Keys that are no fields are passed to a function by name."""

    kind: RewardKind = Field(
        "own",
        description="`exact`: the answer is the text in `field`. `number`: the last number of the answer equals that "
        "in `field`. `regex`: the answer has a match of the pattern in `field`. `json_schema`: the answer is JSON "
        "that fits the schema in `field`. `tests`: the code of the answer passes the Python tests in `field`. `own`: "
        "the function `use`. `model`: the number of the reward model `model` at the last token of the answer.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="A reward model: a folder in the Hugging Face layout, `s3://bucket/folder` or `hf://owner/name`, "
        "with the tokenizer of `data.tokenizer`. Its content is part of the run id, and not its place.",
    )
    use: str | None = runtime_field(  # type: ignore[assignment]
        None,
        "Your own reward: a Python file, relative to the folder of the spec, and a function of a record and an answer "
        "in it.",
        pattern=USE,
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum of all rewards.")
    field: str | None = Field(
        None,
        min_length=1,
        description="The key of a record that a built-in reward reads. Default: `tests` for tests, `schema` for "
        "json_schema, `pattern` for regex, else `answer`.",
    )
    timeout_seconds: float = Field(
        5.0, gt=0, le=3600, description="Limit of one answer, in seconds. A reward over it counts as `on_failure`."
    )
    memory_mib: int = Field(1024, ge=64, le=2**20, description="Memory of the process that computes it, in MiB.")
    on_failure: float = Field(
        0.0,
        allow_inf_nan=False,
        description="The reward of an answer on which it exceeds a limit or raises. The cause is recorded.",
    )

    @classmethod
    def _of_text(cls, value: str) -> dict[str, object]:
        return {"use": value} if ":" in value else {"kind": value}

    @property
    def key(self) -> str:
        """The key of a record that a built-in reward reads."""
        defaults: Mapping[str, str] = {"tests": "tests", "json_schema": "schema", "regex": "pattern"}
        return self.field or defaults.get(self.kind, "answer")

    @property
    def title(self) -> str:
        """Its name, for pages and metrics."""
        return self.function_name if self.use else self.kind


class Environment(Function):
    """A function `reply(record, turns)` of your own code that answers the model, such as a tool. `turns` are the texts
    so far: the model's, your reply, the model's. It returns the next text, or None to end the answer. Keys that are no
    fields are passed to it by name."""

    turns: int = Field(4, ge=2, le=1000, description="Maximum number of texts that the model writes in an answer.")
    turn_tokens: int | None = Field(
        None, ge=1, description="Maximum length of a text of the model, in tokens. Default: that of the answer."
    )
    timeout_seconds: float = Field(
        5.0, gt=0, le=3600, description="Limit of one reply, in seconds. An answer whose reply exceeds it ends."
    )
    memory_mib: int = Field(1024, ge=64, le=2**20, description="Memory of the process that computes it, in MiB.")


class AnswerSource(Section):
    """A server with OpenAI's completions API that answers in place of the ranks."""

    software: str = Field(
        ...,
        min_length=1,
        max_length=200,
        description="What generates the answers, such as `vllm-0.32`. It is part of the run id.",
    )
    url: str = runtime_field(
        ..., "Its address with the API's version: `http://host:8000/v1`.", pattern=r"^https?://[^/]"
    )
    weights: str = runtime_field(
        ...,
        "A folder that the ranks and the server share. The weights of each step are written into it, in the folder "
        "`RUN/DIGEST`: the run id, and the digest of the weights. The server must offer them as the model `DIGEST`.",
        min_length=1,
    )
    timeout_seconds: float = runtime_field(
        300.0,
        "Limit of all answers of a step on a rank, in seconds, with the time in which the server loads the weights. "
        "With several ranks it is below `cluster.collective_timeout_minutes`.",
        gt=0,
        le=86400,
    )


class Grpo(Section):
    """Reinforcement learning from rewards (objective grpo). See docs/rl.md."""

    rewards: tuple[Reward, ...] = Field((), max_length=16, description="Rewards of an answer, which are added.")
    group: int = Field(
        8, ge=2, le=4096, description="Answers to each prompt. A step has `global_batch` answers in total."
    )
    answer_tokens: int = Field(
        256, ge=1, le=2**20, description="Maximum length of an answer, in tokens, with the replies of an environment."
    )
    environment: Environment | None = Field(
        None, description="Your function that replies to the model, for answers with several turns and tools."
    )
    server: AnswerSource | None = Field(
        None, description="A server that generates the answers. They are recorded, and a resumed run replays them."
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature of the sampled answers.")
    lot: int = Field(
        8,
        ge=1,
        le=4096,
        description="Prompts whose answers are generated together. A lot never changes, so neither do its bits.",
    )
    normalization: Literal["grpo", "dr_grpo", "dapo"] = Field(
        "dapo",
        description="The divisor of an answer's loss. `dapo`: the tokens of the global batch. `grpo`: the tokens of "
        "the answer, then the number of answers. `dr_grpo`: `answer_tokens` times the number of answers.",
    )
    scale_rewards: bool = Field(True, description="Divide advantages by the standard deviation of their group.")
    clip_low: float = Field(
        0.2, ge=0, le=1, description="Ratios of probabilities below 1 - `clip_low` have no gradient."
    )
    clip_high: float = Field(0.2, ge=0, description="Ratios of probabilities above 1 + `clip_high` have no gradient.")
    kl_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the divergence from the weights of `model.init_from` (estimator k3). 0 needs no "
        "reference model.",
    )
    updates: int = Field(
        1,
        ge=1,
        le=100,
        description="Optimizer steps on the same answers. The first of them generates; later ones compare with its "
        "probabilities.",
    )
    lag: int = Field(
        0,
        ge=0,
        le=1,
        description="Age of the weights that answer, in steps. 0: a step learns from answers of the current weights. "
        "1: from those of the weights one step before, always.",
    )
    keep_steps: int | None = runtime_field(
        None,
        "Delete the records of answers that are more than this many steps older than the oldest checkpoint. Default: "
        "keep all.",
        ge=0,
    )
