"""Fitting an encoding to the tables of several parties, by sums.

What travels, per party:
    up to three times   down  state     what the sums have given so far
                        up    counts and sums of its columns; see `fedloom.data.encoding`
    once                down  state     the fitted encoding

With secure sums the server sees nothing but the sums over all parties.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.ledger import Ledger
from fedloom.core.message import Message, Schema
from fedloom.core.method import Method
from fedloom.core.phase import Computed, phase, summed
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.settings import FEWEST, setting
from fedloom.data.encoding import IGNORE, STAGES, Column, Encoding
from fedloom.data.federation import Federation
from fedloom.data.labels import union_of_classes, with_classes
from fedloom.data.raw_graph import RawGraph
from fedloom.data.split import DEFAULT_SPLIT, apply_split
from fedloom.data.tables import (
    is_folder_of_tables,
    read_declaration,
    read_folder,
    with_degrees,
)
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError, DataError
from fedloom.privacy.choice import aggregation_for, require_cohort, responder_for

PARTIES = "parties:"  # a dataset of several parties: parties:FOLDER
LOG = logging.getLogger("fedloom.data")
MODEL = "mlp-1x1"  # facts need a model, but nothing is trained here


def _part(name: str) -> Computed:
    """The declaration of one tensor of a stage's summands; nothing if the stage has none."""

    def schema(method: FitEncoding, facts: Facts, message: Message, reply: Any) -> Schema:
        rows = method.known(message.get("state")).schema
        return tuple(("", dtype, shape) for key, dtype, shape in rows if key == name)

    return Computed(schema)


@dataclass(frozen=True)
class FitEncoding(Method):
    """Fits an encoding to the raw tables of all clients: each client's graph is a `RawGraph`.

    `server.state["encoding"]` holds the result as tensors, and each client has the fitted encoding
    in `client.memory["encoding"]`.
    """

    declared: str = setting("", "the declared encoding, as JSON")

    requires_all: ClassVar[tuple[str, ...]] = (*STAGES, "keep")

    @cached_property
    def encoding(self) -> Encoding:
        """The declared encoding."""
        return with_min_count(Encoding.from_json(self.declared))

    def known(self, state: Message | None) -> Encoding:
        """Returns the encoding with what the sums have given so far."""
        return self.encoding.with_tensors(state or {})

    @summed
    @phase(parties=_part("parties"), votes=_part("votes"))
    def kinds(self, client: Client) -> Message:
        """Says which kinds each undeclared column can have."""
        return self._summands(client, None)

    @summed
    @phase(
        present=_part("present"),
        rows=_part("rows"),
        sums=_part("sums"),
        categories=_part("categories"),
    )
    def totals(self, client: Client, state: Message | None = None) -> Message:
        """Counts and sums of the columns."""
        return self._summands(client, state)

    @summed
    @phase(rows=_part("rows"), squares=_part("squares"))
    def squares(self, client: Client, state: Message | None = None) -> Message:
        """Sums of squared distances from the means."""
        return self._summands(client, state)

    @phase()
    def keep(self, client: Client, state: Message | None = None) -> Message:
        """Keeps the fitted encoding, `client.memory["encoding"]`."""
        client.memory["encoding"] = self.known(state)
        return {}

    def run(self, server: Server) -> None:
        """Asks for one sum per stage."""
        encoding = self.encoding
        while encoding.stage:
            total = server.sum(getattr(self, encoding.stage), **_state(encoding))
            encoding = encoding.fitted(total)
        if server.facts.secure is None and encoding.min_count < FEWEST and any(encoding.buckets):
            LOG.warning(
                "encoding.min_count is %d: all parties learn of categories that occur fewer than "
                "%d times", encoding.min_count, FEWEST,
            )  # fmt: skip
        server.state["encoding"] = encoding.tensors()
        server.ask(self.keep, **_state(encoding))

    def result(self, server: Server) -> Encoding:
        """Returns the fitted encoding after `run`."""
        return self.known(server.state["encoding"])

    def _summands(self, client: Client, state: Message | None) -> Message:
        graph, terms = client.full_graph, client.facts.secure
        if not isinstance(graph, RawGraph):
            raise DataError(f"client {client.name!r}: its graph has no table of raw columns")
        noise = 0 if terms is None else 32 if terms.bits == 64 else 8
        encoding, rows = self.known(state), graph.rows_to_fit(client.inductive)
        return dict(encoding.summands(graph.table, rows, noise))


