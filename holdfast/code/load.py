"""Functions of user code, by file and name: checked from the source, and loaded from an unpacked bundle.

`check_function` reads the syntax tree and imports nothing, so a spec can be validated without running its code.
`load_function` imports the file. Imports of the file start from its folder, as when Python runs a script.
"""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from holdfast.code.closure import parse_source
from holdfast.spec.errors import UserCodeError, causes

_loaded: dict[str, Path] = {}  # name of a module of user code -> the folder that it comes from


def check_function(
    files: Mapping[str, str], use: str, given: int, arguments: Mapping[str, object], *, is_class: bool = False
) -> str | None:
    """Why the function `use` ("mine.py:focal") of a bundle cannot be called with `given` values and the named
    `arguments`. None if it can. `files` are the texts of the bundle, by path. A class must have `predict`."""
    path, _, name = use.partition(":")
    if path not in files:
        return f"names the file {path}, which does not exist"
    try:
        tree = parse_source(files[path], path)
    except SyntaxError as error:
        return f"names {path}, which is not valid Python: line {error.lineno or 1}: {error.msg}"
    found = [statement for statement in tree.body if name == getattr(statement, "name", None)]
    if is_class:
        return _class_fault(name, path, found, arguments)
    functions = [statement for statement in found if isinstance(statement, ast.FunctionDef)]
    if not functions:
        names = [statement.name for statement in tree.body if isinstance(statement, ast.FunctionDef)]
        known = f"; it defines {', '.join(names[:10])}" if names else ""
        kind = "is a class or async" if found else "is not defined with `def` at the top level"
        return f"names {name}, which {kind} in {path}{known}"
    return _call_fault(name, functions[-1].args, given, arguments)


def _class_fault(name: str, path: str, found: Sequence[ast.stmt], arguments: Mapping[str, object]) -> str | None:
    """Why a class cannot be created with a folder and `arguments`, or has no `predict`. What it inherits is not
    known."""
    classes = [statement for statement in found if isinstance(statement, ast.ClassDef)]
    if not classes:
        return f"names {name}, which is not defined with `class` at the top level in {path}"
    methods = {one.name: one for one in classes[-1].body if isinstance(one, ast.FunctionDef)}
    if not classes[-1].bases:
        for method in ("__init__", "predict"):
            if method not in methods:
                return f"names {name}, which has no method {method} in {path}"
    if "predict" in methods and (fault := _call_fault(f"{name}.predict", methods["predict"].args, 2, {})):
        return fault
    return _call_fault(name, methods["__init__"].args, 2, arguments) if "__init__" in methods else None


def _call_fault(name: str, signature: ast.arguments, given: int, arguments: Mapping[str, object]) -> str | None:
    positional = [*signature.posonlyargs, *signature.args]
    if len(positional) < given and signature.vararg is None:
        return f"calls {name} with {given} values, and it takes {len(positional)}"
    by_name = {argument.arg for argument in [*signature.args[max(0, given - len(signature.posonlyargs)) :]]}
    keyword_only = {argument.arg for argument in signature.kwonlyargs}
    for argument in arguments:
        if argument not in by_name | keyword_only and signature.kwarg is None:
            names = sorted(by_name | keyword_only)
            known = f"; it takes {', '.join(names)}" if names else "; it takes none"
            return f"gives {name} the argument {argument!r}, which it does not take{known}"
    first_default = len(positional) - len(signature.defaults)
    missing = [argument.arg for argument in positional[given:first_default] if argument.arg not in arguments]
    missing += [
        argument.arg
        for argument, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        if default is None and argument.arg not in arguments
    ]
    return f"calls {name} without {', '.join(missing)}, which it needs" if missing else None


def load_function(folder: Path, use: str) -> Callable[..., Any]:
    """The function `use` ("mine.py:focal") of the bundle in `folder`. Raises UserCodeError if its file cannot be
    imported, or has no such function."""
    path, _, name = use.partition(":")
    module_name = path.removesuffix(".py")
    folder = folder.resolve()
    if not module_name.isidentifier() or not (folder / path).is_file():
        raise UserCodeError(f"{use}: the bundle has no file {path}; submit the run again")
    _make_importable(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a program without `if __name__ == "__main__"` exits
        raise UserCodeError(f"{use}: {path} cannot be imported: {describe(error, folder)}") from error
    if Path(getattr(module, "__file__", None) or "/").resolve() != folder / path:
        raise UserCodeError(f"{use}: a module {module_name!r} of another package is loaded; rename {path}")
    _loaded[module_name] = folder
    function = getattr(module, name, None)
    if not callable(function):
        raise UserCodeError(f"{use}: {path} defines no function {name}")
    return cast(Callable[..., Any], function)


def _make_importable(folder: Path) -> None:
    """Put a folder first on the path of imports, instead of the folder of another bundle."""
    sys.dont_write_bytecode = True  # a bundle's folder has only the files of the bundle
    for other in set(_loaded.values()) - {folder}:
        sys.path[:] = [entry for entry in sys.path if entry != str(other)]
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").is_relative_to(other):
                del sys.modules[name]
        for name in [name for name, origin in _loaded.items() if origin == other]:
            del _loaded[name]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()


def describe(error: BaseException, folder: Path) -> str:
    """An exception of user code: its type, its message, and the last line of user code that it passed."""
    place, folder = "", folder.resolve()  # modules are loaded from there
    for cause in causes(error):
        trace = cause.__traceback__
        while trace is not None:
            file = Path(trace.tb_frame.f_code.co_filename)
            if file.is_relative_to(folder):
                place = f" ({file.relative_to(folder)}, line {trace.tb_lineno})"
            trace = trace.tb_next
        if place:
            break
    return f"{type(error).__name__}: {error}{place}"
