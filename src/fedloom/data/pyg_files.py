"""A graph that PyG has saved: `torch.save(data, "graph.pt")`, of a `Data`, a list of them, or what an `InMemoryDataset` keeps.

Such a file is a zip with a pickle in it, and a pickle can name any function of any module and have it called. This one may name what a
plain `Data` with tensors consists of, `ALLOWED`, and nothing else. That is looked at before anything is loaded; PyTorch then loads it
and is held to PyG's four classes once more (`weights_only`).
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

OF_PYG = {
    "torch_geometric.data.data": ("Data", "DataEdgeAttr", "DataTensorAttr"),
    "torch_geometric.data.storage": ("GlobalStorage",),
}
OF_TENSORS = (
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2",
    *(f"torch {kind}Storage" for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")),
)  # fmt: skip
ALLOWED = frozenset(
    (*OF_TENSORS, *(f"{module} {name}" for module, names in OF_PYG.items() for name in names))
)
UNSEEN = {
    "STACK_GLOBAL",
    "INST",
    "OBJ",
    "EXT1",
    "EXT2",
    "EXT4",
}  # other ways to name something; torch.save writes none of them


def from_pyg_file(path: str | Path) -> Graph:
    """A graph from PyG's file. DataError if it cannot be read, holds anything but graphs, or names what a graph does not consist of."""
    path = Path(path)
    try:
        _inspect(path)
        found = _graphs(_load(path), path)
        for data in found if isinstance(found, list) else [found]:
            _require_held(data, path)
        return from_pyg(found, name=path.stem)
    except FedloomError:
        raise
    except OSError as error:
        raise DataError(f"graph: cannot read {str(path)!r} ({error.strerror or error})") from error
    except (
        Exception
    ) as error:  # whatever else bytes that nobody vouches for can make zipfile, torch and PyG raise
        words = " ".join(str(error).split())[
            :150
        ]  # PyTorch's go on for pages, and may hold the file's own bytes
        said = f"{type(error).__name__}: {''.join(char if char.isprintable() else '?' for char in words)}"
        raise DataError(
            f"graph: {str(path)!r} is damaged, or not a graph that torch.save wrote ({said})"
        ) from error


def _inspect(path: Path) -> None:
    """Refuses a file that is not what torch.save writes, or whose pickle names something else than a graph's parts."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if (
            any(part.compress_type != zipfile.ZIP_STORED for part in parts)
            or sum(part.file_size for part in parts) > path.stat().st_size
        ):
            raise DataError(
                f"graph: {str(path)!r} holds more than its size: torch.save compresses nothing"
            )
        pickles = [part for part in parts if part.filename.endswith(".pkl")]
        if len(pickles) != 1:
            raise DataError(
                f"graph: {str(path)!r} is not what torch.save writes: it holds {len(pickles)} pickles"
            )
        content = archive.read(pickles[0])
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in UNSEEN:
            raise DataError(
                f"graph: {str(path)!r} is not what torch.save writes: its pickle has a {operation.name}; nothing of it was run"
            )
        if operation.name == "GLOBAL" and argument not in ALLOWED:
            named = str(argument).replace(" ", ".")
            raise DataError(
                f"graph: {str(path)!r} names {named!r}, which is no part of a plain graph; nothing of it was run. "
                f"Valid: what torch.save writes of a PyG Data with tensors, or of a list of them"
            )


def _load(path: Path) -> Any:
    import torch_geometric.data.data
    import torch_geometric.data.storage

    modules = {
        "torch_geometric.data.data": torch_geometric.data.data,
        "torch_geometric.data.storage": torch_geometric.data.storage,
    }
    classes = [getattr(modules[module], name) for module, names in OF_PYG.items() for name in names]
    # What PyG has allowed for the whole process must stay so: at its end, `safe_globals` takes back all that it was given.
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([cls for cls in classes if cls not in known]):
        return torch.load(path, map_location="cpu", weights_only=True)


def _graphs(loaded: Any, path: Path) -> Any:
    """The one graph in what was loaded, or a list of graphs."""
    from torch_geometric.data import Data
    from torch_geometric.data.separate import separate

    if isinstance(loaded, Data):
        return loaded
    if isinstance(loaded, list) and loaded and all(isinstance(data, Data) for data in loaded):
        return loaded
    # A dataset that was collated: everything joined (a Data, or a dict), and where each graph begins.
    if (
        isinstance(loaded, tuple)
        and len(loaded) in (2, 3, 4)
        and isinstance(loaded[0], Data | dict)
    ):
        joined, slices = (
            Data.from_dict(loaded[0]) if isinstance(loaded[0], dict) else loaded[0],
            loaded[1],
        )
        if slices is None:
            return joined
        _require_held(joined, path)
        count = len(slices["y"]) - 1
        return [
            separate(Data, joined, idx=k, slice_dict=slices, decrement=False) for k in range(count)
        ]
    raise DataError(
        f"graph: {str(path)!r} holds a {type(loaded).__name__}, must be a PyG Data, a list of them, or a collated dataset"
    )


def _require_held(data: Any, path: Path) -> None:
    """Refuses a tensor that says it is larger than what the file holds of it: it would fill memory once it is worked with."""
    for name, tensor in _tensors(data):
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise DataError(
                f"graph: {str(path)!r}: {name} has {tensor.numel()} entries, the file holds less; save {name}.contiguous()"
            )


def _tensors(data: Any) -> Iterator[tuple[str, Tensor]]:
    held: Mapping[str, Any] = data.to_dict()
    return ((name, value) for name, value in held.items() if isinstance(value, Tensor))
