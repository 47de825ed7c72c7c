"""Private runs: what the noisy mean is, engines, secure sums, budgets, resumes, an audit."""

import json
import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

import fedloom
from fedloom.core.client import Client
from fedloom.core.message import flatten
from fedloom.data.synthetic import synthetic_clients
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError
from fedloom.experiments.run import agree_on_facts, run
from fedloom.experiments.settings import RunSettings
from fedloom.methods.fedavg import FedAvg
from fedloom.privacy import dp_noise
from fedloom.privacy.choice import aggregation_for, responder_for
from fedloom.privacy.dp_accounting import LOG, epsilon_of

pytest.importorskip("dp_accounting", reason="the extra 'dp' is not installed")


@pytest.fixture(scope="module")
def parties():
    return synthetic_clients(8, 30, 3, 8)


def private(method, parties, **settings):
    chosen = {"rounds": 3, "dp_epsilon": 8.0, "model": "gcn-2x8", **settings}
    return run(method, parties, **chosen)


# ---- the mechanism ----
def update_of(monkeypatch, parties, scale=1.0, **settings):
    """Returns the change of the global model in one round, with the noise made `scale` as large."""
    real = dp_noise.discrete_gaussian
    monkeypatch.setattr(
        dp_noise,
        "discrete_gaussian",
        lambda count, sigma, source: real(count, scale * sigma, source),
    )
    before = {}

    class Watched(FedAvg):
        def run(self, server):
            before.update(flatten(server.model()))
            super().run(server)

    chosen = {"rounds": 1, "dp_noise": 1.0, "evaluation": "global", "model": "gcn-2x8", **settings}
    after = flatten(run(Watched, parties, **chosen).models["server"])
    return torch.cat([(after[name] - before[name]).double().flatten() for name in sorted(before)])


def test_each_update_is_clipped_and_weighs_the_same(monkeypatch, parties):
    far = update_of(monkeypatch, parties, 0.0, dp_clip=1e4)
    assert far.norm() > 0.1
    near = update_of(monkeypatch, parties, 0.0, dp_clip=0.05)
    assert near.norm() <= 0.05 * (1 + 1e-6)
    assert torch.cosine_similarity(far, near, 0) > 0.9


def test_no_update_is_shortened_by_what_others_send(parties):
    """Otherwise one client would change what the others add to the sum."""
    lies = {"clients": 1, "attack": "scale"}
    noise = {"dp_seeded": True, "dp_clip": 1e4, "rounds": 1, "adversary": lies}
    off, on = (private("fedavg", parties, clip_norms=c, **noise) for c in (0.0, 2.0))
    assert off.summary["history_hash"] == on.summary["history_hash"]
    # The control: without privacy the long update is shortened.
    plain = {"rounds": 2, "model": "gcn-2x8", "adversary": lies}
    off, on = (run("fedavg", parties, clip_norms=c, **plain) for c in (0.0, 2.0))
    assert off.summary["history_hash"] != on.summary["history_hash"]


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_has_the_declared_size(monkeypatch, parties, secure):
    settings = {"dp_clip": 0.5, "dp_noise": 3.0, "secure": secure}
    silent = update_of(monkeypatch, parties, 0.0, **settings)
    monkeypatch.undo()
    noise = torch.cat(
        [update_of(monkeypatch, parties, seed=0, **settings) - silent for _ in range(10)]
    )
    # Under secure sums the shares of 6 of 8 clients make up the noise (threshold 2/3).
    size = 3.0 * 0.5 / 8 * (math.sqrt(8 / 6) if secure else 1)
    assert noise.std().item() == pytest.approx(size, rel=0.1)
    assert stats.kstest(noise.numpy() / size, "norm").pvalue > 1e-4


def test_a_client_that_stays_away_takes_no_noise_away(parties):
    """The shares of the fewest clients that a sum can have suffice."""
    from fedloom.core.facts import SecureTerms
    from fedloom.privacy.dp_secure import fewest_shares

    terms = SecureTerms(cohort=0.5)
    for parties_asked in range(3, 30):
        assert fewest_shares(terms, parties_asked, 30) <= terms.quorum(parties_asked)
    assert fewest_shares(SecureTerms(neighbours=4, cohort=0.3), 30, 30) == 9


