"""A node with very many modules: searching them for a caller's name takes it about a second, as on a busy machine."""

from __future__ import annotations

import sys
from types import ModuleType

from holdfast.launch import torchrun

MODULES = 50_000


def main() -> int:
    for number in range(MODULES):
        module = ModuleType(f"crowd_{number}")
        module.__file__ = f"/crowd/{number}.py"
        sys.modules[module.__name__] = module
    return torchrun.main()


if __name__ == "__main__":
    sys.exit(main())
