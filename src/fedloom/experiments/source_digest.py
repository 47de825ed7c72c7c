"""Source digest: identifies the code that a run's numbers depend on.

The digest covers every module that the run imports, found by parsing the imports of each file. No
list of modules is kept by hand: a new module is covered as soon as another one imports it.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import fedloom
from fedloom.core.method import Method
from fedloom.core.phase import Phase
from fedloom.core.registry import method_class
from fedloom.engines import engine_class
from fedloom.nn.build import split_specs
from fedloom.nn.own_model import is_own

ROOT = Path(fedloom.__file__).parent
# The search starts here, and at the method and the engine. `recipe` loads and divides the data.
_ENTRY_POINTS = ("fedloom.experiments.run", "fedloom.experiments.recipe")
# Modules that cannot change a run's numbers. The search does not enter them.
_EXCLUDED = (
    "fedloom.experiments.report",  # reads finished run folders
    "fedloom.data.display",  # shows objects as text
    "fedloom.experiments.display",  # the same
    "fedloom.cli",  # parses the command line; the settings are part of a cell's name anyway
    "fedloom.commands",  # prints results
    "fedloom.experiments.trackers",  # copies history entries; a failing tracker is dropped
    "fedloom.experiments.executor",  # decides when and where a cell runs, not what it computes
    "fedloom.experiments.grid",  # chooses the settings of each cell; they are part of its name
    "fedloom.experiments.tune",  # the same, for trials
    "fedloom.experiments.audit",  # runs and attacks on its own
    "fedloom.experiments.audit_file",  # keeps what was found
    "fedloom.experiments.comparing",  # compares finished runs
    "fedloom.experiments.python_api",  # chooses settings, and compares finished runs
    "fedloom.experiments.memory_estimate",  # may refuse a run, but does not change it
    "fedloom.experiments.engine_choice",  # a cell's digest covers the engines that it chooses from
)


def code_behind(method: str, base: str | None = None, engine: str = "loop", model: str = "") -> str:
    """Returns a digest of the source files that a run imports.

    Args:
        method: A method's name, or the path of a method file.
        base: The method that a plug-in prepares the clients for; None for other methods.
        engine: The engine's name.
        model: The clients' models. The files of the user's own models count.
    """
    digest = hashlib.sha256()
    for path in imported_files(method, base, engine, model):
        digest.update(hashlib.sha256(_read(path)).digest())
    for line in _compiled(_class(method, base)):
        digest.update(line.encode())
    return digest.hexdigest()


def _class(method: str, base: str | None) -> type[Method]:
    return method_class(method, {"base": base} if base else {})


def _compiled(cls: type[Method]) -> Iterator[str]:
    """Yields what a method's classes do that have no file, as a notebook defines them.

    It covers their functions, and the functions and classes of the notebook that these name.
    """
    todo: list[Any] = [each for each in cls.__mro__ if _without_file(each)]
    seen: set[int] = set()
    while todo:
        if id(found := todo.pop(0)) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, type):
            for key, value in sorted(vars(found).items()):
                if isinstance(value, Phase):
                    value = value.function
                if isinstance(value, (FunctionType, type, staticmethod, classmethod)):
                    todo.append(getattr(value, "__func__", value))
                elif isinstance(value, (bool, int, float, str, tuple)) and key[:2] != "__":
                    yield f"{found.__name__}.{key} = {value!r}"
        elif _without_file(found):
            yield from _instructions(found.__code__)
            named = (found.__globals__.get(name) for name in found.__code__.co_names)
            todo += [n for n in named if isinstance(n, (FunctionType, type)) and _without_file(n)]


def _instructions(code: CodeType) -> Iterator[str]:
    """Yields what code does, without where it is written."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    constants = [
        sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each)
        for each in code.co_consts
        if not isinstance(each, CodeType)
    ]
    yield f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
    for each in inner:
        yield from _instructions(each)


def _without_file(value: Any) -> bool:
    return getattr(sys.modules.get(value.__module__), "__file__", None) is None and (
        value.__module__ != "builtins"
    )


def imported_files(
    method: str, base: str | None = None, engine: str = "loop", model: str = ""
) -> list[Path]:
    """Returns the files that a run imports: those of fedloom, and the user's own.

    Takes the same arguments as `code_behind`. The order is the same on every machine.
    """
    modules = [parent.__module__ for parent in _class(method, base).__mro__]
    roots = [*_ENTRY_POINTS, engine_class(engine).__module__]
    roots += [name for name in modules if name.startswith("fedloom.")]
    found = {path for path in map(_file_of, roots) if path is not None}
    own = [spec.partition(":")[0] for spec in split_specs(model) if is_own(spec)]
    found |= {Path(path).resolve() for path in own}
    found |= set(_users_files(modules))
    todo = list(found)
    while todo:
        new = set(_imports(todo.pop())) - found
        found |= new
        todo += new
    return sorted(found, key=_sort_key)


def _users_files(modules: Iterable[str]) -> Iterator[Path]:
    """Yields the files of a user's own modules: method files, scripts, modules beside them."""
    for name in modules:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and name.partition(".")[0] not in ("fedloom", *sys.stdlib_module_names):
            yield Path(path).resolve()


def _sort_key(path: Path) -> tuple[bool, str]:
    """fedloom's files by their place in the package, then the user's by name."""
    inside = path.is_relative_to(ROOT)
    return not inside, str(path.relative_to(ROOT)) if inside else path.name


def _imports(path: Path) -> Iterator[Path]:
    """Yields the files that a file imports anywhere, also inside functions."""
    for name in _names_in(_read(path), _package_of(path)):
        if name == "fedloom" or name.startswith("fedloom."):
            parts = name.split(".")
            for length in range(1, len(parts) + 1):  # importing a module runs its packages first
                if found := _file_of(".".join(parts[:length])):
                    yield found
        elif not path.is_relative_to(ROOT):  # a user's file may import files of its folder
            own = path.parent.joinpath(*name.split(".")).with_suffix(".py")
            if own.is_file():
                yield own


@cache  # by content: an edited file is parsed again
def _names_in(source: bytes, package: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_imported_names(ast.parse(source), package)))


def _imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Yields the dotted names that code imports: for `from a import b` both `a` and `a.b`.

    Imports under `if TYPE_CHECKING:` do not run and are left out.
    """
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        for other in node.orelse:
            yield from _imported_names(other, package)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        start = ".".join([*(above if node.level else []), *filter(None, [node.module])])
        yield start
        yield from (f"{start}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imported_names(child, package)


def _package_of(path: Path) -> str:
    """Returns the package that a relative import in the file starts from; empty for a user's."""
    if not path.is_relative_to(ROOT):
        return ""
    return ".".join(["fedloom", *path.parent.relative_to(ROOT).parts])


@cache
def _file_of(module: str) -> Path | None:
    """Returns the file of a fedloom module; None if there is none or it is excluded."""
    if any(f"{module}.".startswith(f"{name}.") for name in _EXCLUDED):
        return None
    place = ROOT.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def _read(path: Path) -> bytes:
    return path.read_bytes()
