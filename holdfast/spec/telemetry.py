"""The `telemetry` section: metrics of a training run."""

from __future__ import annotations

from holdfast.spec.section import Section, runtime_field


class Telemetry(Section):
    """Metrics of a training run, and where they are served."""

    peak_tflops: float | None = runtime_field(
        None,
        "Dense TFLOP/s of one accelerator at `training.precision`, the base of MFU. Default: the planner's table. An "
        "accelerator that is not in the table has no MFU.",
        gt=0,
    )
    metrics_port: int | None = runtime_field(
        None,
        "Port at which rank 0 serves its metrics for Prometheus. The launcher uses the next port. Default: no metrics.",
        ge=1,
        le=65_534,
    )
    metrics_host: str = runtime_field(
        "127.0.0.1",
        "Address of the machine or pod for the metrics; `0.0.0.0` for Prometheus on another machine. Everyone who can "
        "reach it can read them.",
        pattern=r"^[0-9A-Za-z.:-]{1,255}$",
    )
