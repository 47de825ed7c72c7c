"""Agreement: one TOML file. The coordinator and every party have a copy.

    [federation]
    address = "fed.example.org:8443"     # where parties find the coordinator
    listen = "0.0.0.0:8443"              # where the coordinator listens, if that differs
    authority = "ca.crt"                 # the CA's certificate, in the same folder
    coordinator = "coordinator.pub"      # its public key: a file in the same folder,
                                         # or the key itself ("p384:... ed25519:...")

    [parties]                            # all parties, in client order, with their public keys
    bank-a = "bank-a.pub"
    bank-b = "bank-b.pub"

    [data]                               # what every party's graph must match
    class_names = ["ok", "fraud"]        # the classes, in the order of their numbers
    feature_names = ["age", "balance"]   # the columns, in order; or only their number:
                                         # num_classes = 2, num_features = 128
    task = "node"
    split = "20/40/40"                   # "own": each graph has its own training, validation
                                         # and test masks

    [data.columns]                       # raw columns, which the parties encode together; they
    amount = { scale = "log" }           # replace feature_names (`fedloom.data.encoding`)
    country = "category"

    [model], [method], [run]             # as in a recipe

A party does only what its own copy says. It refuses a coordinator with another method, model or
setting, and names the differences. The parties agree on public keys, not on the names of files. A
party can replace its key without a new agreement (`fedloom.deploy.keyring`).
Classes and columns of a party's graph are brought into the agreed order by their names
(`fedloom.deploy.names`).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from fedloom.core.facts import Facts
from fedloom.core.message import FORMAT
from fedloom.core.method import Method
from fedloom.core.registry import make_method, method_class
from fedloom.core.settings import check_setting, setting
from fedloom.data.columns import Table
from fedloom.data.encoding import AUTO, Encoding
from fedloom.data.federation import PartySize, Roster
from fedloom.data.files import from_file, from_folder
from fedloom.data.graph import Graph, Task
from fedloom.data.split import apply_split, check_split
from fedloom.data.tables import read_folder
from fedloom.deploy.envelope import VERSION as ENVELOPE_VERSION
from fedloom.deploy.keyring import COORDINATOR, Keyring, read_keyring
from fedloom.deploy.keys import PublicKey, public_key_of, read_public_key, require_party_name
from fedloom.deploy.names import align_classes, align_features
from fedloom.deploy.rate_limit import Limits
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.federated_encoding import with_min_count
from fedloom.experiments.recipe import ModelTable, read_tables, table
from fedloom.experiments.run import agree_on_facts
from fedloom.experiments.settings import RunSettings, chosen_evaluation
from fedloom.experiments.source_digest import code_behind
from fedloom.experiments.trust import require_trust
from fedloom.nn.build import parse_spec, split_specs
from fedloom.nn.own_model import is_own, own_spec
from fedloom.privacy.secure_sum import VERSION as SUM_VERSION

OWN_SPLIT = "own"


@dataclass(frozen=True)
class FederationTable:
    """[federation]: the coordinator's address, certificate authority and public key."""

    address: str = setting("", "host:port, where parties find the coordinator")
    listen: str = setting("", "host:port, where the coordinator listens (empty = the address)")
    authority: str = setting("", "the CA's certificate (empty = no TLS, on loopback only)")
    coordinator: str = setting("", "the coordinator's public key: a file, or the key itself")
    silence: float = setting(
        60.0, "seconds without a sign of life after which a party is given up", at_least=3
    )
    closed: float = setting(
        0.0,
        "the same for a party that has closed its connections (0 = 7, or `silence` in a run with "
        "a deadline)",
        at_least=0,
    )
    party_requests: float = setting(
        Limits.party_requests, "requests per second of a party", at_least=20
    )
    party_concurrent: int = setting(
        Limits.party_concurrent, "requests of a party at once", at_least=8
    )
    address_requests: float = setting(
        Limits.address_requests, "unsigned requests per second of an address", above=0
    )
    address_connections: int = setting(
        Limits.address_connections, "connections without a signed request of an address", at_least=8
    )

    @property
    def limits(self) -> Limits:
        """What the SuperLink accepts from one sender."""
        return Limits(**{f.name: getattr(self, f.name) for f in fields(Limits)})


