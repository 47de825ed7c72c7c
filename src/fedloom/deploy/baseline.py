"""Local baseline of a deployment: what a party reaches without the federation.

After the rounds, each party trains the same model on its own graph, for as many rounds and epochs,
and sends nothing. So a party can tell whether federating pays. The coordinator learns the average
over the parties by a sum of scores; in a secure run it sees only that sum.

Training is done in steps of a few seconds, so that a party stays able to answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from fedloom.core.absence import FaultPolicy
from fedloom.core.class_weight import BALANCED, balanced_weights
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Absent, Message
from fedloom.core.method import Method
from fedloom.core.phase import phase, summed
from fedloom.core.registry import make_method, method_class
from fedloom.core.server import RoundPolicy, Server
from fedloom.data.graph import Graph
from fedloom.deploy.scores import observed, scores_of
from fedloom.engines.base import Engine
from fedloom.errors import ConfigError, MessageError, Refusal, RoundFailed
from fedloom.experiments.federated_encoding import NoRounds
from fedloom.experiments.history import History
from fedloom.experiments.settings import RunSettings
from fedloom.nn import metrics
from fedloom.privacy.choice import aggregation_for

STEP_SECONDS = 2.0  # that a party trains before it answers
WAIT_SECONDS = 3600.0  # that the coordinator waits for the parties' baselines
PROGRAM = "fedloom_local_"  # with which the phases of `LocalScores` begin on the wire


# ---- at a party ----
def local_method(method: Method) -> Method:
    """Returns the method `local` with the settings that it shares with a method."""
    own = {f.name for f in fields(method_class("local"))}
    return make_method("local", {k: v for k, v in method.settings().items() if k in own})


class LocalBaseline:
    """Trains a party's own model, in steps.

    Attributes:
        done: Whether the training is over.
        scores: The scores at the best round so far, by the party's own validation items.
        summand: What the party adds to the sum of all parties' scores.

    Args:
        name: The party's name.
        graph: Its graph.
        facts: The facts of the run.
        method: The method of the run.
        run: The settings of the run.
        inductive: Whether training sees neither validation nor test items.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        facts: Facts,
        method: Method,
        run: RunSettings,
        inductive: bool,
    ):
        alone = replace(facts, secure=None, privacy=None, upload="", download="")
        self._replies: list[Message] = []
        self._method: Any = observed(local_method(method), self._replies.append)
        self._client = Client(name, graph, alone, inductive)
        self._history, self._run, self._round = History(None, run.patience, run.selection), run, 0
        self.done = False

    def train(self, seconds: float) -> bool:
        """Trains for about that long. Returns whether the training is over."""
        until = time.monotonic() + seconds
        while not self.done:
            self._train_round()
            if time.monotonic() >= until:
                break
        return self.done

    @property
    def scores(self) -> dict[str, Any]:
        """The scores at the best round so far."""
        return {k: v for k, v in self._best.items() if k not in ("stage", "summand")}

    @property
    def summand(self) -> Message:
        """What the party adds to the sum of all parties' scores."""
        found: Message = self._best["summand"]
        return found

    @property
    def _best(self) -> dict[str, Any]:
        return self._history.scored()[0]

    def _train_round(self) -> None:
        method, client = self._method, self._client
        if not self._round:
            if client.facts.class_weight == BALANCED:  # by the party's own labels
                counts = method.count_labels(client)["counts"]
                method.weigh_classes(client, weights=balanced_weights(counts))
            method.setup(client)
        self._round += 1
        client.perform(method, "train", {})
        last = self._round == method.rounds
        if last or self._round % self._run.evaluate_every == 0:
            summand = method.evaluate_sum(client)
            scores = scores_of(self._replies.pop(), self._run.selection)
            self._history.add(
                {"round": self._round, "stage": "train", **scores, "summand": summand}
            )
        self.done = last or self._history.out_of_patience()


@dataclass(frozen=True)
class LocalScores(Method):
    """Adds up the scores of the parties' Local baselines."""

    requires_all: ClassVar[tuple[str, ...]] = ("evaluate_sum",)

    @summed
    @phase(**Method.evaluate_sum.reply)
    def evaluate_sum(self, client: Client) -> Message:
        """Returns what the party adds, once: two sums could differ in one party."""
        if "local" not in client.memory:
            raise Refusal(f"client {client.name!r} gives no score of its Local baseline")
        summand: Message = client.memory.pop("local")
        return summand

    def run(self, server: Server) -> None:
        """One sum over all parties."""
        server.state["local"] = server.sum(self.evaluate_sum, clients=server.clients)


# ---- at the coordinator ----
Control = Callable[[str, Mapping[str, dict[str, Any]]], dict[str, dict[str, Any] | Absent]]


def local_scores(
    parties: Sequence[str],
    facts: Facts,
    control: Control,
    engine: Engine,
    log: Callable[[str], None],
) -> dict[str, float | None]:
    """Waits for the parties' Local baselines. Returns their average scores, by size and plain.

    Returns nothing if a party has declined, or is not there: averages over other parties could not
    be compared.

    Args:
        parties: The parties that have taken part.
        facts: The facts of the run.
        control: Sends control orders; see `Coordinator.control`.
        engine: Runs the phases of `LocalScores` at parties.
        log: Called with a line that says why there is no average.
    """
    if set(parties) != set(facts.clients):
        log(f"no Local baseline: only {len(parties)} of {facts.num_clients} parties are here")
        return {}
    until, waiting = time.monotonic() + WAIT_SECONDS, list(parties)
    while waiting:
        answers = control("fedloom_local", {name: {"seconds": STEP_SECONDS} for name in waiting})
        absent = {name: a for name, a in answers.items() if isinstance(a, Absent)}
        declined = [n for n, a in answers.items() if not isinstance(a, Absent) and a["declined"]]
        if declined or absent:
            causes = [f"{name} declines" for name in declined]
            causes += [f"{name}: {answer.cause}" for name, answer in absent.items()]
            log(f"no Local baseline: {'; '.join(causes)}")
            return {}
        waiting = [name for name in waiting if answers[name]["done"] is not True]  # type: ignore[index]
        if time.monotonic() > until:
            log(f"no Local baseline: {', '.join(waiting)} did not finish it in time")
            return {}
    method = LocalScores()
    policy = RoundPolicy("local", faults=FaultPolicy(quorum=0.5), retries=0)
    server = Server(method, facts, engine.call, policy, NoRounds(), aggregation_for(facts))
    engine.longest_reply = server.longest_reply
    try:
        method.run(server)
    except (ConfigError, MessageError, RoundFailed) as error:
        log(f"no Local baseline: {error}")
        return {}
    total = server.state["local"]
    by_size, plain = metrics.mean_scores(total["scores"], total["more"], facts.selection)
    return {**by_size, **{f"{name}_mean": value for name, value in plain.items()}}