def with_min_count(declared: Encoding) -> Encoding:
    """Returns a declared encoding for several parties: `min_count` is `FEWEST` if not declared.

    Parties learn which categories occur. A rare one may point at a single row.
    """
    return replace(declared, min_count=declared.min_count or FEWEST)


def _state(encoding: Encoding) -> dict[str, Any]:
    """The message with what is fitted so far; empty messages do not travel."""
    tensors = encoding.tensors()
    return {"state": tensors} if tensors and encoding.stage != "kinds" else {}


def encoding_facts(
    clients: tuple[str, ...], num_classes: int = 1, secure: SecureTerms | None = None, seed: int = 0
) -> Facts:
    """Returns the facts of a fit: the clients' names and the terms of secure sums."""
    models = (MODEL,) * len(clients)
    return Facts(1, num_classes, "node", clients, models, seed=seed, secure=secure)


def fit_encoding(
    declared: Encoding,
    graphs: Mapping[str, RawGraph],
    *,
    secure: bool = False,
    inductive: bool = False,
) -> tuple[Encoding, Ledger]:
    """Fits an encoding to the tables of several parties that this process holds.

    Args:
        declared: The rules of the columns.
        graphs: The parties' graphs, by name.
        secure: Whether the sums are secure. That needs at least 3 parties.
        inductive: Whether only the rows of training items count.

    Returns:
        The fitted encoding, and the ledger of what travelled.
    """
    if secure:
        require_cohort(len(graphs), "the number of parties")
    facts = encoding_facts(tuple(graphs), secure=SecureTerms() if secure else None)
    method = FitEncoding(declared=declared.to_json())
    clients = [Client(n, g, facts, inductive, responder_for(facts, n)) for n, g in graphs.items()]
    engine = Engine(method, clients, FaultPolicy())
    policy, aggregation = RoundPolicy("local"), aggregation_for(facts)
    server = Server(method, facts, engine.call, policy, NoRounds(), aggregation)
    method.run(server)
    return method.result(server), server.ledger


def from_folders(
    folders: Mapping[str, str | Path],
    *,
    secure: bool = False,
    split: str = "",
    seed: int = 0,
    inductive: bool = False,
    class_names: Sequence[str] | None = None,
) -> Federation:
    """Returns the federation of parties that each have a folder of tables.

    The columns of all parties are encoded alike, by an encoding that is fitted by sums. Columns and
    classes are matched by name, whatever their order. The rules of a column may be in the
    graph.toml of any party; two parties may not declare different ones.

    Args:
        folders: The folder of each party, by name; see `fedloom.data.tables`.
        secure: Whether the sums are secure. That needs at least 3 parties.
        split: As in `apply_split`; each party splits its own items. The default is the parties' own
            split if all have one, else "20/40/40".
        seed: The seed of the split.
        inductive: Whether training sees neither validation nor test items. The encoding is then
            fitted on training items.
        class_names: The classes by name, in order. A party with another class is refused. The
            default is the union of all parties' classes.
    """
    began = time.perf_counter()
    if not folders:
        raise ConfigError("folders is empty: give at least one party, as {name: folder}")
    declared = merged_declaration({name: read_declaration(f) for name, f in folders.items()})
    raw = {name: read_folder(folder, declared) for name, folder in folders.items()}
    classes = tuple(class_names or _union_of_classes(raw))
    raw = {name: with_classes(graph, classes, name) for name, graph in raw.items()}
    own = all(bool(graph.train.any() and graph.test.any()) for graph in raw.values())
    split = split or ("public" if own else DEFAULT_SPLIT)
    for name, graph in raw.items():
        done = apply_split(graph, split, seed, names=[name])
        raw[name] = replace(graph, train=done.train, val=done.val, test=done.test)
    Federation(tuple(raw.values()), tuple(raw)).check()
    about: dict[str, Any] = {"dataset": "tables", "split": split, "split_seed": seed}
    if any(column.kind != IGNORE for column in declared.columns):
        encoding, ledger = fit_encoding(declared, raw, secure=secure, inductive=inductive)
        graphs = tuple(graph.encoded(encoding) for graph in raw.values())
        traffic = ledger.traffic()
        about["encoding_bytes"] = traffic["bytes_up"] + traffic["bytes_down"]
    else:
        graphs = tuple(with_degrees(graph) for graph in raw.values())
    federation = Federation(graphs, tuple(raw), inductive=inductive, about=about).check()
    return replace(federation, seconds_loading=time.perf_counter() - began)


