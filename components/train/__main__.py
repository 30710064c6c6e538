"""`python -m components.train`: train a run to its end, from wherever it is."""

import sys

from components.spec.step import configure_logging, exit_code_of, publish, spec_and_store, step_parser


def main() -> int:
    """Entry point."""
    parser = step_parser("Train the model that a spec describes; resumes from the newest checkpoint that verifies.")
    parser.add_argument("--dataset-id", required=True, help="the dataset, as printed by components.preprocess")
    parser.add_argument("--salt", default="", help="makes it another run with the same inputs")
    arguments = parser.parse_args()
    configure_logging()

    def body() -> None:
        from components.store import open_store
        from components.train import run

        spec, store_url = spec_and_store(arguments)
        result = run(spec, arguments.dataset_id, open_store(store_url), arguments.salt)
        publish(result.model_dump(mode="json"), arguments.output)

    return exit_code_of(body)


if __name__ == "__main__":
    sys.exit(main())
