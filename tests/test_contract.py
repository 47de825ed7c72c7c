"""The contract: what every method guarantees, in every engine.

The suite finds a new file in `methods/` by itself. Runs with default settings are cached, because
most tests compare something with them.
"""

import importlib
import math
import re
import tomllib
from dataclasses import fields, replace

import pytest
import torch
from tests.faults.schedule import Schedule

from fedloom.commands import _as_baseline
from fedloom.core.disclosure import server_learns
from fedloom.core.ledger import MEASURING
from fedloom.core.message import flatten, unflatten
from fedloom.core.phase import phases_of
from fedloom.core.registry import make_method, method_class, method_names
from fedloom.core.server import Server
from fedloom.data.federation import Federation
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.engines import engine_names, in_lockstep
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError, Refusal, RoundFailed
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run
from fedloom.experiments.trained import load_model
from fedloom.privacy import measured

METHODS = sorted(method_names())
MODEL = "gcn-2x8"
THOROUGH = ("fedavg", "fedstruct")  # methods that are tested with every fault and every kill point
# Methods that cover all that the processes engine carries: sums, peer messages, plug-ins.
IN_PROCESSES = ("fedavg", "fedgcn", "fedgh", "fedpg", "fedstruct", "opfgl")

# Engines that run clients in lockstep round differently than the loop.
LOCKSTEP = [e for e in engine_names() if in_lockstep(e)]
# Engines that must be bit-identical to the loop. Ray and Flower take seconds to start and have
# tests of their own.
EXACT = [e for e in engine_names() if e not in ("loop", "ray", "flower", *LOCKSTEP)]
FAULTS = ("nan", "inf", "shape", "dtype", "missing", "extra")
_cached = {}


def pytest_generate_tests(metafunc):
    """Runs every test for every method; expensive variants for some of them only."""
    wanted = set(metafunc.fixturenames)
    if "fault" in wanted:
        cases = [(n, f) for n in METHODS for f in FAULTS if f == "shape" or n in THOROUGH]
        metafunc.parametrize(("name", "fault"), cases)
    elif "last" in wanted:  # a one-shot method has one round
        ends = {n: rounds_of(n) for n in METHODS}
        every = {n: range(1, ends[n] + 1) if n in THOROUGH else [min(2, ends[n])] for n in METHODS}
        metafunc.parametrize(("name", "last"), [(n, k) for n in METHODS for k in every[n]])
    elif "task" in wanted:
        tasks = {n: [t for t in ("node", "graph") if t in method_class(n).tasks] for n in METHODS}
        cases = [(n, task) for n in METHODS for task in tasks[n]]
        if "engine" in wanted:
            if metafunc.function is test_engines_in_lockstep_agree_with_the_loop:
                cases = [(*c, e) for e in LOCKSTEP for c in cases]
            else:
                some = {"processes": IN_PROCESSES}
                cases = [(*c, e) for e in EXACT for c in cases if c[0] in some.get(e, METHODS)]
            metafunc.parametrize(("name", "task", "engine"), cases)
            return
        if metafunc.function is test_every_setting_changes_something:
            slow = [
                pytest.param(*c, marks=pytest.mark.slow) for c in cases if c[1] != tasks[c[0]][0]
            ]
            cases = [c for c in cases if c[1] == tasks[c[0]][0]] + slow
        metafunc.parametrize(("name", "task"), cases)
    else:
        metafunc.parametrize("name", METHODS)


def own_tests(name):
    """The module with a method's own tests."""
    return importlib.import_module(f"tests.methods.test_{method_names()[name]}")


def quick(name):
    """Settings for a short run in which every setting matters: three rounds, and QUICK."""
    return {"rounds": 3, **getattr(own_tests(name), "QUICK", {})}


def tunes(name):
    """Whether a method has a setting for local epochs after the rounds."""
    return "finetune" in {f.name for f in fields(method_class(name))}


def rounds_of(name):
    """The number of rounds of a quick run."""
    return quick(name)["rounds"]


