"""The outcome of a verdict: which figures bless a model, and which never do."""

import json
import math
from typing import Any

import pytest

from holdfast.components.evaluate.checks import checks, decide
from holdfast.scoring import Measured, Verdict
from holdfast.scoring.verdict import Opponent
from holdfast.spec.operations import Evaluation

FINE = Measured(loss=2.0, perplexity=math.exp(2), bits_per_byte=1.0, tokens=100, text_bytes=300)


def opponent(bits_per_byte: float) -> Opponent:
    measured = FINE.model_copy(update={"bits_per_byte": bits_per_byte})
    return Opponent(
        registry="here", model="m", version=3, run_id="a" * 16, state_digest="b" * 16, measured=measured,
        note="Scored on the same tokens.",
    )  # fmt: skip


def judged(champion: Opponent | None = None, /, **settings: object) -> tuple[str, str]:
    """The outcome and the first reason."""
    word, reasons = decide(checks(Evaluation.model_validate(settings), FINE, champion))
    return word, reasons[0]


@pytest.mark.parametrize(
    ("field", "bound", "outcome", "sentence"),
    [
        ("min_pass_at_1", 0.72, "blessed", "pass@1 0.7200 reaches the bound 0.72."),
        ("min_pass_at_1", 0.73, "not_blessed", "pass@1 0.7200 does not reach the bound 0.73."),
        ("min_pass_at_k", 0.79, "blessed", "pass@4 0.7900 reaches the bound 0.79."),
        ("min_pass_at_k", 0.8, "not_blessed", "pass@4 0.7900 does not reach the bound 0.8."),
    ],
)
def test_the_shares_of_solved_prompts_have_bounds(field: str, bound: float, outcome: str, sentence: str) -> None:
    measured = FINE.model_copy(update={"pass_at_1": 0.72, "pass_at_k": 0.79})
    results = checks(Evaluation.model_validate({field: bound, "answers": 4}), measured, None)
    assert decide(results)[0] == outcome
    assert sentence in [check.sentence for check in results]


@pytest.mark.parametrize(
    ("field", "value"), [("max_loss", FINE.loss), ("max_perplexity", FINE.perplexity), ("max_bits_per_byte", 1.0)]
)
def test_each_bound_blesses_below_it_and_not_at_it_or_above(field: str, value: float) -> None:
    assert judged(**{field: value * 1.01})[0] == "blessed"
    for bound in (value, value * 0.99 + 0.01 * (field == "max_perplexity")):
        word, reason = judged(**{field: bound})
        assert word == "not_blessed"
        assert "is not below the bound" in reason


def test_without_bounds_a_finite_loss_is_enough() -> None:
    assert judged() == ("blessed", "The held-out loss is 2.0000 nats a token.")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["loss", "perplexity", "bits_per_byte"])
@pytest.mark.parametrize("settings", [{}, {"max_loss": 9, "max_perplexity": 99, "max_bits_per_byte": 9}])
@pytest.mark.parametrize("champion", [None, opponent(1.5), opponent(math.nan), opponent(math.inf)])
def test_a_metric_that_is_not_finite_is_never_blessed(
    bad: float, field: str, settings: dict[str, int], champion: Opponent | None
) -> None:
    results = checks(Evaluation.model_validate(settings), FINE.model_copy(update={field: bad}), champion)
    assert decide(results)[0] == "not_blessed"
    assert not any(check.passed for check in results if not math.isfinite(check.value)), "every check by itself"


@pytest.mark.parametrize(
    ("settings", "theirs", "word"),
    [
        ({"versus_champion": "not_worse"}, 1.0, "blessed"),
        ({"versus_champion": "not_worse"}, 1.1, "blessed"),
        ({"versus_champion": "not_worse"}, 0.99, "not_blessed"),
        ({"versus_champion": "not_worse", "champion_tolerance": 0.02}, 0.99, "blessed"),
        ({"versus_champion": "not_worse", "champion_tolerance": 0.02}, 0.97, "not_blessed"),
        ({"versus_champion": "better"}, 1.0, "not_blessed"),
        ({"versus_champion": "better"}, 1.0001, "blessed"),
        ({"versus_champion": "better", "champion_tolerance": 0.5}, 0.99, "not_blessed"),
        ({"versus_champion": "better"}, math.nan, "blessed"),
    ],
)
def test_the_comparison_with_the_champion_follows_the_settings(
    settings: dict[str, Any], theirs: float, word: str
) -> None:
    assert judged(opponent(theirs), **settings)[0] == word


def test_the_reasons_name_every_check_and_begin_with_what_failed() -> None:
    results = checks(Evaluation(max_loss=3.0, max_bits_per_byte=0.5), FINE, opponent(0.9))
    word, reasons = decide(results)
    assert word == "not_blessed"
    assert [check.name for check in results] == ["finite", "max_loss", "max_bits_per_byte", "versus_champion"]
    assert reasons == (
        "Bits per byte 1.0000 is not below the bound 0.5.",
        "1.0000 bits per byte against 0.9000 of the champion m version 3 on the same text: not at most 0.9000.",
        "The held-out loss is 2.0000 nats a token.",
        "Held-out loss 2.0000 is below the bound 3.",
    )


def test_a_verdict_with_nan_survives_json() -> None:
    broken = FINE.model_copy(update={"loss": math.nan, "perplexity": math.inf})
    results = checks(Evaluation(), broken, opponent(math.nan))
    word, reasons = decide(results)
    verdict = Verdict(
        word=word, reasons=reasons, checks=results, metrics=broken.figures, champion=opponent(math.nan),
        run_id="r", dataset_id="d", step=1, checkpoint="c", export="e", export_digest="x", state_digest="s", key="k",
        settings=Evaluation(), device="cpu",
    )  # fmt: skip
    json.loads(verdict.dump(), parse_constant=pytest.fail)  # strict JSON: no bare NaN
    reloaded = Verdict.model_validate_json(verdict.dump())
    assert reloaded.dump() == verdict.dump()
    assert math.isnan(reloaded.metrics["loss"])
    assert reloaded.metrics["tokens"] == 100
    assert reloaded.champion is not None and isinstance(reloaded.champion.measured, Measured)
    assert math.isnan(reloaded.champion.measured.bits_per_byte)
