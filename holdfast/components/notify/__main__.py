"""`python -m holdfast.components.notify --status failed`: say what became of a DAG. Always ends with 0."""

import sys

from holdfast.components.notify.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("notify", body))
