"""Audit: attacks on a run, each on exactly what its attacker sees.

`audit` runs a recipe with its messages kept (`fedloom.experiments.overhearing`), and then attacks.
There are three attackers. The server follows the protocol; it has all its messages, the settings
and the seed, and in a secure run sums in place of replies. A client has what it receives. An
outsider has the released model: the server's, or, where the server has none that predicts, the
clients' own, if they release them. What an attacker knows besides is stated with each finding.

An attack is a function with the mark `@attack`. It yields findings, one for each attacker and way.
The attacks are simple, so their success is a lower bound of what can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message, flatten, unflatten
from fedloom.core.registry import make_method
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, DataError, MessageError, Refusal, unknown
from fedloom.experiments.audit_file import SHADOWS, Audit, Finding
from fedloom.experiments.disclosure import Reading, aggregated, distance, read, replayed
from fedloom.experiments.overhearing import Exchange, Recording, record
from fedloom.experiments.recipe import Recipe
from fedloom.experiments.recipe_files import find_tables
from fedloom.experiments.result import Result
from fedloom.experiments.run_folder import read_config
from fedloom.methods.fedgram import FedGram
from fedloom.methods.fedgram.ridge import nearest_psd, unpacked
from fedloom.nn.nearest import pairs, random_non_edges
from fedloom.nn.weights import load_weights, weights
from fedloom.privacy import disclosure, inference
from fedloom.privacy.choice import responder_for
from fedloom.privacy.inference import Score
from fedloom.privacy.leakage import labels_read, member_auc

SMALL = 8  # training items of a client whose features `inversion` recovers
PAIRS = 400  # linked pairs of a client that `links` looks at
QUERIES = 30  # nodes of a client whose features `links` changes
EXACT = 1e-5  # relative error of what counts as recovered

Found = Iterator[Finding]
ATTACKS: dict[str, Callable[[Attacked], Found]] = {}


@dataclass(frozen=True)
class Released:
    """The models that an outsider has.

    Attributes:
        sees: What they are, in words.
        logits: What they predict for each client's items.
        predict: Returns the logits of a client's nodes for other features; None if the models
            predict for their own items only.
    """

    sees: str
    logits: Mapping[str, Tensor]
    predict: Callable[[str, Tensor], Tensor] | None


class Attacked:
    """A run that is attacked: its recording, and what several attacks need.

    Args:
        recipe: The run.
        federation: The clients' graphs.
        shadows: The number of shadow models.
    """

    def __init__(self, recipe: Recipe, federation: Federation, shadows: int = SHADOWS):
        self.recipe, self.federation, self.shadows = recipe, federation, shadows

    def recorded(self, federation: Federation, whole: bool) -> Recording:
        """Returns the recording of this run on a federation."""
        recipe = self.recipe
        method = make_method(recipe.method, recipe.method_settings)
        if any(f.name == "audit" for f in fields(method)):  # the method counts what it shows
            method = replace(method, audit=True)  # type: ignore[call-arg]
        model, dropout = recipe.model.name, recipe.model.dropout
        with torch.enable_grad():  # an attack may be the first to need it
            return record(method, recipe.method, federation, model, recipe.run, dropout, whole)

    @cached_property
    def seen(self) -> Recording:
        """The recording of the run."""
        return self.recorded(self.federation, whole=True)

    @property
    def result(self) -> Result:
        """The outcome of the run."""
        assert self.seen.result is not None
        return self.seen.result

    @property
    def graphs(self) -> Mapping[str, Graph]:
        """The clients' graphs."""
        return self.seen.graphs

    @cached_property
    def reading(self) -> Reading:
        """What the attacks on the messages of the first round have read."""
        return read(self.seen)

    @cached_property
    def moments(self) -> list[Moments]:
        """What second moments tell about training nodes, for each client or for the sum."""
        return _moments(self.seen)

    @cached_property
    def released(self) -> Released:
        """The released models."""
        return released(self.result, self.graphs)

    @property
    def from_server(self) -> str:
        """What the server sees of the replies, in words."""
        return "the sums of the replies" if self.seen.secure else "each client's replies"

    @property
    def outsider(self) -> str:
        """Who has the released model: also the clients, if the server sends it to them."""
        last = [e for e in self.seen.exchanges if e.round and e.received]
        sent = any(_models_in(self.seen, c, m) for e in last[-2:] for c, m in e.received.items())
        return "client, outsider" if sent else "outsider"


