"""Global pruning (Sec. 5.3): the p·n largest entries of the whole Â^l stay.

No client sees the whole matrix, and no client shows an entry. The server finds the threshold byte
by byte from counts: how many entries have which next byte, summed over the clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase, summed
from fedloom.core.server import Server
from fedloom.methods.fedstruct import powers
from fedloom.methods.fedstruct.state import state_of


class GlobalPruning:
    """The phases of `prune = "global"`."""

    @summed
    @phase(counts="int64[256] in 0..")
    def tally(self, client: Client, prefix: Tensor, depth: Tensor) -> Message:
        """Counts own entries with the leading bytes `prefix` by their next byte."""
        counts = powers.tally(state_of(client).power, int(prefix), int(depth))
        return {"counts": torch.from_numpy(counts)}

    @summed
    @phase(counts="int64[K] in 0..")
    def ties(self, client: Client, bits: Tensor) -> Message:
        """Counts own entries that are equal to the threshold, at the client's own position."""
        counts = torch.zeros(client.facts.num_clients, dtype=torch.int64)
        equal = int((powers.ranks(state_of(client).power) == int(bits)).sum())
        counts[client.facts.clients.index(client.name)] = equal
        return {"counts": counts}

    @phase()
    def cut(self, client: Client, bits: Tensor, ties: Tensor) -> Message:
        """Drops entries below the threshold, and all but `ties` of those that are equal to it."""
        state = state_of(client)
        state.power = powers.cut_below(state.power, int(bits), int(ties))
        return {}

    def _prune_globally(self, server: Server, most: int) -> None:
        """Has the clients keep the `most` largest entries of the whole matrix."""
        bits, above = 0, 0  # the threshold's bytes so far; how many entries are surely above it
        for depth in range(4):
            prefix, number = torch.tensor(bits), torch.tensor(depth)
            counts = server.sum(self.tally, prefix=prefix, depth=number)["counts"]
            if depth == 0 and int(counts.sum()) <= most:
                return
            from_top = counts.flip(0).cumsum(0)
            place = int((above + from_top < most).sum())
            above += int(from_top[place - 1]) if place else 0
            bits = bits * 256 + 255 - place
        counts = server.sum(self.ties, bits=torch.tensor(bits))["counts"]
        equal = dict(zip(server.clients, counts.tolist(), strict=True))
        room, share = most - above, {}
        for client in sorted(equal):
            share[client] = min(equal[client], room)
            room -= share[client]
        each = {
            client: {"bits": torch.tensor(bits), "ties": torch.tensor(share[client])}
            for client in server.clients
        }
        server.ask(self.cut, each=each)
