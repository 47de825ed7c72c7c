"""One door to every dataset: `load("cora")` gives a Graph, wherever the files are.

Looked for in this order: the folder given as `root` or in FEDLOOM_DATA; `shared/data` beside the project's checkout; for Cora
the `graphdatascience` package; what was downloaded before; a download. A data folder is laid out as PyG's classes expect it
(`Planetoid/Cora/raw/ind.cora.x`, ...; `Entry.folder` says where) and is never written to.

What was read once is kept as tensors in the cache (FEDLOOM_CACHE, else `fedloom` in the user's cache folder), under a name made of
everything that went in: a second load neither parses nor imports PyG. The cache may be deleted at any time.

Planetoid's raw files are Python pickles, which can run code when they are read: take them from a source you trust.
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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedloom.data import files, synthetic
from fedloom.errors import ConfigError, DataError, FedloomError, unknown
from fedloom.graph import SPARSE_FEATURES_BELOW, Graph, Task
from fedloom.sparse import Sparse

# Graphs without node features get their degree, one-hot; all degrees from this one on share a column.
DEGREE_CAP = 128
# Part of every cache name: raise it when what is stored changes.
CACHE_FORMAT = 1
MASKS = ("train_mask", "val_mask", "test_mask")
Counts = tuple[int, int, int, int]  # nodes, edges, features, classes


@dataclass(frozen=True)
class Entry:
    """What the catalogue knows about a dataset. Counts are those of the Graph that `load` gives (edges in both directions)."""

    description: str
    task: Task
    family: str  # PyG's class, or "OGB"
    arguments: Mapping[str, Any]  # of that class
    folder: str  # the raw files' place in a data folder
    nodes: int  # of all graphs together
    edges: int
    features: int
    classes: int
    split: str  # usual shares of train/val/test, in percent
    graphs: int = 1
    # Whether the counts were compared with the real files: then other counts mean damaged files.
    exact: bool = False


@dataclass(frozen=True)
class Place:
    """Where a dataset comes from: `path` is read (or, for a download, written)."""

    kind: Literal["folder", "zip", "package", "download", "tables", "recipe"]
    path: Path

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


def _planetoid(name: str, about: str, counts: Counts) -> Entry:
    return Entry(about, "node", "Planetoid", {"name": name}, f"Planetoid/{name}/raw", *counts, "20/40/40", exact=True)


def _npz(family: str, name: str, about: str, counts: Counts) -> Entry:
    return Entry(about, "node", family, {"name": name}, f"{family}/{name}/raw", *counts, "20/40/40", exact=True)


def _wikipedia(name: str, about: str, counts: Counts, exact: bool = False) -> Entry:
    folder = f"WikipediaNetwork/{name}/geom_gcn/raw"
    return Entry(about, "node", "WikipediaNetwork", {"name": name}, folder, *counts, "48/32/20", exact=exact)


def _heterophilous(name: str, about: str, counts: Counts, exact: bool = False) -> Entry:
    family = "HeterophilousGraphDataset"
    return Entry(about, "node", family, {"name": name}, f"{family}/{name}/raw", *counts, "50/25/25", exact=exact)


def _single(family: str, about: str, counts: Counts, split: str = "60/20/20", **arguments: Any) -> Entry:
    return Entry(about, "node", family, arguments, f"{family}/raw", *counts, split)


def _ogb(name: str, about: str, counts: Counts) -> Entry:
    return Entry(about, "node", "OGB", {"name": name}, f"OGB/ogbn_{name}", *counts, "60/20/20")


def _tu(name: str, graphs: int, about: str, counts: Counts, exact: bool = False) -> Entry:
    folder = f"TUDataset/{name}/raw"
    return Entry(about, "graph", "TUDataset", {"name": name}, folder, *counts, "80/10/10", graphs=graphs, exact=exact)


# Counts of what is only ever downloaded are as published.
_CATALOGUE: dict[str, Entry] = {
    "cora": _planetoid("Cora", "citations between machine-learning papers, bag of words", (2708, 10556, 1433, 7)),
    "citeseer": _planetoid("CiteSeer", "citations between computer-science papers, bag of words", (3327, 9104, 3703, 6)),
    "pubmed": _planetoid("PubMed", "citations between papers on diabetes, TF-IDF words", (19717, 88648, 500, 3)),
    "photo": _npz("Amazon", "Photo", "Amazon photo articles bought together, words of reviews", (7650, 238162, 745, 8)),
    "computers": _npz("Amazon", "Computers", "Amazon computer articles bought together, words of reviews", (13752, 491722, 767, 10)),
    "cs": _npz("Coauthor", "CS", "computer scientists who wrote together, keywords", (18333, 163788, 6805, 15)),
    "physics": _npz("Coauthor", "Physics", "physicists who wrote together, keywords", (34493, 495924, 8415, 5)),
    "dblp": Entry(
        "citations between papers of DBLP, bag of words", "node", "CitationFull", {"name": "dblp"}, "CitationFull/dblp/raw",
        (17716, 105734, 1639, 4), "20/40/40",
    ),
    "chameleon": _wikipedia(
        "chameleon", "links between Wikipedia pages on chameleons, directed, heterophilous", (2277, 36101, 2325, 5), exact=True
    ),
    "squirrel": _wikipedia(
        "squirrel", "links between Wikipedia pages on squirrels, directed, heterophilous", (5201, 217073, 2089, 5)
    ),
    "actor": _single("Actor", "actors on the same Wikipedia page, directed, heterophilous", (7600, 30019, 932, 5), split="48/32/20"),
    "minesweeper": _heterophilous("minesweeper", "a mine field on a grid, synthetic, heterophilous", (10000, 78804, 7, 2), exact=True),
    "roman-empire": _heterophilous("roman_empire", "words of an article and their syntax, heterophilous", (22662, 65854, 300, 18)),
    "amazon-ratings": _heterophilous("amazon_ratings", "products bought together, their ratings", (24492, 186100, 300, 5)),
    "tolokers": _heterophilous("tolokers", "workers on the same tasks, who was banned", (11758, 1038000, 10, 2)),
    "questions": _heterophilous("questions", "users who answered each other, who stayed", (48921, 307080, 301, 2)),
    "wikics": _single(
        "WikiCS", "links between Wikipedia pages on computer science", (11701, 431726, 300, 10), split="50/25/25", is_undirected=True
    ),
    "flickr": _single("Flickr", "images with common properties", (89250, 899756, 500, 7)),
    "reddit": _single("Reddit", "posts with a common commenter", (232965, 114615892, 602, 41)),
    "reddit2": _single("Reddit2", "posts with a common commenter, sparser", (232965, 23213838, 602, 41)),
    "ogbn-arxiv": _ogb("arxiv", "citations between arXiv papers, made undirected", (169343, 2315598, 128, 40)),
    "ogbn-products": _ogb("products", "Amazon products bought together", (2449029, 123718280, 100, 47)),
    "mutag": _tu("MUTAG", 188, "compounds, mutagenic or not", (3371, 7442, 7, 2), exact=True),
    "nci1": _tu("NCI1", 4110, "compounds, active against lung cancer or not", (122747, 265506, 37, 2), exact=True),
    "proteins": _tu("PROTEINS", 1113, "proteins, enzymes or not", (43471, 162088, 3, 2), exact=True),
    "imdb-binary": _tu("IMDB-BINARY", 1000, "who plays with whom, genre; degree features", (19773, 193062, 129, 2), exact=True),
    "collab": _tu("COLLAB", 5000, "who writes with whom, field; degree features", (372474, 24572158, 129, 3), exact=True),
    "enzymes": _tu("ENZYMES", 600, "enzymes, their top-level class", (19580, 74564, 3, 6)),
    "dd": _tu("DD", 1178, "proteins, enzymes or not, large", (334925, 1686092, 89, 2)),
    "imdb-multi": _tu("IMDB-MULTI", 1500, "who plays with whom, genre; degree features", (19502, 197806, 129, 3)),
    "reddit-binary": _tu("REDDIT-BINARY", 2000, "who replies to whom; degree features", (859254, 1991016, 129, 2)),
}  # fmt: skip


def catalogue() -> dict[str, Entry]:
    """Every dataset there is a name for, with what is known about it. Being listed does not mean being on this machine."""
    return dict(_CATALOGUE)


def find(name: str, *, root: Path | None = None) -> Place:
    """Where `load` would take a dataset from; reads and downloads nothing. Takes the same arguments as `load`."""
    if name.partition(":")[0] in synthetic.MAKERS:
        return Place("recipe", Path(name))
    if name not in _CATALOGUE:
        path = Path(name).expanduser()
        if path.suffix == ".toml" or (path / "graph.toml").exists() or len(path.parts) > 1:
            return Place("tables", path)
        raise unknown("dataset", name, [*_CATALOGUE, *synthetic.MAKERS])
    entry = _CATALOGUE[name]
    here = (place for place in _candidates(name, entry, root) if place.path.exists())
    return next(here, Place("download", _downloads() / entry.folder))


def load(name: str, *, root: Path | None = None, public_split: int = 0) -> Graph:
    """The dataset as one Graph; a graph-level one is a disjoint union with `batch`.

    name: one of `catalogue()`; or a folder with a graph.toml, or such a file (see `files.from_folder`); or a recipe such as
    "synthetic:nodes=1000,homophily=0.8" (see `synthetic`). root: a data folder, instead of the one in FEDLOOM_DATA.
    public_split: which of the splits that came with the data fills train, val and test; they stay empty if there is none.

    Edges are as published and each there once; edge attributes are dropped. Graphs without node features get their degree
    one-hot, up to DEGREE_CAP.
    """
    place = find(name, root=root)
    if place.kind in ("recipe", "tables"):
        if public_split != 0:
            raise ConfigError(f"public_split is {public_split}, but {name!r} has one split at most: 0")
        return synthetic.from_text(name) if place.kind == "recipe" else files.from_folder(place.path)
    entry = _CATALOGUE[name]
    if place.kind == "download":
        _download(name, entry, place, root)
        place = Place("folder", place.path)
    stored = _cache() / "graphs" / f"{name}-{_fingerprint(entry, place)}.safetensors"
    data = _restore(stored)
    if data is None:
        data = _read(name, entry, place)
        _store(data, stored)
    return files.trusted(data, entry.classes, name, public_split)


# ---- where things are ----
def _data_folders(root: Path | None) -> Iterator[Path]:
    """The data folders of this machine, first choice first."""
    asked = root or os.environ.get("FEDLOOM_DATA")
    if asked:
        folder = Path(asked).expanduser()
        if not folder.is_dir():
            raise DataError(f"{'root' if root else 'FEDLOOM_DATA'} is {str(folder)!r}, which is not a folder")
        yield folder
    project = Path(__file__).resolve().parents[3]
    if (project / "pyproject.toml").is_file():
        yield project.parent / "shared" / "data"


def _candidates(name: str, entry: Entry, root: Path | None) -> Iterator[Place]:
    """Every place the dataset may lie in, first choice first."""
    for folder in _data_folders(root):
        yield Place("folder", folder / entry.folder)
        if entry.family == "TUDataset":
            yield Place("zip", folder / entry.family / f"{entry.arguments['name']}.zip")
    if name == "cora":
        package = importlib.util.find_spec("graphdatascience")  # finds, but does not import
        for parent in (package and package.submodule_search_locations) or ():
            yield Place("package", Path(parent) / "resources" / "cora")
    yield Place("folder", _downloads() / entry.folder)


def _cache() -> Path:
    """The cache folder, made if need be."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"
    folder = Path(os.environ.get("FEDLOOM_CACHE") or default).expanduser()
    try:
        (folder / "graphs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the cache folder {folder} cannot be made ({error}): set FEDLOOM_CACHE to one that can") from error
    return folder


