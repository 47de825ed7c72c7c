"""FedGH: the autoencoder, the diffusion, the contrast, refinement, and what travels.

Terms are compared with values computed by hand and with their limits.
"""

import math
from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.faults.schedule import LOST
from tests.faults.schedule import Schedule as Faults
from tests.watching import Largest
from torch import nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.core.method import Plugin, composed
from fedloom.core.registry import make_method, method_class, method_names
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedgh import FedGH
from fedloom.methods.fedgh.contrast import Contrast, contrast_loss, harmonise
from fedloom.methods.fedgh.diffusion import (
    TIME,
    Denoiser,
    Schedule,
    diffusion_loss,
    reverse,
    time_embedding,
)
from fedloom.methods.fedgh.refinement import NO_EDGES, bare, received_graph, refined
from fedloom.methods.fedgh.vgae import (
    LENGTH,
    divergence,
    edge_loss,
    levelled,
    minimise,
    reconstruction,
    units,
)
from fedloom.nn.nearest import pairs, random_non_edges
from fedloom.nn.training import seeded

pytestmark = pytest.mark.usefixtures("reference_engine")

SMALL = {
    "vgae": "gcn-2x8",
    "latent_width": 4,
    "vgae_epochs": 4,
    "diffusion_steps": 5,
    "diffusion_epochs": 4,
    "embedding_width": 3,
    "contrast_epochs": 4,
    "add_edges": 1,
}
QUICK = {
    **SMALL,
    "diffusion_rows": 8,
    "contrast_lr": 0.1,
    "contrast_patience": 1,
    "contrast_epochs": 8,
}
OTHER = {
    "base": "fedprox",
    "vgae": "gin-2x8",
    "add_above": 0.5,
    "top_entries": 2,
    "contrast_patience": 0,
    "last_beta": 0.5,
}
NEEDS = {
    "contrast_epochs": {"contrast_patience": 0},
    "contrast_patience": {"contrast_lr": 5.0, "contrast_epochs": 20},
}
BASES = [
    name
    for name in method_names()
    if name not in ("fedgh", "fedgram+", "central") and "node" in method_class(name).tasks
]

USUAL_BASES = ("fedprox", "fedpg", "fedstruct", "opfgl", "fedtad")  # those of the quick tests


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def client_of(graph, **facts):
    known = Facts(
        graph.num_features, graph.num_classes, "node", ("0",), ("gcn-2x8",), dropout=0.0, **facts
    )
    return Client("0", graph, known)


def models_of(result):
    return {
        f"{owner}/{name}": t
        for owner, model in result.final_models.items()
        for name, t in flatten(model).items()
    }


def same_models(one, other):
    one, other = models_of(one), models_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def path(n=4, **more):
    ends = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    x = torch.rand(n, 3, generator=rng())
    return Graph(
        x, torch.cat([ends, ends.flip(0)], 1), torch.zeros(n, dtype=torch.int64), 2, **more
    )


# ---- the autoencoder ----
def test_vgae_terms_by_hand():
    mu, log_sigma = torch.tensor([[1.0, 0.0], [2.0, -1.0]]), torch.tensor([[0.0, 0.5], [-0.5, 0.0]])
    by_hand = (
        sum(
            -0.5 * (1 + 2 * s - m**2 - math.exp(2 * s))
            for m, s in ((1, 0), (0, 0.5), (2, -0.5), (-1, 0))
        )
        / 2
        / 2
    )
    assert divergence(mu, log_sigma) == pytest.approx(by_hand)
    H = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    edges, others = torch.tensor([[0], [1]]), torch.tensor([[0, 1], [2, 2]])

    def sigmoid(v):
        return 1 / (1 + math.exp(-v))

    by_hand = (
        -math.log(sigmoid(2)) - (math.log(1 - sigmoid(0)) + math.log(1 - sigmoid(3))) / 2
    ) / 2
    assert edge_loss(H, edges, others) == pytest.approx(by_hand)
    assert edge_loss(H, edges[:, :0], others[:, :0]) == 0


