"""`python -m holdfast.components.tokenise --spec SPEC --division NAME --share I/N`: tokenizes one share of a corpus."""

import sys

from holdfast.components.tokenise import run
from holdfast.spec import Spec
from holdfast.steps import StepResult
from holdfast.steps.adapters import main
from holdfast.store import open_store

# Entry point of the tokenise step in a DAG.


def body(spec: Spec, url: str, division: str, share: str) -> StepResult:
    """Tokenize one share. The result is `Tokenised`."""
    tokenised = run(spec, open_store(url), division, share)
    summary = f"share {share}: {tokenised.units} units, {tokenised.units_reused} of them were there"
    return StepResult(tokenised.model_dump(mode="json"), summary=summary)


if __name__ == "__main__":
    sys.exit(main("tokenise", body))