def _downloads() -> Path:
    """Downloaded raw files: a data folder like any other."""
    return _cache() / "data"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder in the cache (so that a rename can move things out of it) that goes away again."""
    try:
        with tempfile.TemporaryDirectory(dir=_cache(), prefix="tmp-") as folder:
            yield Path(folder)
    except PermissionError as error:
        raise DataError(f"the cache folder {_cache()} cannot be written ({error}): set FEDLOOM_CACHE to one that can") from error


# ---- raw files -> tensors ----
def _read(name: str, entry: Entry, place: Place) -> SimpleNamespace:
    """Reads the raw files; what comes back is checked and has PyG's attribute names."""
    try:
        with _scratch() as scratch, _quiet():
            if place.kind == "package":
                data = _read_package(place.path)
            elif entry.family == "OGB":
                data = _read_ogb(place.path)
            else:
                data = _read_pyg(name, entry, place, scratch)
        if data.x is None:
            data.x = _degree_features(data.edge_index, data.num_nodes)
        graph = files.from_pyg(data, entry.classes, name)
    except FedloomError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise DataError(f"dataset {name!r}: {place.path} cannot be read: {type(error).__name__}: {text}") from error
    found = {"nodes": graph.num_nodes, "edges": graph.num_edges, "features": graph.num_features, "items": graph.num_items}
    known = {"nodes": entry.nodes, "edges": entry.edges, "features": entry.features}
    known["items"] = entry.graphs if entry.task == "graph" else entry.nodes
    for key, count in known.items():
        if entry.exact and found[key] != count:
            raise DataError(f"dataset {name!r}: {place.path} is damaged or not {name}: {found[key]} {key}, must be {count}")
    masks = {key: getattr(data, key, None) for key in MASKS}
    return SimpleNamespace(x=graph.x, edge_index=graph.edge_index, y=graph.y, batch=graph.batch, **masks)


