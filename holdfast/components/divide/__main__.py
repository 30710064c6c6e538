"""`python -m holdfast.components.divide --spec SPEC`: divides the corpus of a spec among workers."""

import sys

from holdfast.components.divide.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("divide", body))