def go(name, federation, **settings):
    """A quick run."""
    model = getattr(own_tests(name), "CONTRACT_MODEL", MODEL)
    chosen = {"model": model, "engine": "loop", **quick(name), **settings}
    return run(name, federation, **chosen)


def plain(name, federation, **settings):
    """A quick run, cached: the federations of the fixtures live as long as the session."""
    key = (name, id(federation), tuple(sorted(settings.items())))
    if key not in _cached:
        _cached[key] = go(name, federation, **settings)
    return _cached[key]


def weights_of(result, final_only=False):
    """All that the best and the final models of a run hold, by owner and name."""
    return {
        f"{which}/{owner}/{name}": tensor
        for which, models in (("best", result.models), ("final", result.final_models))
        if which == "final" or not final_only
        for owner, model in models.items()
        for name, tensor in flatten(model).items()
    }


def same_bits(one, other, final_only=False):
    """Whether two runs leave the same weights."""
    one, other = weights_of(one, final_only), weights_of(other, final_only)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def differences(one, other):
    """Absolute differences of all weights of two runs, as one tensor."""
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys()
    return torch.cat([torch.zeros(1), *((one[k] - other[k]).abs().flatten() for k in one)])


def supports_partial(name):
    """Whether a round may leave out clients."""
    return method_class(name).partial_participation


@pytest.fixture
def node_federation(name, node_federation, cross_federation, graph_federation):
    """A federation for the method: a node task if it does any, cross edges if it needs them."""
    cls = method_class(name)
    if "node" not in cls.tasks:
        return graph_federation
    return cross_federation if cls.uses_cross_edges else node_federation


@pytest.fixture
def federation(task, node_federation, graph_federation):
    """A federation for each task that the method does."""
    return node_federation if task == "node" else graph_federation


# ---- training losses and class weights ----


def test_every_evaluation_has_the_loss_of_the_training_before(name, task, federation):
    """No method is an exception: all of them train by `client.loss`, or record their loss."""
    for entry in plain(name, federation).history:
        losses = [row["loss"] for row in entry["clients"]]
        assert entry["loss"] > 0
        assert min(losses) <= entry["loss"] <= max(losses)
        assert all(math.isfinite(loss) and loss > 0 for loss in losses)


def test_class_weights_act(name, node_federation):
    weights = ",".join(("1", "4", "9")[: node_federation.num_classes])
    weighted = go(name, node_federation, class_weight=weights)
    assert not same_bits(plain(name, node_federation), weighted)
    assert all(tensor.isfinite().all() for tensor in weights_of(weighted).values())


# ---- the same seed gives the same bits ----


def test_same_seed_same_bits_and_another_seed_others(name, task, federation):
    first = plain(name, federation)
    again, other = go(name, federation), go(name, federation, seed=6)
    assert first.summary["history_hash"] == again.summary["history_hash"]
    assert same_bits(first, again)
    # A task in which a method draws no random number gives the same bits for every seed.
    without_draws = task in getattr(own_tests(name), "DRAWS_NOTHING", ())
    same = first.summary["history_hash"] == other.summary["history_hash"]
    assert same == without_draws
    assert all(torch.isfinite(t).all() for t in weights_of(first).values())
    assert 0 <= first.accuracy <= 1
    assert first.summary["status"] == "completed"
    assert first.summary["rounds"] == rounds_of(name)


def test_the_global_random_state_is_neither_read_nor_changed(name, node_federation):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = go(name, node_federation)
    assert torch.equal(before, torch.get_rng_state())
    # The cached run started from another global state.
    assert first.summary["history_hash"] == plain(name, node_federation).summary["history_hash"]


def test_renumbering_clients_changes_only_the_numbers(name, task, federation):
    order = list(reversed(range(federation.num_clients)))

    def renumbered(graph):  # cross edges name the owner of their other end by its number
        own, remote, owner, direction = graph.cross_edges
        edges = torch.stack([own, remote, len(order) - 1 - owner, direction])
        return replace(graph, cross_edges=edges)

    graphs = tuple(renumbered(federation.graphs[k]) for k in order)
    names = tuple(federation.names[k] for k in order)
    other = go(name, replace(federation, graphs=graphs, names=names))
    # Sums run in another order, so rounding differs.
    assert differences(plain(name, federation), other).max() < 2e-5


