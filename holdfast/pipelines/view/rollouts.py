"""`holdfast rollouts`: the recorded answers of a step, as a table in the terminal or as a page."""

from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.pages import render
from holdfast.pipelines.documents import write_whole
from holdfast.pipelines.view.report import WIDE
from holdfast.pipelines.view.terminal import SafeConsole
from holdfast.rollouts.records import Answer, LotRecord, recorded_steps, records_of_step
from holdfast.runtime.environment import cache_dir
from holdfast.spec.errors import MissingError
from holdfast.spec.tree import Spec
from holdfast.store import Store

SHOWN_CHARACTERS = 200  # of an answer, in the terminal


@dataclass(frozen=True)
class ShownAnswer:
    """One answer."""

    text: str
    tokens: int
    ending: str  # stop or length
    entropy: float | None  # nats a token; None if a server generated it
    rewards: dict[str, float]  # by name
    errors: dict[str, str]  # of the rewards, or the environment, that failed
    reward: float  # the weighted sum
    advantage: float


@dataclass(frozen=True)
class ShownUnit:
    """The answers to one prompt."""

    prompt: str
    number: int
    answers: list[ShownAnswer]


@dataclass(frozen=True)
class Rollouts:
    """The answers that a step learned from."""

    run_id: str
    step: int  # the first step that learned from them
    policy: str  # digest of the weights that generated them
    units: list[ShownUnit]


def rollouts_of(store: Store, spec: Spec, run_id: str, dataset_id: str, step: int | None = None) -> Rollouts:
    """The answers that `step` learned from; default: the newest ones. Raises MissingError if there are none."""
    from holdfast.rollouts.advantages import advantages_of

    settings = spec.training.grpo
    steps = recorded_steps(store, run_id)
    if not steps:
        raise MissingError(f"run {run_id}: has no recorded answers; they exist with training.objective: grpo")
    first = steps[-1] if step is None else step - (step - 1) % settings.updates
    if first not in steps:
        known = f"{steps[0]} to {steps[-1]}"
        raise MissingError(f"run {run_id}: has no answers of step {step}; it has those of steps {known}")
    newest: dict[int, LotRecord] = {record.lot: record for record in records_of_step(store, run_id, first)}
    dataset = Dataset.open(store, dataset_id, cache_dir())
    prompts, tokenizer = dataset.prompts(), load_tokenizer(dataset.tokenizer_json())
    names = [f"{number}.{reward.title}" for number, reward in enumerate(settings.rewards)]
    units = []
    for unit in (unit for _, record in sorted(newest.items()) for unit in record.units):
        advantages = advantages_of([answer.reward for answer in unit.answers], settings.scale_rewards).tolist()
        answers = [
            ShownAnswer(
                text=tokenizer.decode(answer.tokens, skip_special_tokens=False),
                tokens=len(answer.tokens),
                ending=answer.ending,
                entropy=answer.entropy,
                rewards=dict(zip(names, answer.rewards, strict=True)),
                errors=_errors(answer, names),
                reward=answer.reward,
                advantage=advantage,
            )
            for answer, advantage in zip(unit.answers, advantages, strict=True)
        ]
        text = tokenizer.decode(prompts[unit.prompt].tokens, skip_special_tokens=False)
        units.append(ShownUnit(text, unit.prompt, answers))
    return Rollouts(run_id, first, next(iter(newest.values())).policy, units)


def _errors(answer: Answer, names: list[str]) -> dict[str, str]:
    named = {"environment": answer.environment_error, **dict(zip(names, answer.errors, strict=True))}
    return {name: error for name, error in named.items() if error}


def print_rollouts(found: Rollouts) -> None:
    """Print each prompt with its answers."""
    console = SafeConsole(width=WIDE)
    console.print(f"run {found.run_id}, step {found.step:,}: answers of the weights {found.policy[:16]}")
    for unit in found.units:
        console.print(f"\n[bold]prompt {unit.number}[/bold]: {escape(repr(unit.prompt))}", highlight=False)
        table = Table("answer", "ended by", "reward", "advantage", box=None, pad_edge=False)
        for answer in unit.answers:
            text = repr(answer.text)
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
            failed = "".join(f"; {name} {error}" for name, error in answer.errors.items())
            table.add_row(
                escape(shown), answer.ending, escape(f"{answer.reward:g}{failed}"), f"{answer.advantage:+.3f}"
            )
        console.print(table)


def write_page(found: Rollouts, path: Path) -> Path:
    """Write the HTML page. Raises as `write_whole`."""
    page = render("rollouts.html", found=found, page=f"{found.run_id} · answers of step {found.step}")
    write_whole(path, page)
    return path.absolute()
