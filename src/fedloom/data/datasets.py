"""Datasets: `load("cora")` returns a Graph, wherever the files are.

`load` looks for the raw files in this order:

1. the folder given as `root`, or else the one in FEDLOOM_DATA;
2. `shared/data` next to the project's checkout;
3. for Cora, the `graphdatascience` package;
4. earlier downloads;
5. a new download.

A data folder has the layout that PyG's classes expect (`Planetoid/Cora/raw/ind.cora.x`, ...; see
`Entry.folder`). fedloom never writes to it.

The tensors are cached (in FEDLOOM_CACHE, else in `fedloom` in the user's cache folder). The name of
a cached file depends on everything that the tensors depend on. A second load neither parses the
files nor imports PyG. The cache may be deleted at any time.

Planetoid's raw files are Python pickles. Reading a pickle can run code, so use files from a source
that you trust.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import urllib.request
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedloom.data import files, synthetic
from fedloom.data.edges import DEGREE_CAP, degree_features
from fedloom.data.graph import SPARSE_FEATURES_BELOW, Graph, Task, timed
from fedloom.data.sparse import Sparse
from fedloom.data.tables import SPLITS
from fedloom.errors import ConfigError, DataError, unknown

# Part of every cached file's name. Raise it when the stored content changes.
CACHE_FORMAT = 1
MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True)
class Entry:
    """A dataset in the catalogue. The counts are those of the Graph that `load` returns.

    Attributes:
        collection: PyG's class, or "OGB".
        member: The dataset's name in the collection. "" if the collection is a single dataset.
        nodes: Number of nodes of all graphs.
        edges: Number of edges of all graphs. Both directions count.
        features: Number of node features.
        classes: Number of classes.
        split: The usual shares of train/val/test, in percent.
        description: What nodes, edges and features are.
        graphs: Number of graphs.
        exact: Whether the counts were compared with the real files. Other counts then mean that
            the files are damaged. Otherwise the counts are the published ones.
        public: Sizes of train, val and test in the first public split. Recorded where `exact`.
        options: Further arguments of PyG's class.
    """

    collection: str
    member: str
    nodes: int
    edges: int
    features: int
    classes: int
    split: str
    description: str
    graphs: int = 1
    exact: bool = False
    public: tuple[int, int, int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The unit of prediction, "node" or "graph"."""
        return "graph" if self.collection == "TUDataset" else "node"

    @property
    def folder(self) -> str:
        """The folder of the raw files in a data folder. PyG's class looks for them there."""
        if self.collection == "OGB":
            return f"OGB/ogbn_{self.member}"  # contains raw/ and split/
        inner = "geom_gcn/raw" if self.collection == "WikipediaNetwork" else "raw"
        return "/".join(filter(None, [self.collection, self.member, inner]))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of PyG's class, except the root folder."""
        return ({"name": self.member} if self.member else {}) | dict(self.options)


@dataclass(frozen=True)
class Place:
    """Where a dataset comes from. `load` reads `path`, or writes it for a download."""

    kind: Literal["folder", "zip", "package", "download", "tables", "recipe"]
    path: Path

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


