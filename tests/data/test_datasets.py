"""Datasets: counts, places, the cache and damaged files.

Tests use the real files if they are on this machine. No test uses the network.
"""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import re
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.data import datasets
from fedloom.data.datasets import DEGREE_CAP, catalogue, find, load
from fedloom.data.edges import degree_features
from fedloom.data.files import to_folder
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError, DataError

# From the README of the data folder: items, nodes, edges, features, classes, and the sizes of
# train, val and test.
COUNTS = {
    "cora": (2708, 2708, 10556, 1433, 7, (140, 500, 1000)),
    "citeseer": (3327, 3327, 9104, 3703, 6, (120, 500, 1000)),
    "photo": (7650, 7650, 238162, 745, 8, (0, 0, 0)),
    "chameleon": (2277, 2277, 36101, 2325, 5, (1092, 729, 456)),
    "minesweeper": (10000, 10000, 78804, 7, 2, (5000, 2500, 2500)),
    "mutag": (188, 3371, 7442, 7, 2, (0, 0, 0)),
    "proteins": (1113, 43471, 162088, 3, 2, (0, 0, 0)),
    "imdb-binary": (1000, 19773, 193062, DEGREE_CAP + 1, 2, (0, 0, 0)),
}


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Gives every test its own cache."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def need(name: str) -> Path:
    """Returns the folder of a dataset's raw files, or skips the test."""
    place = find(name)
    if place.kind != "folder":
        places = datasets._candidates(name, catalogue()[name], None)
        looked = ", ".join(str(place.path) for place in places)
        pytest.skip(f"{name} is not on this machine; looked in {looked}")
    return place.path


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def tiny_tu(folder: Path, name: str = "ENZYMES", labels: str = "1\n2\n") -> Path:
    """Writes two graphs in TU's format, a path of three nodes and an edge. Returns the folder.

    They replace a dataset whose counts are not known exactly.
    """
    folder.mkdir(parents=True)
    for part, text in {
        "A": "1, 2\n2, 1\n2, 3\n3, 2\n4, 5\n5, 4\n",
        "graph_indicator": "1\n1\n1\n2\n2\n",
        "graph_labels": labels,
        "node_labels": "0\n1\n2\n0\n1\n",
    }.items():
        (folder / f"{name}_{part}.txt").write_text(text)
    return folder


def copied(name: str, to: Path) -> Path:
    """Copies one dataset's raw files to a data folder. Returns the raw folder."""
    raw = to / catalogue()[name].folder
    shutil.copytree(need(name), raw)
    for path in [raw, *raw.iterdir()]:
        path.chmod(0o755)
    return raw


# ---- loading ----
@pytest.mark.parametrize("name", COUNTS)
def test_counts(name, shared_cache, monkeypatch):
    need(name)
    monkeypatch.setenv("FEDLOOM_CACHE", str(shared_cache))
    items, nodes, edges, features, classes, splits = COUNTS[name]
    graph = load(name).check()
    assert (graph.num_items, graph.num_nodes, graph.num_edges) == (items, nodes, edges)
    assert (graph.num_features, graph.num_classes, graph.name) == (features, classes, name)
    assert tuple(int(mask.sum()) for mask in (graph.train, graph.val, graph.test)) == splits
    assert graph.y.unique().tolist() == list(range(classes))
    assert (graph.x.dtype, graph.edge_index.dtype) == (torch.float32, torch.int64)
    entry = catalogue()[name]
    assert (entry.nodes, entry.edges, entry.features, entry.classes, entry.task) == (
        *COUNTS[name][1:5],
        graph.task,
    )
    assert (entry.public or (0, 0, 0)) == splits
    source, target = graph.edge_index
    key = source * nodes + target
    assert (key[1:] > key[:-1]).all()
    undirected = torch.equal(torch.sort(target * nodes + source).values, key)
    assert undirected == (name != "chameleon")
    assert bool((source == target).any()) == (name == "chameleon")
    if graph.batch is not None:
        assert torch.equal(graph.batch[source], graph.batch[target])


