"""Secure runs keep the rules of plain runs: declared replies, weights, types, error messages."""

import io
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console
from tests import test_contract as contract
from tests.privacy.test_secure_aggregation import NAMES, begin, make

from fedloom.core.facts import SecureTerms
from fedloom.core.method import Method
from fedloom.core.phase import averaged, phase, summed
from fedloom.errors import ConfigError, FedloomError, MessageError, Refusal
from fedloom.experiments.report import tables as show
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Odd(Method):
    """Phases with something odd about them."""

    @summed
    @phase(x="float32[3]", count="int64[]")
    def dtype(self, client):
        """Declares float and integer, gives them the other way round."""
        return {"x": torch.tensor([1, 2, 3]), "count": torch.tensor(2.0)}

    @summed
    @phase(x="float32[2,3]")
    def shape(self, client):
        """As many numbers, in another shape."""
        return {"x": torch.arange(6.0).view(3, 2)}

    @summed
    @phase(x="float32[]", y="float32[]")
    def names(self, client):
        """As many tensors, under other names."""
        return {"p": torch.tensor(1.0), "q": torch.tensor(2.0)}

    @averaged()
    @phase(x="int64[]")
    def whole(self, client):
        """Whole numbers, whose mean is none."""
        return {"x": torch.tensor(NAMES.index(client.name))}

    @phase(w="float32[]")
    def debt(self, client):
        """A weight below 0."""
        return {"w": torch.tensor(-1.0 if client.name == "a" else 1.0)}

    @averaged(by="debt")
    @phase(x="float32[]")
    def owed(self, client):
        """Averaged by it."""
        return {"x": torch.tensor(float(NAMES.index(client.name)))}

    @phase(w="float32[]")
    def growing(self, client):
        """A weight that is another one each time."""
        client.state["n"] = client.state.get("n", torch.zeros(())) + 1
        return {"w": client.state["n"] ** NAMES.index(client.name)}

    @averaged(by="growing")
    @phase(x="float32[]")
    def grown(self, client):
        """Averaged by it."""
        return {"x": torch.tensor(float(NAMES.index(client.name)))}

    @summed
    @phase(x="float32[n]")
    def any_length(self, client):
        """n long."""
        return {"x": torch.ones(2)}

    @summed
    @phase(x="float32[0]")
    def empty(self, client):
        """Nothing in it."""
        return {"x": torch.ones(0)}

    @summed
    @phase(x="int8[]")
    def small(self, client):
        """Too small a type for the sum."""
        return {"x": torch.tensor(100, dtype=torch.int8)}

    @phase()
    def talks(self, client):
        """Declares nothing, says something."""
        return {"x": client.graph.x}

    @summed
    @phase(x="float32[]")
    def counts(self, client):
        """Leaves a trace."""
        client.state["n"] = client.state.get("n", torch.zeros(())) + 1
        return {"x": client.state["n"]}

    def run(self, server):
        """Not used."""


def both(name):
    """(What the plain run gives or raises, what the secure one does)."""
    found = []
    for terms in (None, SecureTerms()):
        server, _, method = make(terms, method=Odd())
        function = getattr(method, name)
        try:
            found.append(getattr(server, function.phase.aggregate)(function))
        except FedloomError as error:
            found.append(error)
    return found


@pytest.mark.parametrize(("name", "tensor"), [("dtype", "count"), ("shape", "x"), ("names", "x")])
def test_a_reply_that_is_not_as_declared_is_refused_by_name_in_a_secure_run_too(name, tensor):
    plain, secure = both(name)
    assert isinstance(plain, MessageError)
    assert isinstance(secure, MessageError), f"accepted, and the server got {secure}"
    assert repr(tensor) in str(secure) or "is missing" in str(
        secure
    )  # which of several is missing, a set decides


def test_a_mean_of_whole_numbers_is_not_cut_off():
    plain, secure = both("whole")
    assert plain["x"].item() == 3.5
    assert secure["x"].item() == pytest.approx(3.5)


def test_a_negative_weight_is_refused_in_a_secure_run_too():
    plain, secure = both("owed")
    assert isinstance(plain, MessageError)
    assert isinstance(secure, MessageError), f"accepted, and the server got {secure}"


