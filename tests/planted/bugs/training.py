"""What could go wrong with the model and its training."""

from __future__ import annotations

from tests.planted.bug import Bug

_ENGINES = "tests/train/test_engines.py tests/golden"
_ANOMALIES = "tests/train/test_anomalies.py"

BUGS = [
    Bug(
        "components/train/cadence.py",
        "self._gang.any_later(self._gang.rank == 0 and self._time_has_come(now))",
        "self._gang.any_later(self._time_has_come(now))",
        "tests/train/test_cadence.py",
        "the cadence of saves would follow the clock of whichever rank runs ahead",
    ),
    Bug(
        "components/train/cadence.py",
        "self._stall + max(0.0, sum(self._durations) - usual)",
        "self._stall",
        "tests/train/test_cadence.py",
        "the cadence would count only what a save stalls, not what it slows down",
    ),
    Bug(
        "components/train/engines/deepspeed/engine.py",
        "parameter.ds_tensor.copy_(self._partition(parameter, None))",
        "parameter.ds_tensor.copy_(parameter.ds_tensor)",
        "tests/train/test_engines.py",
        "ZeRO 3 would compute with the weights from before the load",
    ),
    Bug(
        "components/train/schedule.py",
        "peak * (step + 1) / schedule.warmup_steps",
        "peak * step / schedule.warmup_steps",
        "tests/train/test_schedule.py",
        "the first step would learn nothing",
    ),
    Bug(
        "components/train/schedule.py",
        "training.steps - 1 - schedule.warmup_steps",
        "training.steps - schedule.warmup_steps",
        "tests/train/test_schedule.py",
        "the last step would not reach the final rate",
    ),
    Bug(
        "components/train/randomness.py",
        r"\0{step}\0{rank}",
        r"\0{rank}",
        "tests/train tests/golden",
        "the same random numbers in every step",
    ),
    Bug(
        "components/train/cadence.py",
        "agreed or done == self._steps or self._by_steps(done)",
        "agreed or self._by_steps(done)",
        "tests/train/test_cadence.py",
        "the last step would not be saved",
    ),
    Bug(
        "components/train/observers.py",
        "not (math.isfinite(loss) and math.isfinite(norm)):",
        "math.isnan(loss):",
        "tests/train",
        "an infinite norm would be taken for training",
    ),
    Bug(
        "components/train/observers.py",
        '< row["step"] <= step]',
        '< row["step"] <= step + 1]',
        "tests/train",
        "rows of steps that no checkpoint covers would be written",
    ),
    Bug(
        "components/model/initialise.py",
        "math.sqrt(2 * model.layers)",
        "math.sqrt(model.layers)",
        "tests/model tests/golden",
        "the residual stream would grow with depth",
    ),
    Bug(
        "components/model/initialise.py",
        'f"initialise\\0{seed}\\0{name}\\0{block}"',
        'f"initialise\\0{seed}\\0{name}"',
        "tests/model",
        "the blocks of a large tensor would be equal",
    ),
    Bug(
        "components/model/rotary.py",
        "torch.cat((-second, first), dim=-1)",
        "torch.cat((second, first), dim=-1)",
        "tests/model",
        "no rotation",
    ),
    Bug(
        "components/model/decoder.py",
        "ends_BT.cumsum(dim=1) - ends_BT.long()",
        "ends_BT.cumsum(dim=1)",
        "tests/model",
        "an end-of-text token is part of what it ends",
    ),
    Bug(
        "components/model/decoder.py",
        "(back_TS >= 0)[None, None]",
        "(back_TS < end)[None, None]",
        "tests/model",
        "attention would see the future",
    ),
    Bug(
        "components/train/engines/torch/context.py",
        "chunks.select(-3, 1).flip(0)",
        "chunks.select(-3, 1)",
        "tests/train/test_context.py",
        "keys would stand at positions that are not theirs",
    ),
    Bug(
        "components/train/engines/torch/adamw.py",
        '"weight_decay": weight_decay if matrix else 0.0}',
        '"weight_decay": weight_decay}',
        _ENGINES,
        "norms do not decay",
    ),
    Bug(
        "components/train/anomalies.py",
        "dist.all_reduce(seen, dist.ReduceOp.MAX)",
        "pass",
        _ANOMALIES,
        "anomalies: each rank would decide for itself",
    ),
    Bug(
        "components/train/anomalies.py",
        "held = odd | pardoned | self._blocked",
        "held = odd | pardoned",
        _ANOMALIES,
        "anomalies: what was computed from a state that goes would count",
    ),
    Bug(
        "components/train/loop.py",
        "due = cadence.due(done) or leaving or anomalies.saves(done)",
        "due = cadence.due(done) or leaving",
        _ANOMALIES,
        "anomalies: a rewind would find no checkpoint",
    ),
    Bug(
        "components/train/engines/torch/adamw.py",
        "tensor.copy_(torch.where(held.bool(), old, tensor))",
        "pass",
        _ANOMALIES,
        "anomalies: an update that is held back would be applied to shards",
    ),
    Bug(
        "components/train/engines/torch/scaling.py",
        "self.scale.fill_(float(scalars.get(SCALE, self._first)))",
        "self.scale.fill_(self._first)",
        _ANOMALIES,
        "anomalies: a resumed run would begin with the first loss scale again",
    ),
    Bug(
        "components/spec/sizes.py",
        "return firsts[level] + (step - begins[level]) * sizes[level]",
        "return step * sizes[level]",
        "tests/train/test_batch_ramp.py",
        "a batch that grew would skip samples",
    ),
    Bug(
        "components/train/engines/torch/compression.py",
        "self._state.rng = np.random.RandomState(torch.initial_seed() % 2**32)",
        "pass",
        "tests/train/test_compression.py",
        "the projections of a resumed run would be those of its first steps",
    ),
]
