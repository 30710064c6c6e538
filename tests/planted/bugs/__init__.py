"""The bugs that are planted: small mistakes of the kind that people make, each with the tests that must notice."""

from __future__ import annotations

from tests.planted.bugs import (
    audit,
    checkpoint,
    data,
    launching,
    outcome,
    planning,
    protocol,
    review,
    spec,
    store,
    survivors_of_bits,
    survivors_of_operation,
    sweeps,
    training,
)

AREAS = (
    audit,
    data,
    checkpoint,
    protocol,
    training,
    store,
    spec,
    outcome,
    launching,
    sweeps,
    review,
    planning,
    survivors_of_bits,
    survivors_of_operation,
)
BUGS = [bug for area in AREAS for bug in area.BUGS]
