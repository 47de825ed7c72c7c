"""fedloom as a Flower app, for users who run Flower's own SuperLink and SuperNodes.

    [tool.flwr.app.components]
    serverapp = "fedloom.deploy.apps:server"
    clientapp = "fedloom.deploy.apps:client"

The `ServerApp` and the `ClientApp` work with all methods. They use the same envelopes and the same
code as `fedloom serve` and `fedloom join`. Flower starts a process for each message. The client
side therefore passes its envelope on to a party in a process of its own,
`fedloom join ... --socket PATH`, and does not import PyTorch. Decision 10 says what Flower's own
processes cost and which failures they do not notice. Use them only if you must.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.deploy.framing import receive_frame, send_frame
from fedloom.deploy.superlink import LIMIT, configure_flower
from fedloom.deploy.transport import PartyStatus

configure_flower()
from flwr.app import (  # noqa: E402  (Flower reads the environment when it is imported)
    ConfigRecord,
    Context,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

POLL_SECONDS = 0.1  # between two looks for answers
ASK_AGAIN = 5.0  # seconds after which a node that has not named its party is asked again
# One line each: Flower finds the names by parsing this file.
server = ServerApp()
client = ClientApp()


# ---- at a party ----
@client.query("fedloom")
def answer(message: Message, context: Context) -> Message:
    """Passes an order on to the party at this node, and returns its answer.

    The node config has `party`, the party's name, and `socket`, the path of its Unix socket. A
    message without an envelope asks for the name of the party.
    """
    envelope = message.content.config_records["fedloom"].get("envelope")
    if not isinstance(envelope, bytes):
        return _reply(message, {"party": str(context.node_config["party"])})
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(str(context.node_config["socket"]))
        send_frame(wire, envelope)
        return _reply(message, {"envelope": receive_frame(wire)})


def _reply(message: Message, content: dict[str, Any]) -> Message:
    return Message(RecordDict({"fedloom": ConfigRecord(content)}), reply_to=message)


# ---- at the coordinator ----
@server.main()
def main(grid: Grid, context: Context) -> None:
    """Runs `fedloom serve` over Flower's grid. It resumes a run that is in the folder already.

    The run config has the coordinator's paths `agreement`, `keys` and `out`; `wait`, the seconds
    to wait for the parties; and `trust`, whether to execute Python files that the agreement names.
    """
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.serve import serve
    from fedloom.experiments.run_folder import read_config

    config = context.run_config
    path, keys, out = (Path(str(config[name])) for name in ("agreement", "keys", "out"))
    agreement = read_agreement(path, trust=bool(config.get("trust", False)))
    serve(
        agreement,
        keys,
        out,
        wait=float(config.get("wait", 600.0)),
        resumed=read_config(out) if (out / "config.json").exists() else None,
        open_transport=lambda: GridTransport(grid, agreement.parties),
    )


class GridTransport:
    """Implements `Transport` over Flower's own grid.

    Flower says which nodes are connected; it notices a dead one after a minute. A node says which
    party it is. A node that lies about it signs with the wrong key.
    """

    def __init__(self, grid: Grid, parties: Mapping[str, Any]):
        self.grid, self.parties = grid, parties
        self.node_of: dict[str, int] = {}
        # Messages that ask a node for the name of its party: the node, and when it was asked.
        self._questions: dict[str, tuple[int, float]] = {}
        self._connections: Counter[str] = Counter()  # each time a party connects as another node

    def status(self) -> dict[str, PartyStatus]:
        """Returns the status of the parties whose nodes are connected."""
        connected = set(self.grid.get_node_ids())
        self._read_names()
        self._ask_names(connected - set(self.node_of.values()))
        return {
            name: PartyStatus(0.0, self._connections[name])
            for name, node in self.node_of.items()
            if node in connected
        }

    def _read_names(self) -> None:
        """Reads the answers of nodes that were asked for the name of their party."""
        if not self._questions:
            return
        for message in self.grid.pull_messages(list(self._questions)):
            node, _ = self._questions.pop(message.metadata.reply_to_message_id, (0, 0.0))
            if message.has_error():
                continue
            name = message.content.config_records["fedloom"].get("party")
            if node and isinstance(name, str) and name in self.parties:
                self.node_of[name] = node
                self._connections[name] += 1

    def _ask_names(self, unknown: set[int]) -> None:
        """Asks nodes for the name of their party, unless they were asked a moment ago."""
        now = time.monotonic()
        asked = {node for node, when in self._questions.values() if now < when + ASK_AGAIN}
        if nodes := sorted(unknown - asked):
            numbers = self.grid.push_messages([_message(node, {"who": True}) for node in nodes])
            self._questions |= {
                number: (node, now) for number, node in zip(numbers, nodes, strict=True)
            }

    def send(self, envelopes: Mapping[str, bytes], limit: int = LIMIT) -> dict[str, str]:
        """Sends an envelope to each party. Returns {message id: party}.

        The limit has no effect: Flower's own SuperLink has no door that could refuse an answer.
        """
        messages = [
            _message(self.node_of[party], {"envelope": data}) for party, data in envelopes.items()
        ]
        return dict(zip(self.grid.push_messages(messages), envelopes, strict=True))

    def receive(
        self, pending: Mapping[str, str], seconds: float
    ) -> Iterator[tuple[str, bytes | str]]:
        """Waits for answers; see `Transport`."""
        until = time.monotonic() + seconds
        while not (messages := list(self.grid.pull_messages(list(pending)))):
            if time.monotonic() >= until:
                return
            time.sleep(POLL_SECONDS)
        for message in messages:
            number = message.metadata.reply_to_message_id
            if message.has_error():
                yield number, f"Flower: {message.error.reason}"
                continue
            data = message.content.config_records["fedloom"].get("envelope")
            yield number, data if isinstance(data, bytes) else "the answer holds no envelope"

    def admit(self, parties: Mapping[str, Any]) -> None:
        """Does nothing: Flower admits nodes. An envelope with another key is refused later."""

    def close(self) -> None:
        """Does nothing: the SuperLink belongs to Flower."""


def _message(node: int, content: dict[str, Any]) -> Message:
    return Message(RecordDict({"fedloom": ConfigRecord(content)}), node, "query.fedloom")
