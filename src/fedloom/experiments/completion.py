"""Completion: the names that a shell can complete, and the list of methods, without torch.

A shell asks for names at each Tab, and torch takes a second to import. So they are read from the
source files that define them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def methods() -> list[str]:
    """Returns the names of all methods: those of the files in `methods/`."""
    return sorted(_method_files())


def described_methods() -> dict[str, str]:
    """Returns {name: what it does} of all methods: the first lines of their files, without names.

    A method that is a package describes itself in `method.py`.
    """
    described = {}
    for name, path in sorted(_method_files().items()):
        file = path / "method.py" if path.is_dir() else path
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        described[name] = text.partition("\n")[0].partition(": ")[2]
    return described


def _method_files() -> dict[str, Path]:
    """Returns {name: file or package} of all methods."""
    return {
        path.stem.replace("_plus", "+").replace("_", "-"): path
        for path in (ROOT / "methods").iterdir()
        if not path.name.startswith(("_", "."))
        and (path.suffix == ".py" or (path / "__init__.py").exists())
    }


def datasets() -> list[str]:
    """Returns the names of all datasets: the keys of the catalogue."""
    return [*_keys("data/datasets.py", "_CATALOGUE"), *_keys("data/synthetic.py", "GENERATORS")]


def partitions() -> list[str]:
    """Returns the names of all partitions: the arguments of `@partitioner`."""
    return re.findall(r'^@partitioner\("([^"]+)"', _text("data/partition.py"), re.M)


def models() -> list[str]:
    """Returns the names of all architectures: those of the classes in ARCHITECTURES."""
    value = _assigned("nn/architectures.py", "ARCHITECTURES")
    assert isinstance(value, ast.DictComp)
    listed = value.generators[0].iter
    return [each.id.lower() for each in ast.walk(listed) if isinstance(each, ast.Name)]


def engines() -> list[str]:
    """Returns "auto" and the names of all engines: those of the files in `engines/`."""
    found = (path.stem for path in (ROOT / "engines").iterdir())
    here = {name for name in found if not name.startswith(("_", ".")) and name != "base"}
    return ["auto", *sorted({*here, *_keys("engines/__init__.py", "_ELSEWHERE")})]


def attacks() -> list[str]:
    """Returns the names of all attacks: those of the functions marked `@attack`."""
    found = re.findall(r"^@attack\ndef (\w+)", _text("experiments/audit.py"), re.M)
    return [name.replace("_", "-") for name in found]


def recipes() -> list[str]:
    """Returns the names of all recipes, PAPER/ENTRY."""
    import tomllib  # `fedloom --help` need not wait for it

    return [
        f"{path.stem}/{entry}"
        for path in sorted((ROOT / "experiments" / "recipes").glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["entry"]
    ]


def papers() -> list[str]:
    """Returns the papers that have recipes."""
    return sorted(path.stem for path in (ROOT / "experiments" / "recipes").glob("*.toml"))


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Returns a function that returns the names that begin with what was typed.

    Of several names, separated by commas, it completes the last one.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _text(file: str) -> str:
    return (ROOT / file).read_text()


def _assigned(file: str, name: str) -> ast.expr:
    """Returns the expression that a file assigns to a name."""
    for node in ast.parse(_text(file)).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                assert node.value is not None
                return node.value
    raise LookupError(f"{file} does not define {name}")


def _keys(file: str, name: str) -> list[str]:
    """Returns the keys of a dict that a file assigns to a name."""
    value = _assigned(file, name)
    assert isinstance(value, ast.Dict)
    return [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
