"""FedGram: one round of ridge regression on propagated features, exact, from sums alone.

A method of this project. Each client sends the second moments of its propagated features, and the
server solves one linear system. There is no training loop: the result equals ridge regression on
the pooled rows of all clients. The parts are known. Analytic federated learning (He et al.: "AFL: A
Single-Round Analytic Approach for Federated Learning with Pre-trained Models", CVPR 2025) and
one-shot federated ridge regression (arXiv 2601.08216) send such sums for images and tables. The
propagation is that of SGC (Wu et al., ICML 2019) and S²GC (Zhu, Koniusz, ICLR 2021).

What travels, per client, as sums:
    up    gram, moment   G_k = Fᵀ F (upper triangle) and B_k = Fᵀ Y over the training items,
                         m (m+1)/2 + m C numbers; before that, if there are several maps and the
                         features are wide, the same for each map with `sketch` columns
    down  weights        W(λ) for every λ of the grid (and every map of the sketch), m C each
    up    confusion      confusion matrices of the validation items for each of them, C² each
    down  model          the chosen W, m C numbers
With one map and one λ there is one upload and one download.

    H_0 = rows of X at length 1;  H_l = S H_{l-1}, S = D̃^-1/2 (A+I) D̃^-1/2        `features`
    F   = [rows of H_0 + ... + H_L at length 1, w · labels of neighbours, 1]      `features`
          or, for the map "side": [X, S X, Sᵀ X, ... side by side, labels, 1]     `structure`
    G = Σ_k G_k,  B = Σ_k B_k                                                     `send_moments`
    W(λ) = (G + λ I)^-1 B                                                         `solve`
    map, λ: the best validation score of the confusion matrices, summed           `compare_weights`
    W_k = W + Fᵀ (F Fᵀ + μ I)^-1 (Y - F W) over the client's own training rows,   `personalised`
          with the best μ on its own validation items, if it gains more than      `chosen`
          one standard error there; else W_k = W
    logits = log softplus(20 F W_k) / 20: scores of ridge regression estimate     `predict`
          probabilities

Wide features (d > m) are first projected by a common matrix of random signs. Graph tasks have other
features: hashed Weisfeiler-Leman labels and pooled node features (`graph_features`); the rest is
the same. Rows count by their class to the power `balance`. With `epsilon`, the sum gets Gaussian
noise once (`noise`, docs/fedgram.md). `leave` and `join` subtract and add clients' sums.

The clients' models (`--model`) are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.class_weight import balanced_weights
from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.message import Message, Schema, tree_map
from fedloom.core.method import Method
from fedloom.core.phase import Computed, phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.capping import capped
from fedloom.data.graph import Graph
from fedloom.data.seeds import entropy_noise
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.methods.fedgram.features import smoothed, start
from fedloom.methods.fedgram.graph_features import graph_features
from fedloom.methods.fedgram.noise import (
    RELATIONS,
    bounded_rows,
    gaussian_scale,
    noise_share,
    ridge_for_noise,
    sensitivity,
    symmetric_noise,
)
from fedloom.methods.fedgram.ridge import (
    corrections,
    generalised_error,
    nearest_psd,
    packed,
    unpacked,
    weights_of,
)
from fedloom.methods.fedgram.structure import (
    labels_around,
    side_width,
    structure_features,
    structure_width,
)
from fedloom.nn import metrics
from fedloom.nn.metric_names import FROM_CONFUSION

STEEPNESS = 20  # of the softplus that makes probabilities of scores
SIDE = "side"  # the map with all hops side by side
NARROWEST_GRAPH = 8  # the fewest columns of `graph_features`


def gram_schema(method: FedGram, facts: Facts, message: Message, reply: Message | None) -> Schema:
    """Returns the schema of one packed Gram matrix for each map that the message asks for."""
    sizes = _asked(method, facts, message)
    return tuple((str(k), "float32", (m * (m + 1) // 2,)) for k, m in sizes)


def moment_schema(method: FedGram, facts: Facts, message: Message, reply: Message | None) -> Schema:
    """Returns the schema of B for each map that the message asks for."""
    sizes = _asked(method, facts, message)
    return tuple((str(k), "float32", (m, facts.num_classes)) for k, m in sizes)


def _asked(method: FedGram, facts: Facts, message: Message) -> list[tuple[int, int]]:
    """Returns number and width of each map that a message asks for."""
    width = int(message["width"])
    return [(k, method.columns(facts, k, width)) for k in message["maps"].tolist()]


def confusion_schema(
    method: FedGram, facts: Facts, message: Message, reply: Message | None
) -> Schema:
    """Returns the schema of a confusion matrix for each λ of each map."""
    classes = facts.num_classes
    return tuple(
        (str(k), "int64", (len(W), classes, classes)) for k, W in message["weights"].items()
    )


@dataclass(frozen=True)
class FedGram(Method):
    """Ridge regression on propagated features, from sums."""

    rounds: int = setting(
        1, "communication rounds: this is a one-shot method", at_least=1, at_most=1
    )
    hops: str = setting(
        "2,4,side",
        "maps of the features; of several, the best on validation items: a number L sums 0 to L "
        "hops, 'side' has them side by side, for graphs whose neighbours differ",
        task="node",
    )
    colors: int = setting(
        4, "rounds of Weisfeiler-Leman labels", at_least=0, task="graph", tune="0..6"
    )
    width: int = setting(
        2048, "m, the most columns of features; wider ones are projected", at_least=1
    )
    sketch: int = setting(
        512, "columns of the projection on which maps are compared", at_least=1, task="node"
    )
    labels: float = setting(
        0.2,
        "w, weight of the columns with the labels of neighbours; 0 = no such columns",
        at_least=0,
        task="node",
        tune="0..1",
    )
    ridges: str = setting(
        "0.003,0.01,0.03,0.1,0.3,1,3,10",
        "λ, the penalties; of several, the best on validation items",
    )
    personal: str = setting(
        "0.03,0.1,0.3,1,3,10",
        "μ, the penalties of the personal part; empty = every client uses W",
    )
    caution: float = setting(
        1.0,
        "standard errors by which the personal part must gain; 0 = it must not lose",
        at_least=0,
        tune="0..2",
    )
    balance: float = setting(
        0.0,
        "power of n / (C n_c) by which the rows of class c count; 0.5 raises macro-F1",
        at_least=0,
        at_most=1,
        tune="0..1",
    )
    epsilon: float = setting(
        0.0, "ε of differential privacy; 0 = no noise. It needs --secure and one map", at_least=0
    )
    delta: float = setting(1e-5, "δ of differential privacy", above=0, below=1)
    protects: str = setting(
        "node",
        "what ε is about: a training label, an edge, or a training item with all it has",
        choices=RELATIONS,
    )
    private_hops: int = setting(
        0, "L of the sums in a private run; predictions use `hops`", at_least=0, task="node"
    )
    degree: int = setting(
        10, "most edges of a protected node, if `private_hops` is above 0", at_least=1, task="node"
    )
    join: str = setting(
        "", "clients that join after the first model: their sums are added to those of the others"
    )
    leave: str = setting(
        "", "clients that leave after the first model: their sums are subtracted (unlearning)"
    )

    evaluations: ClassVar[tuple[str, ...]] = ("local", "global")
    needs_of_model: ClassVar[str] = "nothing"
    validates: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = (
        "the second moments of the propagated features of training items: each client's own unless "
        "the run is secure, which shows the span of the rows of a client with few training items "
        "and lets them be recognised (docs/fedgram.md)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.maps  # noqa: B018  (raises an error if a name is wrong)
        numbers("ridges", self.ridges)
        numbers("personal", self.personal, empty=True)

    def _check_secure(self, setting_: str, changing: int, terms: SecureTerms, all_: int) -> None:
        """Checks that clients will take part in sums before and after others join or leave."""
        if changing == 1:
            raise ConfigError(
                f"run.secure: method.{setting_} names one client; the difference of the sums "
                "before and after would be its statistics; name two or more"
            )
        if changing < terms.apart:
            raise ConfigError(
                f"run.secure_apart is {terms.apart}, but method.{setting_} names {changing} "
                "clients; name more, or agree on a smaller number"
            )
        if all_ - changing < terms.least(all_):
            raise ConfigError(
                f"run.secure_cohort: {terms.least(all_)} of {all_} clients must be in every sum, "
                f"but method.{setting_} leaves {all_ - changing}; set run.secure_cohort to a "
                f"share of at most {(all_ - changing) / all_:.2g}"
            )

    def check(self, facts: Facts) -> None:
        """Checks the clients that join and leave."""
        for setting_, text in (("join", self.join), ("leave", self.leave)):
            for client in names(text):
                if client not in facts.clients:
                    raise unknown(f"client in method.{setting_}:", client, facts.clients)
        if self.epsilon:
            self.check_privacy(facts)
        for setting_, text in (("join", self.join), ("leave", self.leave)):
            if (changing := len(names(text))) and facts.secure is not None:
                self._check_secure(setting_, changing, facts.secure, facts.num_clients)
        staying = [c for c in facts.clients if c not in names(self.join) + names(self.leave)]
        if not staying:
            raise ConfigError("method.join and method.leave name all clients; one must stay")

    def check_privacy(self, facts: Facts) -> None:
        """Checks that a private run releases nothing but the noisy sums, once."""
        refused = {
            "run.secure is false: each client adds only its share of the noise, so the sums must "
            "be secure; give --secure": facts.secure is None,
            f"method.hops is {self.hops!r}: nothing is chosen by validation; give one number, "
            "e.g. method.hops=2": facts.task == "node" and not self.hops.strip().isdecimal(),
            "run.class_weight and method.balance weigh rows, so that there is no bound; leave them "
            "out": bool(self.balance or facts.class_weight),
            "method.join and method.leave need further sums; leave them out": bool(
                self.join or self.leave
            ),
            "method.protects is 'edge': in a graph task give 'node', which protects a whole "
            "graph": facts.task == "graph" and self.protects == "edge",
        }
        for reason, wrong in refused.items():
            if wrong:
                raise ConfigError(f"method.epsilon is {self.epsilon:g}, but {reason}")

    # ---- features ----
    @property
    def label_weight(self) -> float:
        """The weight of the columns with labels of neighbours. A private run has none."""
        return 0.0 if self.epsilon else self.labels

    @property
    def maps(self) -> list[str]:
        """The maps of node features that are compared: numbers of hops, or SIDE."""
        listed = [part.strip() for part in self.hops.split(",") if part.strip()]
        for name in listed:
            if name != SIDE and not name.isdecimal():
                listed = []
        if not listed or len(set(listed)) < len(listed):
            raise ConfigError(
                f"method.hops is {self.hops!r}, must be different whole numbers from 0, "
                f"or {SIDE!r}, separated by commas"
            )
        return listed

    def full(self, facts: Facts) -> int:
        """Returns `width`, or less if no map has as many columns."""
        if facts.task == "graph":
            return self.width
        widest = side_width(facts.num_features) if SIDE in self.maps else facts.num_features
        return min(self.width, widest)

    def columns(self, facts: Facts, number: int, width: int) -> int:
        """Returns m: the number of columns of F.

        Args:
            facts: The facts of the run.
            number: The number of the map.
            width: The most columns that come from the features.
        """
        features, classes = facts.num_features, facts.num_classes
        if facts.task == "graph":
            return max(width, NARROWEST_GRAPH) + 1
        if self.maps[number] == SIDE:
            return structure_width(features, classes, width) + 1
        return min(width, features) + (2 * classes if self.label_weight else 0) + 1

    def features(self, client: Client, graph: Graph, number: int, width: int) -> Tensor:
        """Returns F [items, m] of a graph.

        Args:
            client: The client, for the run's seed.
            graph: The client's graph: that of training, or the full one.
            number: The number of the map.
            width: The most columns that come from the features.
        """
        one = torch.ones(graph.num_items, 1)
        if graph.task == "graph":
            width = max(width, NARROWEST_GRAPH)
            rows = graph.cached(
                ("gram graphs", width, self.colors),
                lambda: graph_features(graph, width, self.colors),
            )
            return torch.cat([rows, one], 1)
        if self.maps[number] == SIDE:
            return torch.cat([structure_features(graph, width), one], 1)
        parts = [self.smoothed(client, graph, int(self.maps[number]), width), one]
        if self.label_weight:
            parts.insert(1, self.label_weight * labels_around(graph))
        return torch.cat(parts, 1)

    def smoothed(self, client: Client, graph: Graph, count: int, width: int) -> Tensor:
        """Returns the rows of H_0 + ... + H_count at length 1, [nodes, columns]."""
        return smoothed(graph, width, client.facts.seed, count)

    def training_rows(self, client: Client, number: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns F and Y of the client's training items, scaled by the root of their weight."""
        graph = client.graph
        rows = self.features(client, graph, number, width)[graph.train]
        labels = graph.y[graph.train]
        Y = F.one_hot(labels, graph.num_classes).float()
        weight = torch.ones(graph.num_classes)
        if client.class_weight is not None:
            weight = weight * client.class_weight
        if (balance := client.state.get("balance")) is not None:
            weight = weight * balance
        scale = weight.sqrt()[labels][:, None]
        return scale * rows, scale * Y

    # ---- at a client ----
    @phase()
    def weigh_rows(self, client: Client, weights: Tensor) -> Message:
        """Remembers by how much the rows of each class count (`balance`)."""
        client.state["balance"] = weights
        return {}

    @summed
    @phase(gram=Computed(gram_schema), moment=Computed(moment_schema))
    def send_moments(self, client: Client, maps: Tensor, width: Tensor) -> Message:
        """Answers G_k and B_k for some maps.

        Args:
            client: The client.
            maps: The numbers of the maps.
            width: The most columns that come from the features.
        """
        if self.epsilon:
            # A repeated request gets the same noise.
            if "noisy" not in client.memory:
                client.memory["noisy"] = self.noisy_moments(client, int(width))
            return dict(client.memory["noisy"])
        gram, moment = {}, {}
        for k in maps.tolist():
            rows, Y = self.training_rows(client, k, int(width))
            gram[str(k)], moment[str(k)] = packed(rows.T @ rows), rows.T @ Y
        return {"gram": gram, "moment": moment}

    def noisy_moments(self, client: Client, width: int) -> Message:
        """Returns G_k and B_k with the client's share of the noise, as `send_moments` answers."""
        graph, facts = client.graph, client.facts
        Y = F.one_hot(graph.y[graph.train], graph.num_classes).float()
        rows = self.private_rows(client, width)[graph.train]
        m = self.columns(facts, 0, width)
        noise, of_gram = torch.zeros(m, graph.num_classes), torch.zeros(m, m)
        scale = noise_share(self.noise_scale(facts), self.honest(facts))
        noise[:-1] = entropy_noise((m - 1, graph.num_classes), scale)  # the last column is 0
        if self.protects != "label":  # otherwise G is public
            of_gram[:-1, :-1] = symmetric_noise(m - 1, scale)
        return {
            "gram": {"0": packed(rows.T @ rows + of_gram)},
            "moment": {"0": rows.T @ Y + noise},
        }

    def private_rows(self, client: Client, width: int) -> Tensor:
        """Returns rows of length at most 1 and a column of zeros, [items, m]."""
        graph, count = client.graph, self.private_hops
        if graph.task == "graph":
            rows = self.features(client, graph, 0, width)[:, :-1]
        else:
            if count and graph.edge_weight is not None:
                raise DataError(
                    f"graph {graph.name!r}: edge_weight: with method.private_hops above 0 edges "
                    "must have no weights: there is no bound for them"
                )
            if count and self.protects == "node":
                graph = capped(graph, self.degree)
            # A projection may lengthen rows.
            total = last = bounded_rows(start(graph, width, client.facts.seed), 1.0)
            for _ in range(count):
                last = graph.propagate(last, "sym")
                total = total + last
            rows = bounded_rows(total / (count + 1), 1 / (count + 1))
        return F.pad(rows, (0, 1))

    def noise_scale(self, facts: Facts) -> float:
        """Returns σ of the noise on the sums."""
        count = self.private_hops if facts.task == "node" else 0
        change = sensitivity(self.protects, count, self.degree, constant=0.0)
        return gaussian_scale(self.epsilon, self.delta, change)

    def honest(self, facts: Facts) -> int:
        """Returns how many clients' shares make up σ: the fewest that a secure sum needs."""
        assert facts.secure is not None
        return facts.secure.quorum(facts.num_clients)

    @summed
    @phase(confusion=Computed(confusion_schema))
    def compare_weights(self, client: Client, weights: Message, width: Tensor) -> Message:
        """Answers confusion matrices of the client's validation items.

        Args:
            client: The client.
            weights: W(λ) [ridges, m, C] of each map, by its number.
            width: The most columns that come from the features.
        """
        graph, found = client.full_graph, {}
        for k, W in weights.items():
            rows = self.features(client, graph, int(k), int(width))[graph.val]
            every = torch.ones(len(rows), dtype=torch.bool)
            y, classes = graph.y[graph.val], graph.num_classes
            found[k] = torch.stack([metrics.confusion(rows @ w, y, every, classes) for w in W])
        return {"confusion": found}

    @phase()
    def adopt(self, client: Client, model: Message) -> Message:
        """Computes W_k from W.

        model: W as `weights` [m, C], and the number of its map as `map`.
        """
        own = self.personalised(client, model["weights"], int(model["map"]))
        client.state["predictor"] = {"weights": own, "map": model["map"]}
        return {}

    def personalised(self, client: Client, W: Tensor, number: int) -> Tensor:
        """Returns W_k, and records the squared error on the client's training items.

        Args:
            client: The client.
            W: The weights that all clients share, [m, C].
            number: The number of the map.
        """
        width = self.full(client.facts)
        rows, Y = self.training_rows(client, number, width)
        penalties = numbers("personal", self.personal, empty=True)
        if len(rows) and penalties:
            W = self.chosen(client, W, W + corrections(rows, Y - rows @ W, penalties), number)
        if len(rows):
            client.record_loss((Y - rows @ W).square().sum(1).mean())
        return W

    def chosen(self, client: Client, W: Tensor, others: Tensor, number: int) -> Tensor:
        """Returns the best of several W_k on the client's validation items, if it is clearly best.

        Its gain over W must exceed `caution` standard errors. One standard error is √(items on
        which just one of both is right). Of equals, the one with the largest penalty is best.
        """
        graph = client.full_graph
        rows = self.features(client, graph, number, self.full(client.facts))[graph.val]
        right = (torch.stack([rows @ w for w in (W, *others)]).argmax(2)) == graph.y[graph.val]
        shared, own = right[0], right[1:]
        gain = own.sum(1) - shared.sum()
        best = len(gain) - 1 - int(gain.flip(0).argmax())
        error = float((own[best] ^ shared).sum()) ** 0.5
        clear = gain[best] > self.caution * error if self.caution else gain[best] >= 0
        return others[best] if clear else W

    # ---- predictions ----
    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns logits: logarithms of the scores, made positive.

        model: W and its map. None: the client's own.
        """
        scores = self.scores(client, self.predictor(client) if model is None else model)
        return (F.softplus(STEEPNESS * scores) / STEEPNESS).log()

    def scores(self, client: Client, model: Message) -> Tensor:
        """Returns F W [items, C] of the client's full graph."""
        width = self.full(client.facts)
        return self.features(client, client.full_graph, int(model["map"]), width) @ model["weights"]

    def predictor(self, client: Client) -> Message:
        """Returns W_k and its map. A client that has not received a W fits a model of its own."""
        if "predictor" not in client.state:
            facts = client.facts
            columns = self.columns(facts, 0, self.full(facts))
            none = {"weights": torch.zeros(columns, facts.num_classes), "map": torch.tensor(0)}
            self.adopt(client, none)
        return dict(client.state["predictor"])

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Prepares a new client to predict with W_k."""
        client.state["predictor"] = dict(kept)

    # ---- at the server ----
    def gather(
        self, server: Server, maps: Sequence[int], width: int, clients: Sequence[str]
    ) -> Message:
        """Returns G and B of some maps, summed over clients, by the number of the map."""
        chosen, columns = torch.tensor(list(maps)), torch.tensor(width)
        sums = server.sum(self.send_moments, clients=clients, maps=chosen, width=columns)
        sizes = {str(k): self.columns(server.facts, k, width) for k in maps}
        gram = {k: unpacked(triangle, sizes[k]) for k, triangle in sums["gram"].items()}
        return {"gram": gram, "moment": sums["moment"]}

    def penalties(self, facts: Facts) -> list[float]:
        """Returns the values of λ. In a private run, one that follows from the noise."""
        if not self.epsilon:
            return numbers("ridges", self.ridges)
        scale = self.noise_scale(facts) * (facts.num_clients / self.honest(facts)) ** 0.5
        return [ridge_for_noise(scale, self.columns(facts, 0, self.full(facts)))]

    def solve(self, sums: Message, facts: Facts) -> Message:
        """Returns W(λ) [ridges, m, C] of each map."""
        gram, moment = sums["gram"], sums["moment"]
        ridges = self.penalties(facts)
        if self.epsilon:
            gram = {k: nearest_psd(G) for k, G in gram.items()}
        return {k: weights_of(gram[k], moment[k], ridges) for k in gram}

    def choose(
        self, server: Server, sums: Message, width: int, clients: Sequence[str]
    ) -> tuple[int, int, Tensor]:
        """Returns the number of the best map, the place of the best λ, and its W [m, C].

        Clients compare them on their validation items, if there is more than one. Of candidates
        with the same score, the best has the smallest error of generalised cross-validation.
        """
        weights = self.solve(sums, server.facts)
        best = [(next(iter(weights)), 0)]
        if len(weights) > 1 or len(weights[best[0][0]]) > 1:
            columns = torch.tensor(width)
            counted = server.sum(
                self.compare_weights, clients=clients, weights=weights, width=columns
            )
            best = self.best(counted["confusion"], server.facts.selection)
        ridges = self.penalties(server.facts)

        def error(candidate: tuple[str, int]) -> float:
            k, place = candidate
            W = weights[k][place]
            return generalised_error(sums["gram"][k], sums["moment"][k], W, ridges[place])

        number, place = best[0] if len(best) == 1 else min(best, key=error)
        return int(number), place, weights[number][place]

    def best(self, confusion: Message, selection: str) -> list[tuple[str, int]]:
        """Returns the candidates with the best score: number of the map, place of λ.

        SIDE must be better than every other map by more than one standard error: √errors items.

        Args:
            confusion: Summed confusion matrices [ridges, C, C] of each map.
            selection: The run's metric. Metrics that need probabilities are replaced by accuracy.
        """
        metric = selection if selection in FROM_CONFUSION else "accuracy"
        scores = {
            (k, place): -1.0 if score is None else score
            for k, matrices in confusion.items()
            for place, score in enumerate(metrics.scores(matrices)[metric])
        }
        sums = [candidate for candidate in scores if self.maps[int(candidate[0])] != SIDE]
        if sums and len(sums) < len(scores):
            k, place = max(sums, key=lambda candidate: scores[candidate])
            matrix = confusion[k][place]
            items, errors = int(matrix.sum()), int(matrix.sum() - matrix.trace())
            margin = errors**0.5 / max(items, 1)
            enough = scores[k, place] + margin
            scores = {c: score for c, score in scores.items() if c in sums or score > enough}
        highest = max(scores.values())
        return [candidate for candidate, score in scores.items() if score == highest]

    def best_map(self, server: Server, clients: Sequence[str]) -> tuple[int, Message]:
        """Returns the number of the best map, and its G and B.

        Maps are compared on `sketch` columns. If the best one has no more, its sums are known.
        """
        facts, full = server.facts, self.full(server.facts)
        number, maps = 0, range(len(self.maps)) if facts.task == "node" else range(1)
        if len(maps) > 1:
            width = min(self.sketch, full)
            sums = self.gather(server, maps, width, clients)
            number = self.choose(server, sums, width, clients)[0]
            server.notes["map"] = float(number)
            if self.columns(facts, number, width) == self.columns(facts, number, full):
                return number, {name: {str(number): of[str(number)]} for name, of in sums.items()}
        return number, self.gather(server, [number], full, clients)

    def selected(
        self, server: Server, sums: Message, number: int, clients: Sequence[str]
    ) -> Message:
        """Returns the model: the best W of one map's sums, and the number of the map."""
        width = self.full(server.facts)
        _, place, W = self.choose(server, sums, width, clients)
        server.notes["ridge"] = self.penalties(server.facts)[place]
        return {"weights": W, "map": torch.tensor(number)}

    def changed(
        self, server: Server, sums: Message, number: int, clients: Sequence[str]
    ) -> Message:
        """Returns the sums of one map after clients have joined and left.

        A secure run sums again over the clients that stay: a sum over the few that change would
        need a quorum of its own. The server can subtract both sums.

        Args:
            server: The server.
            sums: The sums before.
            number: The number of the map.
            clients: The clients that are there now.
        """
        full = self.full(server.facts)
        if server.facts.secure is not None:
            return self.gather(server, [number], full, clients)
        for changing, combine in ((self.join, torch.add), (self.leave, torch.sub)):
            if listed := names(changing):
                own = self.gather(server, [number], full, listed)
                sums = tree_map(combine, sums, own)
        return sums

    def run(self, server: Server) -> None:
        """One round: statistics up, W down, and the choice between candidates by sums."""
        state, late, gone = server.state, names(self.join), names(self.leave)
        for _ in server.rounds(1):
            clients = [c for c in server.participants if c not in late]
            if self.balance:
                counts = server.sum(self.count_labels)["counts"]
                server.ask(self.weigh_rows, weights=balanced_weights(counts) ** self.balance)
            number, sums = self.best_map(server, clients)
            state["model"] = self.selected(server, sums, number, clients)
            if late or gone:
                server.ask(self.adopt, clients=clients, model=state["model"])
                server.evaluate(stage="before", model=state["model"])
                clients = [c for c in server.participants if c not in gone]
                sums = self.changed(server, sums, number, clients)
                state["model"] = self.selected(server, sums, number, clients)
            server.ask(self.adopt, clients=clients, model=state["model"])
            server.evaluate(model=state["model"])


def names(text: str) -> list[str]:
    """Returns the clients of a setting that lists them, such as "bank-a,bank-b"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(name: str, text: str, empty: bool = False) -> list[float]:
    """Returns the numbers of a setting that lists them, such as "0.1,1,10".

    Raises a ConfigError that names the setting unless all of them are above 0.

    Args:
        name: The setting.
        text: Its value.
        empty: Whether the list may be empty.
    """
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [-1.0]
    if not all(0 < value < math.inf for value in values) or not (values or empty):
        raise ConfigError(
            f"method.{name} is {text!r}, must be numbers above 0, separated by commas"
            f"{', or empty' if empty else ''}"
        )
    return values
