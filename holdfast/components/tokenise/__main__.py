"""`python -m holdfast.components.tokenise --spec SPEC --division NAME --share I/N`: tokenizes one share of a corpus."""

import sys

from holdfast.components.tokenise.entrypoint import body
from holdfast.steps.adapters import main

if __name__ == "__main__":
    sys.exit(main("tokenise", body))
