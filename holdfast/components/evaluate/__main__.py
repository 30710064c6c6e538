"""`python -m holdfast.components.evaluate --spec S --run-id R`: scores a finished run and decides whether it is
blessed."""

import sys

from holdfast.components.evaluate.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("evaluate", body))