_HETEROPHILOUS = "HeterophilousGraphDataset"
# The numbers are nodes, edges, features and classes.
_CATALOGUE = {
    # node classification
    "cora": Entry("Planetoid", "Cora", 2708, 10556, 1433, 7, "20/40/40",
        "citations, machine learning; words", exact=True, public=(140, 500, 1000)),
    "citeseer": Entry("Planetoid", "CiteSeer", 3327, 9104, 3703, 6, "20/40/40",
        "citations, computer science; words", exact=True, public=(120, 500, 1000)),
    "pubmed": Entry("Planetoid", "PubMed", 19717, 88648, 500, 3, "20/40/40",
        "citations, diabetes; TF-IDF words", exact=True, public=(60, 500, 1000)),
    "dblp": Entry("CitationFull", "dblp", 17716, 105734, 1639, 4, "20/40/40",
        "citations, computer science; words"),
    "photo": Entry("Amazon", "Photo", 7650, 238162, 745, 8, "20/40/40",
        "photo articles bought together; reviews", exact=True),
    "computers": Entry("Amazon", "Computers", 13752, 491722, 767, 10, "20/40/40",
        "computers bought together; reviews", exact=True),
    "cs": Entry("Coauthor", "CS", 18333, 163788, 6805, 15, "20/40/40",
        "co-authors, computer science; keywords", exact=True),
    "physics": Entry("Coauthor", "Physics", 34493, 495924, 8415, 5, "20/40/40",
        "co-authors, physics; keywords", exact=True),
    "wikics": Entry("WikiCS", "", 11701, 431726, 300, 10, "50/25/25",
        "linked Wikipedia pages on computing; 20 splits", options={"is_undirected": True}),
    "ogbn-arxiv": Entry("OGB", "arxiv", 169343, 2315598, 128, 40, "60/20/20",
        "arXiv citations, made undirected; split by time"),
    "ogbn-products": Entry("OGB", "products", 2449029, 123718280, 100, 47, "60/20/20",
        "products bought together; split by rank"),
    "flickr": Entry("Flickr", "", 89250, 899756, 500, 7, "60/20/20",
        "images with common properties"),
    "reddit": Entry("Reddit", "", 232965, 114615892, 602, 41, "60/20/20",
        "posts with a common commenter"),
    "reddit2": Entry("Reddit2", "", 232965, 23213838, 602, 41, "60/20/20",
        "posts with a common commenter, sparser"),
    # node classification, heterophilous; 10 splits each
    "chameleon": Entry("WikipediaNetwork", "chameleon", 2277, 36101, 2325, 5, "48/32/20",
        "linked Wikipedia pages, directed, self-loops", exact=True, public=(1092, 729, 456)),
    "squirrel": Entry("WikipediaNetwork", "squirrel", 5201, 217073, 2089, 5, "48/32/20",
        "linked Wikipedia pages, directed, self-loops"),
    "actor": Entry("Actor", "", 7600, 30019, 932, 5, "48/32/20",
        "actors on the same page, directed"),
    "minesweeper": Entry(_HETEROPHILOUS, "minesweeper", 10000, 78804, 7, 2, "50/25/25",
        "mines on a grid, synthetic", exact=True, public=(5000, 2500, 2500)),
    "roman-empire": Entry(_HETEROPHILOUS, "roman_empire", 22662, 65854, 300, 18, "50/25/25",
        "words of an article, their syntax"),
    "amazon-ratings": Entry(_HETEROPHILOUS, "amazon_ratings", 24492, 186100, 300, 5, "50/25/25",
        "products, their ratings"),
    "tolokers": Entry(_HETEROPHILOUS, "tolokers", 11758, 1038000, 10, 2, "50/25/25",
        "workers on the same tasks, banned or not"),
    "questions": Entry(_HETEROPHILOUS, "questions", 48921, 307080, 301, 2, "50/25/25",
        "users that answered each other, active or not"),
    # graph classification
    "mutag": Entry("TUDataset", "MUTAG", 3371, 7442, 7, 2, "80/10/10",
        "compounds, mutagenic or not", 188, exact=True),
    "nci1": Entry("TUDataset", "NCI1", 122747, 265506, 37, 2, "80/10/10",
        "compounds, active or not", 4110, exact=True),
    "proteins": Entry("TUDataset", "PROTEINS", 43471, 162088, 3, 2, "80/10/10",
        "proteins, enzymes or not", 1113, exact=True),
    "enzymes": Entry("TUDataset", "ENZYMES", 19580, 74564, 3, 6, "80/10/10",
        "enzymes, top-level class", 600),
    "dd": Entry("TUDataset", "DD", 334925, 1686092, 89, 2, "80/10/10",
        "large proteins, enzymes or not", 1178),
    "imdb-binary": Entry("TUDataset", "IMDB-BINARY", 19773, 193062, 129, 2, "80/10/10",
        "actors in the same film, genre; degrees", 1000, exact=True),
    "imdb-multi": Entry("TUDataset", "IMDB-MULTI", 19502, 197806, 129, 3, "80/10/10",
        "actors in the same film, genre; degrees", 1500),
    "reddit-binary": Entry("TUDataset", "REDDIT-BINARY", 859254, 1991016, 129, 2, "80/10/10",
        "users that reply to each other; degrees", 2000),
    "collab": Entry("TUDataset", "COLLAB", 372474, 24572158, 129, 3, "80/10/10",
        "scientific collaborations, field; degrees", 5000, exact=True),
}  # fmt: skip


def catalogue() -> dict[str, Entry]:
    """Returns all datasets by name. Not all of them need to be on this machine."""
    return dict(_CATALOGUE)