def test_secure_and_plain_runs_agree_without_noise(monkeypatch, parties):
    plain = update_of(monkeypatch, parties, 0.0, dp_clip=0.1)
    secure = update_of(monkeypatch, parties, 0.0, dp_clip=0.1, secure=True)
    assert (plain - secure).abs().max() < 1e-6


def test_a_round_without_participants_releases_noise(monkeypatch, parties):
    monkeypatch.setattr(
        "fedloom.core.server.uniform_numbers", lambda n, rng: torch.ones(n, dtype=torch.float64)
    )
    found = update_of(monkeypatch, parties, 1.0, dp_sampling="poisson", participation=0.5)
    assert found.std().item() == pytest.approx(1 / 4, rel=0.2)


# ---- runs ----
@pytest.mark.parametrize("method", ["fedavg", "fedsgd", "fedprox", "fedopt"])
def test_epsilon_is_that_of_all_rounds(method, parties):
    result = private(method, parties)
    privacy = result.summary["privacy"]
    spent = [entry["epsilon"] for entry in result.history]
    noise = privacy["noise"]
    assert spent == [epsilon_of([((noise, 1.0), k)], 1e-5) for k in (1, 2, 3)]
    assert 7.9 < privacy["epsilon"] == spent[-1] <= 8
    assert privacy["private"]
    assert privacy["releases"] == 3


def test_noise_is_different_in_every_run_unless_seeded(parties):
    hashes = {private("fedavg", parties).summary["history_hash"] for _ in range(3)}
    assert len(hashes) == 3
    seeded = [private("fedavg", parties, dp_seeded=True) for _ in range(2)]
    assert len({result.summary["history_hash"] for result in seeded}) == 1
    assert seeded[0].summary["privacy"]["private"] is False
    assert any("not private" in line for line in seeded[0].summary["warnings"])


@pytest.mark.parametrize("engine", ["loop", "wire", "stacked", "processes"])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_engines_agree(engine, sampling, parties):
    settings = {"dp_seeded": True, "participation": 0.5, "dp_sampling": sampling, "dp_clip": 0.1}
    one = private("fedavg", parties, engine="loop", dp_noise=0.1, dp_epsilon=0.0, **settings)
    other = private("fedavg", parties, engine=engine, dp_noise=0.1, dp_epsilon=0.0, **settings)
    assert [e["participants"] for e in one.history] == [e["participants"] for e in other.history]
    assert other.accuracy == pytest.approx(one.accuracy, abs=0.02)


def test_poisson_participants_vary_and_cost_less(parties):
    settings = {"participation": 0.25, "dp_noise": 1.0, "dp_epsilon": 0.0, "rounds": 12}
    poisson = private("fedavg", parties, dp_sampling="poisson", **settings)
    assert len({len(entry["participants"]) for entry in poisson.history}) > 1
    fixed = private("fedavg", parties, **settings)
    assert {len(entry["participants"]) for entry in fixed.history} == {2}
    spent = [r.summary["privacy"]["epsilon"] for r in (poisson, fixed)]
    assert spent == [epsilon_of([((1.0, q), 12)], 1e-5) for q in (0.25, 1.0)]


def test_the_last_round_is_reported(parties):
    result = private("fedavg", parties, rounds=6, dp_seeded=True)
    assert result.summary["best_round"] == 6
    assert result.summary["accuracy"] == result.summary["final_accuracy"]


# ---- the budget through stops and resumes ----
class Stop(fedloom.Callback):
    """Ends a run as Ctrl-C does."""

    def __init__(self, round):
        self.round = round

    def on_round(self, entry, rounds):
        if entry["round"] == self.round:
            raise KeyboardInterrupt


def test_a_resumed_run_pays_for_repeated_rounds_and_ends_early(parties, tmp_path):
    folder = tmp_path / "run"
    settings = {"rounds": 6, "checkpoint_every": 2, "out": folder}
    with pytest.raises(KeyboardInterrupt):
        private("fedavg", parties, callbacks=Stop(3), **settings)
    lines = (folder / LOG).read_text().splitlines()
    assert len(lines) == 3
    before = json.loads(lines[-1])["epsilon"]
    result = private("fedavg", parties, resume=True, **settings)
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    # Round 3 was released twice, so there is no budget for round 6.
    assert [row["round"] for row in rows] == [1, 2, 3, 3, 4, 5]
    assert all(row["epsilon"] > before for row in rows[3:])
    assert result.summary["privacy"]["epsilon"] <= 8
    assert result.summary["rounds"] == 5
    assert any("the run ended after round 5 of 6" in line for line in result.summary["warnings"])
    spent = [entry["epsilon"] for entry in result.history]
    assert spent == sorted(spent)


