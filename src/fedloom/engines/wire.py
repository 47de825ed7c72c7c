"""The loop with a wire in it: every message becomes bytes and passes the strict decoder, both ways. Deployment without a network."""

from fedloom.engines import loop
from fedloom.message import Message, decode, encode


class Engine(loop.Engine):
    """Gives the same bits as the loop; what could not travel between organisations fails here."""

    def call(self, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
        """Takes a phase's name and a message per client, gives each client's reply."""
        arrived = {name: decode(encode(message, phase), phase) for name, message in messages.items()}
        replies = super().call(phase, arrived)
        return {name: decode(encode(reply, phase), phase) for name, reply in replies.items()}