def attack(function: Callable[[Attacked], Found]) -> Callable[[Attacked], Found]:
    """Marks an attack. Its name is that of the function, with hyphens."""
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


def require_attacks(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the attacks that names stand for; all if there are none."""
    for name in names:
        if name not in ATTACKS:
            raise unknown("attack", name, ATTACKS)
    return tuple(dict.fromkeys(names)) or tuple(ATTACKS)


def audited_tables(source: str | Path) -> tuple[dict[str, Any], Path | None]:
    """Returns the tables of a run folder or a recipe, unchecked, and the folder if it is one.

    Raises a DataError if the folder holds no run, and a ConfigError if there is no such recipe.

    source: a run folder, PAPER/ENTRY or a TOML file.
    """
    folder = Path(source)
    if not folder.is_dir():
        return dict(find_tables(str(source))), None
    tables = read_config(folder)
    if "deployment" in tables:
        raise ConfigError(
            f"audit: {str(folder)!r} is the run of a deployment, whose data are with the parties; "
            "audit a simulation of it (`fedloom run` with the same method and settings)"
        )
    return tables, folder


def audit_recipe(
    recipe: Recipe,
    attacks: Sequence[str] = (),
    *,
    shadows: int = SHADOWS,
    federation: Federation | None = None,
    on_attack: Callable[[str], None] = lambda name: None,
) -> Audit:
    """Runs a recipe with its messages kept, and attacks it.

    Args:
        recipe: The run.
        attacks: The attacks' names; none means all.
        shadows: The number of shadow models of `membership`; 0 for none.
        federation: The clients' graphs, if they are loaded already.
        on_attack: Called with each attack's name before it starts.
    """
    names = require_attacks(attacks)
    if shadows < 0 or shadows == 1:
        raise ConfigError(f"shadows is {shadows}, must be 0 or at least 2")
    if recipe.adversary.clients:
        raise ConfigError(
            f"adversary.clients is {recipe.adversary.clients}: an audit measures what honest "
            "clients disclose; valid: 0"
        )
    federation = federation or recipe.federation()
    if make_method(recipe.method, recipe.method_settings).centralized:
        raise ConfigError(
            f"audit: method {recipe.method!r} has all graphs in one place; there is no message to "
            "attack"
        )
    attacked = Attacked(recipe, federation, shadows)
    found: list[Finding] = []
    for name in names:
        on_attack(name)
        found += [replace(each, attack=name) for each in ATTACKS[name](attacked)]
    summary = attacked.result.summary
    about = {key: summary[key] for key in ("method", "dataset", "partition", "clients", "seed")}
    about |= {
        "model": recipe.model.name,
        "secure": recipe.run.secure,
        "rounds": summary["rounds"],
        "accuracy": summary["accuracy"],
        "shadows": shadows,
    }
    return Audit(about, tuple(found))


def _finding(
    how: str,
    attacker: str,
    score: Score | None = None,
    *,
    sees: str = "",
    knows: str = "",
    measure: str = "AUC",
    why: str = "",
) -> Finding:
    """Returns a finding; one without a score, or with a score that is nan, does not apply."""
    if score is None or np.isnan(score.value):
        return Finding("", how, attacker, sees, knows, measure, why=why or "nothing to attack")
    value, low, high, chance = (round(float(number), 4) for number in score)
    return Finding("", how, attacker, sees, knows, measure, value, low, high, chance, why)


# ---- labels ----
@attack
def labels(attacked: Attacked) -> Found:
    """The shares of labels at each client, from weights, gradients, prototypes or statistics."""
    shares, sees = attacked.reading.label_shares(), attacked.from_server
    how, knows = "label shares of each client", "the average client's shares"
    if shares is None:
        why = "no reply has a classifier's bias, class counts or class statistics"
        yield _finding(how, "server", sees=sees, measure="rate", why=why)
    else:
        told, true, guess = shares
        score = inference.rate((1 - distance(told, true)).tolist(), _right(guess, true))
        exact = f"counted exactly for {len(attacked.reading.exact)} of {len(true)} clients"
        yield _finding(how, "server", score, sees=sees, knows=knows, measure="rate", why=exact)
    notes = attacked.result.summary["notes"]
    if labelled := int(notes.get("training labels", 0)):
        right = int(notes["training labels that the server can read"])
        y = torch.cat([graph.y[graph.train] for graph in attacked.graphs.values()])
        most = float(torch.bincount(y).max() / len(y))
        score = inference.rate([1.0] * right + [0.0] * (labelled - right), most)
        sees, knows = "the sums of gradients of node embeddings, all rounds", "the largest class"
        how = "label of each training node"
        yield _finding(how, "server", score, sees=sees, knows=knows, measure="rate")
    if moments := attacked.moments:
        score = inference.rate([m.labels for m in moments], mean(m.guess for m in moments))
        how, knows = "label of each training node", "the training nodes' features"
        sees = f"second moments in {attacked.from_server}"
        yield _finding(how, "server", score, sees=sees, knows=knows, measure="rate")


def _right(shares: Tensor, true: Tensor) -> float:
    return float((1 - distance(shares, true)).mean())


class Moments(NamedTuple):
    """What second moments G = Fᵀ F and B = Fᵀ Y of a client, or of all, tell.

    Attributes:
        members: How well they tell training nodes from others, an AUC.
        labels: The share of the training nodes whose label is read.
        guess: The share of other nodes whose label is predicted: no more than a model does.
    """

    members: float
    labels: float
    guess: float


def _moments(seen: Recording) -> list[Moments]:
    """Returns what FedGram's statistics tell, for each client or for the sum."""
    method = seen.method
    sent = [e for e in seen.first_round() if e.phase == "send_moments"]
    if not isinstance(method, FedGram) or not sent:
        return []
    exchange, found = sent[0], []
    told = exchange.replies or {"": exchange.total or {}}
    for name, reply in told.items():
        number, width = (
            next(iter(reply["gram"])),
            int(next(iter(exchange.received.values()))["width"]),
        )
        m = method.columns(seen.facts, int(number), width)
        gram, moment = unpacked(reply["gram"][number], m), reply["moment"][number]
        if method.epsilon:  # what the server makes of it
            gram = nearest_psd(gram) + method.penalties(seen.facts)[0] * torch.eye(m)
        rows = []
        graphs = {c: g for c, g in seen.graphs.items() if name in ("", c)}
        for c, graph in graphs.items():
            client = Client(c, graph, seen.facts, seen.inductive, responder_for(seen.facts, c))
            own = method.private_rows(client, width) if method.epsilon else None
            kept = method.features(client, graph, int(number), width) if own is None else own
            rows.append(kept)
        f = torch.cat(rows)
        y, train = (
            torch.cat([getattr(g, part) for g in graphs.values()]) for part in ("y", "train")
        )
        found.append(
            Moments(
                member_auc(gram, f, train),
                labels_read(gram, moment, f[train], y[train]),
                labels_read(gram, moment, f[~train], y[~train]),
            )
        )
    return found


# ---- membership ----
@attack
def membership(attacked: Attacked) -> Found:
    """Which items were trained on: a threshold on the loss, and shadow models."""
    knows = "candidates with features, labels and edges"
    local = _last_weights(attacked)
    sees = "the last mean of the weights" if attacked.seen.secure else "each client's last weights"
    how = "loss threshold"
    if local:
        score = _members(attacked, _confidences(attacked.graphs, local))
        yield _finding(how, "server", score, sees=sees, knows=knows)
    else:
        why = "no reply holds the weights of a whole model"
        yield _finding(how, "server", sees=attacked.from_server, why=why)
    if moments := attacked.moments:
        score = inference.rate([m.members for m in moments], 0.5)
        sees = f"second moments in {attacked.from_server}"
        at = "rows that second moments contain"
        yield _finding(at, "server", score, sees=sees, knows="candidates with features and edges")
    shown = attacked.released
    score = _members(attacked, _confidences(attacked.graphs, shown.logits))
    yield _finding(how, attacked.outsider, score, sees=shown.sees, knows=knows)
    how = "shadow models (offline LiRA)"
    if not attacked.shadows:
        why = "no shadow models were asked for"
        yield _finding(how, attacked.outsider, sees=shown.sees, why=why)
        return
    score = _members(attacked, _shadowed(attacked))
    knows = f"{knows}, {attacked.shadows} runs on other divisions of them"
    yield _finding(how, attacked.outsider, score, sees=shown.sees, knows=knows)


def _members(attacked: Attacked, scores: Mapping[str, Tensor]) -> Score:
    """Returns how well scores of the clients' items tell those of training from others."""
    graphs = attacked.graphs
    inside = [scores[c][graph.train] for c, graph in graphs.items()]
    outside = [scores[c][graph.val | graph.test] for c, graph in graphs.items()]
    return inference.auc(torch.cat(inside), torch.cat(outside))


def _confidences(graphs: Mapping[str, Graph], logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns how sure models are of the labels of each client's items."""
    return {c: inference.confidence(logits[c], graph.y.clamp(min=0)) for c, graph in graphs.items()}


def _shadowed(attacked: Attacked) -> dict[str, Tensor]:
    """Returns the LiRA score of each client's items."""
    graphs, found, trained = attacked.graphs, [], []
    for number in range(attacked.shadows):
        other = _divided_again(attacked.federation, number)
        result = _shadow_run(attacked, other, number)
        again = dict(zip(other.names, other.graphs, strict=True))
        found.append(_confidences(graphs, released(result, again).logits))
        trained.append({c: graph.train for c, graph in again.items()})
    return {
        c: inference.lira(
            target,
            torch.stack([each[c] for each in found]),
            torch.stack([each[c] for each in trained]),
        )
        for c, target in _confidences(graphs, attacked.released.logits).items()
    }


def _divided_again(federation: Federation, number: int) -> Federation:
    """Returns the federation with the labelled items of each client divided at random again."""
    rng = torch.Generator().manual_seed(number)
    graphs = []
    for graph in federation.graphs:
        items = (graph.train | graph.val | graph.test).nonzero().flatten()
        mixed = items[torch.randperm(len(items), generator=rng)]
        parts = mixed.split([int(part.sum()) for part in (graph.train, graph.val, graph.test)])
        train, val, test = (_mask(graph, part) for part in parts)
        graphs.append(replace(graph, train=train, val=val, test=test))
    return replace(federation, graphs=tuple(graphs), whole=None)


def _mask(graph: Graph, items: Tensor) -> Tensor:
    mask = torch.zeros_like(graph.train)
    mask[items] = True
    return mask


def _shadow_run(attacked: Attacked, federation: Federation, number: int) -> Result:
    """Runs a shadow model: plain if the method allows it, because secure sums are exact."""
    recipe = attacked.recipe
    settings = replace(recipe.run, seed=recipe.run.seed + 1 + number, engine="auto")
    chosen = replace(recipe, run=settings, given=federation)
    try:
        return replace(chosen, run=replace(settings, secure=False)).execute()
    except ConfigError:
        if not settings.secure:
            raise
        return chosen.execute()  # protections that need secure sums


def _models_in(seen: Recording, client: str, message: Message) -> list[Message]:
    """Returns the entries of a message that are weights of the client's model."""
    own = weights(seen.facts.build(seen.facts.model_of[client], client))
    shapes = {name: tensor.shape for name, tensor in own.items()}
    return [
        entry
        for entry in message.values()
        if isinstance(entry, dict)
        and {name: getattr(tensor, "shape", None) for name, tensor in entry.items()} == shapes
    ]


@torch.no_grad()
def _last_weights(attacked: Attacked) -> dict[str, Tensor]:
    """Returns the logits of the last weights of each client that the server has seen."""
    seen, found = attacked.seen, {}
    for exchange in seen.exchanges:
        declared = seen.declared(exchange).reply
        whole = [n for n, d in declared.items() if isinstance(d, str) and d[0] in "w~"]
        told = exchange.replies
        if exchange.total is not None:
            told = dict.fromkeys(seen.graphs, exchange.total)
        for client, reply in told.items():
            for entry in _models_in(seen, client, {name: reply[name] for name in whole}):
                model = seen.facts.build(seen.facts.model_of[client], client)
                load_weights(model, dict(entry))
                found[client] = model(seen.graphs[client])
    return found if len(found) == len(seen.graphs) else {}


@torch.no_grad()
def released(result: Result, graphs: Mapping[str, Graph]) -> Released:
    """Returns what the released models of a run predict for the clients' items."""
    try:
        model = result.model() if "server" in result.best else None
        if model is not None and model.method.predicts_unseen:
            logits = {c: model(graph) for c, graph in graphs.items()}
            return Released(
                "the released model",
                logits,
                lambda c, x: model(replace(graphs[c], x=x)),
            )
    except (DataError, ConfigError):  # the server's model does not predict by itself
        pass
    models = {c: result.model(c) for c in graphs}
    own = {c: m.own_logits for c, m in models.items()}
    sees = "each client's own model, if it is released"
    logits = {}
    for c, graph in graphs.items():
        kept = own[c]
        logits[c] = models[c](graph) if kept is None else kept
    if all(m.method.predicts_unseen for m in models.values()):
        return Released(sees, logits, lambda c, x: models[c](replace(graphs[c], x=x)))
    return Released(sees, logits, None)


# ---- links ----
@attack
def links(attacked: Attacked) -> Found:
    """Which nodes are linked: from predictions, from queries, and from messages about nodes."""
    if attacked.seen.facts.task != "node":
        why = "the data are a graph task: predictions are of whole graphs"
        yield _finding("similar predictions", "outsider", why=why)
        return
    yield from _links_in_messages(attacked)
    chosen = {c: _pairs(graph) for c, graph in attacked.graphs.items()}
    shown = attacked.released
    guess = _told({c: F.normalize(g.x) for c, g in attacked.graphs.items()}, chosen)
    sees = f"predictions for the nodes of a client's graph, by {shown.sees}"
    rows = {c: F.log_softmax(logits, 1) for c, logits in shown.logits.items()}
    known = f"from features alone: {guess.value:.2f}"
    yield _finding("similar predictions", "outsider", _told(rows, chosen), sees=sees, why=known)
    how = "whose prediction changes with a node (LinkTeller)"
    if shown.predict is None:
        why = "the models do not predict for other features"
        yield _finding(how, "outsider", sees=shown.sees, why=why)
        return
    linked, others = [], []
    for c, graph in attacked.graphs.items():
        near, far = _influenced(graph, c, shown.predict)
        linked.append(near)
        others.append(far)
    score = inference.auc(torch.cat(linked), torch.cat(others))
    sees = f"{sees}, and for changed features"
    yield _finding(how, "outsider", score, sees=sees, knows="the nodes' features", why=known)


def _links_in_messages(attacked: Attacked) -> Found:
    """The server's and the peers' view: messages with a row for each node."""
    if pseudo := attacked.reading.pseudo:
        score = inference.rate([each["edge_auc"] for each in pseudo], 0.5)
        yield _finding("links and rows of the pseudo-graph", "server", score, sees="pseudo-graphs")
    else:
        why = "no reply has a row for each node"
        yield _finding("rows of nodes", "server", sees=attacked.from_server, why=why)
    notes = attacked.result.summary["notes"]
    if "edges of others that clients can read" in notes:
        count, right = _edges_of_others(attacked), notes["edges of others that clients can read"]
        score = inference.rate([1.0] * int(right) + [0.0] * max(0, count - int(right)), 0.0)
        how, sees = "rows of one node in the second hop", "the blocks of peers"
        yield _finding(how, "client", score, sees=sees, knows="its own edges", measure="rate")


def _edges_of_others(attacked: Attacked) -> int:
    """Returns the number of edges that do not touch a client, summed over the clients."""
    graphs, clients = attacked.graphs.values(), len(attacked.graphs)
    inner = sum(pairs(g.edge_index, g.num_nodes).shape[1] for g in graphs)
    cut = sum(len(g.cross_edges[:2].unique(dim=1).T) for g in graphs) // 2
    return (clients - 1) * inner + (clients - 2) * cut


def _pairs(graph: Graph) -> tuple[Tensor, Tensor]:
    """Returns linked and other pairs of nodes, at most `PAIRS` of each."""
    rng, n = torch.Generator().manual_seed(0), graph.num_nodes
    edges = pairs(graph.edge_index, n)
    some = edges[:, torch.randperm(edges.shape[1], generator=rng)[:PAIRS]]
    return some, random_non_edges(edges, n, rng)[:, :PAIRS] if n > 1 else some[:, :0]


def _told(rows: Mapping[str, Tensor], chosen: Mapping[str, tuple[Tensor, Tensor]]) -> Score:
    linked, others = (
        torch.cat([inference.alike(rows[c], each[k]) for c, each in chosen.items()]) for k in (0, 1)
    )
    return inference.auc(linked, others)


def _influenced(
    graph: Graph, client: str, predict: Callable[[str, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the influence of some nodes on their neighbours and on others."""
    rng, n = torch.Generator().manual_seed(0), graph.num_nodes
    nodes = torch.randperm(n, generator=rng)[:QUERIES]
    moved = inference.influence(lambda x: predict(client, x), graph.x, nodes)
    linked = torch.zeros(n, n, dtype=torch.bool)
    linked[graph.edge_index[0], graph.edge_index[1]] = True
    near = linked[nodes] | linked.T[nodes]
    away = ~near
    away[torch.arange(len(nodes)), nodes] = near[torch.arange(len(nodes)), nodes] = False
    return moved[near], moved[away]


# ---- features ----
@attack
def features(attacked: Attacked) -> Found:
    """Which features, such as words, occur at a client: membership of a node by its features."""
    told, how = attacked.reading.features(), "words from changes of weights, or statistics"
    knows = "candidates with features; a replay without features"
    if told is None:
        why = "no reply has an axis of features"
        yield _finding(how, "server", sees=attacked.from_server, why=why)
    else:
        areas = list(disclosure.feature_membership(told, attacked.graphs).values())
        named = sum(int(t.sum()) for t in told.values())
        held = {c: (graph.x != 0).any(0) for c, graph in attacked.graphs.items()}
        right = sum(int((t & held[c]).sum()) for c, t in told.items())
        why = f"{right:,} of {named:,} pairs of client and feature named rightly"
        score = inference.rate(areas, 0.5)
        sees = f"{attacked.from_server} of the first round"
        yield _finding(how, "server", score, sees=sees, knows=knows, why=why)
    if alone := attacked.reading.single["peers"]:
        score = inference.rate([float(one) for one in alone], 0.0)
        how = "rows of a single node"
        yield _finding(how, "client", score, sees="the messages of peers", measure="rate")


# ---- inversion ----
@attack
def inversion(attacked: Attacked) -> Found:
    """The features of a client with few training items, from the change of its first layer."""
    how, knows = "first layer, in closed form", "the model that was sent, a replay without features"
    small = {c for c, g in attacked.graphs.items() if 0 < int(g.train.sum()) <= SMALL}
    seen, who = attacked.seen, f"{len(small)} clients with at most {SMALL} training items"
    if not small:
        who = "a probe: the first round, each client with one training item"
        graphs = tuple(_with_one(graph) for graph in attacked.federation.graphs)
        probe = replace(attacked.federation, graphs=graphs, whole=None)
        try:
            seen = attacked.recorded(probe, whole=False)
        except MessageError as error:
            why = f"the method refuses clients with one training item: {error}"
            yield _finding(how, "server", sees=attacked.from_server, measure="rate", why=why)
            return
        small = set(seen.graphs)
    sees = f"{attacked.from_server}; {who}"
    values, guesses = [], []
    rows = _recovered(seen)
    for client in sorted(small & rows.keys()):
        others = torch.cat([g.x for c, g in seen.graphs.items() if c != client])
        values.append(inference.closest(rows[client], seen.graphs[client]))
        guesses.append(inference.closest(others.mean(0), seen.graphs[client]))
    if not values:
        why = "no reply has a weight and a bias of a layer that reads features"
        yield _finding(how, "server", sees=attacked.from_server, measure="rate", why=why)
        return
    score = inference.rate(values, mean(guesses))
    why = "the rate is the cosine of the recovered and the nearest real input row"
    yield _finding(how, "server", score, sees=sees, knows=knows, measure="rate", why=why)


def _with_one(graph: Graph) -> Graph:
    """Returns the graph with its first training item as the only one; the others have no part."""
    return replace(graph, train=graph.train & (graph.train.cumsum(0) == 1))


def _recovered(seen: Recording) -> dict[str, Tensor]:
    """Returns the input row that the first round tells about each client."""
    found: dict[str, Tensor] = {}
    for exchange, blanks in replayed(seen):
        told = exchange.replies
        if exchange.total is not None:
            told = dict.fromkeys(blanks, exchange.total)
            blanks = dict.fromkeys(blanks, aggregated(seen, seen.declared(exchange), blanks))
        for client, reply in told.items():
            if client in found or client not in blanks:
                continue
            change = _change(reply, exchange.received[client], blanks[client])
            row = inference.inverted(change, seen.facts.num_features)
            if row is not None:
                found[client] = row
    return found


def _change(reply: Message, received: Message, blank: Message) -> Message:
    """Returns the change of weights that features cause, and that of biases.

    The weights of a stand-in without features move by weight decay alone.
    """
    after, before, still = flatten(reply), flatten(received), flatten(blank)
    change = {}
    for name, tensor in after.items():
        if not tensor.is_floating_point() or name not in still or still[name].shape != tensor.shape:
            continue
        start = still[name] if tensor.dim() == 2 else before.get(name, torch.zeros_like(tensor))
        change[name] = tensor - start
    return unflatten(change)


# ---- prototypes ----
@attack
def prototypes(attacked: Attacked) -> Found:
    """Class means of a single item: the item's own embedding."""
    how, alone = "class means of one item", attacked.reading.single["prototypes"]
    if alone:
        score = inference.rate([float(one) for one in alone], 0.0)
        sees = attacked.from_server
        yield _finding(how, "server", score, sees=sees, measure="rate", why=_among(alone))
    else:
        why = "no reply has class means"
        yield _finding(how, "server", sees=attacked.from_server, measure="rate", why=why)
    if received := _received_means(attacked.seen):
        score = inference.rate([float(one) for one in received], 0.0)
        sees = "the class means that the server sends"
        yield _finding(how, "client", score, sees=sees, measure="rate", why=_among(received))


def _among(alone: Sequence[bool]) -> str:
    return f"{sum(alone)} of {len(alone)} rows"


def _received_means(seen: Recording) -> list[bool]:
    """Returns, for the class means that clients receive in the last round, which are of one item.

    They are compared with the embeddings of the items when the clients last answered.
    """
    rows: dict[int, Tensor] = {}  # by width
    alone: list[bool] = []
    for exchange in seen.exchanges:
        if exchange.round == max(e.round for e in seen.exchanges) and rows:
            for tensor in next(iter(exchange.received.values()), {}).values():
                if not isinstance(tensor, Tensor) or tensor.dim() != 2:
                    continue
                if tensor.shape[1] in rows and len(tensor) <= seen.facts.num_classes:
                    sent = tensor[(tensor != 0).any(1)]
                    alone += disclosure.single_items(sent, rows[tensor.shape[1]]).tolist()
            if alone:
                break
        kinds = [each for each in exchange.rows.values() if each]
        for name in kinds[0] if kinds else ():
            every = torch.cat([each[name] for each in kinds])
            rows[every.shape[1]] = every
    return alone


# ---- stand-ins ----
@attack
def stand_ins(attacked: Attacked) -> Found:
    """The real nodes behind the rows of pseudo-graphs."""
    how = "nearest real row"
    if pseudo := attacked.reading.pseudo:
        chance = mean(each["chance"] for each in pseudo)
        score = inference.rate([each["found"] for each in pseudo], chance)
        knows = "candidates with features"
        yield _finding(how, "server", score, sees="pseudo-graphs", knows=knows, measure="rate")
    else:
        why = "no reply has rows that stand for nodes"
        yield _finding(how, "server", sees=attacked.from_server, measure="rate", why=why)


# ---- cohorts ----
@attack
def cohorts(attacked: Attacked) -> Found:
    """A client's reply as the difference of two sums whose cohorts differ in that client."""
    how, terms = "difference of two sums", attacked.seen.facts.secure
    if terms is None:
        why = "the server sees each reply; secure sums (--secure) hide them"
        yield _finding(how, "server", sees=attacked.from_server, measure="rate", why=why)
        return
    sums = [e for e in attacked.seen.first_round() if e.total is not None and e.answers]
    exchange = max(sums, key=lambda e: sum(t.numel() for t in flatten(e.total or {}).values()))
    sees = f"two sums of {exchange.phase!r} in a round, with and without a client"
    for apart in dict.fromkeys((1, terms.apart)):
        outcome = [_differenced(attacked, exchange, c, apart) for c in exchange.answers]
        score = inference.rate([float(not text) for text in outcome], 0.0)
        why = next(filter(None, outcome), "no client refuses")
        at = f"{how}, run.secure_apart = {apart}"
        yield _finding(at, "server", score, sees=sees, measure="rate", why=why)


def _differenced(attacked: Attacked, exchange: Exchange, client: str, apart: int) -> str:
    """Returns why two sums do not give away a client's reply; "" if they do."""
    from fedloom.privacy import secure_sum  # imports cryptography
    from fedloom.privacy.sum_record import SumId, SumRecord

    terms = attacked.seen.facts.secure
    assert terms is not None
    everybody = list(exchange.answers)
    cohorts = (everybody, [c for c in everybody if c != client])
    kept = SumRecord(apart=apart)  # every client in both cohorts has this record
    try:
        for number, cohort in enumerate(cohorts, 1):
            about = SumId(bytes(16), number, exchange.round, exchange.phase)
            kept.begin(about)
            kept.release(about, cohort)
    except Refusal as refusal:
        return f"refused: {refusal}"
    arrays = {
        c: {n: t.double().numpy() for n, t in flatten(answer).items()}
        for c, answer in exchange.answers.items()
    }
    try:
        coded = {c: secure_sum.encode(a, terms, len(everybody)) for c, a in arrays.items()}
    except MessageError as error:
        return str(error)
    one, two = (np.sum([coded[c] for c in cohort], 0, terms.word) for cohort in cohorts)
    like = {n: ("float64", a.shape) for n, a in arrays[client].items()}
    found = secure_sum.decode(one - two, like, terms, len(everybody))
    for name, true in arrays[client].items():
        if np.abs(found[name] - true).max(initial=0.0) > EXACT * max(1.0, np.abs(true).max()):
            return "the difference is not the reply"
    return ""
