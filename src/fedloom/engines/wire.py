"""The wire engine: the loop, with every message encoded to bytes and decoded again, both ways.

Bit-identical to the loop engine. A message that could not travel between organisations fails here,
and so does a reply that is longer than its phase declares.
"""

from fedloom.core.message import Limit, Message, decode, encode, largest_size
from fedloom.engines import loop


class Engine(loop.Engine):
    """The loop over encoded messages."""

    def perform(self, name: str, phase: str, message: Message) -> Message:
        """Runs the phase at one client."""
        sent = encode(message, phase)
        # This process wrote the message, so it may have any length.
        arrived = decode(sent, phase, Limit(len(sent), len(sent)))
        reply = encode(super().perform(name, phase, arrived), phase)
        longest = self.longest_reply(name)
        if longest is None:
            return decode(reply, phase, Limit(len(reply), len(reply)))
        return decode(reply, phase, largest_size(longest, phase))