def find(name: str, *, root: Path | None = None) -> Place:
    """Returns where `load` would find a dataset. It reads and downloads nothing.

    The arguments are those of `load`.
    """
    if name.partition(":")[0] in synthetic.GENERATORS:
        return Place("recipe", Path(name))
    if name not in _CATALOGUE:
        path = Path(name).expanduser()
        is_file = path.suffix in (".toml", *files.ENDINGS)
        if is_file or files.is_folder_of_tables(path) or len(path.parts) > 1:
            return Place("tables", path)
        raise unknown("dataset", name, [*_CATALOGUE, *synthetic.GENERATORS])
    entry = _CATALOGUE[name]
    existing = (place for place in _candidates(name, entry, root) if place.path.exists())
    return next(existing, Place("download", _downloads() / entry.folder))


@timed
def load(name: str, *, root: Path | None = None, public_split: int = 0) -> Graph:
    """Returns a dataset as one Graph. A graph-level dataset is a disjoint union with `batch`.

    Edges are those of the published data, each once. Edge attributes are dropped. Graphs without
    node features get their degree as a one-hot vector, up to DEGREE_CAP.

    Args:
        name: A name in `catalogue()`; a folder of tables, or its graph.toml (see
            `tables.from_folder`); a file with a graph (see `files.from_file`); or a recipe such as
            "synthetic:nodes=1000,homophily=0.8" (see `synthetic`).
        root: A data folder, in place of the one in FEDLOOM_DATA.
        public_split: Which of the dataset's own splits fills train, val and test. They stay empty
            if the dataset has no split.
    """
    place = find(name, root=root)
    if place.kind in ("recipe", "tables"):
        if public_split != 0:
            raise ConfigError(f"{name!r} has no public split {public_split}. Valid: 0")
        if place.kind == "recipe":
            return synthetic.from_text(name)
        return (
            files.from_file(place.path)
            if place.path.suffix in files.ENDINGS
            else files.from_folder(place.path)
        )
    entry = _CATALOGUE[name]
    if place.kind == "download":
        _download(name, entry, place, root)
        place = Place("folder", place.path)
    stored = _cache() / "graphs" / f"{name}-{_fingerprint(entry, place)}.safetensors"
    data = _restore(stored)
    if data is None:
        data = _read(name, entry, place)
        _store(data, stored)
    return files.from_pyg_unchecked(data, entry.classes, name, public_split)


# ---- places ----
def _data_folders(root: Path | None) -> Iterator[Path]:
    """Yields the data folders of this machine, the first choice first."""
    asked = root or os.environ.get("FEDLOOM_DATA")
    if asked:
        folder = Path(asked).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"{'root' if root else 'FEDLOOM_DATA'} is {str(folder)!r}, which is not a folder"
            )
        yield folder
    project = Path(__file__).resolve().parents[3]
    if (project / "pyproject.toml").is_file():
        yield project.parent / "shared" / "data"


def _candidates(name: str, entry: Entry, root: Path | None) -> Iterator[Place]:
    """Yields all places where the dataset may be, the first choice first."""
    for folder in _data_folders(root):
        yield Place("folder", folder / entry.folder)
        if entry.collection == "TUDataset":
            yield Place("zip", folder / entry.collection / f"{entry.member}.zip")
    if name == "cora":
        package = importlib.util.find_spec("graphdatascience")  # does not import it
        for parent in (package and package.submodule_search_locations) or ():
            yield Place("package", Path(parent) / "resources" / "cora")
    yield Place("folder", _downloads() / entry.folder)


def _cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"
    return Path(os.environ.get("FEDLOOM_CACHE") or default).expanduser()


def _downloads() -> Path:
    """Returns the data folder of downloaded files."""
    return _cache() / "data"


@contextmanager
def _scratch() -> Iterator[Path]:
    """Makes a temporary folder in the cache, so that a rename can move files out of it."""
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=_cache(), prefix="tmp-")
    except OSError as error:
        raise DataError(
            f"the cache folder {_cache()} cannot be written ({error}): "
            "set FEDLOOM_CACHE to a folder that can be written"
        ) from error
    with scratch as folder:
        yield Path(folder)