@pytest.mark.parametrize("name", ["cora", "chameleon", "photo", "imdb-binary"])
def test_the_second_load_reads_the_cache_and_is_identical(name, shared_cache, monkeypatch):
    need(name)
    monkeypatch.setenv("FEDLOOM_CACHE", str(shared_cache))
    first = load(name)
    monkeypatch.setattr(datasets, "_read", lambda *arguments: pytest.fail("read again"))
    second = load(name)
    for key in ("x", "edge_index", "y", "train", "val", "test", "batch"):
        mine, theirs = getattr(first, key), getattr(second, key)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), key
    # Changes of the loaded graph must not change the file.
    second.x.zero_()
    second.y.zero_()
    third = load(name)
    assert torch.equal(third.x, first.x)
    assert torch.equal(third.y, first.y)


def test_cora_equals_pyg(shared_cache, monkeypatch, tmp_path):
    from torch_geometric.datasets import Planetoid

    copied("cora", tmp_path)
    monkeypatch.setenv("FEDLOOM_CACHE", str(shared_cache))
    theirs, mine = Planetoid(str(tmp_path / "Planetoid"), "Cora")[0], load("cora")
    assert torch.equal(mine.x, theirs.x)
    assert torch.equal(mine.y, theirs.y)
    assert torch.equal(mine.train, theirs.train_mask)
    assert set(map(tuple, mine.edge_index.t().tolist())) == set(
        map(tuple, theirs.edge_index.t().tolist())
    )


def test_public_split(shared_cache, monkeypatch):
    need("chameleon")
    monkeypatch.setenv("FEDLOOM_CACHE", str(shared_cache))
    first, last = load("chameleon"), load("chameleon", public_split=9)
    assert not torch.equal(first.train, last.train)
    assert last.train.sum() == 1092
    with pytest.raises(ConfigError, match=r"'chameleon' has no public split 10. Valid: 0 to 9"):
        load("chameleon", public_split=10)


@pytest.fixture
def package_cora(tmp_path, monkeypatch):
    """Cora from the package, without a data folder."""
    # Importing the packages takes seconds, so this only looks for them.
    if not (find_spec("graphdatascience") and find_spec("pyarrow")):
        pytest.skip("the extra 'demo' is not installed")
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "_data_folders", lambda root: iter([tmp_path]))
        assert find("cora").kind == "package"
        return load("cora").check()


def test_package_cora(package_cora):
    assert (package_cora.num_nodes, package_cora.num_edges, package_cora.num_features) == (
        2708,
        2 * 5278,
        1433,
    )
    assert torch.bincount(package_cora.y).tolist() == [351, 217, 418, 818, 426, 298, 180]
    assert not package_cora.train.any()


def test_package_cora_is_planetoid_cora(package_cora, shared_cache, monkeypatch):
    need("cora")
    monkeypatch.setenv("FEDLOOM_CACHE", str(shared_cache))

    # The nodes have other numbers, so this compares the multisets of their neighbourhoods.
    def fingerprint(g):
        degree = torch.bincount(g.edge_index[0], minlength=g.num_nodes)
        near = torch.zeros(g.num_nodes).index_add_(
            0, g.edge_index[0], degree[g.edge_index[1]].float()
        )
        return sorted(zip(g.y.tolist(), degree.tolist(), near.tolist(), strict=True))

    assert fingerprint(package_cora) == fingerprint(load("cora"))


def test_degree_features():
    star = torch.stack([torch.zeros(200, dtype=torch.int64), torch.arange(1, 201)])
    x = degree_features(torch.cat([star, star.flip(0)], 1), 202)
    assert x.shape == (202, DEGREE_CAP + 1)
    # The degree 200 is over the cap. The last node is isolated.
    assert x.argmax(1).tolist() == [DEGREE_CAP, *[1] * 200, 0]
    assert (x.sum(1) == 1).all()


def test_graphs_without_features_get_degrees(tmp_path):
    raw = tiny_tu(tmp_path / "TUDataset" / "ENZYMES" / "raw")
    (raw / "ENZYMES_node_labels.txt").unlink()
    assert load("enzymes", root=tmp_path).x.argmax(1).tolist() == [1, 2, 1, 1, 1]


# ---- places ----
def test_a_data_folder_is_never_changed(tmp_path):
    data = tmp_path / "data"
    copied("mutag", data)
    before = tree(data)
    load("mutag", root=data)
    assert tree(data) == before


