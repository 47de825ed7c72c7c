"""Graphs that PyG saved are read. Files with any other content are refused before it can run."""

import io
import os
import pickle
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data, InMemoryDataset

import fedloom
from fedloom.data.files import from_pyg
from fedloom.errors import DataError


def some(nodes=6, **changed):
    """Returns a ring of nodes with features, labels and masks as a PyG `Data`."""
    edges = torch.tensor([[k, (k + 1) % nodes] for k in range(nodes)]).t()
    masks = {
        f"{part}_mask": torch.arange(nodes) % 3 == k
        for k, part in enumerate(("train", "val", "test"))
    }
    return Data(
        **{
            "x": torch.rand(nodes, 4),
            "edge_index": torch.cat([edges, edges.flip(0)], 1),
            "y": torch.arange(nodes) % 2,
            **masks,
            **changed,
        }
    )


def small(label, nodes=3):
    return some(nodes, y=torch.tensor([label]), train_mask=None, val_mask=None, test_mask=None)


def saved(content, path, **how):
    torch.save(content, path, **how)
    return path


def same(one, other):
    names = ("x", "edge_index", "y", "train", "val", "test", "edge_weight", "batch")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.num_classes == other.num_classes and all(
        a is b is None or torch.equal(a, b) for a, b in pairs
    )


# ---- graphs ----
@pytest.mark.parametrize(
    "more",
    [{}, {"edge_weight": torch.rand(12)}, {"name": "a text", "numbers": [1, 2.5, None, True]}],
)
def test_a_graph_that_pyg_saved_is_read(more, tmp_path):
    data = some(**more)
    path = saved(data, tmp_path / "mine.pt")
    for graph in (fedloom.from_file(path), fedloom.load(str(path))):
        assert same(graph, from_pyg(data))
        assert graph.name == "mine"


@pytest.mark.parametrize("form", ["list", "collated", "collated as a dict"])
def test_many_small_graphs_are_a_graph_level_dataset(form, tmp_path):
    graphs = [small(0), small(1, 5), small(1)]
    joined, slices = InMemoryDataset.collate(graphs)
    content = {
        "list": graphs,
        "collated": (joined, slices),
        "collated as a dict": (joined.to_dict(), slices, Data),
    }[form]
    assert same(fedloom.from_file(saved(content, tmp_path / "mine.pt")), from_pyg(graphs))


def test_a_dataset_of_one_graph_is_that_graph(tmp_path):
    data = some()
    assert same(
        fedloom.from_file(saved((data.to_dict(), None, Data), tmp_path / "mine.pt")), from_pyg(data)
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (some(y=None), "graph 'mine': y is missing: a graph needs edge_index and y"),
        (some(y=torch.rand(6)), "y must hold one class number"),
        (some(train_mask=torch.ones(3, dtype=torch.bool)), r"train must be \[6\] bool"),
        (some(train_mask="half"), "damaged, or not a graph"),
        (some(edge_index=torch.tensor([[0], [9]])), "edge_index holds 9"),
        ([], "holds a list, must be a PyG Data"),
        ({"x": torch.ones(2)}, "holds a dict, must be a PyG Data"),
        (torch.ones(3), "holds a Tensor, must be"),
        (
            some(x=torch.ones(1, 1).expand(10**9, 1000)),
            "x has 1000000000000 entries, the file holds less",
        ),
        ((some().to_dict(), {"x": torch.tensor([0, 10**12])}, Data), "damaged, or not a graph"),
    ],
)
def test_content_that_is_not_a_graph_is_refused(content, words, tmp_path):
    with pytest.raises(DataError, match=words):
        fedloom.from_file(saved(content, tmp_path / "mine.pt"))


def test_masks_are_optional(tmp_path):
    graph = fedloom.from_file(
        saved(some(train_mask=None, val_mask=None, test_mask=None), tmp_path / "mine.pt")
    )
    assert not (graph.train | graph.val | graph.test).any()


