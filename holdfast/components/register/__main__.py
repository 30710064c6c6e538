"""`python -m holdfast.components.register --spec S --run-id R`: register the model of a finished, blessed run."""

import sys

from holdfast.components.register.body import body
from holdfast.steps.faces import main

if __name__ == "__main__":
    sys.exit(main("register", body))
