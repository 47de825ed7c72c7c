"""The agreement: one TOML file that the coordinator and every party have, and that each holds the others to.

    [federation]
    address = "fed.example.org:8443"     # where parties find the coordinator
    listen = "0.0.0.0:8443"              # where the coordinator listens, if that is written otherwise
    authority = "ca.crt"                 # the CA's certificate, beside this file
    coordinator = "coordinator.pub"      # its public key: a file beside this one, or the key itself ("p384:... ed25519:...")

    [parties]                            # everybody who may take part, in client order, with their public keys
    bank-a = "bank-a.pub"
    bank-b = "bank-b.pub"

    [data]                               # what every party's graph must fit
    num_features = 128
    num_classes = 4
    task = "node"
    split = "20/40/40"                   # "own": each party's graph says itself what trains, validates and tests

    [model], [method], [run]             # as in a recipe

A party does what its own copy says, and nothing else: a coordinator with another method, model or setting is refused, and told what
differs. Public keys, not files' names, are what is agreed on.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import getfile
from pathlib import Path
from typing import Any

from fedloom.core.message import FORMAT
from fedloom.core.method import Method
from fedloom.core.registry import make_method, method_class
from fedloom.core.settings import check_setting, setting
from fedloom.data.federation import PartySize
from fedloom.data.files import from_file, from_folder
from fedloom.data.graph import Graph
from fedloom.data.split import apply_split, check_split
from fedloom.deploy.envelope import VERSION as ENVELOPE_VERSION
from fedloom.deploy.keys import PublicKey, public_key_of, read_public_key, require_party_name
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.recipe import ModelTable, read_tables, table
from fedloom.experiments.settings import RunSettings, chosen_evaluation
from fedloom.nn.build import parse_spec

OWN_SPLIT = "own"


@dataclass(frozen=True)
class FederationTable:
    """[federation]: where the coordinator is, and how to know it."""

    address: str = setting("", "host:port, where parties find the coordinator")
    listen: str = setting("", "host:port, where the coordinator listens (empty = the address)")
    authority: str = setting("", "the CA's certificate (empty = no TLS, on loopback only)")
    coordinator: str = setting("", "the coordinator's public key: a file, or the key itself")


@dataclass(frozen=True)
class DataTable:
    """[data]: what every party's graph must fit."""

    num_features: int = setting(0, "width of the node features", at_least=1)
    num_classes: int = setting(0, "number of classes over all parties", at_least=1)
    task: str = setting("node", "what is predicted", choices=("node", "graph"))
    split: str = setting("20/40/40", 'shares per class, or "own": what each graph says itself')
    inductive: bool = setting(False, "validation and test items are absent during training")


TABLES: dict[str, Any] = {
    "federation": FederationTable,
    "data": DataTable,
    "model": ModelTable,
    "run": RunSettings,
}


@dataclass(frozen=True)
class Agreement:
    """A checked agreement. `folder` is where the file lies: what it names is beside it."""

    federation: FederationTable
    data: DataTable
    model: ModelTable
    run: RunSettings
    method: str
    method_settings: Mapping[str, Any]
    parties: Mapping[str, PublicKey]
    coordinator: PublicKey
    folder: Path

    def make_method(self) -> Method:
        """The method, with its settings."""
        return make_method(self.method_path, dict(self.method_settings))

    @property
    def method_path(self) -> str:
        """The method's name, or the path of its file."""
        return str(self.folder / self.method) if self.method.endswith(".py") else self.method

    @property
    def authority(self) -> Path | None:
        """The CA's certificate; None: no TLS."""
        return self.folder / self.federation.authority if self.federation.authority else None

    def agreed(self) -> dict[str, Any]:
        """All that has to be the same at every party, as JSON would say it."""
        method = self.make_method()
        run = {
            f.name: getattr(self.run, f.name)
            for f in fields(RunSettings)
            if f.name not in ("engine", "workers")
        }
        return {
            "wire": {"messages": FORMAT, "envelopes": ENVELOPE_VERSION},
            "parties": {name: key.text() for name, key in self.parties.items()},
            "data": {f.name: getattr(self.data, f.name) for f in fields(DataTable)},
            "model": {f.name: getattr(self.model, f.name) for f in fields(ModelTable)},
            "method": {
                "name": Path(self.method).name,
                **method.settings(),
                "code": code_of(type(method)),
            },
            "run": run,
        }

    def graph(self, path: Path, party: str) -> Graph:
        """A party's graph, from a folder of tables or a file (`from_file`), split as agreed; DataError if it does not fit the agreement."""
        graph = from_folder(path) if path.is_dir() else from_file(path)
        for fact in ("num_features", "task"):
            if (here := getattr(graph, fact)) != (agreed := getattr(self.data, fact)):
                raise DataError(
                    f"party {party!r}: {fact} of {str(path)!r} is {here}, the agreement says {agreed}"
                )
        if len(graph.y) and (highest := int(graph.y.max())) >= self.data.num_classes:
            raise DataError(
                f"party {party!r}: {str(path)!r} has a class {highest}, which the agreement does not know: "
                f"num_classes is {self.data.num_classes} (0 to {self.data.num_classes - 1})"
            )
        graph = Graph(
            **{f.name: getattr(graph, f.name) for f in fields(Graph) if f.init}
            | {"num_classes": self.data.num_classes}
        )
        return (
            graph
            if self.data.split == OWN_SPLIT
            else apply_split(graph, self.data.split, self.run.seed, names=[party])
        )


