"""`python -m holdfast.components.trigger --spec SPEC`: whether a retraining is due. The result has the word."""

import sys

from holdfast.components.steps.faces import main
from holdfast.components.trigger.body import body

if __name__ == "__main__":
    sys.exit(main("trigger", body))
