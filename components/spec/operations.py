"""The `cluster`, `evaluation`, `registration` and `schedule` sections: where a run runs and what happens around it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.spec.section import Section, knob


class Nodes(Section):
    """How many machines train together. `min` below `max` asks for elastic training."""

    min: int = knob(1, "Fewest nodes to start with.", ge=1, le=100_000)
    max: int = Field(1, ge=1, le=100_000, description="Most nodes to use.")


class Resources(Section):
    """What each node of the training job asks for."""

    cpu: str = knob("4", "CPU cores, as a Kubernetes quantity.")
    memory: str = knob("16Gi", "Memory, as a Kubernetes quantity.")
    shared_memory: str = knob("8Gi", "Size of /dev/shm, as a Kubernetes quantity.")


class Restarts(Section):
    """How often a failed gang is started again before the run is given up."""

    budget: int = knob(
        10, "Restarts allowed within `window_minutes`; a checkpoint in between does not refill it.", ge=0
    )
    window_minutes: float = knob(60.0, "Length of the sliding window, in minutes.", gt=0)
    backoff_seconds: float = knob(1.0, "Wait before the second restart in a row; doubles up to one minute.", ge=0)


class Cluster(Section):
    """Where the training job runs. Only the accelerator and the number of nodes influence the weights."""

    accelerator: Literal["cpu", "nvidia", "amd", "ascend", "gaudi"] = Field("cpu", description="Kind of accelerator.")
    nodes: Nodes = Field(default_factory=Nodes, description="Machines that train together.")
    resources: Resources = Field(default_factory=Resources, description="What each node asks for.")
    restarts: Restarts = Field(default_factory=Restarts, description="Restart budget of the training job.")
    namespace: str | None = knob(None, "Kubernetes namespace; none takes the one of the pipeline run.")
    image: str | None = knob(None, "Image of the training job; none takes the one of the accelerator.")
    scheduler: Literal["default", "volcano", "kueue"] = knob("default", "Who places the pods.")
    queue: str | None = knob(None, "Volcano or Kueue queue.")
    priority_class: str | None = knob(None, "Kubernetes priority class.")


class Evaluation(Section):
    """What is measured on the held-out split, and what a model must reach to be blessed."""

    max_tokens: int = knob(500_000, "Held-out tokens to score at most; the same ones for every model.", ge=1)
    max_loss: float | None = knob(None, "Bless only below this mean loss, in nats a token.", gt=0)
    max_perplexity: float | None = knob(None, "Bless only below this perplexity.", gt=1)
    max_bits_per_byte: float | None = knob(None, "Bless only below this many bits for each byte of text.", gt=0)
    versus_champion: Literal["not_worse", "better", "ignore"] = knob(
        "not_worse", "How the model must compare with the champion on the same held-out data, in bits per byte."
    )
    champion_tolerance: float = knob(
        0.0, "`not_worse` allows this much more bits per byte than the champion, as a share of its value.", ge=0, lt=1
    )
    prompts: tuple[str, ...] = knob((), "Prompts to continue in the report.", max_length=50)
    sample_tokens: int = knob(64, "Length of each continuation, in tokens.", ge=1, le=4096)
    temperature: float = knob(0.8, "Sampling temperature; 0 always takes the likeliest token.", ge=0, le=10)
    tasks: tuple[str, ...] = knob((), "Downstream tasks to score.")


class Registration(Section):
    """Where the model is registered."""

    model: str | None = knob(None, "Name of the registered model; none takes the spec's name.")
    experiment: str | None = knob(None, "MLflow experiment; none takes the spec's name.")
    promote: bool = knob(True, "Move the `champion` alias to a blessed model; else it becomes `challenger`.")


class Retraining(Section):
    """When the pipeline runs by itself."""

    cron: str | None = knob(None, "Five-field cron expression.")
    every_minutes: int | None = knob(None, "Interval between two runs, in minutes.", ge=1)
    timezone: str = knob("UTC", "IANA time zone of `cron`.")
    starting_deadline_seconds: int = knob(600, "A run that could not start for so long is skipped, in seconds.", ge=0)
