"""What one secure sum costs: all clients and the server in one process, on one core, with dropouts at every stage.

Each end of a pair computes its own keys, as real clients would. The sum is compared with the plain one, entry by entry.

python bench/secure_sum_core.py [--clients 1000] [--neighbours 100] [--size 100000] [--dropout 0.1] [--bits 64]
"""

import argparse
import os
import resource
import time
from collections.abc import Iterator

import numpy as np

from fedloom.privacy.secure_sum import Collector, Member, Terms


def dropouts(clients: int, share: float, rng: np.random.Generator) -> dict[int, str]:
    """At which stage each lost client is lost: half of them while masking, the others spread evenly."""
    lost = rng.permutation(clients)[: round(share * clients)].tolist()
    order = ["mask", "advertise", "mask", "share", "mask", "unmask"]
    return {client: order[i % len(order)] for i, client in enumerate(lost)}


class Traffic:
    """Bytes that one client that stays to the end sends and receives, by stage."""

    def __init__(self, client: int):
        self.client, self.up, self.down = client, {}, {}

    def book(self, client: int, stage: str, request: tuple, reply: np.ndarray) -> None:
        """Counts what the watched client got and gave."""
        if client == self.client:
            self.down[stage] = sum(array.nbytes for array in request)
            self.up[stage] = reply.nbytes


def main() -> None:
    """Prints seconds by stage, traffic and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--neighbours", type=int, default=100)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bits", type=int, default=64)
    asked = parser.parse_args()

    rng = np.random.default_rng(0)
    terms = Terms(neighbours=asked.neighbours, bits=asked.bits)
    lost = dropouts(asked.clients, asked.dropout, rng)
    watched = min(set(range(asked.clients)) - lost.keys())
    traffic = Traffic(watched)
    roster, run = np.ones(asked.clients, bool), os.urandom(16)
    values = rng.integers(0, 2**terms.bits, asked.size, terms.word.type)  # client c holds these times c + 1: no memory for all
    survivors = [client for client in range(asked.clients) if lost.get(client) not in ("advertise", "share", "mask")]

    begun = time.perf_counter()
    seconds: dict[str, float] = {}
    collector = Collector(terms, run, 0, roster, asked.size)
    members = [Member(client, asked.clients, terms, run, 0, roster, collector.threshold) for client in range(asked.clients)]

    def replies(stage: str, requests: dict) -> Iterator[tuple[int, np.ndarray]]:
        for client, request in requests.items():
            if lost.get(client) == stage:
                continue
            vector = (values * terms.word.type(client + 1),) if stage == "mask" else ()
            reply = getattr(members[client], stage)(*vector, *request)
            traffic.book(client, stage, request, reply)
            yield client, reply

    requests: dict = dict.fromkeys(range(asked.clients), ())
    takes = {"advertise": collector.take_keys, "share": collector.take_shares, "mask": collector.take_vectors}
    for stage, take in takes.items():
        since = time.perf_counter()
        requests = take(replies(stage, requests))
        seconds[stage] = time.perf_counter() - since
    since = time.perf_counter()
    revealed = list(replies("unmask", requests))
    seconds["unmask"] = time.perf_counter() - since
    since = time.perf_counter()
    total = collector.take_reveals(revealed)
    seconds["server puts together"] = time.perf_counter() - since
    whole = time.perf_counter() - begun

    expected = values * terms.word.type(sum(client + 1 for client in survivors) % 2**terms.bits)
    if not np.array_equal(total, expected):
        raise SystemExit("the sum is wrong")
    plain = asked.size * terms.word.itemsize
    print(f"{asked.clients} clients, {asked.neighbours} neighbours, t = {collector.threshold}, {asked.size} entries of {terms.bits} bits")
    print(f"lost: {', '.join(f'{list(lost.values()).count(stage)} in {stage}' for stage in ('advertise', 'share', 'mask', 'unmask'))}")
    print(f"whole sum {whole:.1f} s, exact; " + ", ".join(f"{stage} {took:.1f}" for stage, took in seconds.items()))
    up, down = sum(traffic.up.values()), sum(traffic.down.values())
    print(f"a client sends {up} bytes (plain: {plain}, {up / plain:.3f} x) and receives {down} besides the model")
    print(f"that is {up + down - plain} bytes more than plain, both ways; up {traffic.up}, down {traffic.down}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
