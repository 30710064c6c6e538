"""`python -m holdfast.components.preprocess --spec SPEC`: prepares the dataset of a spec."""

import sys

from holdfast.components.preprocess.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("preprocess", body))
