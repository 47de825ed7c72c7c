"""The wire engine: the loop, with every message encoded to bytes and decoded again, both ways.

Bit-identical to the loop engine. A message that could not travel between organisations fails here.
"""

from fedloom.core.message import Limit, Message, decode, encode
from fedloom.engines import loop


class Engine(loop.Engine):
    """The loop over encoded messages."""

    def perform(self, name: str, phase: str, message: Message) -> Message:
        """Runs the phase at one client."""
        reply = super().perform(name, phase, _travelled(message, phase))
        return _travelled(reply, phase)


def _travelled(message: Message, phase: str) -> Message:
    """Encodes a message and decodes it. This process wrote it, so it may have any length."""
    data = encode(message, phase)
    return decode(data, phase, Limit(len(data), len(data)))
