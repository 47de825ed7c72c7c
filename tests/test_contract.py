"""The contract: what every method file keeps to, in every engine. A new file in `methods/` is picked up by itself."""

import importlib
import tomllib
from dataclasses import fields, replace

import pytest
import torch
from tests.faults.schedule import Schedule

from fedloom.commands import _as_baseline
from fedloom.core.ledger import MEASURING
from fedloom.core.message import flatten, unflatten
from fedloom.core.registry import make_method, method_class, method_names
from fedloom.data.federation import Federation
from fedloom.engines import engine_names
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError, Refusal, RoundFailed
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run

METHODS = sorted(method_names())
# What cannot run with secure = true, since it needs more than sums
SINGLE_REPLIES = {
    "scaffold", "dense", "coboost", "fedgen", "gcfl+", "fpl", "fggp", "fedtgp", "fedpg", "fedkd", "fed-pub", "fedgta", "fedgh", "fedtad",
}  # fmt: skip
MODEL = "gcn-2x8"


def own_tests(name):
    return importlib.import_module(f"tests.methods.test_{method_names()[name]}")


def quick(name):
    """Settings that keep a run short and let every setting matter: three rounds, and what the method's own tests say in QUICK."""
    return {"rounds": 3, **getattr(own_tests(name), "QUICK", {})}


def rounds_of(name):
    return quick(name)["rounds"]


def go(name, federation, **settings):
    return run(
        name,
        federation,
        **{"model": getattr(own_tests(name), "CONTRACT_MODEL", MODEL), **quick(name), **settings},
    )


def weights_of(result):
    return {
        f"{owner}/{name}": tensor
        for owner, model in result.models.items()
        for name, tensor in flatten(model).items()
    }


def same_bits(one, other):
    one, other = weights_of(one), weights_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


pytestmark = pytest.mark.parametrize("name", METHODS)


@pytest.fixture
def node_federation(name, node_federation, cross_federation, graph_federation):
    """A node task, whose clients know the edges between them if the method works on those; a graph task if it does no other."""
    cls = method_class(name)
    return (
        graph_federation
        if "node" not in cls.tasks
        else cross_federation
        if cls.uses_cross_edges
        else node_federation
    )


@pytest.fixture(params=["node", "graph"])
def federation(request, name, node_federation, graph_federation):
    """Both kinds of task, of which a method does those that it says."""
    if request.param not in method_class(name).tasks:
        pytest.skip(f"{name} does {' and '.join(method_class(name).tasks)} tasks only")
    return node_federation if request.param == "node" else graph_federation


def test_same_seed_same_bits_and_another_seed_others(name, federation):
    first, again, other = (go(name, federation, seed=seed) for seed in (5, 5, 6))
    assert first.summary["history_hash"] == again.summary["history_hash"]
    assert same_bits(first, again)
    assert first.summary["history_hash"] != other.summary["history_hash"]
    assert all(torch.isfinite(t).all() for t in weights_of(first).values())
    assert 0 <= first.accuracy <= 1
    assert first.summary["status"] == "completed"
    assert first.summary["rounds"] == rounds_of(name)


# What takes seconds to start has tests of its own: tests/test_ray.py, tests/deploy/test_flower.py.
@pytest.mark.parametrize(
    "engine", [e for e in engine_names() if e not in ("loop", "ray", "flower")]
)
def test_engines_agree_with_the_loop(name, engine, federation):
    loop, other = go(name, federation, engine="loop"), go(name, federation, engine=engine)
    assert loop.traffic == other.traffic
    if engine == "stacked":  # it adds in another order
        one, two = weights_of(loop), weights_of(other)
        assert one.keys() == two.keys()
        # Adam divides a gradient by its own size: where large terms have cancelled, it makes steps of what rounding has left.
        off = (
            torch.cat([(one[key] - two[key]).abs().flatten() for key in one])
            if one
            else torch.zeros(1)
        )
        assert off.max() < 1e-4
        assert (off > 1e-5).float().mean() < 0.01
        return
    assert loop.summary["history_hash"] == other.summary["history_hash"]
    assert same_bits(loop, other)


