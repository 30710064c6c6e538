"""A node with very many modules: searching them for a caller's name takes it about a second, as on a busy machine.

It writes one byte for each time that its agent has looked for waiting nodes, which interrupt the gang.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from holdfast.launch import torchrun

MODULES = 50_000
LOOKS = "looks-*"


def count_looks(folder: Path) -> None:
    look = DynamicRendezvousHandler.num_nodes_waiting

    def counted(handler: DynamicRendezvousHandler) -> int:
        waiting = look(handler)
        with (folder / LOOKS.replace("*", str(os.getpid()))).open("ab") as looks:
            looks.write(b".")
        return waiting

    DynamicRendezvousHandler.num_nodes_waiting = counted  # type: ignore[method-assign, assignment]


def main() -> int:
    count_looks(Path(os.environ["FOLDER"]))
    for number in range(MODULES):
        module = ModuleType(f"crowd_{number}")
        module.__file__ = f"/crowd/{number}.py"
        sys.modules[module.__name__] = module
    return torchrun.main()


if __name__ == "__main__":
    sys.exit(main())
