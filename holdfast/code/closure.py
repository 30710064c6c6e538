"""Role digest: a digest of the source that a function reaches, read from the syntax tree and never imported.

It is part of an identity: another loss is another run, and a new metric in the same file is not. It covers the
top-level statements that the function reaches by name, in the order of the file, and whole files of the bundle that it
imports. A file that does anything cleverer at its top level, such as `exec` or a call of a function it defines,
counts as a whole. Where source names no file, as with `importlib`, all files of the bundle count. The digest is of
text, because syntax trees differ between versions of Python.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from holdfast.spec.errors import MissingError

# Names with which code reaches other code in a way that the syntax tree does not show.
_IMPORTING = frozenset(
    "eval exec compile __import__ builtins importlib pkgutil runpy site __builtins__ __file__".split()
)
_DYNAMIC = _IMPORTING | frozenset("globals locals vars setattr delattr getattr inspect".split())
_DYNAMIC_ATTRIBUTES = frozenset("__dict__ __globals__ __builtins__ __code__ __import__".split())
_OF_SYS = frozenset("modules path meta_path path_hooks".split())  # attributes that decide what an import finds
# Hooks that the definition of a class runs, in the class of another file as well.
_HOOKS = re.compile(r"__init_subclass__|__set_name__|\bmetaclass\s*=\s*(?!(?:abc\.)?ABCMeta\b)")


def source_text(data: bytes) -> str:
    """The text of a file of code, as digests count it. Two contents never have the same text."""
    return data.decode("utf-8-sig", errors="backslashreplace")


def parse_source(text: str, path: str) -> ast.Module:
    """The syntax tree of a file of code. Raises SyntaxError for every text that Python does not accept."""
    try:
        return ast.parse(text, path)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "is nested too deeply") from None


def role_digest(files: Mapping[str, str], use: str) -> str:
    """The digest of the source that the function `use` ("mine.py:focal") reaches. `files` are the texts of the bundle,
    by path. Raises MissingError if there is no such function, and SyntaxError."""
    path, _, name = use.partition(":")
    if path not in files:
        raise MissingError(f"{use}: the folder of code has no file {path}")
    source = _File.of(path, files[path])
    if name not in source.names:
        raise MissingError(f"{use}: {path} defines no {name}")
    text, imported = source.reached(name, files)
    counts_whole = imported | ({path} if text == source.text else set())
    if any(_names_no_file(files[file], file) for file in counts_whole):
        imported = set(files)
    hasher = blake3()
    for part in (text, *(f"{file}\0{files[file]}" for file in sorted(imported - {path}))):
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


class _Own(NamedTuple):
    """The names of a file that are not those of other packages."""

    names: set[str]
    callables: set[str]  # those that may be functions or classes


@dataclass(frozen=True)
class _File:
    """A file of code, as its top-level statements."""

    path: str
    text: str
    statements: tuple[ast.stmt, ...]
    names: Mapping[str, frozenset[int]]  # the statements that bind each name

    @classmethod
    def of(cls, path: str, text: str) -> _File:
        statements = tuple(parse_source(text, path).body)
        names: dict[str, frozenset[int]] = {}
        for number, statement in enumerate(statements):
            for name in _bound(statement):
                names[name] = names.get(name, frozenset()) | {number}
        return cls(path, text, statements, names)

    def reached(self, name: str, files: Mapping[str, str]) -> tuple[str, set[str]]:
        """The text that `name` reaches, and the paths of the bundle that it imports."""
        wanted, waiting = set[int](), [name]
        seen = {name}
        while waiting:
            for number in self.names.get(waiting.pop(), frozenset()) - wanted:
                wanted.add(number)
                found = _names_in(self.statements[number]) - seen
                seen |= found
                waiting.extend(found)
        if not self.is_plain(files) or any(_is_dynamic(self.statements[number]) for number in wanted):
            return self.text, _imports_of(self.path, self.statements, files)
        effects = {path for path in _imports_of(self.path, self.statements, files) if not _has_no_effects(path, files)}
        imported = _imports_of(self.path, [self.statements[number] for number in sorted(wanted)], files)
        lines = re.split(r"\r\n|\r|\n", self.text)  # as Python counts them: `splitlines` knows more ends
        return "\n".join(_text(self.statements[number], lines) for number in sorted(wanted)), imported | effects

    def is_plain(self, files: Mapping[str, str]) -> bool:
        """Whether importing the file only defines names: no statement calls code of the bundle or changes anything."""
        if any(_HOOKS.search(text) for text in files.values()):
            return False
        names = set(self.names) - _imported_names(self.path, self.statements, files)
        constants = {
            name for name in names if all(_binds_constant(self.statements[number]) for number in self.names[name])
        }
        own = _Own(names, names - constants)
        return all(_only_defines(statement, own) for statement in self.statements)


def _has_no_effects(path: str, files: Mapping[str, str]) -> bool:
    """Whether importing a file of the bundle, and what it imports, only defines names."""
    try:
        sources = [_File.of(path, files[path]) for path in {path, *_imports_of_file(path, files)}]
    except SyntaxError:
        return False
    return all(
        source.is_plain(files) and not any(_is_dynamic(statement) for statement in source.statements)
        for source in sources
    )


def _text(statement: ast.stmt, lines: list[str]) -> str:
    """The source lines of a statement, with its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : statement.end_lineno])


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import() | ast.ImportFrom():
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0]
        case _:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                    yield node.id
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield node.name
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _names_in(statement: ast.stmt) -> set[str]:
    """All names that a statement uses, including those in annotations that are text."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Global):
            names.update(node.names)
    return names


def _is_dynamic(tree: ast.AST, names: frozenset[str] = _DYNAMIC) -> bool:
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                found = node.id in names
            case ast.Attribute():
                found = node.attr in _DYNAMIC_ATTRIBUTES or (
                    node.attr in _OF_SYS and isinstance(node.value, ast.Name) and node.value.id == "sys"
                )
            case ast.Import():
                found = any(
                    alias.name.partition(".")[0] in names or (alias.name == "sys" and alias.asname not in (None, "sys"))
                    for alias in node.names
                )
            case ast.ImportFrom():
                of_sys = node.module == "sys" and any(alias.name in {"*", *_OF_SYS} for alias in node.names)
                found = of_sys or (node.module or "").partition(".")[0] in names
            case _:
                found = False
        if found:
            return True
    return False


def _names_no_file(text: str, path: str) -> bool:
    """Whether a file may import, read or run files of the bundle that its source does not name."""
    try:
        return _is_dynamic(parse_source(text, path), _IMPORTING)
    except SyntaxError:
        return False


def _only_defines(statement: ast.stmt, own: _Own) -> bool:
    """Whether a top-level statement only binds names. It calls nothing of the file itself (`own`) when imported."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            plain = _definition_is_plain(statement, own)
        case ast.ImportFrom():
            plain = all(alias.name != "*" for alias in statement.names)
        case ast.Assign():
            plain = all(map(_is_name, statement.targets)) and _calls_are_foreign(statement.value, own)
        case ast.AnnAssign():
            value = statement.value
            plain = _is_name(statement.target) and (value is None or _calls_are_foreign(value, own))
        case ast.Expr():
            plain = isinstance(statement.value, ast.Constant)
        case ast.If():
            rest = all(_only_defines(inner, own) for inner in statement.orelse)
            plain = _is_main_or_typing(statement.test) and rest
        case _:
            plain = isinstance(statement, ast.Import | ast.Pass)
    return plain


