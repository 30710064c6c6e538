"""`python -m holdfast.components.compare --spec S --dataset-id D --trials JSON`: compares the trials of a sweep."""

import sys

from holdfast.components.compare.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("compare", body))
