"""`python -m holdfast.components.train --spec SPEC --dataset-id D`: trains a run to its last step."""

import sys

from holdfast.components.train.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("train", body))
