"""Rate limits: how many requests a sender may send, and how many connections it may open."""

from __future__ import annotations

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_SENDERS = 4096  # whose buckets are kept; the one that was silent longest is dropped first
BURST_SECONDS = 2.0  # a sender may send the requests of this time at once


@dataclass(frozen=True)
class Limits:
    """What the SuperLink accepts from one sender.

    Args:
        party_requests: Requests per second that a party may send, with a valid signature.
        party_concurrent: Requests of a party that may be under way at once.
        address_requests: Requests per second without a valid signature, from one address.
        address_connections: Open connections without a valid signature, from one address, and
            new connections per second.
    """

    party_requests: float = 200.0
    party_concurrent: int = 32
    address_requests: float = 20.0
    address_connections: int = 64


class RateLimit:
    """A token bucket for each sender. Its memory is bounded by `MAX_SENDERS`.

    Args:
        rate: Requests per second.
        clock: Returns a time in seconds that never goes back.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst, self._clock = rate, max(1.0, BURST_SECONDS * rate), clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, sender: str) -> float:
        """Counts a request. Returns 0, or the seconds after which the sender may try again."""
        now = self._clock()
        tokens, before = self._buckets.pop(sender, (self.burst, now))
        tokens = min(self.burst, tokens + (now - before) * self.rate)
        allowed = tokens >= 1
        self._buckets[sender] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > MAX_SENDERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self.rate


Peer = tuple[str, int]  # the address and the port of the other end of a connection


class Connections:
    """The open connections: those of each party, and those of each address.

    A connection belongs to its address until a request on it has a valid signature. Then it belongs
    to the party. So parties behind one address do not share a limit.

    Attributes:
        left: The parties that have closed their last connection and have sent nothing since.

    Args:
        limit: Open connections that belong to one address.
    """

    def __init__(self, limit: int):
        self.limit, self.left = limit, set[str]()
        self._owner: dict[Peer, str | None] = {}
        self._of_party: Counter[str] = Counter()
        self._of_address: Counter[str] = Counter()

    def opened(self, peer: Peer) -> bool:
        """Records a new connection. Returns whether its address may have one more."""
        self._owner[peer] = None
        self._of_address[network(peer[0])] += 1
        return self._of_address[network(peer[0])] <= self.limit

    def has_room(self, address: str) -> bool:
        """Returns whether an address, as `network` returns it, may have one more connection."""
        return self._of_address[address] < self.limit

    def authenticated(self, peer: Peer, owner: str) -> None:
        """Records that a request on a connection has a valid signature."""
        self.left.discard(owner)
        if peer in self._owner and (before := self._owner[peer]) != owner:
            self._forget(peer, before)
            self._owner[peer] = owner
            self._of_party[owner] += 1

    def is_anonymous(self, peer: Peer) -> bool:
        """Returns whether no request on a connection had a valid signature so far."""
        return self._owner.get(peer, "") is None

    def closed(self, peer: Peer, by_peer: bool) -> None:
        """Records that a connection is closed.

        Args:
            peer: The other end.
            by_peer: Whether the other end has closed it.
        """
        owner = self._owner.pop(peer, None)
        self._forget(peer, owner)
        if owner is not None and by_peer and not self._of_party[owner]:
            self.left.add(owner)

    def _forget(self, peer: Peer, owner: str | None) -> None:
        counts, name = (
            (self._of_address, network(peer[0])) if owner is None else (self._of_party, owner)
        )
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def network(address: str) -> str:
    """Returns what counts as one address: an IPv4 address, or an IPv6 network of /64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))