def test_in_step_the_states_are_the_loops_where_steps_follow_the_gradient(name, node_federation):
    """To 1e-5, everywhere: what Adam makes of rounding, which is why the test above allows for more, is not in the way of SGD."""
    if "optimizer" not in {f.name for f in fields(method_class(name))}:
        pytest.skip(f"{name} has no choice of optimisers")
    one, two = (
        weights_of(go(name, node_federation, engine=engine, optimizer="sgd"))
        for engine in ("loop", "stacked")
    )
    assert one.keys() == two.keys()
    assert max(((one[key] - two[key]).abs().max().item() for key in one), default=0.0) < 1e-5


def test_the_global_random_state_is_neither_read_nor_moved(name, node_federation):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = go(name, node_federation)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert go(name, node_federation).summary["history_hash"] == first.summary["history_hash"]


def test_renumbering_clients_changes_nothing_but_the_numbers(name, federation):
    order = list(reversed(range(federation.num_clients)))

    def as_seen(graph):  # cross edges name their other end's owner by its number
        own, remote, owner, direction = graph.cross_edges
        return replace(
            graph, cross_edges=torch.stack([own, remote, len(order) - 1 - owner, direction])
        )

    graphs = tuple(as_seen(federation.graphs[k]) for k in order)
    renumbered = replace(federation, graphs=graphs, names=tuple(federation.names[k] for k in order))
    one, other = weights_of(go(name, federation)), weights_of(go(name, renumbered))
    assert one.keys() == other.keys()
    # Sums run in another order: rounding differs, nothing else.
    assert all(torch.allclose(one[key], other[key], atol=2e-5) for key in one)


def test_training_never_sees_a_held_out_label(name, federation):
    chosen_by = method_class(
        name
    ).validates  # then validation labels choose between models, and test labels still do nothing

    def scrambled(graph):
        seen = graph.train | graph.val if chosen_by else graph.train
        return replace(graph, y=torch.where(seen, graph.y, (graph.y + 1) % graph.num_classes))

    whole = None if federation.whole is None else scrambled(federation.whole)
    other = replace(federation, graphs=tuple(map(scrambled, federation.graphs)), whole=whole)
    assert same_bits(go(name, federation), go(name, other))


def test_no_reply_is_as_large_as_the_data_unless_declared(name, node_federation, monkeypatch):
    sizes = {graph.num_nodes for graph in node_federation.graphs} | {
        sum(g.num_nodes for g in node_federation.graphs)
    }
    seen = []
    original = Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, sent: seen.append((phase, r := original(self, phase, sent))) or r,
    )
    go(name, node_federation)
    for phase, replies in seen:
        for reply in replies.values():
            for key, tensor in flatten(reply).items():
                assert not sizes & set(tensor.shape) or method_class(name).discloses_to_server, (
                    f"{phase} sends {key} {list(tensor.shape)}"
                )


def test_clients_tell_each_other_nothing_of_features_and_labels_unless_declared(
    name, node_federation, monkeypatch
):
    cls = method_class(name)
    sent, original = [], Loop.call

    def call(self, phase, messages):
        replies = original(self, phase, messages)
        if writes := hasattr(getattr(cls, phase, None), "read_by"):
            sent.append(
                {
                    f"{phase} {c}/{key}": t
                    for c, r in replies.items()
                    for key, t in flatten(r).items()
                }
            )
        for client, reply in ({} if writes and cls.discloses_to_peers else replies).items():
            x = self.clients[client].full_graph.x
            for key, tensor in flatten(reply).items():
                rows = (
                    tensor.reshape(-1, x.shape[1])
                    if tensor.dim() and tensor.shape[-1] == x.shape[1]
                    else x[:0]
                )
                assert not (torch.cdist(rows.float(), x) < 1e-6).any(), (
                    f"{phase}: {key} holds a node's features"
                )
        return replies

    monkeypatch.setattr(Loop, "call", call)
    go(name, node_federation)
    if cls.discloses_to_peers:
        return  # letters may hold, and depend on, features and labels then; no reply to the server holds a node's features in any case
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