def _read_pyg(name: str, entry: Entry, place: Place, scratch: Path) -> Any:
    """A PyG class reads the raw files through a link, so that what it writes lands in the scratch folder."""
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
        # PyG downloads when a file is missing, and would write through the link.
        missing = [Path(path).name for path in dataset.raw_paths if not Path(path).exists()]
        raise DataError(f"dataset {name!r}: {place.path} is incomplete: no {', '.join(missing)}")

    dataset = _pyg(entry, scratch, download=refuse)
    if entry.task == "node":
        return dataset[0]
    from torch_geometric.data import Batch

    return Batch.from_data_list(list(dataset))


def _pyg(entry: Entry, root: Path, **methods: Any) -> Any:
    """The dataset's PyG class with some methods replaced, and quiet; `root` is laid out like a data folder."""
    import torch_geometric.datasets

    kind = getattr(torch_geometric.datasets, entry.family)
    methods["log"] = property(lambda self: False, lambda self, value: None)  # the classes offer no argument for it
    return type(entry.family, (kind,), methods)(str(root / entry.family), **entry.arguments)


def _read_package(folder: Path) -> SimpleNamespace:
    """Cora as the graphdatascience package has it. Nodes by their number; classes numbered as in Planetoid's Cora."""
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise DataError(f"dataset 'cora': {folder} needs pyarrow to be read: pip install 'fedloom[demo]'") from error
    nodes = read_table(folder / "cora_nodes.parquet.gzip").sort_by("nodeId")
    edges = read_table(folder / "cora_rels.parquet.gzip")
    number = nodes["nodeId"].to_numpy()
    ends = np.stack([np.searchsorted(number, edges[side].to_numpy()) for side in ("sourceNodeId", "targetNodeId")])
    ends = np.concatenate([ends, ends[::-1]], axis=1)
    planetoid = np.array([3, 6, 1, 4, 0, 2, 5])
    return SimpleNamespace(
        x=torch.from_numpy(np.stack(nodes["features"].to_numpy()).astype(np.float32)),
        edge_index=torch.from_numpy(ends[:, ends[0] != ends[1]]),
        y=torch.from_numpy(planetoid[nodes["subject"].to_numpy()]),
    )