def test_weights_are_asked_once_secure_or_not():
    found = []
    for terms in (None, SecureTerms()):
        server, _, method = make(terms, method=Odd())
        found.append([server.mean(method.grown)["x"].item() for _ in range(3)])
    assert found[1] == pytest.approx(found[0])


def test_an_answer_of_any_length_is_refused_by_its_phase():
    _, secure = both("any_length")
    assert isinstance(secure, FedloomError), repr(secure)
    assert "any_length" in str(secure)


def test_a_sum_that_does_not_fit_its_type_is_an_error_not_a_wrap_around():
    _, secure = both("small")
    assert isinstance(secure, MessageError), f"8 x 100 is {secure}"
    assert "'x'" in str(secure)


def test_an_empty_tensor_can_be_added():
    plain, secure = both("empty")
    assert plain["x"].shape == (0,)
    assert not isinstance(secure, Exception), repr(secure)


def test_nobody_asked_is_not_called_a_difference_in_shape():
    server, _, method = make(SecureTerms(), method=Odd())
    with pytest.raises(FedloomError) as error:
        server.sum(method.counts, clients=[])
    assert "differ in shape" not in str(error.value)


def test_a_phase_that_declares_no_answer_gives_none_in_a_secure_run():
    _, engine, _ = make(SecureTerms(), method=Odd())
    with pytest.raises(MessageError):
        engine.call("talks", {"a": {}})


def test_a_masking_that_is_refused_changes_nothing_at_the_client():
    server, engine, method = make(SecureTerms(), method=Odd())
    asked = []
    original = engine.call
    server._call = lambda name, sent: asked.append((name, sent)) or original(name, sent)
    server.sum(method.counts)
    begin(server, engine, method, number=torch.tensor(2))  # keys, but no shares yet
    (sent,) = [sent for name, sent in asked if name == "counts"]
    with pytest.raises(Refusal):
        engine.call("counts", {"a": sent["a"]})
    assert engine.clients["a"].state["n"] == 1


def test_a_sum_number_between_two_whole_ones_is_no_new_one():
    for number in (1.0, 1.5):  # both would be 1 in the sum's id
        with pytest.raises(Refusal, match="what identifies the sum is not valid"):
            begin(*make(), number=torch.tensor(number))


def test_no_phase_takes_a_parameter_of_the_protocols_name():
    def taken(self, client, secure=None):
        return {"x": torch.zeros(())}

    with pytest.raises(ValueError, match="cannot take a tensor called 'secure'"):
        phase(x="float32[]")(taken)


# ---- errors ----
def test_an_error_of_a_secure_run_names_the_client_and_holds_no_number_of_its(
    tmp_path, node_federation
):
    first, *rest = node_federation.graphs
    x = first.x.clone()
    x[first.train.nonzero()[0], 0] = 31337.0  # 31337² = 982007569
    federation = replace(node_federation, graphs=(replace(first, x=x), *rest), whole=None)
    with pytest.raises(MessageError) as error:
        run(
            "opfgl",
            federation,
            model="gcn-2x8",
            secure=True,
            out=tmp_path / "x",
            rounds=1,
            variant="ft",
            condense_steps=1,
            steps=1,
        )
    written = (tmp_path / "x" / "summary.json").read_text()
    assert "'squares'" in str(error.value)
    assert "secure_range" in str(error.value)
    assert "98200755" not in str(error.value)
    assert "98200755" not in written
    assert f"client {node_federation.names[0]!r}" in str(error.value)


def test_out_of_range_in_a_mean_says_that_the_weight_is_in_it():
    server, _, method = make(SecureTerms(range=60.0))
    with pytest.raises(MessageError, match="weight"):
        server.mean(
            method.blend, model={"w": torch.full((1,), 5.0)}
        )  # no tensor holds more than 12; 17 x 12 does