# ---- engines agree ----


def test_engines_are_bit_identical_to_the_loop(name, task, engine, federation):
    loop, other = plain(name, federation), go(name, federation, engine=engine)
    assert loop.traffic == other.traffic
    assert loop.summary["history_hash"] == other.summary["history_hash"]
    assert same_bits(loop, other)


def test_engines_in_lockstep_agree_with_the_loop(name, task, engine, federation):
    loop, other = plain(name, federation), go(name, federation, engine=engine)
    assert loop.traffic == other.traffic
    # Adam divides a gradient by its own size. Where large terms cancel, it scales rounding errors.
    off = differences(loop, other)
    assert off.max() < 1e-4
    assert (off > 1e-5).float().mean() < 0.01


def test_the_stacked_engine_agrees_to_rounding_with_sgd(name, node_federation):
    if "optimizer" not in {f.name for f in fields(method_class(name))}:
        pytest.skip(f"{name} has no choice of optimisers")
    loop, stacked = (
        go(name, node_federation, engine=engine, optimizer="sgd") for engine in ("loop", "stacked")
    )
    assert differences(loop, stacked).max() < 1e-5


# ---- privacy ----


def test_training_never_sees_a_held_out_label(name, task, federation):
    validates = method_class(name).validates  # then validation labels may choose between models

    def scrambled(graph):
        seen = graph.train | graph.val if validates else graph.train
        return replace(graph, y=torch.where(seen, graph.y, (graph.y + 1) % graph.num_classes))

    whole = None if federation.whole is None else scrambled(federation.whole)
    other = replace(federation, graphs=tuple(map(scrambled, federation.graphs)), whole=whole)
    # Validation labels choose the best round, and nothing else.
    assert same_bits(plain(name, federation), go(name, other), final_only=True)


def test_no_reply_is_as_large_as_the_data_unless_declared(name, node_federation, monkeypatch):
    nodes = [graph.num_nodes for graph in node_federation.graphs]
    sizes, seen, original = {*nodes, sum(nodes)}, [], Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        seen.append((phase, replies))
        return replies

    monkeypatch.setattr(Loop, "call", call)
    go(name, node_federation)
    declared = method_class(name).discloses_to_server
    for phase, replies in seen:
        for reply in replies.values():
            for key, tensor in flatten(reply).items():
                large = sizes & set(tensor.shape)
                assert declared or not large, f"{phase} sends {key} {list(tensor.shape)}"