def another_value(name, f, value):
    other = getattr(own_tests(name), "OTHER", {})
    if f.name in other:
        return other[f.name]
    bounds = f.metadata["bounds"]
    if bounds["at least"] is not None and bounds["at least"] == bounds["at most"]:
        return None  # a one-shot method has one round, and says so
    if f.metadata["choices"]:
        return next(c for c in f.metadata["choices"] if c != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return (
            value // 10 if f.metadata["task"] == "graph" else value + 1
        )  # small clients fill no batch of 33
    return value / 2 if value else 0.5


def test_every_setting_changes_something(name, federation):
    plainly = go(name, federation)
    idle = []
    for f in fields(method_class(name)):
        if f.metadata["task"] not in (None, federation.task):
            continue
        other = another_value(name, f, getattr(make_method(name, quick(name)), f.name))
        if other is None:
            continue
        # Some settings matter only beside others: NEEDS of the method's own tests says which, for both runs.
        beside = getattr(own_tests(name), "NEEDS", {}).get(f.name, {})
        plain = go(name, federation, **beside) if beside else plainly
        try:
            changed = go(name, federation, **beside, **{f.name: other})
        except Refusal:
            continue  # a bound at which clients refuse
        if changed.summary["history_hash"] == plain.summary["history_hash"] and same_bits(
            changed, plain
        ):
            idle.append(f.name)
    assert not idle


def test_settings_survive_toml(name):
    method = make_method(name, {})
    text = "\n".join(
        f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}"
        for k, v in method.settings().items()
    )
    assert make_method(name, tomllib.loads(text)) == method


class Killed(BaseException):
    """Stands for whatever ends a process between two rounds."""


@pytest.mark.parametrize("last", range(1, 4))
def test_killed_after_any_round_and_resumed_equals_unbroken(name, last, node_federation, tmp_path):
    rounds = rounds_of(name)
    if last > rounds:
        return  # a one-shot method has one round
    settings = (
        {"participation": 0.7, "finetune": 1}
        if "finetune" in {f.name for f in fields(method_class(name))}
        else {}
    )
    unbroken = go(name, node_federation, checkpoint_every=1, out=tmp_path / "unbroken", **settings)

    def die(entry, planned):
        if entry["round"] == last + 1 or (last == rounds and entry.get("stage") == "finetune"):
            raise Killed

    dies = last < rounds or bool(settings)
    folder = tmp_path / "broken"
    if dies:
        with pytest.raises(Killed):
            go(name, node_federation, checkpoint_every=1, out=folder, on_round=die, **settings)
    else:
        go(name, node_federation, checkpoint_every=1, out=folder, **settings)
    resumed = go(name, node_federation, checkpoint_every=1, out=folder, resume=True, **settings)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert same_bits(resumed, unbroken)
    assert resumed.traffic == unbroken.traffic
    without_time = [{k: v for k, v in e.items() if k != "seconds"} for e in resumed.history]
    assert without_time == [
        {k: v for k, v in e.items() if k != "seconds"} for e in unbroken.history
    ]
    assert (folder / "ledger.csv").read_text() == (tmp_path / "unbroken" / "ledger.csv").read_text()


def first_float(reply):
    return next(
        (key for key, t in flatten(reply).items() if t.is_floating_point() and t.dim() > 0), None
    )


@pytest.mark.parametrize("fault", ["nan", "inf", "shape", "dtype", "missing", "extra"])
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

    phases = go(name, node_federation).traffic["phases"]
    monkeypatch.setattr(Loop, "call", call)
    if not sum(t["scalars_up"] for phase, t in phases.items() if phase not in MEASURING):
        go(name, node_federation)
        assert not spoilt  # nothing travels up: nothing to spoil
        return
    with pytest.raises(MessageError) as refusal:
        go(name, node_federation)
    # A letter may have any length as far as the server can tell; then its reader says what is wrong with its tensor.
    assert any(
        repr(named) in str(refusal.value) for named in (spoilt[0], spoilt[0].rpartition("/")[2])
    )