def test_the_reconstruction_loss_depends_on_the_kind_of_features():
    x = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    out = torch.tensor([[2.0, -1, 0, 0], [0, 0, 1.0, 3.0]])
    p = out.sigmoid()
    weighted = -(3 * x * p.log() + (1 - x) * (1 - p).log()).mean()  # six zeros for two ones
    assert torch.allclose(reconstruction(x)(out), weighted)
    rare = torch.zeros(10, 10)
    rare[0, 0] = 1
    assert torch.allclose(
        reconstruction(rare)(torch.zeros(10, 10)), torch.tensor(math.log(2) * (99 + 20) / 100)
    )
    real = torch.tensor([[0.5, 2.0], [1.5, 2.0]])
    centre, scale = units(real)
    assert centre.tolist() == [1.0, 2.0]
    assert scale == pytest.approx(0.5 / 2**0.5)
    # The means of the columns have an error of one deviation.
    assert reconstruction(real)(torch.zeros(2, 2)) == pytest.approx(1.0)
    assert reconstruction(real)((real - centre) / scale) == pytest.approx(0.0, abs=1e-12)
    constant = torch.full((3, 2), 0.3)
    assert reconstruction(constant)(torch.zeros(3, 2)) == 0


def test_the_vgae_learns_the_edges():
    graph = synthetic(nodes=200, classes=3, features=12, degree=8.0, homophily=0.9, seed=1)
    fits = [
        make_method("fedgh", {**SMALL, "vgae_epochs": e, "latent_width": 8}).fit_vgae(
            client_of(graph)
        )
        for e in (1, 100)
    ]
    linked = pairs(graph.edge_index, graph.num_nodes)
    scores = []
    for _, mu in fits:
        scores.append(
            edge_loss(mu, linked, random_non_edges(linked, graph.num_nodes, rng())).item()
        )
    assert scores[1] < scores[0]


@pytest.mark.parametrize(
    "size", [0.01, *(pytest.param(size, marks=pytest.mark.slow) for size in (1.0, 100.0))]
)
def test_the_vgae_learns_features_of_any_size(size):
    """Without `levelled`, an encoder learns nothing from small features.

    A step of Adam is larger than they are.
    """
    graph = synthetic(nodes=200, classes=3, features=12, degree=8.0, homophily=0.9, seed=1)
    graph = replace(graph, x=size * graph.x)
    settings = {**SMALL, "vgae": "gcn-2x32", "vgae_epochs": 100, "latent_width": 8}
    model, mu = make_method("fedgh", settings).fit_vgae(client_of(graph))
    assert reconstruction(graph.x)(model.decoder(mu)) < 0.9  # the means of the columns give 1


def test_levelled_features_have_a_fixed_mean_row_length():
    xs = [0.01 * torch.rand(5, 3, generator=rng()), 0.01 * torch.rand(4, 3, generator=rng(1)) + 1]
    made = torch.cat(levelled(xs))
    assert torch.allclose(made.mean(0), torch.zeros(3), atol=1e-5)
    assert made.norm(dim=1).mean() == pytest.approx(LENGTH)
    ratio = made / (torch.cat(xs) - torch.cat(xs).mean(0))
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3)  # one scale for all
    assert torch.equal(levelled([torch.ones(3, 2)])[0], torch.zeros(3, 2))