@pytest.mark.parametrize("point", ["exchange-answered", "round-unclosed", "history-written"])
def test_a_killed_run_has_recorded_what_it_spent(point, parties, tmp_path):
    """A child process is killed at a point of round 2 and resumed here."""
    folder = tmp_path / "run"
    settings = {"rounds": 4, "checkpoint_every": 1, "out": folder, "engine": "loop"}
    child = os.fork()
    if child == 0:
        from fedloom import _system

        count = 0

        def crash(name):
            nonlocal count
            count += name == point
            rows = (folder / LOG).read_text().count("\n") if (folder / LOG).exists() else 0
            if name == point and rows >= 2:
                os.kill(os.getpid(), 9)

        _system.crash_point = crash
        import fedloom.experiments.recorder as recorder

        recorder.crash_point = crash
        private("fedavg", parties, **settings)
        os._exit(0)
    os.waitpid(child, 0)
    killed = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    result = private("fedavg", parties, resume=True, **settings)
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    assert rows[: len(killed)] == killed
    assert len(killed) >= 2
    assert result.summary["privacy"]["releases"] == len(rows) <= 4
    assert result.summary["privacy"]["epsilon"] >= killed[-1]["epsilon"]


def test_clients_of_a_secure_run_count_too(parties):
    """A server that asks once more than the budget allows is refused."""
    settings = RunSettings(secure=True, dp_epsilon=8.0)
    method = FedAvg(rounds=2)
    facts = agree_on_facts(method, "fedavg", parties.roster, "gcn-2x8", 0.5, settings)
    assert facts.privacy.releases == 2
    clients = [
        Client(n, g, facts, responder=responder_for(facts, n))
        for n, g in zip(parties.names, parties.graphs, strict=True)
    ]
    from fedloom.core.server import RoundPolicy, Server

    aggregation = aggregation_for(facts)
    server = Server(
        method, facts, Engine(method, clients).call, RoundPolicy("local"), None, aggregation
    )
    server.ask(method.setup)
    model = server.model()
    for _ in range(2):
        model = server.mean(method.train, model=model)["model"]
    aggregation._budget.spend = lambda *_: None  # a server that does not count
    with pytest.raises(fedloom.FedloomError, match="it has taken part in 2 noisy sums"):
        server.mean(method.train, model=model)


# ---- bad input ----
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dp_epsilon": -1.0}, r"run\.dp_epsilon is -1\.0, must be a number at least 0"),
        ({"dp_epsilon": math.nan}, r"run\.dp_epsilon is nan"),
        ({"dp_delta": 0.0}, r"run\.dp_delta is 0\.0, must be a number above 0 and below 1"),
        ({"dp_delta": 1.0}, r"run\.dp_delta is 1\.0, must be a number above 0 and below 1"),
        ({"dp_clip": 0.0}, r"run\.dp_clip is 0\.0, must be a number above 0"),
        ({"dp_noise": 0.01}, r"run\.dp_noise is 0\.01, must be 0 .* or at least 0\.1"),
        ({"dp_noise": 0.2, "dp_epsilon": 1.0}, r"run\.dp_noise is 0\.2: one noisy sum costs more"),
        ({"dp_unit": "house"}, r"run\.dp_unit is 'house', must be client or node or edge or label"),
        ({"dp_unit": "node"}, r"what clients answer to 'train' has no bounded sensitivity"),
        ({"aggregation": "median"}, r"run\.aggregation is 'median': only the mean has a bounded"),
        ({"secure": True, "bucketing": 3}, r"run\.bucketing is 3; valid: 0"),
        ({"secure": True, "secure_clip": 1.0}, r"run\.secure_clip is 1: run\.dp_clip limits"),
        ({"patience": 3}, r"run\.patience is 3: it stops by validation scores"),
        ({"class_weight": "balanced"}, r"run\.class_weight is 'balanced': it counts labels"),
        ({"secure": True, "dp_sampling": "poisson"}, r"its server is not trusted"),
        (
            {"secure": True, "secure_bits": 32, "secure_range": 2.0**20},
            r"run\.secure_range is 1\.04858e\+06 with run\.secure_bits = 32: noise",
        ),
    ],
)
def test_bad_settings_are_one_line(settings, line, parties):
    with pytest.raises(ConfigError, match=line):
        private("fedavg", parties, **settings)