def test_a_client_that_does_not_answer_is_left_out(name, node_federation, monkeypatch):
    original, absent = Loop.call, node_federation.names[1]

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        return (
            replies
            if phase in ("setup", *MEASURING)
            else {c: r for c, r in replies.items() if c != absent}
        )

    monkeypatch.setattr(Loop, "call", call)
    assert go(name, node_federation).summary["status"] == "completed"


@pytest.mark.parametrize("when", ["before", "in"])
def test_who_fails_in_every_phase_is_survived_or_the_method_says_that_it_needs_everybody(
    name, when, node_federation, monkeypatch
):
    number = 0 if when == "before" else min(2, rounds_of(name))
    cls = method_class(name)
    absent = (
        None if cls.centralized else node_federation.names[1]
    )  # in one place there is nobody else
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


@pytest.mark.parametrize("inductive", [False, True])
def test_a_client_without_training_items_takes_part(name, inductive, federation):
    if inductive and method_class(name).transductive:
        pytest.skip(
            f"{name} has to see all nodes before training, and is refused in an inductive federation"
        )
    first, *rest = federation.graphs
    bare = replace(first, test=first.test | first.train, train=torch.zeros_like(first.train))
    result = go(name, replace(federation, graphs=(bare, *rest), whole=None, inductive=inductive))
    assert all(torch.isfinite(t).all() for t in weights_of(result).values())
    assert method_class(name).centralized or result.summary["without_training_items"] == [
        federation.names[0]
    ]


def test_part_of_the_clients_can_take_part(name, node_federation):
    result = go(name, node_federation, participation=0.5)
    expected = 1 if method_class(name).centralized else 2
    in_rounds = [
        entry for entry in result.history if entry.get("stage", "train") == "train"
    ]  # everybody is in what comes after
    assert all(len(entry["participants"]) == expected for entry in in_rounds)
    assert result.summary["status"] == "completed"


def test_inductive(name, node_federation):
    if method_class(name).transductive:
        with pytest.raises(
            ConfigError, match=r"data\.inductive: method .* has to see all nodes before training"
        ):
            go(name, replace(node_federation, inductive=True))
        return
    result = go(name, replace(node_federation, inductive=True))
    assert result.summary["status"] == "completed"
    assert not same_bits(result, go(name, node_federation))


@pytest.mark.parametrize("models", ["gcn-2x8,gat-2x8,sage-2x8"])
def test_different_architectures_run_or_are_refused(name, models, node_federation):
    if method_class(name).one_model:
        with pytest.raises(ValueError, match="one model for all clients"):
            go(name, node_federation, model=models)
    else:
        models = getattr(own_tests(name), "CONTRACT_MODELS", models)
        assert go(name, node_federation, model=models).summary["status"] == "completed"


def test_secure_sums_agree_with_plain_ones_or_the_method_is_refused(name, node_federation):
    if name in SINGLE_REPLIES:
        with pytest.raises(
            ConfigError, match=r"run\.secure: this method asks for every client's own answer"
        ):
            go(name, node_federation, secure=True)
        return
    first, again = (
        go(name, node_federation, secure=True, engine=engine) for engine in ("loop", "wire")
    )
    assert (
        first.summary["history_hash"] == again.summary["history_hash"]
    )  # masks are different, sums are not
    assert same_bits(first, again)
    plain = go(name, node_federation)
    one, other = weights_of(first), weights_of(plain)
    assert all(torch.allclose(one[key], other[key], atol=2e-5) for key in one)
    assert first.accuracy == pytest.approx(plain.accuracy, abs=1e-6)


def test_one_client_is_enough(name, node_federation):
    alone = Federation((replace(node_federation.graphs[0], cross_edges=None),))
    assert go(name, alone).summary["status"] == "completed"


def test_it_can_stand_beside_a_method_of_many_rounds(name):
    base = {
        "data": {"dataset": "synthetic:nodes=60"},
        "method": {"name": "fedavg", "rounds": 20, "epochs": 7},
    }
    make_recipe(_as_baseline(base, name))


def test_its_file_says_what_it_is(name):
    text = __import__(method_class(name).__module__, fromlist=["x"]).__doc__
    assert "What travels" in text
    assert text.partition("\n")[0].endswith(".")