@dataclass(frozen=True)
class DataTable:
    """[data]: what every party's graph must match."""

    num_features: int = setting(0, "width of the node features", at_least=1)
    num_classes: int = setting(0, "number of classes over all parties", at_least=1)
    class_names: tuple[str, ...] = setting((), "the classes, in the order of their numbers")
    feature_names: tuple[str, ...] = setting((), "the columns of the node features, in order")
    task: str = setting("node", "what is predicted", choices=("node", "graph"))
    split: str = setting("20/40/40", 'shares per class, or "own": the masks of each graph')
    inductive: bool = setting(False, "validation and test items are absent during training")
    columns: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "raw columns of the tables, and how to encode them"}
    )
    encoding: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "what all columns share: fill, scale, min_count"}
    )


TABLES: dict[str, Any] = {
    "federation": FederationTable,
    "data": DataTable,
    "model": ModelTable,
    "run": RunSettings,
}


@dataclass(frozen=True)
class Agreement:
    """A valid agreement. `folder` holds its file, and the files that it names."""

    federation: FederationTable
    data: DataTable
    model: ModelTable
    run: RunSettings
    method: str
    method_settings: Mapping[str, Any]
    parties: Mapping[str, PublicKey]
    coordinator: PublicKey
    folder: Path

    @cached_property
    def encoding(self) -> Encoding | None:
        """The declared encoding of raw columns, not fitted; None if features are numbers already.

        Its columns are sorted by name, so that their order in a copy does not matter.
        """
        return _declared(self.data)

    def make_method(self) -> Method:
        """Returns the method, with its settings."""
        return make_method(self.method_path, dict(self.method_settings))

    @property
    def method_path(self) -> str:
        """The method's name, or the path of its file."""
        return str(self.folder / self.method) if self.method.endswith(".py") else self.method

    @property
    def model_specs(self) -> list[str]:
        """The models that the parties train, in turn."""
        specs = split_specs(self.model.name)
        return [own_spec(spec, self.folder) if is_own(spec) else spec for spec in specs]

    @property
    def _located_models(self) -> str:
        specs = split_specs(self.model.name)
        return ",".join(str(self.folder / spec) if is_own(spec) else spec for spec in specs)

    @property
    def authority(self) -> Path | None:
        """The CA's certificate; None for no TLS."""
        return self.folder / self.federation.authority if self.federation.authority else None

    def read_keyring(self) -> Keyring:
        """Returns the parties' keys with what the folder says about their life."""
        return read_keyring(self.parties, self.coordinator, self.folder, self.authority)

    def agreed(self) -> dict[str, Any]:
        """Returns everything that must be the same at every party, as JSON."""
        method = self.make_method()
        run = {
            f.name: getattr(self.run, f.name)
            for f in fields(RunSettings)
            if f.name not in ("engine", "workers", "device")
        }
        return {
            "wire": {"messages": FORMAT, "envelopes": ENVELOPE_VERSION, "secure_sums": SUM_VERSION},
            "parties": {name: key.summary() for name, key in self.parties.items()},
            "data": {f.name: _json(getattr(self.data, f.name)) for f in fields(DataTable)},
            "model": {f.name: getattr(self.model, f.name) for f in fields(ModelTable)},
            "method": {
                "name": Path(self.method).name,
                **method.settings(),
                "code": code_behind(
                    self.method_path, method.settings().get("base"), model=self._located_models
                ),
            },
            "run": run,
        }

    def digest(self) -> bytes:
        """Returns the SHA-256 digest of everything that must be the same at every party."""
        return sha256(json.dumps(self.agreed(), sort_keys=True).encode()).digest()

    def roster(
        self,
        sizes: Mapping[str, PartySize],
        encoding: Encoding | None,
        knows_cross_edges: bool = True,
    ) -> Roster:
        """Returns the parties and the public facts about their data.

        Args:
            sizes: The sizes of parties. A party that is missing has size 0.
            encoding: The fitted encoding; None if features are numbers already.
            knows_cross_edges: Whether some party knows an edge to another party's node.
        """
        data = self.data
        known = tuple(sizes.get(n, PartySize(n, 0, 0, 0, 0, 0)) for n in self.parties)
        names = data.feature_names if encoding is None else tuple(encoding.feature_names)
        return Roster(
            known,
            len(names) or data.num_features,
            data.num_classes,
            cast(Task, data.task),
            data.inductive,
            knows_cross_edges,
            {"dataset": "each party's own", "clients": len(known)},
            data.class_names,
            names,
        )

    def facts(self, roster: Roster) -> Facts:
        """Returns what every party knows before training. Each side derives it from its own copy.

        Raises a ConfigError if method, models, data and settings do not fit each other.
        """
        method, dropout = self.make_method(), self.model.dropout
        return agree_on_facts(method, self.method, roster, self.model_specs, dropout, self.run)

    def graph(self, path: Path, party: str) -> Graph:
        """Returns a party's graph, split as agreed. Raises DataError if it does not match.

        Classes and features are in the agreed order. A warning says what had to be assumed. If the
        agreement declares raw columns, the graph is a `RawGraph`, which is not encoded yet.

        path: a folder of tables, or a file that `from_file` reads.
        """
        where = f"party {party!r}: {str(path)!r}"
        graph = self._read(path, where)
        for fact in ("num_features", "task") if self.encoding is None else ("task",):
            if (actual := getattr(graph, fact)) != (agreed := getattr(self.data, fact)):
                raise DataError(
                    f"party {party!r}: {fact} of {str(path)!r} is {actual}, "
                    f"the agreement says {agreed}"
                )
        graph = align_classes(graph, self.data.class_names, self.data.num_classes, where)
        if self.data.split == OWN_SPLIT:
            return graph
        return apply_split(graph, self.data.split, self.run.seed, names=[party])

    def _read(self, path: Path, where: str) -> Graph:
        """Returns a party's graph with the agreed features, or with the agreed raw columns."""
        if self.encoding is None:
            graph = from_folder(path) if path.is_dir() else from_file(path)
            if graph.encoding is not None:
                columns = ", ".join(column.name for column in graph.encoding.columns)
                raise DataError(
                    f"{where} has columns that must be encoded ({columns}), which a party cannot "
                    "do alone: declare them in [data.columns] of the agreement"
                )
            return align_features(graph, self.data.feature_names, where)
        if not path.is_dir():
            raise DataError(
                f"{where} is a file: the agreement has [data.columns], give a folder of tables"
            )
        raw = read_folder(path, self.encoding)
        require_columns(self.encoding, raw.table)
        return raw


