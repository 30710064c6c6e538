"""`python -m holdfast.components.trigger --spec SPEC`: decides whether a retraining is due. The result has the
outcome."""

import sys

from holdfast.components.trigger.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("trigger", body))