def _read_ogb(folder: Path) -> SimpleNamespace:
    """A node-level OGB dataset from its CSV files.

    Not through the `ogb` package: 1.3.6 cannot load its own files with torch >= 2.6 and asks questions on the terminal.
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


def _degree_features(edge_index: Tensor, num_nodes: int) -> Tensor:
    degree = torch.bincount(edge_index[0], minlength=num_nodes).clamp(max=DEGREE_CAP)
    return torch.nn.functional.one_hot(degree, DEGREE_CAP + 1).float()


def _unzip(archive: Path, folder: Path) -> None:
    """The archive's files, without the folder they lie in."""
    with zipfile.ZipFile(archive) as packed, tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
        packed.extractall(unpacked)
        inside = list(Path(unpacked).iterdir())
        (inside[0] if len(inside) == 1 and inside[0].is_dir() else Path(unpacked)).rename(folder)
        Path(unpacked).mkdir(exist_ok=True)  # for the clean-up


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of PyG's on standard output, and no warning about the old SciPy module that Planetoid's pickles name."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*scipy.sparse.csr.*", category=DeprecationWarning)
        yield


# ---- downloads ----
class _Fetched(Exception):  # noqa: N818  # a signal, no error
    """Raised where PyG would begin to process what it downloaded."""


def _download(name: str, entry: Entry, place: Place, root: Path | None) -> None:
    """Fetches the raw files to `place`: whole or not at all."""

    def stop(dataset: Any) -> None:
        raise _Fetched

    with _scratch() as scratch:
        try:
            with _quiet(), suppress(_Fetched):
                if entry.family == "OGB":
                    _fetch_ogb(entry, scratch)
                else:
                    _pyg(entry, scratch, process=stop)
        except Exception as error:
            looked = ", ".join(str(candidate.path) for candidate in _candidates(name, entry, root))
            raise DataError(
                f"dataset {name!r} is not on this machine and could not be downloaded ({type(error).__name__}: {error}). "
                f"Looked in: {looked}. Go online, or set FEDLOOM_DATA to a folder that holds {entry.folder}"
            ) from error
        place.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            (scratch / entry.folder).rename(place.path)
        except OSError:
            if not place.path.exists():  # else another process was quicker
                raise


