"""torchrun with an exit code that means something: run as `python -m components.launch.torchrun [flags] -m module …`.

Takes torchrun's own flags and PET_ variables, so a PyTorchJob configures it as it configures torchrun.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from components.launch.ending import FOLDER_VARIABLE, as_exit_code, root_cause
from components.launch.orphan import die_with_parent
from components.spec.errors import ExitCode


def main(arguments: list[str]) -> int:
    """Run the gang's processes on this node; the code of the table that explains how they ended."""
    die_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        codes: list[int] = []
        try:
            run(parse_args(arguments))
        except ChildFailedError as error:
            codes = [as_exit_code(failure.exitcode) for failure in error.failures.values()]
        except SignalException as error:
            codes = [128 + int(error.sigval)]
        recorded = [int(path.read_text() or ExitCode.UNEXPECTED) for path in Path(folder).iterdir()]
        if recorded and codes and all(code == ExitCode.TERMINATED for code in codes):
            codes = []  # torchrun was told to stop, and the ranks said how they left
        return root_cause(codes + recorded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
