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
    num_features = 128
    num_classes = 4
    task = "node"
    split = "20/40/40"                   # "own": each graph has its own training, validation
                                         # and test masks

    [model], [method], [run]             # as in a recipe

A party does only what its own copy says. It refuses a coordinator with another method, model or
setting, and names the differences. The parties agree on public keys, not on the names of files.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
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
from fedloom.experiments.source_digest import code_behind
from fedloom.nn.build import parse_spec

OWN_SPLIT = "own"


@dataclass(frozen=True)
class FederationTable:
    """[federation]: the coordinator's address, certificate authority and public key."""

    address: str = setting("", "host:port, where parties find the coordinator")
    listen: str = setting("", "host:port, where the coordinator listens (empty = the address)")
    authority: str = setting("", "the CA's certificate (empty = no TLS, on loopback only)")
    coordinator: str = setting("", "the coordinator's public key: a file, or the key itself")


@dataclass(frozen=True)
class DataTable:
    """[data]: what every party's graph must match."""

    num_features: int = setting(0, "width of the node features", at_least=1)
    num_classes: int = setting(0, "number of classes over all parties", at_least=1)
    task: str = setting("node", "what is predicted", choices=("node", "graph"))
    split: str = setting("20/40/40", 'shares per class, or "own": the masks of each graph')
    inductive: bool = setting(False, "validation and test items are absent during training")


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

    def make_method(self) -> Method:
        """Returns the method, with its settings."""
        return make_method(self.method_path, dict(self.method_settings))

    @property
    def method_path(self) -> str:
        """The method's name, or the path of its file."""
        return str(self.folder / self.method) if self.method.endswith(".py") else self.method

    @property
    def authority(self) -> Path | None:
        """The CA's certificate; None for no TLS."""
        return self.folder / self.federation.authority if self.federation.authority else None

    def agreed(self) -> dict[str, Any]:
        """Returns everything that must be the same at every party, as JSON."""
        method = self.make_method()
        run = {
            f.name: getattr(self.run, f.name)
            for f in fields(RunSettings)
            if f.name not in ("engine", "workers", "device")
        }
        return {
            "wire": {"messages": FORMAT, "envelopes": ENVELOPE_VERSION},
            "parties": {name: key.text() for name, key in self.parties.items()},
            "data": {f.name: getattr(self.data, f.name) for f in fields(DataTable)},
            "model": {f.name: getattr(self.model, f.name) for f in fields(ModelTable)},
            "method": {
                "name": Path(self.method).name,
                **method.settings(),
                "code": code_behind(self.method_path, method.settings().get("base")),
            },
            "run": run,
        }

    def graph(self, path: Path, party: str) -> Graph:
        """Returns a party's graph, split as agreed. Raises DataError if it does not match.

        path: a folder of tables, or a file that `from_file` reads.
        """
        graph = from_folder(path) if path.is_dir() else from_file(path)
        for fact in ("num_features", "task"):
            if (actual := getattr(graph, fact)) != (agreed := getattr(self.data, fact)):
                raise DataError(
                    f"party {party!r}: {fact} of {str(path)!r} is {actual}, "
                    f"the agreement says {agreed}"
                )
        if len(graph.y) and (highest := int(graph.y.max())) >= self.data.num_classes:
            raise DataError(
                f"party {party!r}: {str(path)!r} has a class {highest}, the agreement says "
                f"num_classes = {self.data.num_classes} (0 to {self.data.num_classes - 1})"
            )
        copied = {f.name: getattr(graph, f.name) for f in fields(Graph) if f.init}
        graph = Graph(**copied | {"num_classes": self.data.num_classes})
        if self.data.split == OWN_SPLIT:
            return graph
        return apply_split(graph, self.data.split, self.run.seed, names=[party])


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


def read_agreement(path: Path) -> Agreement:
    """Reads and checks an agreement. A ConfigError names the table, the key and valid values."""
    tables, folder = read_tables(path), path.resolve().parent
    for name in tables:
        if name not in (valid := (*TABLES, "parties", "method")):
            raise unknown("table of an agreement:", name, valid)
    if isinstance(of_run := tables.setdefault("run", {}), dict):
        if "engine" in of_run:
            raise ConfigError("run.engine: an agreement has no engine; remove this line")
        of_run["engine"] = "flower"
        of_run.setdefault("checkpoint_every", 1)  # every deployment can be resumed
    built = {name: table(name, cls, tables.get(name, {})) for name, cls in TABLES.items()}
    parties = tables.get("parties", {})
    if not parties:
        raise ConfigError(
            f"parties: {str(path)!r} names no party; add a line to [parties] for each one: "
            'name = "its public key"'
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
    for field, text in addresses.items():
        if text and not is_loopback(host_and_port(text, field)[0]):
            raise ConfigError(
                f"federation.authority is missing, and {field} is {text!r}: without TLS only "
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