@pytest.mark.parametrize(
    ("method", "phase"), [("fedproto", "train"), ("scaffold", "train"), ("fedgcn", "")]
)
def test_methods_without_a_bound_are_refused(method, phase, parties):
    with pytest.raises(ConfigError, match=f"answer to '{phase}.*has no bounded sensitivity"):
        private(method, parties)


def test_a_run_with_flipped_edges_is_not_resumed(parties, tmp_path):
    settings = {"rounds": 3, "edge_epsilon": 4.0, "checkpoint_every": 1, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        run("fedavg", parties, callbacks=Stop(1), **settings)
    with pytest.raises(ConfigError, match=r"run\.edge_epsilon is 4: a resumed run would flip"):
        run("fedavg", parties, resume=True, **settings)


def test_flipped_edges_are_what_training_sees(parties):
    facts = agree_on_facts(
        FedAvg(), "fedavg", parties.roster, "gcn", 0.5, RunSettings(edge_epsilon=1.0)
    )
    graph = parties.graphs[0]
    one, other = (Client(parties.names[0], graph, facts) for _ in range(2))
    assert torch.equal(one.full_graph.edge_index, graph.edge_index)
    assert not torch.equal(one.graph.edge_index, other.graph.edge_index)
    assert run("fedavg", parties, rounds=1, edge_epsilon=1.0).summary["privacy"] == {
        "edge_epsilon": 1.0,
        "private": True,
    }


# ---- an audit: an attacker's own lower bound of ε ----
def lower_bound(present, absent, delta, confidence=0.95):
    """Returns the largest ε that the scores prove, by Clopper and Pearson's intervals.

    Any test of "is the canary in?" has true positives <= e^ε · false positives + δ.
    """
    best = 0.0
    fail = (1 - confidence) / 2
    half = len(present) // 2
    # The threshold is chosen on one half of the scores and counted on the other.
    for cut in np.quantile(
        np.concatenate([present[:half], absent[:half]]), np.arange(0.5, 1, 0.05)
    ):
        seen, n = int((present[half:] > cut).sum()), len(present) - half
        wrong, m = int((absent[half:] > cut).sum()), len(absent) - half
        low = stats.beta.ppf(fail / 10, seen, n - seen + 1) if seen else 0.0
        high = stats.beta.ppf(1 - fail / 10, wrong + 1, m - wrong) if wrong < m else 1.0
        if low > delta:
            best = max(best, math.log((low - delta) / high))
    return best


@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (0.05, True)])
def test_an_audit_stays_below_epsilon_and_catches_missing_noise(factor, caught, monkeypatch):
    """A client sends the longest update in one known direction, or nothing, 500 times each."""
    from tests.privacy.canaries import Canary

    from fedloom.core.aggregation import Request
    from fedloom.core.facts import Facts
    from fedloom.core.privacy_terms import PrivacyTerms
    from fedloom.core.server import RoundPolicy, Server

    epsilon, delta = 2.0, 1e-5
    noise = fedloom.privacy.dp_accounting.noise_for(epsilon, delta, 1)
    terms = PrivacyTerms(noise, delta, clip=1.0, expected=3)
    names = ("a", "b", "c")
    facts = Facts(2, 2, "node", names, ("gcn",) * 3, privacy=terms)
    real = dp_noise.discrete_gaussian
    monkeypatch.setattr(
        dp_noise, "discrete_gaussian", lambda n, sigma, draw: real(n, factor * sigma, draw)
    )
    method = Canary()
    scores = {}
    for there in (True, False):
        found = []
        for _ in range(500):
            engine = method.answers(names, there)
            server = Server(
                method, facts, engine, RoundPolicy("local"), None, aggregation_for(facts)
            )
            request = Request(method.send, None, None, {"model": {"w": torch.zeros(4)}})
            found.append(float(server.aggregation.mean(server, request)["model"]["w"][0]))
        scores[there] = np.array(found)
    proven = lower_bound(scores[True], scores[False], delta)
    assert (proven > epsilon) == caught
    assert proven > 0.05  # the attack works at all