def test_all_clients_start_from_the_same_weights(node_federation):
    method = make_method("fedgh", {**SMALL, "vgae_epochs": 1, "vgae_lr": 1e-12})
    graph = node_federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0", "1"), ("gcn-2x8",) * 2)
    (one, _), (other, _) = (method.fit_vgae(Client(name, graph, facts)) for name in ("0", "1"))
    assert all(
        torch.allclose(a, b, atol=1e-9)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
    method = make_method(
        "fedgh", {**SMALL, "refine_by": "local", "contrast_epochs": 1, "contrast_lr": 1e-12}
    )
    assert torch.allclose(
        *(method.own_embeddings(Client(name, graph, facts)) for name in ("0", "1")), atol=1e-6
    )


# ---- the diffusion ----
def test_the_forward_process_ends_in_noise():
    schedule = Schedule(100, 1e-3, 0.2)
    assert schedule.alpha_bar[100] == pytest.approx(2e-5, rel=0.3)
    h, noise = (
        torch.randn(4000, 2, generator=rng()) * 0.5 + 3,
        torch.randn(4000, 2, generator=rng(1)),
    )

    def at(t):
        return schedule.noised(h, torch.full((4000,), t), noise)

    assert at(100).mean().abs() < 0.06
    assert at(100).var() == pytest.approx(1, abs=0.05)
    assert torch.allclose(at(0), h)
    # A row at its own time
    mixed = schedule.noised(h[:2], torch.tensor([1, 50]), noise[:2])
    kept = (1 - torch.linspace(1e-3, 0.2, 100))[:50].prod()
    assert torch.allclose(mixed[1], kept.sqrt() * h[1] + (1 - kept).sqrt() * noise[1])


def test_reverse_with_a_perfect_denoiser_restores_the_latents():
    schedule, h_0 = Schedule(100, 1e-3, 0.2), torch.randn(50, 8, generator=rng())

    def oracle(h, t):
        kept = schedule.alpha_bar[t]
        return (h - kept.sqrt() * h_0) / (1 - kept).sqrt()

    assert torch.allclose(
        reverse(torch.randn(50, 8, generator=rng(1)), oracle, schedule, None), h_0, atol=1e-4
    )
    low, high = h_0.amin(0), h_0.amax(0)
    assert torch.allclose(
        reverse(torch.randn(50, 8, generator=rng(1)), oracle, schedule, None, low, high),
        h_0,
        atol=1e-4,
    )
    # The last step adds no noise, so an oracle ends at h_0 despite noise in earlier steps.
    assert torch.allclose(
        reverse(torch.randn(50, 8, generator=rng(1)), oracle, schedule, rng(2)), h_0, atol=1e-4
    )


def test_reverse_with_a_wrong_denoiser_stays_in_the_range_of_the_latents():
    schedule, low, high = (
        Schedule(20, 1e-3, 0.2),
        torch.tensor([-1.0, 0.0]),
        torch.tensor([2.0, 0.5]),
    )
    far = reverse(torch.randn(50, 2, generator=rng()), lambda h, t: -9.0 * h, schedule, rng(1))
    held = reverse(
        torch.randn(50, 2, generator=rng()), lambda h, t: -9.0 * h, schedule, rng(1), low, high
    )
    assert far.abs().max() > 10
    assert (held >= low - 1e-5).all()
    assert (held <= high + 1e-5).all()


def test_very_small_steps_give_finite_results():
    schedule = Schedule(3, 1e-9, 1e-8)
    h = torch.randn(4, 2, generator=rng())
    assert torch.isfinite(reverse(h, lambda h, t: 0 * h, schedule, rng())).all()
    assert torch.isfinite(
        make_method("fedgh", {**SMALL, "first_beta": 1e-9}).pseudo_graph(client_of(path()))[0]
    ).all()


@pytest.mark.slow
def test_the_condition_ties_rows_to_nodes():
    h_0 = F.normalize(torch.randn(4, 6, generator=rng()))[
        torch.arange(60) % 4
    ] * 3 + 0.1 * torch.randn(60, 6, generator=rng(1))
    agreement = {}
    for regulated in (True, False):
        method = make_method(
            "fedgh",
            {
                "latent_width": 6,
                "regulated": regulated,
                "diffusion_epochs": 400,
                "diffusion_lr": 3e-3,
            },
        )
        drawn = method.diffuse(client_of(path()), h_0)
        assert drawn.shape == h_0.shape
        ranks = []
        for h in (h_0, drawn):
            unit = F.normalize(h - h.mean(0))
            cosines = (unit @ unit.T)[*torch.triu_indices(60, 60, 1)]
            ranks.append(cosines.argsort().argsort().double())
        agreement[regulated] = torch.corrcoef(torch.stack(ranks))[0, 1].item()
    assert agreement[True] > 0.3
    assert abs(agreement[False]) < 0.1


def test_the_denoiser_sees_a_latent_only_through_noise():
    h, h_0, t = (
        torch.randn(5, 4, generator=rng()),
        torch.randn(5, 4, generator=rng(1)),
        torch.tensor([1, 2, 3, 4, 5]),
    )
    with seeded(rng()):
        with_r, without = Denoiser(4, True, 1.0), Denoiser(4, False, 1.0)
    assert not torch.equal(
        with_r(h, h_0, t, rng(2)), with_r(h, h_0, t, rng(3))
    )  # fresh noise every time
    assert not torch.equal(with_r(h, h_0, t, rng(2)), with_r(h, h_0 + 1, t, rng(2)))
    assert torch.equal(without(h, h_0, t, rng(2)), without(h, h_0 + 1, t, rng(3)))
    with_r.noise = 0.0
    assert torch.equal(with_r(h, h_0, t, rng(2)), with_r(h, h_0, t, rng(3)))
    diffusion_loss(with_r, h_0, Schedule(5, 0.1, 0.2), rng()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in with_r.parameters())


def test_time_embeddings_differ():
    embedded = time_embedding(torch.arange(1, 101))
    assert embedded.shape == (100, TIME)
    assert torch.cdist(embedded, embedded).fill_diagonal_(1).min() > 0.05


# ---- the contrast ----
def test_contrast_loss_by_hand():
    B, hs, cs = (
        torch.tensor([[1.0, 0.5], [0.0, 2.0]]),
        [torch.tensor([[1.0, 0], [0, 1.0]]), torch.tensor([[2.0, -1.0]])],
        None,
    )
    cs = [h.flip(1) for h in hs]
    s = [h.mean(0).sigmoid() for h in hs]

    def D(h, j):
        return (h @ B @ s[j]).sigmoid()

    for k, loss in enumerate(contrast_loss(B, hs, cs)):
        n = len(hs[k])
        by_hand = -sum(
            D(hs[k][i], j).log() + (1 - D(cs[k][i], j)).log() for i in range(n) for j in range(2)
        ) / (2 * n * 2)
        assert torch.allclose(loss, by_hand)


def test_permuted_embeddings_teach_nothing_and_corruption_does():
    """Permuted embeddings are the same vectors.

    D answers the same for both sides, and ½ is the best answer it can give.
    """
    hs = [torch.randn(30, 4, generator=rng(k)) for k in range(2)]
    B = nn.Parameter(torch.randn(4, 4, generator=rng(9)))
    lowest = math.inf
    for _ in range(300):
        shuffled = [h[torch.randperm(30, generator=rng(3))] for h in hs]
        losses = contrast_loss(B, hs, shuffled)
        lowest = min(lowest, *(loss.item() for loss in losses))
        (gradient,) = torch.autograd.grad(sum(losses), B)
        with torch.no_grad():
            B -= 0.1 * gradient
    assert lowest >= math.log(2) - 1e-6

    x = torch.eye(2)[torch.arange(40) // 20] + 0.1 * torch.randn(
        40, 2, generator=rng()
    )  # two blocks, each with its own features
    ends = torch.stack(
        [torch.arange(40), torch.arange(40) // 20 * 20 + torch.randint(20, (40,), generator=rng())]
    )
    graph = bare(x, pairs(torch.cat([ends, ends.roll(1, 1)], 1), 40))
    with seeded(rng()):
        model = Contrast(2, 8, 1)
    harmonise([graph], model, [rng()], 0.01, 300, 0)
    graph = replace(graph, x=levelled([graph.x])[0])  # as the encoder sees it
    projected = model.project([graph])
    mixed = [projected[0][torch.randperm(40, generator=rng(5))]]
    embedded, corrupted = model.encode([graph], projected), model.encode([graph], mixed)
    (loss,) = contrast_loss(model.bilinear, embedded, corrupted)
    assert loss < 0.9 * math.log(2)


def test_embeddings_come_from_one_encoder_or_from_one_per_client():
    graphs = [path(), path(6)]
    for encoders in (1, 2):
        with seeded(rng()):
            model = Contrast(3, 4, encoders)
        embedded = harmonise(graphs, model, [rng(), rng(1)], 0.01, 5, 0)
        for k, (graph, H) in enumerate(zip(graphs, embedded, strict=True)):
            S = graph.adjacency("sym").dense()
            e = k % encoders
            x = levelled([g.x for g in graphs])[k]
            expected = F.prelu(S @ x @ model.weight[e] + model.bias[e], model.slope[e])
            assert torch.allclose(H, expected, atol=1e-6)


def test_minimise_stops_without_improvement():
    calls = []
    p = nn.Parameter(torch.zeros(1))
    minimise([p], lambda: calls.append(1) or (p * 0).sum() + 1.0, 0.1, 50, 3)
    assert len(calls) == 4


# ---- the refined graph ----
def test_edges_are_added_and_nothing_else_changes():
    graph = path(
        5, train=torch.tensor([True, False, False, False, False]), edge_weight=torch.full((8,), 2.0)
    )
    H = 3 + torch.tensor([[1.0, 0], [-1, 1.1], [1, 0.1], [-1, 1], [0, -2.2]])  # their mean is 3
    new = refined(graph, H, 0.25, count=1, threshold=1.0)
    assert torch.equal(new.edge_index[:, :8], graph.edge_index)
    added = set(map(tuple, new.edge_index[:, 8:].T.tolist()))
    assert added == {(0, 2), (2, 0), (1, 3), (3, 1), (0, 4), (4, 0)}  # 4 is nearest to 0
    assert torch.equal(new.edge_weight, torch.cat([torch.full((8,), 2.0), torch.ones(len(added))]))
    assert torch.equal(new.x[:, :3], graph.x)
    assert torch.allclose(new.x[:, 3:].norm(dim=1), graph.x.norm(dim=1).mean() / 4)
    assert torch.equal(new.y, graph.y)
    assert torch.equal(new.train, graph.train)
    assert torch.equal(refined(graph, H, 0.0, 1, 1.0).x, graph.x)
    # All pairs with a cosine above 0.9; with both rules, their union.
    close = refined(graph, H, 0.0, 0, 0.9)
    assert set(map(tuple, close.edge_index[:, 8:].T.tolist())) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert refined(graph, H, 0.0, 1, 0.9).num_edges == new.num_edges
    assert torch.equal(refined(graph, H, 0.0, 0, 1.0).edge_index, graph.edge_index)


@pytest.mark.parametrize(
    "H",
    [
        torch.zeros(500, 3),
        torch.rand(3, generator=rng()).expand(500, 3),
        torch.full((500, 3), 1e20),
    ],
)
@pytest.mark.parametrize("threshold", [1.0, -0.5])
def test_equal_rows_get_no_edges(H, threshold):
    graph = path(500)
    new = refined(graph, H, 0.25, 3, threshold)
    assert torch.equal(new.edge_index, graph.edge_index)
    assert torch.equal(
        new.x[:, 3:], torch.zeros(500, 3)
    )  # rounding errors are not scaled to length 1


def test_a_row_of_zeros_gets_no_edges_and_others_do():
    H = torch.tensor([[2.0, 0], [0, 2], [2, 0.2], [0, 2.2], [1, 1.1]])
    H[4] = H[:4].mean(0)  # so it is the mean of all five
    new = refined(path(5), H, 0.25, 1, 1.0)
    assert torch.equal(new.x[4, 3:], torch.zeros(2))
    assert not (new.edge_index[:, 8:] == 4).any()
    assert set(map(tuple, new.edge_index[:, 8:].T.tolist())) == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_too_many_similar_nodes_are_refused():
    with pytest.raises(
        ConfigError, match=r"method\.add_above: threshold -1: more than 30000 pairs of 300 nodes"
    ):  # of 44850 pairs
        refined(
            bare(torch.ones(300, 1), NO_EDGES),
            torch.randn(300, 2, generator=rng()),
            0.0,
            0,
            -1.0,
        )


# ---- the whole ----
def prepared(federation, **settings):
    """Runs fedgh. Returns the result, the clients, and all messages and replies."""
    seen, kept = [], {}
    original = Loop.call

    def call(self, phase, messages):
        replies = original(self, phase, messages)
        seen.append((phase, messages, replies))
        kept.update(self.clients)
        return replies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "call", call)
        result = run("fedgh", federation, model="gcn-2x8", rounds=2, **{**SMALL, **settings})
    return result, kept, seen


def test_one_upload_and_one_download_before_training_of_the_stated_sizes(node_federation):
    result, clients, seen = prepared(node_federation)
    assert [phase for phase, _, _ in seen][:3] == ["send_pseudo_graph", "refine", "setup"]
    booked = result.traffic["phases"]
    assert (
        booked["send_pseudo_graph"]["messages"]
        == booked["refine"]["messages"]
        == node_federation.num_clients
    )
    d = node_federation.num_features
    for name, graph in zip(node_federation.names, node_federation.graphs, strict=True):
        up, down = seen[0][2][name], seen[1][1][name]
        assert up["features"].shape == (graph.num_nodes, d)
        assert up["edges"].shape[0] == 2
        assert down["embeddings"].shape == (graph.num_nodes, 3)  # only of this client
        new = clients[name].full_graph
        assert new.num_features == d + 3
        assert torch.equal(new.edge_index[:, : graph.num_edges], graph.edge_index)
        for part in ("y", "train", "val", "test", "node_id"):
            assert torch.equal(getattr(new, part), getattr(graph, part))
        assert torch.equal(clients[name].graph.y, torch.where(graph.train, graph.y, -1))
    nodes = sum(g.num_nodes for g in node_federation.graphs)
    links = sum(seen[0][2][name]["edges"].shape[1] for name in node_federation.names)
    assert booked["send_pseudo_graph"]["scalars_up"] == nodes * d + 2 * links
    assert booked["refine"]["scalars_down"] == nodes * 3
    assert booked["refine"]["scalars_up"] == 0


def test_half_precision_and_top_entries_travel_as_set(node_federation):
    whole, _, seen = prepared(node_federation)
    half, _, halves = prepared(node_federation, precision="float16")
    few, _, tops = prepared(node_federation, top_entries=2)
    name = node_federation.names[0]
    full = seen[0][2][name]["features"]
    assert halves[0][2][name]["features"].dtype == torch.float16
    assert halves[1][1][name]["embeddings"].dtype == torch.float16
    assert torch.allclose(halves[0][2][name]["features"].float(), full, atol=1e-2, rtol=1e-2)
    sent = tops[0][2][name]
    for i, (values, columns) in enumerate(zip(sent["values"], sent["columns"].long(), strict=True)):
        assert set(columns.tolist()) == set(full[i].abs().topk(2).indices.tolist())
        assert torch.equal(values, full[i, columns])
    sizes = [
        result.traffic["phases"][phase]["bytes_up"]
        for result, phase in (
            (whole, "send_pseudo_graph"),
            (half, "send_pseudo_graph"),
            (few, "send_top_entries"),
        )
    ]
    assert sizes[1] < sizes[0]
    assert sizes[2] < sizes[0]


@pytest.mark.parametrize("settings", [{"embedding_width": 0}, {"append": 0.0, "add_edges": 0}])
def test_without_refinement_it_is_bit_identical_to_the_base_method(settings, node_federation):
    for base in ("fedavg", "fedprox", "local"):
        plain = run(base, node_federation, model="gcn-2x8", rounds=2)
        assert same_models(
            plain,
            run(
                "fedgh",
                node_federation,
                model="gcn-2x8",
                rounds=2,
                base=base,
                **{**SMALL, **settings},
            ),
        )
    unrefined = run("fedgh", node_federation, model="gcn-2x8", rounds=2, embedding_width=0)
    assert (
        unrefined.summary["history_hash"]
        == run("fedavg", node_federation, model="gcn-2x8", rounds=2).summary["history_hash"]
    )


def test_the_base_method_runs_on_the_refined_graphs_unchanged(node_federation):
    result, clients, _ = prepared(node_federation, base="fedprox")
    graphs = tuple(clients[name].full_graph for name in node_federation.names)
    assert same_models(
        result,
        run(
            "fedprox",
            replace(node_federation, graphs=graphs, whole=None),
            model="gcn-2x8",
            rounds=2,
        ),
    )


@pytest.mark.parametrize("model", ["gat-2x8", "sage-2x8", "gin-2x8", "sgc-2x8", "appnp-2x8"])
def test_runs_with_any_architecture(model, node_federation):
    assert (
        run("fedgh", node_federation, base="fedprox", model=model, rounds=2, **SMALL).summary[
            "status"
        ]
        == "completed"
    )


@pytest.mark.parametrize(
    "base",
    [base if base in USUAL_BASES else pytest.param(base, marks=pytest.mark.slow) for base in BASES],
)
def test_runs_in_front_of_any_method(base, node_federation, cross_federation):
    cls = method_class("fedgh", {"base": base})
    federation = cross_federation if cls.uses_cross_edges else node_federation
    own = __import__(f"tests.methods.test_{method_names()[base]}", fromlist=["x"])
    quick = {
        "rounds": 1,
        "model": getattr(own, "CONTRACT_MODEL", "gcn-2x8"),
        **getattr(own, "QUICK", {}),
    }
    result = run("fedgh", federation, base=base, **{**SMALL, **quick, "rounds": 1})
    assert result.summary["status"] == "completed"
    assert all(torch.isfinite(t).all() for t in models_of(result).values())
    assert {f.name for f in fields(method_class(base))} <= {f.name for f in fields(cls)}


def test_different_architectures_where_the_base_allows_them(node_federation):
    assert (
        run(
            "fedgh", node_federation, base="fedpg", model="gcn-2x8,gat-2x8", rounds=1, **SMALL
        ).summary["status"]
        == "completed"
    )


def test_controls_send_nothing_and_refine_as_documented(node_federation):
    for name, silent in (
        ("local", True),
        ("latents", True),
        ("noise", True),
        ("pseudo-graph", True),
        ("server", False),
    ):
        result, clients, seen = prepared(node_federation, refine_by=name)
        sent = [
            phase
            for phase, _, replies in seen
            if phase in ("send_pseudo_graph", "refine") and any(replies.values())
        ]
        assert bool(sent) != silent
        graph, new = node_federation.graphs[0], clients[node_federation.names[0]].full_graph
        width = {"pseudo-graph": 0, "latents": 4}.get(name, 3)
        assert new.num_features == graph.num_features + width
        if name == "pseudo-graph":
            assert not torch.equal(new.x, graph.x)
            assert torch.equal(new.y, graph.y)
        assert (
            result.final_models[node_federation.names[0]]["layers.0.weight"].shape[0]
            == graph.num_features + width
        )


def test_without_diffusion_the_pseudo_graph_is_decoded_from_the_latents(node_federation):
    client = client_of(node_federation.graphs[0])
    method = make_method("fedgh", {**SMALL, "diffused": False})
    model, mu = method.fit_vgae(client_of(node_federation.graphs[0]))
    x, edges = method.pseudo_graph(client)
    with torch.no_grad():
        centre, scale = units(client.full_graph.x)
        assert torch.equal(x, centre + scale * model.decoder(mu))
    real = pairs(client.full_graph.edge_index, len(x)).shape[1]
    assert real / 2 <= edges.shape[1] <= 2 * real


def test_bag_of_words_features_become_probabilities():
    graph = replace(path(), x=(torch.rand(4, 3, generator=rng()) > 0.5).float())
    x, _ = make_method("fedgh", SMALL).pseudo_graph(client_of(graph))
    assert ((x > 0) & (x < 1)).all()


# ---- bad input ----
LONE = Graph(
    torch.rand(1, 3, generator=rng()),
    torch.zeros(2, 0, dtype=torch.int64),
    torch.zeros(1, dtype=torch.int64),
    2,
)
STRANGE = {
    "one node": LONE,
    "no edges": replace(path(), edge_index=torch.zeros(2, 0, dtype=torch.int64)),
    "constant features": replace(path(), x=torch.full((4, 3), 0.5)),
    "no features at all": replace(path(), x=torch.zeros(4, 3)),
    "all pairs are edges": replace(
        path(3), edge_index=torch.tensor([[0, 1, 0, 2, 1, 2], [1, 0, 2, 0, 2, 1]])
    ),
    "a loop": replace(path(), edge_index=torch.tensor([[0, 1, 2], [0, 2, 1]])),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("by", ["server", "local", "latents", "pseudo-graph"])
def test_unusual_clients_take_part(kind, by):
    usual = path(6, train=torch.tensor([True] * 3 + [False] * 3))
    result = run(
        "fedgh",
        Federation((usual, STRANGE[kind])),
        model="gcn-2x8",
        rounds=1,
        refine_by=by,
        **SMALL,
    )
    assert all(torch.isfinite(t).all() for t in models_of(result).values())


def test_a_client_that_sends_nothing_gets_zeros_and_no_edges(node_federation, monkeypatch):
    original, absent, kept = Loop.call, node_federation.names[1], {}

    def call(self, phase, messages):
        kept.update(self.clients)
        replies = original(self, phase, messages)
        return {c: r for c, r in replies.items() if phase != "send_pseudo_graph" or c != absent}

    monkeypatch.setattr(Loop, "call", call)
    run("fedgh", node_federation, model="gcn-2x8", rounds=1, **SMALL)
    graph = node_federation.graphs[1]
    assert torch.equal(
        kept[absent].full_graph.x[:, graph.num_features :], torch.zeros(graph.num_nodes, 3)
    )
    assert torch.equal(kept[absent].full_graph.edge_index, graph.edge_index)


@pytest.mark.parametrize(("settings", "words"), [
    ({"diffusion_steps": 0}, r"method\.diffusion_steps is 0, must be a whole number at least 1"),
    ({"add_above": 1.5}, r"method\.add_above is 1\.5, must be a number at least -1 and at most 1"),
    ({"add_above": -2}, r"method\.add_above is -2"),
    ({"base": "fedavgg"}, "fedavg"),
    ({"base": True}, r"method\.base is True, must be a text"),
    ({"base": "fedgh"}, "a plug-in itself; give the method that trains"),
    ({"base": "central"}, "sees all graphs in one place"),
    ({"base": "gcfl+"}, "does graph tasks, not node tasks"),
    ({"refine_by": "magic"}, "server or local or latents or noise or pseudo-graph"),
    ({"base": "fedprox", "muu": 1}, "Did you mean 'mu'"),
    ({"mu": 1}, "setting of method 'fedgh': 'mu'"),
])  # fmt: skip
def test_bad_settings_are_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_method("fedgh", settings)
    with pytest.raises(ConfigError, match=words):
        make_recipe({"method": {"name": "fedgh", **settings}})


@pytest.mark.parametrize(("settings", "words"), [
    ({"vgae": "gcm"}, r"method\.vgae: .*gcn"),
    ({"vgae": "gat-2x7"}, r"method\.vgae: .*7"),
    ({"top_entries": 1000}, r"method\.top_entries is 1000, must be at most"),
    ({"first_beta": 0.3}, r"method\.first_beta is 0\.3, must not exceed method\.last_beta"),
])  # fmt: skip
def test_invalid_combinations_are_refused_before_anything_runs(settings, words, node_federation):
    with pytest.raises(ConfigError, match=words):
        run("fedgh", node_federation, model="gcn-2x8", rounds=1, **settings)


def test_graph_tasks_and_inductive_federations_are_refused(graph_federation, node_federation):
    with pytest.raises(ConfigError, match="does node tasks"):
        run("fedgh", graph_federation, model="gcn-2x8", rounds=1)
    with pytest.raises(ConfigError, match="must see all nodes before training"):
        run("fedgh", replace(node_federation, inductive=True), model="gcn-2x8", rounds=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"edges": torch.tensor([[0], [4]], dtype=torch.int32)},
            "'edges' names a node that is not among 0 to 3",
        ),
        ({"edges": torch.tensor([[-1], [2]], dtype=torch.int32)}, "'edges' names a node"),
        ({"features": torch.zeros(0, 3)}, "'features' has no rows"),
    ],
)
def test_a_pseudo_graph_with_wrong_numbers_is_refused(change, words):
    good = {"features": torch.zeros(4, 3), "edges": torch.tensor([[0], [1]], dtype=torch.int32)}
    assert received_graph(good, 3, "a").num_edges == 2
    with pytest.raises(MessageError, match=words):
        received_graph({**good, **change}, 3, "a")
    sparse = {
        "values": torch.ones(4, 2),
        "columns": torch.tensor([[0, 3]] * 4, dtype=torch.int32),
        "edges": good["edges"],
    }
    with pytest.raises(MessageError, match="'columns' names one that is not among 0 to 2"):
        received_graph(sparse, 3, "a")
    with pytest.raises(MessageError, match="'columns' has 4 rows, 'values' 3"):
        received_graph({**sparse, "values": torch.ones(3, 2)}, 4, "a")


