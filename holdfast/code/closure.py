"""Role digest: a digest of the source that a function reaches, read from the syntax tree and never imported.

It is part of an identity: another loss is another run, and a new metric in the same file is not. It covers the
top-level statements that the function reaches by name, in the order of the file, and whole files of the bundle that it
imports. A file that does anything cleverer at its top level, such as `exec` or a call of a function it defines,
counts as a whole. The digest is of text, because syntax trees differ between versions of Python.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from blake3 import blake3

from holdfast.spec.errors import MissingError

# Names with which code reaches other code in a way that the syntax tree does not show.
_DYNAMIC = frozenset(
    "globals locals vars eval exec compile __import__ builtins importlib runpy setattr delattr getattr __builtins__ "
    "__file__ inspect".split()
)
_DYNAMIC_ATTRIBUTES = frozenset("__dict__ __globals__ __builtins__ __code__ __import__".split())


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
    hasher = blake3()
    for part in (text, *(f"{file}\0{files[file]}" for file in sorted(imported - {path}))):
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


@dataclass(frozen=True)
class _File:
    """A file of code, as its top-level statements."""

    path: str
    text: str
    statements: tuple[ast.stmt, ...]
    names: Mapping[str, frozenset[int]]  # the statements that bind each name

    @classmethod
    def of(cls, path: str, text: str) -> _File:
        statements = tuple(ast.parse(text, path).body)
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
        lines = self.text.splitlines()
        return "\n".join(_text(self.statements[number], lines) for number in sorted(wanted)), imported | effects

    def is_plain(self, files: Mapping[str, str]) -> bool:
        """Whether importing the file only defines names: no statement calls code of the bundle or changes anything."""
        own = set(self.names) - _imported_names(self.path, self.statements, files)
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


def _is_dynamic(statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id in _DYNAMIC:
            return True
        if isinstance(node, ast.Attribute) and (node.attr in _DYNAMIC_ATTRIBUTES or ast.unparse(node) == "sys.modules"):
            return True
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in _DYNAMIC for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _DYNAMIC:
            return True
    return False


def _only_defines(statement: ast.stmt, own: set[str]) -> bool:
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
            plain = _is_main_or_typing(statement.test)
        case _:
            plain = isinstance(statement, ast.Import | ast.Pass)
    return plain


def _definition_is_plain(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, own: set[str]) -> bool:
    """Whether a definition calls nothing of the file when it is imported: in decorators, defaults and class bodies."""
    evaluated: list[ast.expr] = []
    for decorator in statement.decorator_list:
        if isinstance(decorator, ast.Name | ast.Attribute) and _root(decorator) in own:
            return False  # a decorator is called
        evaluated.append(decorator)
    if isinstance(statement, ast.ClassDef):
        evaluated += [*statement.bases, *(keyword.value for keyword in statement.keywords)]
        if any(_root(base) in own for base in statement.bases) and statement.keywords:
            return False
        if not all(_only_defines(inner, own) for inner in statement.body):
            return False
    else:
        evaluated += [*statement.args.defaults, *(value for value in statement.args.kw_defaults if value is not None)]
    return all(_calls_are_foreign(value, own) for value in evaluated)


def _calls_are_foreign(value: ast.expr, own: set[str]) -> bool:
    """Whether all calls of an expression are of builtins or of imported packages."""
    if any(isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(value)):
        return False
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    return all((root := _root(call.func)) is not None and root not in own for call in calls)


def _root(value: ast.expr) -> str | None:
    """The name at the start of `a.b.c`; for a method of a literal, that of its type. None for anything else."""
    while isinstance(value, ast.Attribute):
        value = value.value
    if isinstance(value, ast.Name):
        return value.id
    return type(value.value).__name__ if isinstance(value, ast.Constant) else None


def _is_name(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(map(_is_name, target.elts))
    return isinstance(target, ast.Name) and not hasattr(builtins, target.id)


def _is_main_or_typing(test: ast.expr) -> bool:
    """Whether a condition is `__name__ == "__main__"` or TYPE_CHECKING: its body does not run on import."""
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__":
        return len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
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
            statements = ast.parse(files[current], current).body
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
