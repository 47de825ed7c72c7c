"""FedGram+: FedGram's scores become features of every client; then a method trains.

A plug-in. FedGram runs once and gives every client W. Each client appends the class scores of its
nodes or graphs to their features, and the method `base` trains on the wider features, unchanged.

What travels, per client, once, before the method `base` begins: as in FedGram, without the scores
of an evaluation.

    X̃ = [X, s · F W]: the scores times a weight                                  `append_scores`

A graph's scores are appended to each of its nodes. The personal part of FedGram is left out: it
fits the client's own training items, and so would the model that follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.method import Plugin
from fedloom.core.phase import Computed, phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedgram import FedGram
from fedloom.methods.fedgram.method import confusion_schema, gram_schema, moment_schema


def widened(facts: Facts) -> Facts:
    """Returns the facts with one feature more for each class."""
    return replace(facts, num_features=facts.num_features + facts.num_classes)


@dataclass(frozen=True)
class FedGramPlus(Plugin):
    """Appends FedGram's scores to the features, in front of any method."""

    score_weight: float = setting(5.0, "s, weight of the scores as features", above=0, tune="1..20")
    score_hops: str = setting("2,4,side", "the setting `hops` of FedGram", task="node")
    score_width: int = setting(2048, "the setting `width` of FedGram", at_least=1)

    transductive: ClassVar[bool] = True
    validates: ClassVar[bool] = True
    predicts_unseen: ClassVar[bool] = False
    unseen_needs: ClassVar[str] = "FedGram's scores as features, which only the training graph has"
    keeps_logits: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = FedGram.discloses_to_server

    @property
    def gram(self) -> FedGram:
        """The method that makes the scores."""
        return FedGram(hops=self.score_hops, width=self.score_width, personal="")

    @summed
    @phase(
        gram=Computed(lambda method, *known: gram_schema(method.gram, *known)),
        moment=Computed(lambda method, *known: moment_schema(method.gram, *known)),
    )
    def send_moments(self, client: Client, maps: Tensor, width: Tensor) -> Message:
        """Answers FedGram's statistics."""
        return self.gram.send_moments(client, maps, width)

    @summed
    @phase(confusion=Computed(lambda method, *known: confusion_schema(method.gram, *known)))
    def compare_weights(self, client: Client, weights: Message, width: Tensor) -> Message:
        """Answers FedGram's comparison."""
        return self.gram.compare_weights(client, weights, width)

    @phase()
    def append_scores(self, client: Client, model: Message) -> Message:
        """Appends the scores to the features. The result is the same if it is called again.

        model: W and the number of its map.
        """
        plain = client.memory.setdefault("without scores", (client.full_graph, client.facts))
        client.full_graph, client.facts = plain
        client.graph = client.full_graph.training_view(inductive=False)
        scores = self.gram.scores(client, model)
        client.full_graph = self.with_scores(client.full_graph, scores)
        client.graph = client.full_graph.training_view(inductive=False)
        client.facts = widened(client.facts)
        return {}

    def with_scores(self, graph: Graph, scores: Tensor) -> Graph:
        """Returns a graph with the scores of its items as further features of its nodes."""
        of_nodes = scores if graph.batch is None else scores[graph.batch]
        x = torch.cat([graph.x, self.score_weight * of_nodes], 1)
        return replace(graph, x=x, feature_names=())

    def check(self, facts: Facts) -> None:
        """Checks the base method with the wider features."""
        super().check(widened(facts))  # type: ignore[misc]  # the base method's

    def prepare_clients(self, server: Server) -> None:
        """Runs FedGram and appends its scores."""
        gram, clients = self.gram, server.clients
        number, sums = gram.best_map(server, clients)
        server.ask(self.append_scores, model=gram.selected(server, sums, number, clients))
        server.facts = widened(server.facts)