def party_folders(dataset: str) -> dict[str, Path]:
    """Returns the parties of a dataset "parties:FOLDER": each subfolder with tables is a party."""
    folder = Path(dataset.removeprefix(PARTIES)).expanduser()
    if not folder.is_dir():
        raise DataError(f"data.dataset is {dataset!r}: there is no folder {str(folder)!r}")
    found = {f.name: f for f in sorted(folder.iterdir()) if f.is_dir() and is_folder_of_tables(f)}
    if not found:
        raise DataError(
            f"data.dataset is {dataset!r}: no subfolder has tables; each party needs one with "
            "nodes.csv and edges.csv"
        )
    return found


def merged_declaration(declared: Mapping[str, Encoding]) -> Encoding:
    """Returns the rules of all parties' columns, in the order of the first party.

    Raises a ConfigError if two parties declare different rules, and a DataError if a party lacks a
    column that another one has.

    declared: the rules that each party's folder declares.
    """
    rules: dict[str, tuple[Column, str]] = {}  # the rule of a column, and who declares it
    for party, encoding in declared.items():
        for column in encoding.columns:
            known, whose = rules.get(column.name, (Column(column.name), party))
            if Column(column.name) in (known, column):
                rules[column.name] = (
                    (column, party) if column != Column(column.name) else (known, whose)
                )
            elif known != column:
                raise ConfigError(
                    f"columns.{column.name}: {whose!r} and {party!r} declare different rules; "
                    "declare it the same way, or at one party only"
                )
    for party, encoding in declared.items():
        own = {column.name for column in encoding.columns}
        for name, (rule, _) in rules.items():
            if name not in own and rule.kind != IGNORE:
                other = next(p for p, e in declared.items() if name in {c.name for c in e.columns})
                raise DataError(
                    f"party {party!r} has no column {name!r}, but {other!r} has; add it, or leave "
                    f'it out everywhere: [columns] {name} = "ignore"'
                )
    settings: dict[str, Any] = {}
    for key in ("bits", "min_count"):
        default = getattr(Encoding(()), key)
        found = {getattr(encoding, key) for encoding in declared.values()} - {default}
        if len(found) > 1:
            values = ", ".join(map(str, sorted(found)))
            raise ConfigError(f"encoding.{key}: the parties declare different values: {values}")
        settings[key] = found.pop() if found else default
    return Encoding(tuple(rule for rule, _ in rules.values()), **settings)


def _union_of_classes(graphs: Mapping[str, RawGraph]) -> tuple[str, ...]:
    """Returns the classes of all parties. Refuses names at one party and numbers at another."""
    labelled = {n: g for n, g in graphs.items() if g.class_names or bool((g.y >= 0).any())}
    numbered = {n: all(c.isdigit() for c in g.classes) for n, g in labelled.items()}
    if len(set(numbered.values())) > 1:
        names = next(party for party, number in numbered.items() if not number)
        numbers = next(party for party, number in numbered.items() if number)
        raise DataError(
            f"classes: {names!r} has names ({', '.join(graphs[names].classes)}), {numbers!r} has "
            f"numbers ({', '.join(graphs[numbers].classes)}); set class_names in the graph.toml of "
            f"{numbers!r}"
        )
    known = [g.classes for g in (labelled or graphs).values()]
    union = union_of_classes(known)
    for party, graph in labelled.items():
        if missing := [name for name in union if name not in graph.classes]:
            LOG.info("party %r has no class %s", party, ", ".join(missing))
    return union


class NoRounds:
    """The observer of a run that has neither rounds nor scores."""

    def entered_rounds(self, server: Server, count: int) -> int:
        """Never called."""
        raise ConfigError("fitting an encoding has no rounds")

    def finished_round(self, server: Server) -> bool:
        """Never called."""
        raise ConfigError("fitting an encoding has no rounds")

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Never called."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Never called."""