def test_the_safe_globals_of_the_process_do_not_change(tmp_path):
    before = torch.serialization.get_safe_globals()
    fedloom.from_file(saved(some(), tmp_path / "mine.pt"))
    assert set(map(str, torch.serialization.get_safe_globals())) == set(map(str, before))
    assert Data in before


# ---- hostile and damaged files ----
class Trap:
    """An object that unpickles to a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Disguised(torch.Tensor):
    """A tensor that unpickles to a call."""

    def __reduce_ex__(self, protocol):
        return os.system, ("touch canary",)


HOSTILE = {
    "system": (lambda: Trap(os.system, "touch canary"), "posix.system"),
    "eval": (lambda: Trap(eval, "open('canary', 'w')"), "__builtin__.eval"),
    "exec": (lambda: Trap(exec, "open('canary', 'w')"), "__builtin__.exec"),
    "in a graph": (lambda: some(extra=Trap(os.system, "touch canary")), "posix.system"),
    "in a graph's tensor": (
        lambda: some(extra=torch.ones(2).as_subclass(Disguised)),
        "posix.system",
    ),
    "in a list": (lambda: [some(), Trap(os.mkdir, "canary")], "posix.mkdir"),
    "in slices": (lambda: (some().to_dict(), Trap(os.mkdir, "canary"), Data), "posix.mkdir"),
}
OTHERS = {
    "batch": (
        lambda: Batch.from_data_list([some(), some()]),
        "torch_geometric.data.batch.DynamicInheritanceGetter",
    ),
    "sparse": (lambda: some(adj=torch.eye(3).to_sparse()), "torch._utils._rebuild_sparse_tensor"),
    "parameter": (
        lambda: some(x=torch.nn.Parameter(torch.ones(6, 4))),
        "torch._utils._rebuild_parameter",
    ),
    "module": (lambda: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "array": (lambda: some(extra=torch.ones(2).numpy()), "numpy"),
}


@pytest.mark.parametrize("kind", HOSTILE | OTHERS)
def test_other_names_are_refused_and_nothing_runs(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, named = (HOSTILE | OTHERS)[kind]
    path = saved(make(), tmp_path / "mine.pt")
    with pytest.raises(
        DataError, match=r"names '.*', which is no part of a plain graph; nothing of it was run"
    ) as refused:
        fedloom.from_file(path)
    assert named in str(refused.value)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_same_files_run_code_if_they_are_loaded_as_pickles(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.load(
        io.BytesIO(saved(HOSTILE[kind][0](), tmp_path / "mine.pt").read_bytes()), weights_only=False
    )
    assert (tmp_path / "canary").exists()


def test_safe_globals_of_other_libraries_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(Trap(os.system, "touch canary"), tmp_path / "mine.pt")
    with torch.serialization.safe_globals([(os.system, "posix.system")]):
        with pytest.raises(DataError, match=r"names 'posix\.system'"):
            fedloom.from_file(path)
        assert not (tmp_path / "canary").exists()


def archive(path, pickled, how=zipfile.ZIP_STORED, **more):
    """Writes a file in the format of torch.save that contains a pickle. Returns its path."""
    with zipfile.ZipFile(path, "w", how) as file:
        for name, content in {
            "data.pkl": pickled,
            "version": b"3\n",
            "byteorder": b"little",
            **more,
        }.items():
            file.writestr(f"archive/{name}", content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_names_are_found_in_every_pickle_protocol(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "mine.pt", pickle.dumps(Trap(os.system, "touch canary"), protocol))
    with pytest.raises(DataError, match=r"nothing of it was run"):
        fedloom.from_file(path)
    assert not (tmp_path / "canary").exists()


def test_old_formats_and_bare_pickles_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (
        lambda path: path.write_bytes(pickle.dumps(Trap(os.system, "touch canary"))),
        lambda path: saved(
            Trap(os.system, "touch canary"), path, _use_new_zipfile_serialization=False
        ),
    ):
        make(tmp_path / "mine.pt")
        with pytest.raises(DataError, match=r"damaged, or not a graph that torch\.save wrote"):
            fedloom.from_file(tmp_path / "mine.pt")
    assert not (tmp_path / "canary").exists()


def test_compressed_and_oversized_archives_are_refused(tmp_path):
    packed = archive(
        tmp_path / "mine.pt",
        pickle.dumps([0] * 10**6, 2),
        zipfile.ZIP_DEFLATED,
        **{"data/0": bytes(10**8)},
    )
    assert packed.stat().st_size < 10**6
    with pytest.raises(DataError, match="holds more than its size"):
        fedloom.from_file(packed)
    extended = saved(some(), tmp_path / "two.pt")
    with zipfile.ZipFile(extended, "a") as file:
        file.writestr("other/data.pkl", pickle.dumps(1))
    with pytest.raises(DataError, match="it holds 2 pickles"):
        fedloom.from_file(extended)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    path = saved(
        some(
            x=torch.rand(77, 1),
            y=torch.zeros(77).long(),
            train_mask=None,
            val_mask=None,
            test_mask=None,
        ),
        tmp_path / "mine.pt",
    )
    with zipfile.ZipFile(path) as file:
        parts = {name.removeprefix("mine/"): file.read(name) for name in file.namelist()}
    pickled = parts.pop("data.pkl")
    # The pickle writes 77 as KM, in the length of the storage and in the shape of the tensor.
    assert pickled.count(b"KM") >= 2
    longer = pickled.replace(b"KM", b"K\xff")
    with pytest.raises(DataError, match=r"mine\.pt' is damaged: its pickle expects 1020 bytes"):
        fedloom.from_file(
            archive(
                path, longer, **{name: parts[name] for name in parts if name.startswith("data/")}
            )
        )


def test_a_reference_to_memory_in_another_form_is_refused(tmp_path):
    path = saved(some(), tmp_path / "mine.pt")
    with zipfile.ZipFile(path) as file:
        parts = {name.removeprefix("mine/"): file.read(name) for name in file.namelist()}
    pickled = parts.pop("data.pkl")
    assert b"K\x18tq" in pickled  # 24 entries of x, then the end of the reference
    # Six parts instead of five, and a number of entries that is no number.
    for other in (b"K\x18Ntq", b"\x88tq"):
        forged = pickled.replace(b"K\x18tq", other)
        with pytest.raises(DataError, match="memory is named in another way"):
            fedloom.from_file(archive(path, forged, **parts))


def test_two_parts_with_the_same_name_are_refused(tmp_path):
    path = saved(some(), tmp_path / "mine.pt")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("mine/DATA/0", bytes(8))
    with pytest.raises(DataError, match="two parts have the same name"):
        fedloom.from_file(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_a_truncated_file_is_refused(share, tmp_path):
    path = saved(some(), tmp_path / "mine.pt")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(
        DataError, match=r"'.*mine\.pt' is damaged, or not a graph that torch\.save wrote"
    ):
        fedloom.from_file(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read '.*none\.pt' \(No such file"):
        fedloom.from_file(tmp_path / "none.pt")


edits = st.lists(
    st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits)
@pytest.mark.filterwarnings("ignore")
def test_a_changed_pickle_gives_a_graph_or_a_printable_error(tmp_path, changes):
    path = saved(some(), tmp_path / "mine.pt")
    with zipfile.ZipFile(path) as file:
        parts = {name.removeprefix("mine/"): file.read(name) for name in file.namelist()}
    pickled = bytearray(parts.pop("data.pkl"))
    for where, piece in changes:
        pickled[where % len(pickled) : where % len(pickled) + len(piece)] = piece
    archive(
        path, bytes(pickled), **{name: parts[name] for name in parts if name.startswith("data/")}
    )
    message = ""
    try:
        fedloom.from_file(path).check()
    except DataError as refused:  # the test fails for any other exception
        message = str(refused)
    assert message.isprintable()
