"""The loop with a wire in it: every message becomes bytes and passes the strict decoder, both ways. Deployment without a network."""

from fedloom.engines import loop
from fedloom.message import Message, decode, encode


class Engine(loop.Engine):
    """Gives the same bits as the loop; what could not travel between organisations fails here."""

    def reach(self, name: str, phase: str, message: Message) -> Message:
        """One client's reply."""
        return decode(encode(super().reach(name, phase, decode(encode(message, phase), phase)), phase), phase)
