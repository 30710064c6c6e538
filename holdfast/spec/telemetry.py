"""The `telemetry` section: what is told of a training while it goes on."""

from __future__ import annotations

from holdfast.spec.section import Section, runtime_field


class Telemetry(Section):
    """What is measured of a training, and to whom it is told."""

    peak_tflops: float | None = runtime_field(
        None,
        "TFLOP/s (dense) of one accelerator at training.precision, of which MFU is a share. None takes the planner's "
        "table; what is not in it is not guessed.",
        gt=0,
    )
    metrics_port: int | None = runtime_field(
        None,
        "Port at which rank 0 serves its figures for Prometheus, and the launcher at the one above. None serves none.",
        ge=1,
        le=65_534,
    )
    metrics_host: str = runtime_field(
        "127.0.0.1",
        "Address of the machine, or pod, that they are served at; `0.0.0.0` for a Prometheus elsewhere. Whoever "
        "reaches it can read them.",
        pattern=r"^[0-9A-Za-z.:-]{1,255}$",
    )