def test_order_of_places(tmp_path, monkeypatch, cache):
    folder = "TUDataset/ENZYMES/raw"
    monkeypatch.setattr(
        datasets, "__file__", str(tmp_path / "project/src/fedloom/data/datasets.py")
    )
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").touch()
    # Each of these precedes the ones before it in the list.
    places = [cache / "data", tmp_path / "shared" / "data", tmp_path / "env", tmp_path / "root"]
    assert find("enzymes") == datasets.Place("download", cache / "data" / folder)
    for place in places:
        tiny_tu(place / folder)
        if place.name == "env":
            monkeypatch.setenv("FEDLOOM_DATA", str(place))
        assert find("enzymes", root=place if place.name == "root" else None) == datasets.Place(
            "folder", place / folder
        )
    # A data folder without this dataset is skipped.
    assert find("dd").kind == "download"
    # Without pyproject.toml it is not a checkout, so the folder next to it is not used.
    (tmp_path / "project" / "pyproject.toml").unlink()
    monkeypatch.delenv("FEDLOOM_DATA")
    assert find("enzymes").path == cache / "data" / folder


def test_find_writes_nothing(cache):
    find("enzymes")
    assert not cache.exists()


def test_zip(tmp_path):
    raw = tiny_tu(tmp_path / "unpacked" / "ENZYMES")
    archive = tmp_path / "data" / "TUDataset" / "ENZYMES.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as packed:
        for path in raw.iterdir():
            packed.write(path, f"ENZYMES/{path.name}")
    before = tree(tmp_path / "data")
    graph = load("enzymes", root=tmp_path / "data")
    assert (graph.y.tolist(), graph.batch.tolist()) == ([0, 1], [0, 0, 0, 1, 1])
    assert tree(tmp_path / "data") == before
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(
        DataError, match=r"dataset 'enzymes': .*ENZYMES.zip cannot be read: BadZipFile"
    ):
        load("enzymes", root=tmp_path / "data")


def ogb(folder: Path) -> Path:
    """Writes a graph of four nodes in OGB's layout. Returns the folder."""
    tables = {
        "raw/node-feat": "1,2\n3,4\n5,6\n7,8\n",
        "raw/edge": "0,1\n1,0\n2,3\n",
        "raw/node-label": "0\n39\n1\n0\n",
        "split/time/train": "0\n2\n",
        "split/time/valid": "1\n",
        "split/time/test": "3\n",
    }
    for name, text in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return folder


def check_ogb(graph):
    assert graph.x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert graph.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert graph.y.tolist() == [0, 39, 1, 0]
    assert graph.num_classes == 40
    assert graph.train.tolist() == [True, False, True, False]
    assert (graph.val.nonzero().item(), graph.test.nonzero().item()) == (1, 3)


def test_ogb_folder(tmp_path):
    ogb(tmp_path / "OGB" / "ogbn_arxiv")
    check_ogb(load("ogbn-arxiv", root=tmp_path))


