"""Encoding in a deployment: the parties fit one encoding of their raw columns before the run.

The coordinator asks for sums (`fedloom.experiments.federated_encoding`), by the same signed orders
and, if the run is secure, by the same secure sums as in the run. It never sees a row or a
category's text. Each party keeps the fitted encoding in its own folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.core.absence import FaultPolicy
from fedloom.core.facts import Facts
from fedloom.core.server import RoundPolicy, Server
from fedloom.data.encoding import Encoding
from fedloom.data.graph import Graph
from fedloom.data.raw_graph import RawGraph
from fedloom.deploy.agreement import Agreement
from fedloom.engines.base import Engine
from fedloom.errors import ConfigError
from fedloom.experiments.federated_encoding import FitEncoding, NoRounds, encoding_facts
from fedloom.privacy.choice import aggregation_for

PROGRAM = "fedloom_fit_"  # with which the phases of `FitEncoding` begin on the wire
FILE = "encoding.json"  # in the coordinator's run folder and in a party's folder


def fit_method(agreement: Agreement) -> FitEncoding:
    """Returns the method that fits the agreed encoding."""
    assert agreement.encoding is not None
    return FitEncoding(declared=agreement.encoding.to_json())


def fit_facts(agreement: Agreement) -> Facts:
    """Returns the facts of the fit. Each side derives them from its own copy of the agreement."""
    return encoding_facts(
        tuple(agreement.parties),
        agreement.data.num_classes,
        agreement.run.terms,
        agreement.run.seed,
    )


def fit(agreement: Agreement, parties: Sequence[str], engine: Engine) -> Encoding:
    """Fits the agreed encoding to the tables of the parties that have joined.

    Args:
        agreement: The coordinator's copy of the agreement.
        parties: The parties that have joined.
        engine: Runs the phases of the fit at parties.
    """
    method, facts = fit_method(agreement), fit_facts(agreement)
    # `FitEncoding` needs all of them. A quorum below 1 makes an absence an error of the round.
    policy = RoundPolicy("local", faults=FaultPolicy(quorum=0.5), retries=agreement.run.retries)
    server = Server(method, facts, engine.call, policy, NoRounds(), aggregation_for(facts))
    engine.longest_reply = server.longest_reply
    server.participants = [name for name in facts.clients if name in parties]
    method.run(server)
    return method.result(server)


def encoded(graph: Graph, encoding: Encoding, declared: Encoding | None, party: str) -> Graph:
    """Returns a party's graph with features.

    Raises ConfigError unless the encoding is the declared one, fitted.

    Args:
        graph: The party's graph, with raw columns.
        encoding: What the coordinator sent.
        declared: The encoding in the party's own copy of the agreement.
        party: The party's name.
    """
    if declared is None or _rules(encoding) != _rules(declared):
        raise ConfigError(f"party {party!r}: the encoding is not the agreed one")
    if encoding.stage:
        raise ConfigError(f"party {party!r}: the encoding is not fitted")
    if not isinstance(graph, RawGraph):
        raise ConfigError(f"party {party!r}: its graph has no raw columns to encode")
    return graph.encoded(encoding)


def _rules(encoding: Encoding) -> Encoding:
    """Returns an encoding as it was declared."""
    return Encoding(encoding.columns, encoding.bits, encoding.min_count)