def test_peers_learn_no_features_or_labels_unless_declared(name, node_federation, monkeypatch):
    cls = method_class(name)
    sent, original = [], Loop.call

    def call(self, phase, messages):
        replies = original(self, phase, messages)
        to_peers = getattr(getattr(cls, phase, None), "read_by", "")
        if to_peers:
            flat = {
                f"{phase} {c}/{k}": t for c, r in replies.items() for k, t in flatten(r).items()
            }
            sent.append(flat)
        for client, reply in ({} if to_peers and cls.discloses_to_peers else replies).items():
            x = self.clients[client].full_graph.x
            for key, tensor in flatten(reply).items():
                wide = tensor.dim() and tensor.shape[-1] == x.shape[1]
                rows = tensor.reshape(-1, x.shape[1]) if wide else x[:0]
                found = (torch.cdist(rows.float(), x) < 1e-6).any()
                assert not found, f"{phase}: {key} holds a node's features"
        return replies

    monkeypatch.setattr(Loop, "call", call)
    go(name, node_federation)
    if cls.discloses_to_peers:
        return  # peer messages may depend on features and labels; no reply to the server holds them
    written, sent = sent, []
    rng = torch.Generator().manual_seed(0)
    others = [
        replace(g, x=torch.rand(g.x.shape, generator=rng), y=(g.y + 1) % g.num_classes)
        for g in node_federation.graphs
    ]
    go(name, replace(node_federation, graphs=tuple(others), whole=None))
    for one, other in zip(written, sent, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_its_statement_says_what_the_server_learns(name):
    cls = method_class(name)
    if cls.centralized:
        assert server_learns(cls).startswith("everything")
        return
    declared = [d for phase in phases_of(cls).values() for d in phase.reply.values()]
    texts = [d for d in declared if isinstance(d, str)]
    sends_weights = any(d == "weights" or d[0] in "=~" for d in texts)
    assert ("weights or gradients" in server_learns(cls)) >= sends_weights
    assert cls.discloses_to_server in server_learns(cls)
    assert "scores" in server_learns(cls)


def test_its_disclosure_was_measured(name):
    """`python bench/disclosure.py NAME` measures a new method."""
    head, *runs = measured.statement(name)
    if head.startswith("not measured: "):  # and the statement says why
        assert not runs
        assert name in ("central", "fedgh", "fedsage+")
        return
    assert re.match(r"\d{4}-\d\d-\d\d, round 1 on (cora|mutag), 10 clients", head)
    kept = measured.figures()["methods"][name]
    assert len(measured.figures()["about"]["seeds"]) >= 3
    assert kept["plain"]["held_out"]["exact"] == [10] * 3  # every plain run sends scores
    assert ("secure" in kept) == (not method_class(name)().single_replies())
    advised = [f.name for f in fields(method_class(name)) if f.metadata["advised"] is not None]
    assert all(any(f"plain run, {setting} = " in run for run in runs) for setting in advised)


def test_secure_sums_agree_with_plain_ones_or_are_refused(name, node_federation):
    single = make_method(name, quick(name)).single_replies()
    if single:
        with pytest.raises(ConfigError, match=rf"run\.secure: .*{single[0]!r}"):
            go(name, node_federation, secure=True)
        return
    first, again = (go(name, node_federation, secure=True, engine=e) for e in ("loop", "wire"))
    # Masks differ, sums do not.
    assert first.summary["history_hash"] == again.summary["history_hash"]
    assert same_bits(first, again)
    open_run = plain(name, node_federation)
    assert differences(first, open_run).max() < 2e-5
    assert first.accuracy == pytest.approx(open_run.accuracy, abs=1e-6)


# ---- settings ----


def another_value(name, f, value):
    """Some other value of a setting; None if it has no other."""
    other = getattr(own_tests(name), "OTHER", {})
    if f.name in other:
        return other[f.name]
    bounds = f.metadata["bounds"]
    if bounds["at least"] is not None and bounds["at least"] == bounds["at most"]:
        return None  # a one-shot method has one round
    if f.metadata["choices"]:
        return next(c for c in f.metadata["choices"] if c != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        # Small clients do not fill a batch of 33.
        return value // 10 if f.metadata["task"] == "graph" else value + 1
    return value / 2 if value else 0.5


def test_every_setting_changes_something(name, task, federation):
    default = plain(name, federation)
    idle = []
    for f in fields(method_class(name)):
        if f.metadata["task"] not in (None, federation.task):
            continue
        other = another_value(name, f, getattr(make_method(name, quick(name)), f.name))
        if other is None:
            continue
        # Some settings matter only with others: NEEDS of the method's own tests says which.
        needed = getattr(own_tests(name), "NEEDS", {}).get(f.name, {})
        before = go(name, federation, **needed) if needed else default
        try:
            changed = go(name, federation, **needed, **{f.name: other})
        except Refusal:
            continue  # a bound at which clients refuse
        same_hash = changed.summary["history_hash"] == before.summary["history_hash"]
        if same_hash and same_bits(changed, before):
            idle.append(f.name)
    assert not idle


def test_settings_survive_toml(name):
    method = make_method(name, {})
    text = "\n".join(
        f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}"
        for k, v in method.settings().items()
    )
    assert make_method(name, tomllib.loads(text)) == method


def test_it_can_be_a_baseline_of_a_method_with_many_rounds(name):
    method = {"name": "fedavg", "rounds": 20, "epochs": 7}
    make_recipe(_as_baseline({"data": {"dataset": "synthetic:nodes=60"}, "method": method}, name))


# ---- faults ----


class Killed(BaseException):
    """Stands for anything that ends a process between two rounds."""


def test_a_run_killed_and_resumed_equals_an_unbroken_one(name, last, node_federation, tmp_path):
    rounds = rounds_of(name)
    settings = {"finetune": 1} if tunes(name) else {}
    settings |= {"participation": 0.7} if tunes and supports_partial(name) else {}
    settings |= {"checkpoint_every": 1}
    unbroken = go(name, node_federation, out=tmp_path / "unbroken", **settings)

    def die(entry):
        if entry["round"] == last + 1 or (last == rounds and entry.get("stage") == "finetune"):
            raise Killed

    folder = tmp_path / "broken"
    if last < rounds or tunes(name):
        with pytest.raises(Killed):
            go(name, node_federation, out=folder, callbacks=die, **settings)
    else:
        go(name, node_federation, out=folder, **settings)
    resumed = go(name, node_federation, out=folder, resume=True, **settings)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert same_bits(resumed, unbroken)
    assert resumed.traffic == unbroken.traffic
    timeless = [[{**e, "seconds": 0} for e in r.history] for r in (resumed, unbroken)]
    assert timeless[0] == timeless[1]
    ledgers = [(tmp_path / run / "ledger.csv").read_text() for run in ("broken", "unbroken")]
    assert ledgers[0] == ledgers[1]


def first_float(reply):
    """The name of the first float tensor of a reply that has an axis."""
    flat = flatten(reply).items()
    return next((key for key, t in flat if t.is_floating_point() and t.dim() > 0), None)


def test_a_bad_reply_is_refused_by_name(name, fault, node_federation, monkeypatch):
    original, spoilt = Loop.call, []

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        client = next(iter(replies))
        key = first_float(replies[client])
        if phase in MEASURING or key is None or spoilt:
            return replies
        flat = flatten(replies[client])
        spoilt.append("intruder" if fault == "extra" else key)
        match fault:
            case "nan" | "inf":
                flat[key].view(-1)[0] = float(fault)
            case "shape":
                flat[key] = flat[key][..., :1]  # would broadcast
            case "dtype":
                flat[key] = flat[key].double()
            case "missing":
                del flat[key]
            case "extra":
                flat["intruder"] = torch.zeros(1)
        return {**replies, client: unflatten(flat)}

    phases = plain(name, node_federation).traffic["phases"]
    monkeypatch.setattr(Loop, "call", call)
    if not sum(t["scalars_up"] for phase, t in phases.items() if phase not in MEASURING):
        go(name, node_federation)
        assert not spoilt  # nothing travels up: nothing to spoil
        return
    with pytest.raises(MessageError) as refusal:
        go(name, node_federation)
    # The server does not know the lengths in a peer message; then its reader names the tensor.
    names = (spoilt[0], spoilt[0].rpartition("/")[2])
    assert any(repr(named) in str(refusal.value) for named in names)


def test_a_client_that_does_not_answer_is_left_out(name, node_federation, monkeypatch):
    original, absent = Loop.call, node_federation.names[1]

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase in ("setup", *MEASURING):
            return replies
        return {c: r for c, r in replies.items() if c != absent}

    monkeypatch.setattr(Loop, "call", call)
    assert go(name, node_federation).summary["status"] == "completed"


@pytest.mark.parametrize("when", ["before", "in"])
def test_a_failing_client_is_tolerated_unless_all_are_required(
    name, when, node_federation, monkeypatch
):
    number = 0 if when == "before" else min(2, rounds_of(name))
    cls = method_class(name)
    absent = None if cls.centralized else node_federation.names[1]
    schedule = Schedule(monkeypatch, {(number, None, absent): RuntimeError("out of order")})
    failed = ""
    try:
        result = go(name, node_federation, quorum=0.5)
    except RoundFailed as error:
        failed = str(error)
    if failed:
        assert cls.centralized or any(repr(phase) in failed for phase in cls.requires_all)
        return
    assert result.summary["status"] == "completed"
    assert all(torch.isfinite(t).all() for t in weights_of(result).values())
    asked = any((round_, client) == (number, absent) for round_, _, client in schedule.asked)
    assert bool(result.summary["absences"]) == asked
    assert not cls.centralized


# ---- federations of all kinds ----


@pytest.mark.parametrize("inductive", [False, True])
def test_a_client_without_training_items_takes_part(name, task, inductive, federation):
    if inductive and method_class(name).transductive:
        return  # refused: see test_inductive
    first, *rest = federation.graphs
    bare = replace(first, test=first.test | first.train, train=torch.zeros_like(first.train))
    changed = replace(federation, graphs=(bare, *rest), whole=None, inductive=inductive)
    result = go(name, changed)
    assert all(torch.isfinite(t).all() for t in weights_of(result).values())
    idle = result.summary["without_training_items"]
    assert method_class(name).centralized or idle == [federation.names[0]]


class Kept:
    """The clients of the last run, the server, and what the clients predict with before round 1."""

    def __init__(self, monkeypatch):
        self.clients, self.before, self.server = {}, {}, None
        made, set_up, rounds = Loop.__init__, Server.__init__, Server.rounds

        def init(engine, *args):
            made(engine, *args)
            self.clients = engine.clients

        def init_server(server, *args):
            set_up(server, *args)
            self.server = server

        def entered(server, count):
            for name, client in self.clients.items():
                known = client.state or "predictor" in client.memory
                found = server.method.predictor(client) if known else {}
                self.before[name] = {k: t.clone() for k, t in flatten(found).items()}
            yield from rounds(server, count)

        monkeypatch.setattr(Loop, "__init__", init)
        monkeypatch.setattr(Server, "__init__", init_server)
        monkeypatch.setattr(Server, "rounds", entered)


def test_every_client_is_trained_if_a_round_may_leave_out_some(name, node_federation, monkeypatch):
    rounds, supported = 8 if rounds_of(name) > 1 else 1, supports_partial(name)
    if not supported:
        with pytest.raises(
            ConfigError, match=rf"run\.participation is 0\.5: method {re.escape(repr(name))}"
        ):
            go(name, node_federation, participation=0.5, rounds=rounds)
        # Nothing but this check keeps the run from scoring clients that were never trained.
        monkeypatch.setattr(method_class(name), "partial_participation", True)
    kept = Kept(monkeypatch)
    result = go(name, node_federation, participation=0.5, rounds=rounds, seed=1)
    trained = {
        client
        for client, before in kept.before.items()
        if not same_tensors(before, flatten(result.final_models.get(client, {})))
    }
    assert (trained == set(kept.clients)) is supported
    assert len(result.history[-1]["clients"]) == len(kept.clients)


def same_tensors(one, other):
    """Whether two flat messages have the same names and numbers."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_every_order_outside_the_rounds_may_come_twice(name, task, federation, monkeypatch):
    """A client that answers too late is handed a phase again, with the same message."""
    settings = {"finetune": 2} if tunes(name) else {}
    expected = plain(name, federation, **settings)
    kept, perform = Kept(monkeypatch), Loop.perform

    def twice(engine, client, phase, message):
        reply = perform(engine, client, phase, message)
        if phase in MEASURING or (kept.server.in_round and rounds_of(name) > 1):
            return reply
        state = flatten(engine.clients[client].snapshot())
        again = perform(engine, client, phase, message)
        assert same_tensors(flatten(reply), flatten(again)), f"{phase}: another reply"
        after = flatten(engine.clients[client].snapshot())
        assert same_tensors(state, after), f"{phase}: another state"
        return again

    monkeypatch.setattr(Loop, "perform", twice)
    result = go(name, federation, **settings)
    assert result.summary["history_hash"] == expected.summary["history_hash"]
    assert same_bits(result, expected)


def test_part_of_the_clients_can_take_part(name, node_federation):
    if not supports_partial(name):
        return  # refused: see test_every_client_is_trained_if_a_round_may_leave_out_some
    result = go(name, node_federation, participation=0.5)
    expected = 1 if method_class(name).centralized else 2
    # All clients take part in what follows the rounds.
    rounds = [entry for entry in result.history if entry.get("stage", "train") == "train"]
    assert all(len(entry["participants"]) == expected for entry in rounds)
    assert result.summary["status"] == "completed"


def test_inductive(name, node_federation):
    inductive = replace(node_federation, inductive=True)
    if method_class(name).transductive:
        with pytest.raises(ConfigError, match=r"data\.inductive: method .* must see all nodes"):
            go(name, inductive)
        return
    result = go(name, inductive)
    assert result.summary["status"] == "completed"
    assert not same_bits(result, plain(name, node_federation))


@pytest.mark.parametrize("models", ["gcn-2x8,gat-2x8,sage-2x8"])
def test_different_architectures_run_or_are_refused(name, models, node_federation):
    if method_class(name).one_model:
        with pytest.raises(ValueError, match="one model for all clients"):
            go(name, node_federation, model=models)
    else:
        models = getattr(own_tests(name), "CONTRACT_MODELS", models)
        assert go(name, node_federation, model=models).summary["status"] == "completed"


def test_one_client_is_enough(name, node_federation):
    alone = Federation((replace(node_federation.graphs[0], cross_edges=None),))
    assert go(name, alone).summary["status"] == "completed"


# ---- models after the run ----


def new_graph(federation):
    """A small graph with the features of a federation, without labels."""
    if federation.task == "graph":
        graph = synthetic_graphs(graphs=5, classes=2, seed=9)
    else:
        graph = synthetic(nodes=23, classes=3, features=federation.num_features, seed=9)
    return replace(graph, y=torch.full_like(graph.y, -1))


def require_scored(result, federation):
    """The kept models give the accuracy that the run reports, for each client."""
    graphs = result.own_graphs()
    assert len(result.predict()) == sum(graph.num_items for graph in graphs.values())
    for row in result.per_client:
        graph, found = graphs[row["id"]], result.predict(client=row["id"])
        right = torch.from_numpy(found.numbers)[graph.test] == graph.y[graph.test]
        assert right.float().mean().item() == pytest.approx(row["accuracy"], abs=1e-6)


def test_the_best_models_predict_what_was_scored(name, task, federation, tmp_path):
    cls = method_class(name)
    for k, evaluation in enumerate(cls.evaluations):
        chosen = {"evaluation": evaluation} if k else {}
        result = plain(name, federation, **chosen)
        require_scored(result, federation)
    client, new = result.per_client[-1]["id"], new_graph(federation)
    again = load_model(result.save(tmp_path / "model.safetensors", client=client))
    if cls.predicts_unseen:
        logits = result.model(client)(new)
        assert logits.shape == (new.num_items, federation.num_classes)
        assert torch.equal(logits, again(new))
        assert len(result.embeddings(new, client=client)) == new.num_items
    else:
        assert cls.keeps_logits
        assert torch.equal(result.model(client).own_logits, again.own_logits)
        with pytest.raises(
            ConfigError, match=rf"{re.escape(name)} cannot predict for unseen .*: it needs"
        ):
            result.predict(new, client=client)


def test_final_models_are_those_of_the_last_round(name, node_federation):
    result = plain(name, node_federation)
    last = result.history[-1]
    assert {stored.card.round for stored in result.final.values()} == {last["round"]}
    if not method_class(name).keeps_logits:
        for row in last["clients"]:
            graph = result.own_graphs()[row["id"]]
            right = result.model(row["id"], "final")(graph).argmax(1) == graph.y
            assert right[graph.test].float().mean().item() == pytest.approx(row["accuracy"])


# ---- documentation ----


def test_its_docstring_says_what_it_is(name):
    text = importlib.import_module(f"fedloom.methods.{method_names()[name]}").__doc__
    assert "What travels" in text
    assert text.partition("\n")[0].endswith(".")
