"""`python -m holdfast.components.trigger --spec SPEC`: whether a retraining is due. The result has the word."""

import sys

from holdfast.components.trigger.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("trigger", body))
