"""`python -m holdfast.components.preprocess --spec SPEC`: prepare the dataset of a spec."""

import sys

from holdfast.components.preprocess.body import body
from holdfast.steps.faces import main

if __name__ == "__main__":
    sys.exit(main("preprocess", body))