def test_numbers_beyond_half_precision_are_refused_by_name():
    graph = replace(path(), x=1e6 * path().x)
    with pytest.raises(ConfigError, match=r"method\.precision is 'float16', which cannot hold"):
        make_method("fedgh", {**SMALL, "precision": "float16"}).send_pseudo_graph(client_of(graph))


def test_a_composed_class_declares_what_either_class_does():
    class Discloser(Plugin):
        discloses_to_peers: ClassVar[str] = "a rumour"
        validates: ClassVar[bool] = True

        def prepare_clients(self, server):
            pass

        def _objective(self):
            pass

    joined = composed(Discloser, method_class("fedgcn"), "fedgcn")
    assert joined.uses_cross_edges
    assert joined.validates
    assert joined.transductive
    assert joined.discloses_to_peers.startswith("a rumour; to the owner of a cross edge's target")
    assert joined.discloses_to_server == method_class("fedgcn").discloses_to_server
    with pytest.raises(ConfigError, match="it and Discloser both define '_objective'"):
        composed(Discloser, method_class("fedstruct"), "fedstruct")


def test_a_name_that_both_classes_define_is_refused():
    class Clash(FedAvg):
        append = 1.0

    with pytest.raises(
        ConfigError,
        match=r"method\.base is 'clash\.py': it and FedGH both define 'append'",
    ):
        composed(FedGH, Clash, "clash.py")


