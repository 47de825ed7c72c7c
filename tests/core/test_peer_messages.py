"""Faults between clients: excessive queries, inconsistent edges, malformed peer messages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.methods.test_fedstruct import (
    QUICK,
    dense_power,
    federation_of,
    gathered_matrix,
    go,
    random_graph,
    watched,
    with_few_labels,
)

from fedloom.core.phase import Computed, peer_messages, phase
from fedloom.core.registry import make_method
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, DataError, MessageError, Refusal
from fedloom.experiments.recipe_files import find_tables
from fedloom.experiments.run import run
from fedloom.methods.fedstruct import powers as hops

pytestmark = pytest.mark.usefixtures("reference_engine")

__all__ = ["watched"]


def meddle(monkeypatch, name, change, before=False):
    """Lets `change(engine, content)` alter the replies to a phase, or its messages if `before`."""
    original = Loop.call

    def call(self, phase, messages):
        if before and phase == name:
            change(self, messages)
        replies = original(self, phase, messages)
        if not before and phase == name:
            change(self, replies)
        return replies

    monkeypatch.setattr(Loop, "call", call)


def party(nodes, cross, **changes):
    third = torch.arange(nodes) % 3
    graph = Graph(
        x=torch.rand(nodes, 4, generator=torch.Generator().manual_seed(0)),
        edge_index=torch.tensor([[0, 1], [1, 0]]),
        y=torch.arange(nodes) % 2,
        num_classes=2,
        train=third == 0,
        val=third == 1,
        test=third == 2,
        cross_edges=torch.tensor(cross, dtype=torch.int64).reshape(-1, 4).T.contiguous(),
    )
    return replace(graph, **changes)


# ---- the bound on what a private client answers ----
def test_zeros_do_not_raise_the_bound(monkeypatch):
    """Single-node queries padded with explicit zeros look like sums over all nodes."""
    federation = with_few_labels(federation_of(random_graph(nodes=80), 3))
    leaked = []

    def ask_for_single_nodes(engine, replies):
        rows, size = len(replies["0"]["1"]["count"]), engine.clients["1"].graph.num_nodes
        value = torch.zeros(rows, size)
        value[torch.arange(rows), torch.arange(rows)] = 1
        replies["0"]["1"] |= {
            "count": torch.full((rows,), size, dtype=torch.int32),
            "column": torch.arange(size, dtype=torch.int32).repeat(rows), "value": value.flatten(),
        }  # fmt: skip

    original = Loop.call

    def call(self, phase, messages):
        replies = original(self, phase, messages)
        if phase == "request":
            ask_for_single_nodes(self, replies)
        if phase == "answer":
            leaked.append(
                torch.equal(
                    replies["1"]["0"]["sums"],
                    self.clients["1"].state["S"].detach()[: len(replies["1"]["0"]["sums"])],
                )
            )
        return replies

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match="its embeddings could be solved for"):
        go(federation, private=True, absorbed=True, prune="none", query_limit=0)
    assert not any(leaked)


def test_what_a_peer_can_solve_for_all_the_same_is_counted():
    federation = with_few_labels(federation_of(random_graph(nodes=80), 3))
    notes = go(federation, private=True, absorbed=True, query_limit=0, p=4).summary["notes"]
    assert (
        notes["embeddings that a peer can solve for"] > 0
    )  # pruning leaves rows with a single node
    sums = hops.csr_matrix(np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], np.float32))
    assert hops.determined(sums).tolist() == [0, 1]


# ---- edges between clients ----
@pytest.mark.parametrize("clients", [1, 3])
def test_edges_that_are_there_twice_count_twice_wherever_the_cut_is(clients, watched):
    graph = random_graph(nodes=40, directed=True)
    doubled = replace(graph, edge_index=torch.cat([graph.edge_index, graph.edge_index[:, ::3]], 1))
    go(federation_of(doubled, clients), prune="none", hops=3)
    assert torch.allclose(gathered_matrix(watched[-1]).double(), dense_power(doubled, 3), atol=1e-6)


def test_a_direction_on_which_the_ends_disagree_is_an_edge_that_one_side_knows():
    """Clients may use the same node ids, so ids alone do not distinguish 0 -> 0 from 0 -> 0."""
    federation = Federation((party(3, [0, 0, 1, 1]), party(3, [0, 0, 0, 1])))
    with pytest.raises(
        MessageError, match="cross edge 0 -> 0: client '0' knows it, client '1' does not"
    ):
        run("fedstruct", federation, model="dgcn-2x4", rounds=1, hops=1, d_s=4, hidden="")


def test_targets_in_another_order_are_refused(monkeypatch):
    def swap(engine, replies):
        written = replies["0"]["1"]
        same = (written["source"][1:] == written["source"][:-1]) & (
            written["target"][1:] != written["target"][:-1]
        )
        at = int(same.nonzero()[0])
        for key in ("target", "position"):
            written[key][[at, at + 1]] = written[key][[at + 1, at]].clone()

    meddle(monkeypatch, "greet", swap)
    with pytest.raises(
        MessageError, match="'0': tensor 'target' lists the shared edges in another order"
    ):
        go(federation_of(random_graph(), 3))


# ---- graphs that are not what they should be ----
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_edge_weights_of_another_dtype_are_refused(dtype):
    federation = federation_of(random_graph(), 3)
    graphs = tuple(
        replace(g, edge_weight=torch.ones(g.num_edges, dtype=dtype)) for g in federation.graphs
    )
    with pytest.raises(DataError, match=r"edge_weight must be .* float32"):
        go(replace(federation, graphs=graphs, whole=None), prune="global")


def test_cross_edges_have_two_directions():
    with pytest.raises(DataError, match="cross_edges: directions must be 0 or 1"):
        party(3, [0, 0, 1, 7]).check()


# ---- recipes ----
@pytest.mark.parametrize(
    ("data", "paper"),
    [("citeseer", 65.43), ("pubmed", 85.02), ("chameleon", 52.60), ("photo", 90.93)],
)
def test_a_recipe_has_what_the_paper_prints_for_its_dataset(data, paper):
    expect = find_tables(f"fedstruct/{data}-random-10")["expect"]
    assert expect["paper"] == paper
    assert expect["at_least"] == 0 or abs(expect["at_least"] - paper) <= 1.0


# ---- peer messages ----
def test_peer_messages_declare_only_what_their_reader_can_check():
    computed = Computed(lambda method, facts, message, reply: (("", "float32", ()),))
    for declared in ("=model", "~model", "weights", computed, "float32[*there]"):
        with pytest.raises(ValueError, match="depends on what the reader does not know"):
            peer_messages(read_by="read")(
                phase(x=declared, there="bool[3]")(lambda self, client: {})
            )


def test_peer_messages_for_a_phase_without_a_writer_are_refused(monkeypatch):
    meddle(
        monkeypatch,
        "start",
        lambda _, sent: [
            m.update(inbox={"0": torch.zeros(9, dtype=torch.uint8)}) for m in sent.values()
        ],
        before=True,
    )
    with pytest.raises(Refusal, match="refuses peer messages in 'start'"):
        go(federation_of(random_graph(), 3), secure=True)


# ---- encrypted blocks ----
def spoil_cipher(monkeypatch, values):
    bfv = pytest.importorskip("fedloom.privacy.bfv")
    pytest.importorskip("tenseal")

    def change(engine, replies):
        one = engine.clients["1"]
        public = one.memory["fedstruct"].keys.public
        replies["0"]["1"]["cipher"] = torch.from_numpy(
            bfv.encrypt(public, values(one.graph.num_nodes * 60))
        )

    meddle(monkeypatch, "offer_encrypted", change)


def test_a_negative_sum_is_refused_as_a_negative_block_is(monkeypatch):
    spoil_cipher(monkeypatch, lambda size: np.full(size, -1))
    with pytest.raises(MessageError, match=r"client '1': .* negative"):
        go(federation_of(random_graph(), 3), encrypt=True)


def test_a_cipher_of_another_length_names_who_sent_it(monkeypatch):
    spoil_cipher(monkeypatch, lambda size: np.ones(7, np.int64))
    with pytest.raises(MessageError, match="client '0' in 'offer_encrypted': tensor '1/cipher'"):
        go(federation_of(random_graph(), 3), encrypt=True)


# ---- FedGCN ----
def test_fedgcn_notices_edges_that_only_the_targets_owner_knows():
    federation = federation_of(random_graph(), 3)
    first = federation.graphs[0]
    kept = ~((first.cross_edges[2] == 1) & (first.cross_edges[3] == 0))
    lost = replace(first, cross_edges=first.cross_edges[:, kept])
    with pytest.raises(MessageError, match="client '0' in 'write_sums': tensor 'nodes' lacks"):
        run(
            "fedgcn",
            replace(federation, graphs=(lost, *federation.graphs[1:]), whole=None),
            model="gcn-2x8",
            rounds=1,
        )


# ---- small things ----
def test_widths_that_only_look_like_digits():
    with pytest.raises(ConfigError, match=r"method\.hidden is '²'"):
        make_method("fedstruct", {**QUICK, "hidden": "²"})


# ---- blocks that do not come ----
def test_blocks_that_did_not_arrive_are_counted(monkeypatch):
    meddle(monkeypatch, "offer", lambda _, replies: replies.pop("0"))
    notes = go(federation_of(random_graph(), 3)).summary["notes"]
    assert notes["blocks that did not arrive"] == 2 * 2  # two hops, two receivers


def test_a_peer_that_asks_nothing_is_not_refused():
    """A client without training nodes asks for 0 sums over 0 nodes, which is not too much."""
    federation = with_few_labels(federation_of(random_graph(nodes=80), 3))
    first, *others = federation.graphs
    bare = replace(first, train=torch.zeros_like(first.train))
    result = go(
        replace(federation, graphs=(bare, *others)), private=True, prune="none", query_limit=0
    )
    assert result.summary["status"] == "completed"


def test_a_graph_with_cross_edges_is_not_turned_round_by_half():
    with pytest.raises(DataError, match="flow: turn the edges round before the graph is divided"):
        party(3, [0, 0, 1, 1]).with_flow("reversed")


# ---- what readers check ----
def test_a_position_that_is_none_of_the_peers_is_refused(monkeypatch):
    meddle(monkeypatch, "greet", lambda _, replies: replies["0"]["1"]["position"].add_(1000))
    with pytest.raises(
        MessageError,
        match=r"client '1': .*'0': tensor 'position' holds a number outside 0 to \d+",
    ):
        go(federation_of(random_graph(), 3))


def test_a_block_from_a_client_without_edges_to_here_is_refused(monkeypatch):
    federation = Federation((party(3, [0, 0, 1, 1]), party(3, [0, 0, 0, 0]), party(3, [])))
    block = {
        "count": torch.zeros(0, dtype=torch.int32),
        "column": torch.zeros(0, dtype=torch.int32),
        "value": torch.zeros(0),
    }
    meddle(monkeypatch, "offer", lambda _, replies: replies["2"].update({"0": block}))
    with pytest.raises(
        MessageError,
        match=r"client '0': .*'2': a block from a client without edges to this one",
    ):
        run("fedstruct", federation, model="dgcn-2x4", rounds=1, hops=2, d_s=4, hidden="")


def few():
    return with_few_labels(federation_of(random_graph(nodes=80), 3))


def test_more_training_rows_than_rows_are_refused(monkeypatch):
    meddle(monkeypatch, "request", lambda _, replies: replies["0"]["1"]["train"].add_(1000))
    with pytest.raises(
        MessageError, match=r"client '1': .*'0': tensor 'train' is \d+, must be 0 to \d+"
    ):
        go(few(), private=True)


def test_sums_for_other_rows_than_asked_are_refused(monkeypatch):
    meddle(
        monkeypatch,
        "answer",
        lambda _, replies: replies["0"]["1"].update(sums=replies["0"]["1"]["sums"][:-1]),
    )
    with pytest.raises(
        MessageError,
        match=r"client '1': .*'0': tensor 'sums' has \d+ rows, not one for each asked node",
    ):
        go(few(), private=True)


def test_the_bound_counts_what_scores_ask_for():
    federation = few()
    train = max(int(g.train.sum()) for g in federation.graphs)
    both = max(int((g.train | g.val | g.test).sum()) for g in federation.graphs)
    assert train < both
    with pytest.raises(Refusal, match=rf"for \d+ nodes, more than {train};"):
        go(federation, private=True, prune="none", query_limit=train)
    assert (
        go(federation, private=True, prune="none", query_limit=both).summary["status"]
        == "completed"
    )


def test_scores_ask_only_when_they_are_due_and_are_booked_apart():
    each, other = (
        go(few(), private=True, rounds=4, evaluate_every=every).traffic for every in (1, 2)
    )
    assert each["phases"]["answer"] == other["phases"]["answer"]
    assert each["measuring"]["scalars_up"] > 1.5 * other["measuring"]["scalars_up"]


def test_the_own_block_is_pruned_too(watched):
    graph = random_graph(nodes=90, degree=8.0)
    alone = Federation((replace(federation_of(graph, 1).graphs[0], cross_edges=None),))
    assert go(alone, hops=4, p=5).summary["notes"]["entries of the structure matrix"] == 5 * 90