# ---- raw files -> tensors ----
def _read(name: str, entry: Entry, place: Place) -> SimpleNamespace:
    """Reads and checks the raw files. The result has PyG's attribute names."""
    with _scratch() as scratch:
        try:
            with _quiet():
                data = _read_raw(entry, place, scratch)
            if data.x is None:
                data.x = degree_features(data.edge_index, data.num_nodes)
            data.edge_attr = None
            graph = files.from_pyg(data, entry.classes, name)
        except Exception as error:
            text = " ".join(str(error).split())
            raise DataError(
                f"dataset {name!r}: {place.path} cannot be read: {type(error).__name__}: {text}"
            ) from error
    counts = {
        "nodes": (graph.num_nodes, entry.nodes),
        "edges": (graph.num_edges, entry.edges),
        "features": (graph.num_features, entry.features),
        "labels": (graph.num_items, entry.graphs if entry.task == "graph" else entry.nodes),
    }
    if entry.public and place.kind != "package":  # the Cora of the package has no split
        for key, size in zip(SPLITS, entry.public, strict=True):
            counts[f"{key} nodes"] = (int(getattr(graph, key).sum()), size)
    for key, (found, known) in counts.items():
        if entry.exact and found != known:
            raise DataError(
                f"dataset {name!r}: {place.path} is damaged: {found} {key}, must be {known}"
            )
    masks = {key: getattr(data, key, None) for key in MASKS}
    return SimpleNamespace(
        x=graph.x, edge_index=graph.edge_index, y=graph.y, batch=graph.batch, **masks
    )


def _read_raw(entry: Entry, place: Place, scratch: Path) -> Any:
    if place.kind == "package":
        return _read_package(place.path)
    return _read_ogb(place.path) if entry.collection == "OGB" else _read_pyg(entry, place, scratch)


def _read_pyg(entry: Entry, place: Place, scratch: Path) -> Any:
    """Reads the raw files with PyG's class, through a link in a temporary folder.

    The class writes its own files to the temporary folder.
    """
    raw = scratch / entry.folder
    raw.parent.mkdir(parents=True)
    if place.kind == "zip":
        _unzip(place.path, raw)
    else:
        try:
            raw.symlink_to(place.path.resolve(), target_is_directory=True)
        except OSError:  # a system without links
            shutil.copytree(place.path, raw)

    def refuse(dataset: Any) -> None:
        # PyG downloads if a file is missing, and would write through the link.
        missing = [Path(path).name for path in dataset.raw_paths if not Path(path).exists()]
        raise FileNotFoundError(f"incomplete, no {', '.join(missing)}")

    dataset = _pyg(entry, scratch, download=refuse)
    if entry.task == "node":
        return dataset[0]
    from torch_geometric.data import Batch

    return Batch.from_data_list(list(dataset))


def _pyg(entry: Entry, root: Path, **methods: Any) -> Any:
    """Returns the dataset of PyG's class, with some methods replaced and without log output.

    root: a folder with the layout of a data folder.
    """
    import torch_geometric.datasets

    kind = getattr(torch_geometric.datasets, entry.collection)
    # The classes have no argument for `log`.
    methods["log"] = property(lambda self: False, lambda self, value: None)
    return type(entry.collection, (kind,), methods)(str(root / entry.collection), **entry.arguments)


def _read_package(folder: Path) -> SimpleNamespace:
    """Reads the Cora of the graphdatascience package.

    Nodes are sorted by their number. Classes have the numbers of Planetoid's Cora.
    """
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise DataError("needs pyarrow: pip install 'fedloom[demo]'") from error
    nodes = read_table(folder / "cora_nodes.parquet.gzip").sort_by("nodeId")
    edges = read_table(folder / "cora_rels.parquet.gzip")
    number = nodes["nodeId"].to_numpy()
    ends = np.stack(
        [
            np.searchsorted(number, edges[side].to_numpy())
            for side in ("sourceNodeId", "targetNodeId")
        ]
    )
    ends = np.concatenate([ends, ends[::-1]], axis=1)
    planetoid = np.array([3, 6, 1, 4, 0, 2, 5])
    return SimpleNamespace(
        x=torch.from_numpy(np.stack(nodes["features"].to_numpy()).astype(np.float32)),
        edge_index=torch.from_numpy(ends[:, ends[0] != ends[1]]),
        y=torch.from_numpy(planetoid[nodes["subject"].to_numpy()]),
    )


def _read_ogb(folder: Path) -> SimpleNamespace:
    """Reads a node-level OGB dataset from its CSV files.

    It does not use the `ogb` package. Version 1.3.6 cannot load its own files with torch >= 2.6,
    and it asks questions on the terminal.
    """

    def table(file: Path, kind: type) -> Tensor:
        return torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=kind, ndmin=2))

    x = table(folder / "raw" / "node-feat.csv.gz", np.float32)
    edges = table(folder / "raw" / "edge.csv.gz", np.int64).t()
    masks = {}
    for key, file in zip(MASKS, ("train", "valid", "test"), strict=True):
        masks[key] = torch.zeros(len(x), dtype=torch.bool)
        masks[key][table(next(folder.glob(f"split/*/{file}.csv.gz")), np.int64)[:, 0]] = True
    y = table(folder / "raw" / "node-label.csv.gz", np.int64)
    return SimpleNamespace(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y, **masks)