def code_of(cls: type[Method]) -> str:
    """A digest of the files that a method's class and its parents are in: parties that run different code do not run one method."""
    files = {Path(getfile(c)) for c in cls.__mro__ if c.__module__ not in ("builtins", "abc")}
    return hashlib.sha256(
        b"".join(
            hashlib.sha256(file.read_bytes()).digest()
            for file in sorted(files, key=lambda f: f.name)
        )
    ).hexdigest()


def differences(here: Mapping[str, Any], there: Mapping[str, Any], name: str = "") -> list[str]:
    """What two sides have agreed to differently, each in a few words."""
    found: list[str] = []
    for key in sorted({*here, *there}):
        path, one, other = f"{name}{key}", here.get(key), there.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{path}.")
        elif one != other:
            found.append(
                f"{path} is {json.dumps(one)} at the party and {json.dumps(other)} at the coordinator"
            )
    return found


def read_agreement(path: Path) -> Agreement:
    """Reads and checks the file; a ConfigError that names table and key, and what would be valid."""
    tables, folder = read_tables(path), path.resolve().parent
    for name in tables:
        if name not in (valid := (*TABLES, "parties", "method")):
            raise unknown("table of an agreement:", name, valid)
    if isinstance(of_run := tables.setdefault("run", {}), dict):
        if "engine" in of_run:
            raise ConfigError("run.engine: an agreement has none, parties are where they are")
        of_run |= {
            "engine": "flower",
            "checkpoint_every": of_run.get("checkpoint_every", 1),
        }  # a deployment can always be resumed
    built = {name: table(name, cls, tables.get(name, {})) for name, cls in TABLES.items()}
    parties = tables.get("parties", {})
    if not parties:
        raise ConfigError(
            f"parties: {str(path)!r} names none; each has a line in [parties]: name = its public key"
        )
    for name in parties:
        require_party_name(name)
    method = dict(tables.get("method", {}))
    chosen = str(method.pop("name", "fedavg"))
    located = str(folder / chosen) if chosen.endswith(".py") else chosen
    known = {f.name: f for f in fields(method_class(located, method))}
    for key, value in method.items():
        if key not in known:
            raise unknown(f"setting of method {chosen!r}:", key, known)
        method[key] = check_setting(known[key], value, "method")
    for spec in built["model"].name.split(","):
        parse_spec(spec.strip().lower())
    chosen_evaluation(method_class(located, method), chosen, built["run"].evaluation)
    if built["data"].split != OWN_SPLIT:
        check_split(built["data"].split)
    keys = {name: _public_key(f"parties.{name}", given, folder) for name, given in parties.items()}
    if len({key.text() for key in keys.values()}) < len(keys):
        raise ConfigError("parties: two of them have the same public key")
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


def _public_key(field: str, given: object, folder: Path) -> PublicKey:
    if not isinstance(given, str) or not given:
        raise ConfigError(
            f"{field} is {given!r}, must be a public key: a .pub file's name, or the key itself"
        )
    try:
        return read_public_key(folder / given) if given.endswith(".pub") else public_key_of(given)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def host_and_port(text: str, field: str) -> tuple[str, int]:
    """Takes "host:port" (or "[IPv6]:port"), gives both; a ConfigError that names the field."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"{field} is {text!r}, must be host:port, for example fed.example.org:8443"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and nobody else can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_tls(agreement: Agreement, insecure: bool) -> None:
    """Refuses to go without TLS, unless that was asked for and everything stays on this machine."""
    if agreement.authority is not None:
        if insecure:
            raise ConfigError(
                "--insecure: the agreement names federation.authority; leave one of them out"
            )
        return
    addresses = {
        "federation.address": agreement.federation.address,
        "federation.listen": agreement.federation.listen,
    }
    for field, text in addresses.items():
        if text and not is_loopback(host_and_port(text, field)[0]):
            raise ConfigError(
                f"federation.authority is missing, and {field} is {text!r}: without TLS only on this machine (127.0.0.1)"
            )
    if not insecure:
        raise ConfigError(
            "federation.authority is missing: without TLS only on this machine, and only with --insecure"
        )


def size_of(party: str, graph: Graph) -> dict[str, Any]:
    """What a party tells the coordinator of its graph before training: how much it holds."""
    held = PartySize.of(party, graph)
    return {f.name: getattr(held, f.name) for f in fields(PartySize)}
