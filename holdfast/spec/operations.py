"""The `evaluation`, `registration` and `schedule` sections: what happens around the training of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints

from holdfast.spec.section import Section, runtime_field

# A name that MLflow takes, and that `holdfast generate NAME@ALIAS` and `NAME/VERSION` can be read from.
RegistryName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_. -]{0,198}[A-Za-z0-9_])?$")]


class Task(Section):
    """A downstream task: a file in the format of lm-evaluation-harness, with its data files beside it."""

    uri: str = runtime_field(
        ..., "The task file: a path, or a key such as `s3://bucket/tasks/arithmetic.yaml`.", min_length=1
    )
    metric: str = runtime_field("acc", "Which of the task's figures counts.", min_length=1)
    bound: float | None = runtime_field(None, "Bless only at this figure or a better one.")
    champion_tolerance: float | None = runtime_field(
        None, "Bless only when the figure is at most this much worse than the champion's.", ge=0
    )
    shots: int = runtime_field(0, "Solved examples before each question.", ge=0, le=100)
    examples: int | None = runtime_field(None, "Only so many of the first questions; none asks all.", ge=1)


class Evaluation(Section):
    """What is measured on the held-out split, and what a model must reach to be blessed."""

    max_tokens: int = runtime_field(500_000, "Held-out tokens to score at most; the same ones for every model.", ge=1)
    max_loss: float | None = runtime_field(None, "Bless only below this mean loss, in nats a token.", gt=0)
    max_perplexity: float | None = runtime_field(None, "Bless only below this perplexity.", gt=1)
    max_bits_per_byte: float | None = runtime_field(
        None, "Bless only below this many bits for each byte of text.", gt=0
    )
    versus_champion: Literal["not_worse", "better", "ignore"] = runtime_field(
        "not_worse", "How the model must compare with the champion on the same held-out data, in bits per byte."
    )
    champion_tolerance: float = runtime_field(
        0.0, "`not_worse` allows this much more bits per byte than the champion, as a share of its value.", ge=0, lt=1
    )
    unscorable_champion: Literal["refuse", "ignore"] = runtime_field(
        "refuse",
        "What happens when the champion cannot be scored (its exported model is gone or damaged, or cannot read the "
        "text): the step ends with code 8, or the model is judged without a comparison.",
    )
    prompts: tuple[str, ...] = runtime_field((), "Prompts to continue in the report.", max_length=50)
    sample_tokens: int = runtime_field(64, "Length of each continuation, in tokens.", ge=1, le=4096)
    temperature: float = runtime_field(0.8, "Sampling temperature; 0 always takes the likeliest token.", ge=0, le=10)
    tasks: tuple[Task, ...] = runtime_field((), "Downstream tasks to score.", max_length=100)


class Registration(Section):
    """Where the model is registered."""

    model: RegistryName | None = runtime_field(None, "Name of the registered model; none takes the spec's name.")
    experiment: str | None = runtime_field(
        None, "MLflow experiment; none takes the spec's name.", min_length=1, max_length=200
    )
    promote: bool = runtime_field(True, "Move the `champion` alias to a blessed model; else it becomes `challenger`.")
    trusted_stores: tuple[str, ...] = runtime_field(
        (),
        "Other stores (URLs) whose registrations count as well: a champion that was registered from one of them is "
        "compared with and served. Of all other stores than the run's own a version is foreign, and not used.",
        max_length=10,
    )


MINUTES_A_YEAR = 365 * 24 * 60


class Retraining(Section):
    """When the pipeline runs by itself, and what makes a retraining due once it does.

    Without a champion one is always due. With the champion's data and spec it never is: the same model would come out.
    """

    cron: str | None = runtime_field(
        None,
        "Cron expression: minute, hour, day of the month, month, weekday. Numbers, names (jan-dec, sun-sat), "
        "and lists, ranges and steps of them.",
        max_length=200,
    )
    every_minutes: int | None = runtime_field(
        None, "Interval between two runs, in minutes; a year at most.", ge=1, le=MINUTES_A_YEAR
    )
    timezone: str = runtime_field("UTC", "IANA time zone of `cron`.")
    starting_deadline_seconds: int = runtime_field(
        600, "A run that could not start for so long is skipped, in seconds.", ge=0, le=31_536_000
    )
    on_new_data: bool = runtime_field(
        True, "Retrain when the sources give another dataset than the champion learned from."
    )
    on_changed_spec: bool = runtime_field(
        True, "Retrain when the spec would give another model of the champion's dataset."
    )
    max_age_hours: float | None = runtime_field(
        None, "Retrain a champion that was registered so long ago, in hours, if anything has changed since.", gt=0
    )
    max_decay: float | None = runtime_field(
        None,
        "Retrain when the champion needs this much more bits per byte on the held-out text of the sources as they are "
        "now than it did when it was blessed, as a share.",
        ge=0,
    )
