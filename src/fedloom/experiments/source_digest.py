"""Source digest: identifies the code that a run's numbers depend on.

The digest covers every module that the run imports, found by parsing the imports of each file. No
list of modules is kept by hand: a new module is covered as soon as another one imports it.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fedloom
from fedloom.core.registry import method_class
from fedloom.engines import engine_class

ROOT = Path(fedloom.__file__).parent
# The search starts here, and at the method and the engine. `recipe` loads and divides the data.
_ENTRY_POINTS = ("fedloom.experiments.run", "fedloom.experiments.recipe")
# Modules that cannot change a run's numbers. The search does not enter them.
_EXCLUDED = (
    "fedloom.experiments.report",  # reads finished run folders
    "fedloom.cli",  # parses the command line; the settings are part of a cell's name anyway
    "fedloom.commands",  # prints results
    "fedloom.experiments.trackers",  # copies history entries; a failing tracker is dropped
    "fedloom.experiments.executor",  # decides when and where a cell runs, not what it computes
    "fedloom.experiments.grid",  # chooses the settings of each cell; they are part of its name
    "fedloom.experiments.tune",  # the same, for trials
    "fedloom.experiments.memory_estimate",  # may refuse a run, but does not change it
    "fedloom.experiments.engine_choice",  # a cell's digest covers the engines that it chooses from
)


def code_behind(method: str, base: str | None = None, engine: str = "loop") -> str:
    """Returns a digest of the source files that a run imports.

    Args:
        method: A method's name, or the path of a method file.
        base: The method that a plug-in prepares the clients for; None for other methods.
        engine: The engine's name.
    """
    digest = hashlib.sha256()
    for path in imported_files(method, base, engine):
        digest.update(hashlib.sha256(_read(path)).digest())
    return digest.hexdigest()


def imported_files(method: str, base: str | None = None, engine: str = "loop") -> list[Path]:
    """Returns the files that a run imports: those of fedloom, and the user's own.

    Takes the same arguments as `code_behind`. The order is the same on every machine.
    """
    cls = method_class(method, {"base": base} if base else {})
    modules = [parent.__module__ for parent in cls.__mro__]
    roots = [*_ENTRY_POINTS, engine_class(engine).__module__]
    roots += [name for name in modules if name.startswith("fedloom.")]
    users = [name for name in modules if name.startswith("fedloom_user_")]
    found = {path for path in map(_file_of, roots) if path is not None}
    found |= {Path(str(sys.modules[name].__file__)).resolve() for name in users}
    todo = list(found)
    while todo:
        new = set(_imports(todo.pop())) - found
        found |= new
        todo += new
    return sorted(found, key=_sort_key)


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