def _unzip(archive: Path, folder: Path) -> None:
    """Extracts an archive's files to `folder`, without the archive's top folder.

    It may leave an empty folder next to `folder`.
    """
    unpacked = folder.parent / "unpacked"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(unpacked)
    inside = list(unpacked.iterdir())
    (inside[0] if len(inside) == 1 and inside[0].is_dir() else unpacked).rename(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirects PyG's output to standard error.

    It also hides the warning about the old SciPy module that Planetoid's pickles name.
    """
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*scipy.sparse.csr.*", category=DeprecationWarning
        )
        yield


# ---- downloads ----
class _Fetched(Exception):  # noqa: N818  # a signal, not an error
    """Raised at the point where PyG starts to process a download."""


def _download(name: str, entry: Entry, place: Place, root: Path | None) -> None:
    """Downloads the raw files to `place`. A failed download leaves nothing there."""

    def stop(dataset: Any) -> None:
        raise _Fetched

    with _scratch() as scratch:
        try:
            with _quiet(), suppress(_Fetched):
                if entry.collection == "OGB":
                    _fetch_ogb(entry, scratch)
                else:
                    _pyg(entry, scratch, process=stop)
        except Exception as error:
            looked = ", ".join(str(candidate.path) for candidate in _candidates(name, entry, root))
            raise DataError(
                f"dataset {name!r} is not on this machine and could not be downloaded "
                f"({type(error).__name__}: {error}). Looked in: {looked}. "
                f"Go online, or set FEDLOOM_DATA to a folder that holds {entry.folder}"
            ) from error
        place.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            (scratch / entry.folder).rename(place.path)
        except OSError:
            if not place.path.exists():  # else another process was faster
                raise


def _fetch_ogb(entry: Entry, root: Path) -> None:
    archive = root / "download.zip"
    with (
        urllib.request.urlopen(
            f"https://snap.stanford.edu/ogb/data/nodeproppred/{entry.member}.zip"
        ) as source,
        open(archive, "wb") as target,
    ):
        shutil.copyfileobj(source, target)
    (root / entry.folder).parent.mkdir()
    _unzip(archive, root / entry.folder)


# ---- the cache ----
def _fingerprint(entry: Entry, place: Place) -> str:
    """Returns a short digest of everything that the tensors depend on.

    These are the raw files (paths, sizes, times), the arguments of the reader, and its version.
    """
    where = place.path.resolve()
    raw = sorted(path for path in where.rglob("*") if path.is_file()) if where.is_dir() else [where]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in raw]
    reader = (
        entry.collection,
        sorted(entry.arguments.items()),
        importlib.metadata.version("torch_geometric"),
    )
    return hashlib.sha256(
        repr((CACHE_FORMAT, DEGREE_CAP, place.kind, reader, stats)).encode()
    ).hexdigest()[:16]


def _store(data: SimpleNamespace, path: Path) -> None:
    """Writes the tensors atomically: a reader sees the old file or the new one.

    Sparse features are stored as a sparse matrix. The dense features of Physics take 1.2 GB.
    """
    tensors = {key: value for key, value in vars(data).items() if value is not None and key != "x"}
    tensors["edge_index"] = data.edge_index.int()
    if torch.count_nonzero(data.x).item() < SPARSE_FEATURES_BELOW * data.x.numel():
        x = Sparse.from_dense(data.x)
        tensors |= {
            "x.offsets": x.offsets,
            "x.indices": x.indices,
            "x.values": x.values,
            "x.shape": torch.tensor(x.shape),
        }
    else:
        tensors["x"] = data.x
    with _scratch() as scratch:
        save_file({key: value.contiguous() for key, value in tensors.items()}, scratch / path.name)
        path.parent.mkdir(exist_ok=True)
        os.replace(scratch / path.name, path)


def _restore(path: Path) -> SimpleNamespace | None:
    """Returns what `_store` wrote, or None if the file is missing or damaged."""
    try:
        tensors = load_file(path)
        if "x" not in tensors:
            rows, columns = tensors.pop("x.shape").tolist()
            x = Sparse(
                tensors.pop("x.offsets"),
                tensors.pop("x.indices"),
                tensors.pop("x.values"),
                (rows, columns),
            )
            tensors["x"] = torch.zeros(rows, columns)
            # Several times as fast as `x.dense()`, which adds up repeated entries.
            tensors["x"][x.rows, x.indices.long()] = x.values
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
    return SimpleNamespace(**tensors)