# ---- 32 bits ----
@pytest.mark.parametrize("settings", [{}, {"secure_range": 16.0}, {"secure_range": 2.0}])
def test_scores_do_not_depend_on_the_width_and_range_of_the_methods_numbers(
    settings, node_federation
):
    plain = run("local", node_federation, model="gcn-2x8", rounds=1)
    secure = run(
        "local", node_federation, model="gcn-2x8", rounds=1, secure=True, secure_bits=32, **settings
    )
    for key in ("accuracy", "accuracy_mean", "f1_macro", "f1_macro_mean", "val_accuracy"):
        assert secure.summary[key] == pytest.approx(plain.summary[key], abs=1e-4), key


# ---- names in server.state ----
def test_a_method_may_call_its_model_weights(node_federation):
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """FedAvg that keeps θ under another name."""

        def run(self, server):
            """Algorithm 1."""
            server.ask(self.setup)
            server.state["weights"] = server.model()
            for _ in server.rounds(self.rounds):
                server.state["weights"] = server.mean(self.train, model=server.state["weights"])[
                    "model"
                ]
                server.evaluate(model=server.state["weights"])

    assert run(Mine(rounds=2), node_federation, model="gcn-2x8").summary["status"] == "completed"


def test_an_unmarked_phase_is_an_error_of_input_not_a_traceback():
    server, _, method = make(None)
    with pytest.raises(
        ConfigError, match="@averaged"
    ):  # the command line turns these, and no others, into one line and exit code 2
        server.mean(method.silent)


# ---- what the contract can see ----
def test_the_contract_notices_that_a_method_no_longer_runs_secure(monkeypatch, node_federation):
    def run_in_the_clear(self, server):
        server.ask(self.setup)
        server.state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            server.state["model"] = server.ask(self.train, model=server.state["model"]).mean()[
                "model"
            ]
            server.evaluate(model=server.state["model"])

    monkeypatch.setattr(FedAvg, "run", run_in_the_clear)
    with pytest.raises((AssertionError, ConfigError, pytest.fail.Exception)):
        contract.test_secure_sums_agree_with_plain_ones_or_are_refused("fedavg", node_federation)


# ---- runs ----
def test_a_secure_run_is_not_resumed_in_the_clear(node_federation, tmp_path):
    run(
        "fedavg",
        node_federation,
        model="gcn-2x8",
        rounds=1,
        secure=True,
        checkpoint_every=1,
        out=tmp_path / "x",
    )
    with pytest.raises(ConfigError, match=r"run\.secure = true"):
        run(
            "fedavg",
            node_federation,
            model="gcn-2x8",
            rounds=2,
            checkpoint_every=1,
            out=tmp_path / "x",
            resume=True,
        )


def test_cohorts_that_differ_in_one_client_are_reported():
    server, engine, method = make(SecureTerms(apart=1))
    assert server.aggregation.summary(server) == {
        "sums": 0,
        "fewest_clients": 0,
        "cohorts_one_apart": 0,
    }
    all_clients = server.sum(method.numbers)["count"]
    server.sum(method.numbers)
    assert server.aggregation.summary(server) == {
        "sums": 2,
        "fewest_clients": 8,
        "cohorts_one_apart": 0,
    }
    engine.lost = {"numbers": {"h"}}
    others = server.sum(method.numbers)["count"]
    assert (all_clients - others).tolist() == [7, -(2**40)]  # what h added: this is why
    assert server.aggregation.summary(server) == {
        "sums": 3,
        "fewest_clients": 7,
        "cohorts_one_apart": 1,
    }


def test_the_summary_reports_and_show_warns(node_federation):
    settings = {"model": "gcn-2x8", "rounds": 4}
    plain = run("fedavg", node_federation, **settings)
    fixed, drawn = (
        run("fedavg", node_federation, secure=True, participation=p, **settings) for p in (1, 0.75)
    )
    assert plain.summary["secure"] is None
    assert fixed.summary["secure"] == {"sums": 8, "fewest_clients": 4, "cohorts_one_apart": 0}
    assert drawn.summary["secure"]["fewest_clients"] == 3
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(
        show.result(
            {**fixed.summary, "secure": {**fixed.summary["secure"], "cohorts_one_apart": 2}}
        )
    )
    text = console.export_text()
    assert "secure: 8 masked sums, each over 4 clients or more" in text
    assert "2 pairs of cohorts differ in one client" in text
