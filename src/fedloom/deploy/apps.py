"""fedloom as a Flower app: a `ServerApp` and a `ClientApp` for all methods, for who runs Flower's own SuperLink and SuperNodes already.

    [tool.flwr.app.components]
    serverapp = "fedloom.deploy.apps:server"
    clientapp = "fedloom.deploy.apps:client"

The envelopes are those of `fedloom serve` and `fedloom join`, and so is what reads them. Flower starts a process for every message; the
client side therefore hands its envelope to a party that stays, `fedloom join ... --socket PATH`, and imports no PyTorch. What Flower's own
processes cost, and what they do not notice, is in decision 10: this is the way for who has to use them.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.deploy.framing import receive_frame, send_frame
from fedloom.deploy.superlink import quiet

quiet()
from flwr.app import ConfigRecord, Context, Message, RecordDict  # noqa: E402  (Flower looks at the environment when it is imported)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

LOOK_EVERY = 0.1  # seconds between looks for answers
ASK_AGAIN = 5.0  # seconds after which a node that has not said which party it is, is asked again
server = ServerApp()
client = ClientApp()  # two lines: Flower looks for the names without running this


# ---- at a party ----
@client.query("fedloom")
def answer(message: Message, context: Context) -> Message:
    """Hands an order to the party that stays at this node, and sends back what it answers. node config: party, its name, and socket."""
    told = message.content.config_records["fedloom"].get("envelope")
    if not isinstance(told, bytes):
        return Message(
            RecordDict({"fedloom": ConfigRecord({"party": str(context.node_config["party"])})}),
            reply_to=message,
        )
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(str(context.node_config["socket"]))
        send_frame(wire, told)
        return Message(
            RecordDict({"fedloom": ConfigRecord({"envelope": receive_frame(wire)})}),
            reply_to=message,
        )


# ---- at the coordinator ----
@server.main()
def main(grid: Grid, context: Context) -> None:
    """`fedloom serve` over Flower's grid; a run that is in the folder already is gone on with.

    run config: agreement, keys and out, paths at the coordinator; wait, in seconds, for the parties.
    """
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.serve import serve
    from fedloom.experiments.run_folder import read_config

    said = context.run_config
    agreement, keys, out = (Path(str(said[name])) for name in ("agreement", "keys", "out"))
    agreed = read_agreement(agreement)
    resumed = read_config(out) if (out / "config.json").exists() else None
    serve(
        agreed,
        keys,
        out,
        wait=float(said.get("wait", 600.0)),
        resumed=resumed,
        opened=lambda: GridTransport(grid, agreed.parties),
    )


class GridTransport:
    """What the coordinator needs of an `CoordinatorTransport`, over Flower's own grid.

    Who is there is what Flower says: it notices deaths after a minute. A node says itself which party it is, and whoever lies about that
    signs with the wrong key.
    """

    def __init__(self, grid: Grid, parties: Mapping[str, Any]):
        self.grid, self.parties = grid, parties
        self.node_of: dict[str, int] = {}
        self._asked: dict[
            str, tuple[int, float]
        ] = {}  # questions which party a node is: the node, and when it was asked
        self._came: Counter[str] = (
            Counter()
        )  # how often a party has turned up, each time as another node

    def seen(self) -> dict[str, Any]:
        """Parties whose nodes are there."""
        from fedloom.deploy.coordinator_transport import Seen

        there = set(self.grid.get_node_ids())
        if self._asked:
            for message in self.grid.pull_messages(list(self._asked)):
                node, _ = self._asked.pop(message.metadata.reply_to_message_id, (0, 0.0))
                name = (
                    None
                    if message.has_error()
                    else message.content.config_records["fedloom"].get("party")
                )
                if node and isinstance(name, str) and name in self.parties:
                    self.node_of[name] = node
                    self._came[name] += 1
        asked = {node for node, when in self._asked.values() if time.monotonic() < when + ASK_AGAIN}
        if new := there - set(self.node_of.values()) - asked:
            questions = [_message(node, {"who": True}) for node in sorted(new)]
            numbers = list(self.grid.push_messages(questions))
            self._asked |= {
                number: (node, time.monotonic())
                for number, node in zip(numbers, sorted(new), strict=True)
            }
        return {
            name: Seen(0.0, self._came[name])
            for name, node in self.node_of.items()
            if node in there
        }

    def post(self, envelopes: Mapping[str, bytes]) -> dict[str, str]:
        """Sends each party its envelope; gives {message id: party}."""
        messages = [
            _message(self.node_of[party], {"envelope": data}) for party, data in envelopes.items()
        ]
        return dict(zip(self.grid.push_messages(messages), envelopes, strict=True))

    def collect(
        self, waiting: Mapping[str, str], seconds: float
    ) -> Iterator[tuple[str, bytes | str]]:
        """Waits at most so long for answers to posted messages; gives (message id, envelope), or (message id, what went wrong)."""
        until = time.monotonic() + seconds
        while (
            not (came := list(self.grid.pull_messages(list(waiting)))) and time.monotonic() < until
        ):
            time.sleep(LOOK_EVERY)
        for message in came:
            if message.has_error():
                yield message.metadata.reply_to_message_id, f"Flower: {message.error.reason}"
            else:
                data = message.content.config_records["fedloom"].get("envelope")
                yield (
                    message.metadata.reply_to_message_id,
                    data if isinstance(data, bytes) else "its answer holds no envelope",
                )

    def close(self) -> None:
        """Nothing: the link is Flower's."""


def _message(node: int, content: dict[str, Any]) -> Message:
    return Message(RecordDict({"fedloom": ConfigRecord(content)}), node, "query.fedloom")
