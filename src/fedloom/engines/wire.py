"""The wire engine: the loop, with every message encoded to bytes and decoded again, both ways.

Bit-identical to the loop engine. A message that could not travel between organisations fails here.
"""

from fedloom.core.message import Message, decode, encode
from fedloom.engines import loop


class Engine(loop.Engine):
    """The loop over encoded messages."""

    def perform(self, name: str, phase: str, message: Message) -> Message:
        """Runs the phase at one client."""
        arrived = decode(encode(message, phase), phase)
        return decode(encode(super().perform(name, phase, arrived), phase), phase)