def test_ogb_download(tmp_path, monkeypatch, cache):
    raw, packed = ogb(tmp_path / "arxiv"), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in raw.rglob("*.gz"):
            archive.write(path, path.relative_to(tmp_path))
    asked = []
    monkeypatch.setattr(
        datasets.urllib.request,
        "urlopen",
        lambda url: asked.append(url) or io.BytesIO(packed.getvalue()),
    )
    check_ogb(load("ogbn-arxiv"))
    assert asked == ["https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    check_ogb(load("ogbn-arxiv"))
    assert len(asked) == 1
    # No temporary files are left.
    assert sorted(path.name for path in cache.iterdir()) == ["data", "graphs"]


# ---- downloads ----
def test_a_download_is_cached(monkeypatch, cache, capsys):
    from torch_geometric.datasets import TUDataset

    fetched = []

    def download(self):
        fetched.append(self.name)
        print("Downloading")
        shutil.rmtree(self.raw_dir)
        tiny_tu(Path(self.raw_dir), self.name)

    monkeypatch.setattr(TUDataset, "download", download)
    assert load("enzymes").num_items == 2
    assert find("enzymes") == datasets.Place(
        "folder", cache / "data" / "TUDataset" / "ENZYMES" / "raw"
    )
    shutil.rmtree(cache / "graphs")
    assert load("enzymes").num_items == 2
    assert fetched == ["ENZYMES"]
    assert capsys.readouterr() == ("", "Downloading\n")  # standard output is reserved for results


def test_a_failed_download(tmp_path, monkeypatch, cache):
    from torch_geometric.datasets import TUDataset

    def download(self):
        (Path(self.raw_dir) / "half").write_text("")
        raise OSError("Name or service not known")

    monkeypatch.setattr(TUDataset, "download", download)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    with pytest.raises(DataError) as error:
        load("enzymes")
    text = str(error.value)
    assert "'enzymes' is not on this machine and could not be downloaded" in text
    assert "(OSError: Name or service not known)" in text
    places = [
        tmp_path / "TUDataset/ENZYMES/raw",
        tmp_path / "TUDataset/ENZYMES.zip",
        cache / "data/TUDataset/ENZYMES/raw",
    ]
    positions = [text.index(str(place)) for place in places]
    assert positions == sorted(positions)
    assert "set FEDLOOM_DATA to a folder that holds TUDataset/ENZYMES/raw" in text
    assert "\n" not in text
    assert isinstance(error.value.__cause__, OSError)
    assert list(cache.iterdir()) == []  # nothing of the download is left


# ---- the cache ----
def test_changed_files_are_read_again(tmp_path):
    raw = tiny_tu(tmp_path / "one" / "TUDataset/ENZYMES/raw")
    tiny_tu(tmp_path / "two" / "TUDataset/ENZYMES/raw", labels="2\n1\n")
    assert load("enzymes", root=tmp_path / "one").y.tolist() == [0, 1]
    assert load("enzymes", root=tmp_path / "two").y.tolist() == [1, 0]  # another folder
    assert load("enzymes", root=tmp_path / "one").y.tolist() == [0, 1]
    (raw / "ENZYMES_graph_labels.txt").write_text("7\n3\n")  # same size, another time
    assert load("enzymes", root=tmp_path / "one").y.tolist() == [1, 0]


def test_a_damaged_cache_is_replaced(tmp_path, cache):
    tiny_tu(tmp_path / "TUDataset/ENZYMES/raw")
    first = load("enzymes", root=tmp_path)
    (stored,) = (cache / "graphs").iterdir()
    content = stored.read_bytes()
    for damage in (b"", content[: len(content) // 2], b"nonsense" * 100):
        stored.unlink()  # the loaded graph may still be mapped to the file
        stored.write_bytes(damage)
        assert torch.equal(load("enzymes", root=tmp_path).x, first.x)
        assert stored.read_bytes() == content


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    tiny_tu(tmp_path / "TUDataset/ENZYMES/raw")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DataError, match=r"the cache folder .*file cannot be written .*set FEDLOOM_CACHE"
    ):
        load("enzymes", root=tmp_path)


def test_the_default_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLOOM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert datasets._cache() == tmp_path / "xdg" / "fedloom"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert datasets._cache() == tmp_path / "home" / ".cache" / "fedloom"


@pytest.mark.slow
def test_two_processes_at_once(tmp_path, cache):
    ogb(tmp_path / "OGB" / "ogbn_arxiv")  # read without PyG, whose import takes seconds
    code = (
        "from fedloom.data.datasets import load; "
        f"print(load('ogbn-arxiv', root={str(tmp_path)!r}).x.sum().item())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs == ["36.0\n", "36.0\n"]
    assert [path.name for path in cache.iterdir()] == ["graphs"]
    assert len(list((cache / "graphs").iterdir())) == 1


def test_load_prints_nothing(tmp_path, monkeypatch, capsys):
    tiny_tu(tmp_path / "TUDataset/ENZYMES/raw")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # PyG is silent when it sees this
    load("enzymes", root=tmp_path)
    assert capsys.readouterr() == ("", "")


# ---- errors ----
def test_unknown_name():
    with pytest.raises(
        ConfigError,
        match=r"unknown dataset 'corra'. Did you mean 'cora'\? Valid: actor, .*synthetic",
    ):
        load("corra")


def test_missing_data_folder(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"root is '.*nowhere', which is not a folder"):
        load("cora", root=tmp_path / "nowhere")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"FEDLOOM_DATA is '.*nowhere', which is not a folder"):
        load("cora")


@pytest.mark.parametrize(
    ("name", "file", "length"),
    [
        ("cora", "ind.cora.allx", 1000),
        ("cora", "ind.cora.graph", 0),
        ("cora", "ind.cora.test.index", 500),
        ("photo", "amazon_electronics_photo.npz", 10000),
        ("chameleon", "out1_node_feature_label.txt", 50001),
        ("chameleon", "chameleon_split_0.6_0.2_3.npz", 100),
        ("mutag", "MUTAG_graph_indicator.txt", 100),
        ("mutag", "MUTAG_graph_labels.txt", 30),
    ],
)
def test_truncated_file(tmp_path, name, file, length):
    raw = copied(name, tmp_path)
    path = raw / file
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(
        DataError, match=f"dataset '{name}': {re.escape(str(raw))} (cannot be read: |is damaged: )"
    ) as error:
        load(name, root=tmp_path)
    assert "\n" not in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # NumPy leaves a broken npz open
        del error
        gc.collect()


def test_lost_lines_are_noticed(tmp_path):
    """A file that is cut between two lines can be read. Only the counts show the damage."""
    raw = copied("mutag", tmp_path)
    path = raw / "MUTAG_A.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    (raw / "MUTAG_edge_labels.txt").unlink()
    with pytest.raises(DataError, match="is damaged: 7440 edges, must be 7442"):
        load("mutag", root=tmp_path)


def test_missing_file_is_not_downloaded(tmp_path):
    raw = copied("cora", tmp_path)
    (raw / "ind.cora.ty").unlink()
    before = tree(raw)
    with pytest.raises(
        DataError, match=r"cannot be read: FileNotFoundError: incomplete, no ind.cora.ty"
    ):
        load("cora", root=tmp_path)
    assert tree(raw) == before


def test_missing_labels(tmp_path):
    raw = tiny_tu(tmp_path / "TUDataset/ENZYMES/raw")
    (raw / "ENZYMES_graph_labels.txt").unlink()
    with pytest.raises(DataError, match=r"'enzymes': .*raw cannot be read: .*y is missing"):
        load("enzymes", root=tmp_path)


# ---- folders and recipes as names ----
def test_tables_and_recipes(tmp_path, monkeypatch):
    graph = synthetic(nodes=60)
    where = to_folder(graph, tmp_path / "mine")
    for name in (str(where), str(where / "graph.toml")):
        assert torch.equal(load(name).edge_index, graph.edge_index)
    monkeypatch.chdir(tmp_path)
    assert find("mine").kind == "tables"
    assert torch.equal(load("mine").x, graph.x)
    assert torch.equal(load("synthetic:nodes=60").x, graph.x)
    with pytest.raises(ConfigError, match="has no public split 1"):
        load("synthetic", public_split=1)
    with pytest.raises(DataError, match=r"some/where: no such folder"):
        load("some/where")
    # A name in the catalogue precedes a folder of the same name.
    to_folder(graph, tmp_path / "enzymes")
    assert find("enzymes").kind != "tables"
    assert find("./enzymes").kind == "tables"


# ---- the catalogue ----
@pytest.mark.parametrize(
    "name", [name for name, entry in catalogue().items() if entry.collection != "OGB"]
)
def test_folder_is_where_pyg_looks(name, tmp_path):
    """A data folder can therefore contain datasets that these tests never load."""
    entry = catalogue()[name]

    def download(dataset):
        raise StopIteration(dataset.raw_dir)

    with pytest.raises(StopIteration, match=re.escape(str(tmp_path / entry.folder)) + "$"):
        datasets._pyg(entry, tmp_path, download=download)


def test_the_catalogue_is_consistent():
    entries = catalogue()
    assert len(entries) >= 30
    for name, entry in entries.items():
        assert name == name.lower()
        shares = [int(share) for share in entry.split.split("/")]
        assert (len(shares), sum(shares)) == (3, 100)
        assert entry.description
        assert (entry.graphs > 1) == (entry.task == "graph")
    usual = {
        "cora": "20/40/40",
        "wikics": "50/25/25",
        "actor": "48/32/20",
        "ogbn-arxiv": "60/20/20",
        "mutag": "80/10/10",
    }
    assert {name: entries[name].split for name in usual} == usual
    entries.clear()
    assert catalogue()  # only a copy was cleared


# ---- the time that it takes ----
def test_graphs_and_federations_say_how_long_they_took(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # a second at each call
    graph = load("synthetic:nodes=60,classes=2")
    assert graph.seconds_loading == 1
    federation = fedloom.divide(graph, 2, "random")
    assert federation.seconds_loading == 2
    assert replace(federation, inductive=True).seconds_loading == 2
    assert [part.seconds_loading for part in federation.graphs] == [0, 0]
    path = fedloom.to_file(graph, tmp_path / "graph.safetensors")
    read = fedloom.from_file(path), fedloom.from_folder(fedloom.to_folder(graph, tmp_path / "x"))
    assert [each.seconds_loading for each in read] == [1, 1]
    assert fedloom.Federation(read).seconds_loading == 2
    assert fedloom.from_folders({"a": tmp_path / "x"}).seconds_loading == 1
