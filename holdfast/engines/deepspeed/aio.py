"""DeepSpeed's asynchronous I/O operators, compiled from its sources once per machine.

DeepSpeed's builder compiles in every rank behind a lock file. All other ranks wait for it, and forever if the holder
was killed. Here the kernel releases the lock with the process, and a finished library is moved into place by one
rename. Nothing is compiled for an accelerator, because these operators do not touch its memory.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root, include_paths, library_paths

from holdfast.engines.deepspeed.swap import locked
from holdfast.spec.errors import MissingError

log = logging.getLogger("holdfast.train")

REMEDY = "install g++ and libaio-dev (yum: gcc-c++ and libaio-devel), or leave parallel.offload_path out"


def load_async_io(handle: Callable[[Any], Any]) -> None:
    """Let DeepSpeed find its operators already built, and wrap each handle that it creates with `handle`. Raises
    MissingError if they cannot be built."""
    import deepspeed
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    sources = Path(deepspeed.__file__).parent / "ops"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()  # torch's folder for compiled extensions
    folder = Path(root) / f"holdfast-deepspeed-{deepspeed.__version__}-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):  # the second one needs the first one's symbols
        library = folder / f"{builder.NAME}.so"
        with locked(folder / "lock"):
            if not library.exists():
                _compile(builder.NAME, [sources / source for source in builder.sources()], sources / "csrc", library)
        OpBuilder._loaded_ops[builder.NAME] = _imported(builder.NAME, library)
        builder.load()
    original = OpBuilder._loaded_ops[AsyncIOBuilder.NAME].aio_handle
    OpBuilder._loaded_ops[AsyncIOBuilder.NAME] = SimpleNamespace(
        aio_handle=lambda **options: handle(original(**options))
    )


def _imported(name: str, library: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, library)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _included(source: Path, number: int) -> str:
    """An include of a source that shares a file with sources whose constants have the same names."""
    own = ("c_library_name", "c_block_size", "c_io_queue_depth")
    lines = [f"#define {name} {name}_{number}" for name in own]
    return "\n".join([*lines, f'#include "{source}"', *(f"#undef {name}" for name in own), ""])


def _compile(name: str, sources: list[Path], tree: Path, library: Path) -> None:
    """Compile all sources as one unit, because torch's headers take much longer than they do: 20 seconds of one
    core."""
    log.info("compiling DeepSpeed's %s, once for this machine", name)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{name}-") as work:
        copy, built = Path(work) / "csrc", Path(work) / "built.so"
        for part in ("aio", "pin_memory"):
            shutil.copytree(tree / part, copy / part)
        for header in copy.rglob("*.h"):  # some have no guard, since each is included only once there
            header.write_text(f"#pragma once\n{header.read_text()}")
        unit_file = copy / "whole.cpp"
        unit_file.write_text("".join(_included(copy / path.relative_to(tree), n) for n, path in enumerate(sources)))
        folders = [copy / "aio/py_lib", copy / "aio/common", copy / "pin_memory", sysconfig.get_paths()["include"]]
        command = [
            *"g++ -shared -fPIC -std=c++20 -O1 -fopenmp -DTORCH_API_INCLUDE_EXTENSION_H".split(),
            f"-DTORCH_EXTENSION_NAME={name}",
            *(f"-I{path}" for path in folders),
            *(f"-isystem{path}" for path in include_paths()),
            *(str(unit_file), "-o", str(built)),
            *(f"-L{path}" for path in library_paths()),
            *"-lc10 -ltorch_cpu -ltorch -ltorch_python".split(),
            *(["-laio"] if name == "async_io" else []),
        ]
        try:
            result = subprocess.run(command, check=False, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise MissingError(
                f"parallel.offload_path: DeepSpeed's {name} needs a compiler ({error}); {REMEDY}"
            ) from error
        if result.returncode:
            message = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[-500:])
            raise MissingError(f"parallel.offload_path: DeepSpeed's {name} does not compile: {message}; {REMEDY}")
        built.rename(library)