def _definition_is_plain(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, own: _Own) -> bool:
    """Whether a definition calls nothing of the file when it is imported: in decorators, defaults and class bodies."""
    evaluated: list[ast.expr] = []
    for decorator in statement.decorator_list:
        if isinstance(decorator, ast.Name | ast.Attribute) and _root(decorator) in own.names:
            return False  # a decorator is called
        evaluated.append(decorator)
    if isinstance(statement, ast.ClassDef):
        evaluated += [*statement.bases, *(keyword.value for keyword in statement.keywords)]
        if any(_root(base) in own.names for base in statement.bases) and statement.keywords:
            return False
        if not all(_only_defines(inner, own) for inner in statement.body):
            return False
    else:
        evaluated += [*statement.args.defaults, *(value for value in statement.args.kw_defaults if value is not None)]
    return all(_calls_are_foreign(value, own) for value in evaluated)


def _calls_are_foreign(value: ast.expr, own: _Own) -> bool:
    """Whether all calls of an expression are of builtins or of imported packages, which get no function of the file
    that they could call."""
    if any(isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(value)):
        return False
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    given = (node for call in calls for value in (*call.args, *call.keywords) for node in ast.walk(value))
    if any(isinstance(node, ast.Lambda) or getattr(node, "id", None) in own.callables for node in given):
        return False
    return all((root := _root(call.func)) is not None and root not in own.names for call in calls)


