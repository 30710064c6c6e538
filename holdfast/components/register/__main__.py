"""`python -m holdfast.components.register --spec S --run-id R`: registers the model of a finished, blessed run."""

import sys

from holdfast.components.register.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("register", body))