def _fetch_ogb(entry: Entry, root: Path) -> None:
    archive = root / "download.zip"
    with (
        urllib.request.urlopen(f"https://snap.stanford.edu/ogb/data/nodeproppred/{entry.arguments['name']}.zip") as source,
        open(archive, "wb") as target,
    ):
        shutil.copyfileobj(source, target)
    (root / entry.folder).parent.mkdir()
    _unzip(archive, root / entry.folder)


# ---- the cache ----
def _fingerprint(entry: Entry, place: Place) -> str:
    """A short name for everything the tensors depend on: raw files (place, sizes, times), how they are read, and by what."""
    where = place.path.resolve()
    raw = sorted(path for path in where.rglob("*") if path.is_file()) if where.is_dir() else [where]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in raw]
    reader = (entry.family, sorted(entry.arguments.items()), importlib.metadata.version("torch_geometric"))
    return hashlib.sha256(repr((CACHE_FORMAT, DEGREE_CAP, place.kind, reader, stats)).encode()).hexdigest()[:16]


def _store(data: SimpleNamespace, path: Path) -> None:
    """Writes the tensors; a reader sees the old state or the new one. Sparse features are stored as such: Physics is 1.2 GB dense."""
    tensors = {key: value for key, value in vars(data).items() if value is not None and key != "x"}
    tensors["edge_index"] = data.edge_index.int()
    if torch.count_nonzero(data.x).item() < SPARSE_FEATURES_BELOW * data.x.numel():
        x = Sparse.from_dense(data.x)
        tensors |= {"x.offsets": x.offsets, "x.indices": x.indices, "x.values": x.values, "x.shape": torch.tensor(x.shape)}
    else:
        tensors["x"] = data.x
    with _scratch() as scratch:
        save_file({key: value.contiguous() for key, value in tensors.items()}, scratch / path.name)
        os.replace(scratch / path.name, path)


def _restore(path: Path) -> SimpleNamespace | None:
    """What `_store` wrote, or None if there is nothing or it is damaged."""
    try:
        tensors = load_file(path)
        if "x" not in tensors:
            rows, columns = tensors.pop("x.shape").tolist()
            x = Sparse(tensors.pop("x.offsets"), tensors.pop("x.indices"), tensors.pop("x.values"), (rows, columns))
            tensors["x"] = torch.zeros(rows, columns)
            tensors["x"][x.rows, x.indices.long()] = x.values  # several times as fast as x.dense(), which adds up
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
    return SimpleNamespace(**tensors)
