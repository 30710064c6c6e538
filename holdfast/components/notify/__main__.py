"""`python -m holdfast.components.notify --status failed`: reports the outcome of a DAG. The exit code is always 0."""

import sys

from holdfast.components.notify.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("notify", body))