def require_columns(encoding: Encoding, table: Table) -> None:
    """Raises a DataError if a table lacks a declared column or has a cell that does not fit."""
    if not any(column.kind == AUTO for column in encoding.columns):
        encoding.fit(table)
        return
    encoding.summands(table)
    for column in encoding.columns:
        if column.kind in ("number", "boolean", "date"):
            table.values(column.name, column.kind, column.format)


def differences(
    party: Mapping[str, Any], coordinator: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Returns the differences between a party's agreement and the coordinator's, in words.

    Args:
        party: What the party has agreed to; see `Agreement.agreed`.
        coordinator: What the coordinator has agreed to.
        prefix: What to put before the names.
    """
    found: list[str] = []
    for key in sorted({*party, *coordinator}):
        name, own, other = f"{prefix}{key}", party.get(key), coordinator.get(key)
        if isinstance(own, Mapping) and isinstance(other, Mapping):
            found += differences(own, other, f"{name}.")
        elif own != other:
            sides = f"{json.dumps(own)} at the party and {json.dumps(other)} at the coordinator"
            found.append(f"{name} is {sides}")
    return found


def read_agreement(path: Path, trust: bool = False) -> Agreement:
    """Reads and checks an agreement. A ConfigError names the table, the key and valid values.

    Args:
        path: The file.
        trust: Execute the Python files that it names as method or model. Without it they are an
            error.
    """
    tables, folder = read_tables(path), path.resolve().parent
    require_trust(tables, f"agreement {str(path)!r}", trust)
    for name in tables:
        if name not in (valid := (*TABLES, "parties", "method")):
            raise unknown("table of an agreement:", name, valid)
    if isinstance(of_run := tables.setdefault("run", {}), dict):
        if "engine" in of_run:
            raise ConfigError("run.engine: an agreement has no engine; remove this line")
        of_run["engine"] = "flower"
        of_run.setdefault("checkpoint_every", 1)  # every deployment can be resumed
    built = {name: table(name, cls, tables.get(name, {})) for name, cls in TABLES.items()}
    built["data"] = _counted(built["data"])
    parties = tables.get("parties", {})
    if not parties:
        raise ConfigError(
            f"parties: {str(path)!r} names no party; add a line to [parties] for each one: "
            'name = "its public key"'
        )
    for name in parties:
        require_party_name(name)
        if name == COORDINATOR:
            raise ConfigError(f"parties.{name}: this name is the coordinator's; choose another")
    method = dict(tables.get("method", {}))
    chosen = str(method.pop("name", "fedavg"))
    located = str(folder / chosen) if chosen.endswith(".py") else chosen
    known = {f.name: f for f in fields(method_class(located, method))}
    for key, value in method.items():
        if key not in known:
            raise unknown(f"setting of method {chosen!r}:", key, known)
        method[key] = check_setting(known[key], value, "method")
    for spec in split_specs(built["model"].name):
        parse_spec(own_spec(spec, folder) if is_own(spec) else spec)
    chosen_evaluation(method_class(located, method), chosen, built["run"].evaluation)
    if built["data"].split != OWN_SPLIT:
        check_split(built["data"].split)
    keys = {name: _public_key(f"parties.{name}", given, folder) for name, given in parties.items()}
    for name, public in keys.items():
        if public.terms is not None and public.terms.party != name:
            raise ConfigError(
                f"parties.{name}: this is a key of party {public.terms.party!r}; "
                f"`fedloom keys --party {name}` makes one of {name!r}"
            )
    if len({key.fingerprint for key in keys.values()}) < len(keys):
        raise ConfigError("parties: two parties have the same public key; each needs its own")
    coordinator = _public_key("federation.coordinator", built["federation"].coordinator, folder)
    agreement = Agreement(
        **built,
        method=chosen,
        method_settings=method,
        parties=keys,
        coordinator=coordinator,
        folder=folder,
    )
    host_and_port(agreement.federation.address, "federation.address")
    if agreement.authority is not None and not agreement.authority.is_file():
        raise ConfigError(f"federation.authority: there is no file {str(agreement.authority)!r}")
    return agreement


def _declared(data: DataTable) -> Encoding | None:
    for key in ("columns", "encoding"):
        if not isinstance(getattr(data, key), Mapping):
            raise ConfigError(
                f"data.{key} is {getattr(data, key)!r}, must be a table: [data.{key}]"
            )
    if not data.columns:
        if data.encoding:
            raise ConfigError("data.encoding: there is no [data.columns] that it could apply to")
        return None
    declared = Encoding.of(dict(sorted(data.columns.items())), data.encoding, "data.")
    return with_min_count(declared)


def _counted(data: DataTable) -> DataTable:
    """Returns [data] with the numbers of classes and features, which names may stand for."""
    counted: dict[str, Any] = {}
    encoded = _declared(data) is not None
    if encoded and (data.feature_names or data.num_features):
        given = "feature_names" if data.feature_names else "num_features"
        raise ConfigError(f"data.{given}: [data.columns] gives the features; remove one")
    for number, names in (("num_classes", "class_names"), ("num_features", "feature_names")):
        given, count = getattr(data, names), getattr(data, number)
        valid = isinstance(given, list | tuple) and all(isinstance(n, str) and n for n in given)
        if not valid or len(set(given)) < len(given):
            raise ConfigError(f"data.{names} is {given!r}, must be a list of different names")
        if not given and not count and not (encoded and number == "num_features"):
            raise ConfigError(f"data.{number} is missing: give it, or {names}")
        if given and count and count != len(given):
            raise ConfigError(
                f"data.{number} is {count}, but data.{names} has {len(given)} names; remove one"
            )
        counted |= {names: tuple(given), number: len(given) or count}
    return replace(data, **counted)


def _json(value: Any) -> Any:
    """Returns a setting as JSON, so that it can be compared with one that was received."""
    return list(value) if isinstance(value, tuple) else value


def _public_key(field: str, given: object, folder: Path) -> PublicKey:
    if not isinstance(given, str) or not given:
        raise ConfigError(
            f"{field} is {given!r}, must be a public key: the name of a .pub file, or the key"
        )
    try:
        return read_public_key(folder / given) if given.endswith(".pub") else public_key_of(given)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def host_and_port(text: str, field: str) -> tuple[str, int]:
    """Returns the host and the port of "host:port" or "[IPv6]:port".

    field: the setting that an error message names.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"{field} is {text!r}, must be host:port, for example fed.example.org:8443"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_tls(agreement: Agreement, insecure: bool) -> None:
    """Raises ConfigError without TLS, unless `insecure` is set and only loopback is used."""
    if agreement.authority is not None:
        if insecure:
            raise ConfigError("--insecure: the agreement has federation.authority; remove one")
        return
    addresses = {
        "federation.address": agreement.federation.address,
        "federation.listen": agreement.federation.listen,
    }
    for key, text in addresses.items():
        if text and not is_loopback(host_and_port(text, key)[0]):
            raise ConfigError(
                f"federation.authority is missing, and {key} is {text!r}: without TLS only "
                "addresses of this machine are allowed (127.0.0.1)"
            )
    if not insecure:
        raise ConfigError(
            "federation.authority is missing: name the CA's certificate, or allow a deployment "
            "without TLS on this machine with --insecure"
        )


def size_of(party: str, graph: Graph) -> dict[str, Any]:
    """Returns the size of a party's graph, as JSON. The coordinator learns it before training."""
    size = PartySize.of(party, graph)
    return {f.name: getattr(size, f.name) for f in fields(PartySize)}
