"""Graphs that PyG saved with `torch.save(data, "graph.pt")`.

The data is a `Data`, a list of `Data`, or the content of an `InMemoryDataset`.

Such a file is a zip archive with a pickle. A pickle can name any function of any module, and
unpickling calls it. Here a pickle may name only the parts of a plain `Data` with tensors
(`ALLOWED`). This is checked before anything is loaded. PyTorch then loads the file with
`weights_only`, which again allows only PyG's four classes.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.data.files import from_pyg
from fedloom.data.graph import Graph
from fedloom.errors import DataError, FedloomError

PYG_CLASSES = {
    "torch_geometric.data.data": ("Data", "DataEdgeAttr", "DataTensorAttr"),
    "torch_geometric.data.storage": ("GlobalStorage",),
}
_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2}
_BYTES |= {"Char": 1, "Byte": 1, "Bool": 1}
STORAGES = {f"torch {dtype}Storage": size for dtype, size in _BYTES.items()}  # bytes of an entry
TENSOR_PARTS = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    *STORAGES,
)
ALLOWED = frozenset(
    (
        *TENSOR_PARTS,
        *(f"{module} {name}" for module, names in PYG_CLASSES.items() for name in names),
    )
)
# Other opcodes that name functions or classes, or keep values. torch.save writes none of them.
OTHER_NAMING_OPCODES = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"}
OTHER_NAMING_OPCODES |= {"PUT", "GET", "MEMOIZE", "PERSID"}
# Opcodes whose argument, or the value that it names, is a constant.
RECALLS = {"BINGET", "LONG_BINGET"}
CONSTANTS = {"BINUNICODE", "GLOBAL", "BININT", "BININT1", "BININT2", "LONG1", *RECALLS}


def from_pyg_file(path: str | Path) -> Graph:
    """Returns the graph of a file that PyG saved.

    Raises a DataError if the file cannot be read, contains anything but graphs, or names anything
    but the parts of a graph.
    """
    path = Path(path)
    try:
        _inspect(path)
        found = _graphs(_load(path), path)
        for data in found if isinstance(found, list) else [found]:
            _require_stored(data, path)
        return from_pyg(found, name=path.stem)
    except FedloomError:
        raise
    except OSError as error:
        raise DataError(f"graph: cannot read {str(path)!r} ({error.strerror or error})") from error
    except Exception as error:
        # Untrusted bytes can make zipfile, torch and PyG raise any exception. PyTorch's messages
        # are long, and may contain bytes of the file.
        words = " ".join(str(error).split())[:150]
        printable = "".join(char if char.isprintable() else "?" for char in words)
        cause = f"{type(error).__name__}: {printable}"
        raise DataError(
            f"graph: {str(path)!r} is damaged, or not a graph that torch.save wrote ({cause})"
        ) from error


def _inspect(path: Path) -> None:
    """Refuses a file that torch.save did not write, or whose pickle names other things.

    It loads nothing.
    """
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        compressed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
        if compressed or sum(part.file_size for part in parts) > path.stat().st_size:
            raise DataError(
                f"graph: {str(path)!r} holds more than its size: torch.save compresses nothing"
            )
        pickles = [part for part in parts if part.filename.endswith(".pkl")]
        if len(pickles) != 1:
            raise DataError(
                f"graph: {str(path)!r} is not what torch.save writes: "
                f"it holds {len(pickles)} pickles"
            )
        content = archive.read(pickles[0])
    folder = pickles[0].filename.removesuffix("data.pkl")
    sizes = {part.filename.lower(): part.file_size for part in parts}  # PyTorch ignores the case
    if len(sizes) < len(parts):
        raise DataError(
            f"graph: {str(path)!r} is not what torch.save writes: two parts have the same name"
        )
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in OTHER_NAMING_OPCODES:
            raise DataError(
                f"graph: {str(path)!r} is not what torch.save writes: "
                f"its pickle has a {operation.name}; nothing of it was run"
            )
        if operation.name == "GLOBAL" and argument not in ALLOWED:
            named = str(argument).replace(" ", ".")
            raise DataError(
                f"graph: {str(path)!r} names {named!r}, which is no part of a plain graph; "
                "nothing of it was run. "
                "Valid: what torch.save writes of a PyG Data with tensors, or of a list of them"
            )
    for key, size in _storages(content):
        stored = sizes.get(f"{folder}data/{key}".lower(), 0)
        if size != stored:
            raise DataError(
                f"graph: {str(path)!r} is damaged: "
                f"its pickle expects {size} bytes of tensor {key!r}, the file holds {stored}"
            )


def _storages(content: bytes) -> Iterator[tuple[str, int]]:
    """Yields the key and the size in bytes of every tensor memory that a pickle refers to.

    PyTorch 2.6 does not compare this size with the file, and would show other memory of this
    process. A reference must be written as torch.save writes it: MARK, five constants, TUPLE,
    BINPERSID. Raises a ValueError for others.
    """
    memo: dict[Any, Any] = {}
    constant: Any = None  # the last operation's constant, if it is one
    constants: list[Any] | None = None  # since the last MARK, if there were only constants
    made: list[Any] | None = None  # the constants of the last operation's tuple
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = constant
            continue
        if name == "BINPERSID":
            yield _reference(made or [])
        made = constants if name == "TUPLE" else None
        constant = memo.get(argument) if name in RECALLS else argument
        if name == "MARK":
            constants = []
        elif name not in CONSTANTS:
            constants = constant = None
        elif constants is not None:
            constants.append(constant)


def _reference(parts: list[Any]) -> tuple[str, int]:
    """Returns the key and the size in bytes of a reference to a tensor's memory."""
    match parts:
        case ["storage", str(kind), str(key), str(), int(entries)] if kind in STORAGES:
            return key, entries * STORAGES[kind]
    raise ValueError("a tensor's memory is named in another way")


