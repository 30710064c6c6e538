"""`python -m holdfast.components.train`: train a run to its end, from wherever it is."""

from __future__ import annotations

import sys
from typing import Any

from holdfast.components.runtime.argv import step_parser
from holdfast.components.runtime.shell import run_main
from holdfast.components.spec import Spec
from holdfast.components.store import open_store
from holdfast.components.store.jobs import recorder
from holdfast.components.train import run


def main() -> int:
    """Entry point."""
    parser = step_parser("Train the model that a spec describes; resumes from the newest checkpoint that verifies.")
    parser.add_argument("--dataset-id", required=True, help="the dataset, as printed by holdfast.components.preprocess")
    parser.add_argument("--salt", default="", help="makes it another run with the same inputs")
    parser.add_argument(
        "--replan", action="store_true", help="go on although the plan is not that of the attempts before"
    )
    arguments = parser.parse_args()

    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        result = run(spec, arguments.dataset_id, open_store(url), arguments.salt, replan=arguments.replan)
        return result.model_dump(mode="json"), result.run_id

    return run_main("train", arguments, body, recorder(arguments.job))


if __name__ == "__main__":
    sys.exit(main())