def test_it_is_a_plugin_in_front_of_fedavg_by_default():
    cls = method_class("fedgh")
    assert issubclass(cls, Plugin)
    assert issubclass(cls, FedAvg)
    assert cls is method_class("fedgh", {"base": "fedavg"})
    assert make_method("fedgh", {"base": "fedprox", "mu": 0.5}).mu == 0.5


# ---- size ----
def test_memory_is_linear_in_nodes_and_edges():
    """Compares the largest tensor of any step for twice the nodes and edges."""
    largest = []
    for n in (4000, 8000):
        ends = torch.randint(n, (2, 2 * n), generator=rng())
        graph = Graph(
            torch.rand(n, 4, generator=rng()),
            torch.cat([ends, ends.flip(0)], 1),
            torch.zeros(n, dtype=torch.int64),
            2,
        )
        client = client_of(graph)
        method = make_method(
            "fedgh",
            {
                **SMALL,
                "vgae_epochs": 1,
                "diffusion_epochs": 1,
                "diffusion_steps": 1,
                "diffusion_rows": 64,
            },
        )
        with Largest() as seen, pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedloom.nn.nearest.ENTRIES", 2**16)
            x, _ = method.pseudo_graph(client)
            refined(graph, x, 0.25, 3, 1.0)
        largest.append(seen.numel)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 8000 * 8000 / 10


@pytest.mark.parametrize("refine_by", ["server", "noise", "pseudo-graph"])
def test_a_client_that_refines_too_late_is_refined_once(refine_by, node_federation, monkeypatch):
    settings = {**SMALL, "refine_by": refine_by, "quorum": 0.5, "model": "gcn-2x8", "rounds": 2}
    expected = run("fedgh", node_federation, **settings)
    # The client runs the phase, and its answer does not arrive. It is handed the phase again.
    Faults(monkeypatch, {(0, "refine", "1"): [LOST]})
    result = run("fedgh", node_federation, **settings)
    assert result.summary["absences"] == {"1": 1}
    for owner, model in expected.final_models.items():
        for name, tensor in flatten(model).items():
            assert torch.equal(tensor, flatten(result.final_models[owner])[name])
