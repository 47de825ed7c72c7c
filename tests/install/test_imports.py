"""Every import is of a declared package, and private names of PyTorch are in one file."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.documents import ROOT
from tests.install.requirements import DEPENDENCIES, EXTRAS

SOURCE = ROOT / "src"
CORE = {requirement.module for requirement in DEPENDENCIES}
OPTIONAL = {each.module for extra in EXTRAS.values() for each in extra} - CORE
PRIVATE_TORCH = SOURCE / "fedloom" / "nn" / "private_torch.py"
# Functions that import the module that their first argument names.
IMPORTERS = ("import_module", "importlib.import_module", "__import__", "import_compiled")
# Modules that import an extra when they are imported. The others import these where they use them.
FLOWER = (
    "apps",
    "coordinator",
    "coordinator_transport",
    "engine",
    "flower_internals",
    "join",
    "party",
    "party_transport",
    "serve",
)
NEED_EXTRAS = {"fedloom.engines.ray", *(f"fedloom.deploy.{name}" for name in FLOWER)}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields the modules that a file imports, and whether it does so when it is imported itself."""

    def visit(node: ast.AST, now: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, now) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            yield str(node.module), now
            yield from ((f"{node.module}.{alias.name}", now) for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in IMPORTERS
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), now
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            later = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, now and not later)

    yield from visit(ast.parse(path.read_text()), True)


def third_party(path: Path, own: set[str]) -> Iterator[tuple[str, bool]]:
    for name, now in imports(path):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in own:
            yield top, now


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def test_every_import_is_of_a_declared_package():
    undeclared = {
        f"{module} imports {name}"
        for module, path in FILES.items()
        for name, _ in third_party(path, {"fedloom"})
        if name not in CORE | OPTIONAL
    }
    assert not undeclared


def test_every_dependency_is_imported():
    used = {name for path in FILES.values() for name, _ in third_party(path, {"fedloom"})}
    assert used >= CORE


def test_imports_outside_of_the_package_are_declared():
    files = [
        path for folder in ("tests", "bench", "docs") for path in (ROOT / folder).rglob("*.py")
    ]
    own = {"fedloom", "tests", *(path.stem for path in files)}
    undeclared = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name, _ in third_party(path, own)
        if name not in CORE | OPTIONAL | {"byzfl"}  # the Makefile installs it without torchvision
    }
    assert not undeclared


def needing_an_extra() -> set[str]:
    """Returns the modules whose import imports an extra, directly or by another module."""
    wanted = {
        module: {name for name, now in imports(path) if now} for module, path in FILES.items()
    }
    found = {
        module
        for module, names in wanted.items()
        if any(n.split(".")[0] in OPTIONAL for n in names)
    }
    while more := {m for m, names in wanted.items() if names & found} - found:
        found |= more
    return found


def test_extras_are_imported_where_they_are_used():
    assert sorted(needing_an_extra()) == sorted(NEED_EXTRAS)


def private_names(path: Path) -> Iterator[str]:
    """Yields the private names of PyTorch in a file, with their lines."""
    kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    for node in ast.walk(ast.parse(path.read_text())):
        found = None
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = ast.unparse(node.value)
            of_kind = owner != "self" and any(hasattr(kind, node.attr) for kind in kinds)
            found = node.attr if of_kind or re.match(r"torch\b", owner) else None
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found = next((name for name in names if name.startswith("_")), None)
        if found:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {found}"


def test_private_names_of_pytorch_are_in_one_file():
    assert [
        found for path in FILES.values() if path != PRIVATE_TORCH for found in private_names(path)
    ] == []
    assert list(private_names(PRIVATE_TORCH))


@pytest.mark.parametrize(
    "line", ["torch._C._set_grad_enabled(True)", "x._version", "from torch._utils import f"]
)
def test_private_names_are_found(line, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(line)
    assert list(private_names(tmp_path / "a.py"))
