"""`python -m holdfast.components.compare --spec S --dataset-id D --trials JSON`: compare the trials of a sweep."""

import sys

from holdfast.components.compare.body import body
from holdfast.steps.faces import main

if __name__ == "__main__":
    sys.exit(main("compare", body))