def _root(value: ast.expr) -> str | None:
    """The name at the start of `a.b.c`; for a method of a literal, that of its type. None for anything else."""
    while isinstance(value, ast.Attribute):
        value = value.value
    if isinstance(value, ast.Name):
        return value.id
    return type(value.value).__name__ if isinstance(value, ast.Constant) else None


def _binds_constant(statement: ast.stmt) -> bool:
    """Whether a top-level statement assigns a value that can be no function of the file."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    nodes = ast.walk(statement.value) if statement.value is not None else ()
    return not any(isinstance(node, ast.Lambda | ast.Name | ast.Attribute) for node in nodes)


def _is_name(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(map(_is_name, target.elts))
    return isinstance(target, ast.Name) and not hasattr(builtins, target.id)


def _is_main_or_typing(test: ast.expr) -> bool:
    """Whether a condition is `__name__ == "__main__"` or TYPE_CHECKING: its body does not run on import."""
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__":
        return ast.unparse(test) == "__name__ == '__main__'"
    return (test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")) == "TYPE_CHECKING"


# Imports of files of the bundle


def _imported_names(path: str, statements: Iterable[ast.stmt], files: Mapping[str, str]) -> set[str]:
    """The names that imports of other packages bind: not those of files of the bundle."""
    return {
        name
        for statement in statements
        if isinstance(statement, ast.Import | ast.ImportFrom) and not _imports_of(path, [statement], files)
        for name in _bound(statement)
    }


def _imports_of(path: str, statements: Iterable[ast.stmt], files: Mapping[str, str]) -> set[str]:
    """The paths of the bundle that statements import, and all that these import."""
    found: set[str] = set()
    for statement in statements:
        for target in _targets(path, statement, files):
            if target not in found:
                found |= {target, *_imports_of_file(target, files, found)}
    return found


def _imports_of_file(path: str, files: Mapping[str, str], known: set[str] | None = None) -> set[str]:
    """The paths that a file of the bundle imports, directly or through others."""
    found, waiting = set[str](), [path]
    while waiting:
        current = waiting.pop()
        try:
            statements = parse_source(files[current], current).body
        except SyntaxError:
            continue
        for statement in statements:
            new = _targets(current, statement, files) - found - (known or set())
            found |= new
            waiting.extend(new)
    return found


def _targets(path: str, statement: ast.stmt, files: Mapping[str, str]) -> set[str]:
    """The paths of the bundle that the imports in a statement name."""
    folder = path.rpartition("/")[0]
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= _module_files(alias.name, files)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = folder.split("/") if folder else []
                base = parts[: len(parts) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            found |= _module_files(module, files)
            for alias in node.names:
                found |= _module_files(f"{module}.{alias.name}" if module else alias.name, files)
    return found


def _module_files(module: str, files: Mapping[str, str]) -> set[str]:
    """The files that importing a module runs: its own, and those of the packages around it."""
    parts = module.split(".")
    candidates = []
    for end in range(1, len(parts) + 1):
        base = "/".join(parts[:end])
        candidates += [f"{base}/__init__.py", f"{base}.py"]
    return {path for path in candidates if path in files}
