"""`python -m holdfast.components.train --spec SPEC --dataset-id D`: train a run to its end, from wherever it is."""

import sys

from holdfast.components.steps.faces import main
from holdfast.components.train.body import body

if __name__ == "__main__":
    sys.exit(main("train", body))