def _load(path: Path) -> Any:
    import torch_geometric.data.data
    import torch_geometric.data.storage

    modules = {
        "torch_geometric.data.data": torch_geometric.data.data,
        "torch_geometric.data.storage": torch_geometric.data.storage,
    }
    classes = [
        getattr(modules[module], name) for module, names in PYG_CLASSES.items() for name in names
    ]
    # `safe_globals` ends by removing all classes that it received. The classes that PyG has allowed
    # for the whole process must stay allowed.
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([cls for cls in classes if cls not in known]):
        return torch.load(path, map_location="cpu", weights_only=True)


def _graphs(loaded: Any, path: Path) -> Any:
    """Returns the graph or the list of graphs in a loaded object."""
    from torch_geometric.data import Data
    from torch_geometric.data.separate import separate

    if isinstance(loaded, Data):
        return loaded
    if isinstance(loaded, list) and loaded and all(isinstance(data, Data) for data in loaded):
        return loaded
    # A collated dataset: all graphs joined (a Data or a dict), and where each graph begins.
    collated = isinstance(loaded, tuple) and len(loaded) in (2, 3, 4)
    if collated and isinstance(loaded[0], Data | dict):
        joined, slices = loaded[:2]
        joined = Data.from_dict(joined) if isinstance(joined, dict) else joined
        if slices is None:
            return joined
        _require_stored(joined, path)
        count = len(slices["y"]) - 1
        return [
            separate(Data, joined, idx=k, slice_dict=slices, decrement=False) for k in range(count)
        ]
    raise DataError(
        f"graph: {str(path)!r} holds a {type(loaded).__name__}, "
        "must be a PyG Data, a list of them, or a collated dataset"
    )


def _require_stored(data: Any, path: Path) -> None:
    """Refuses a tensor with more entries than the file stores for it.

    Such a tensor would fill the memory as soon as it is used.
    """
    for name, tensor in _tensors(data):
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise DataError(
                f"graph: {str(path)!r}: {name} has {tensor.numel()} entries, "
                f"the file holds less; save {name}.contiguous()"
            )


def _tensors(data: Any) -> Iterator[tuple[str, Tensor]]:
    fields: Mapping[str, Any] = data.to_dict()
    return ((name, value) for name, value in fields.items() if isinstance(value, Tensor))
