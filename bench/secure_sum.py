"""Measures the cost of one secure sum over a thousand clients, with dropouts at every stage.

All clients and the server run in one process on one core. Both clients of a pair compute their own
keys, and each verifies all signatures, as real clients do. The sum is compared with the plain sum,
entry by entry. The traffic is that of the ledger: bytes on the wire, with headers. The last lines
give the cost of signatures, of the consistency round and of drawing the graph.

python bench/secure_sum.py [--clients 1000] [--neighbours 100] [--size 100000] [--dropout 0.1]
                           [--bits 32]
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.message import Message, encoded_size
from fedloom.core.method import Method
from fedloom.core.phase import phase, summed
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine
from fedloom.privacy import identity
from fedloom.privacy.choice import aggregation_for, responder_for

STAGES = ("advertise_keys", "share_keys", "numbers", "confirm", "unmask")


@dataclass(frozen=True)
class Numbers(Method):
    """A method that only computes a sum."""

    size: int = setting(100_000, "how many numbers a client has", at_least=1)

    @summed
    @phase(x="float32[size]")
    def numbers(self, client: Client) -> Message:
        """Returns numbers that fixed point represents exactly, so that sums can be compared."""
        return {
            "x": torch.randint(-(2**12), 2**12, (self.size,), generator=client.rng("numbers"))
            / 2**10
        }

    def run(self, server: Server) -> None:
        """Does nothing: `main` asks for the sum."""


class Lossy(Engine):
    """An engine that loses the replies of some clients: {client: the stage of its dropout}."""

    lost: dict[str, str]

    def call(self, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
        """Sends messages to the clients. Returns the replies that are not lost."""
        return {
            name: reply
            for name, reply in super().call(phase, messages).items()
            if self.lost.get(name) != phase
        }


def measured_signatures() -> dict[str, list[float]]:
    """Returns {"sign" or "is_signed": [calls, seconds]}, which grows while the sum runs."""
    spent: dict[str, list[float]] = {}
    identity._is_valid = identity._is_valid.__wrapped__  # type: ignore[assignment]
    for name in ("sign", "is_signed"):
        function, total = getattr(identity.Identity, name), spent.setdefault(name, [0, 0.0])

        def timed(self: Any, *given: Any, function: Any = function, total: Any = total) -> Any:
            began = time.thread_time()
            try:
                return function(self, *given)
            finally:
                total[0] += 1
                total[1] += time.thread_time() - began

        setattr(identity.Identity, name, timed)
    return spent


def main() -> None:
    """Prints the seconds, and the bytes per client compared with the plain sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--neighbours", type=int, default=100)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bits", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)

    names = tuple(f"c{k}" for k in range(options.clients))
    facts = Facts(
        1,
        2,
        "node",
        names,
        ("gcn",) * len(names),
        secure=SecureTerms(neighbours=options.neighbours, bits=options.bits, range=8.0),
    )
    method, graph = (
        Numbers(size=options.size),
        Graph(torch.ones(1, 1), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0]), 2),
    )
    engine = Lossy(
        method, [Client(name, graph, facts, responder=responder_for(facts, name)) for name in names]
    )
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[
        : round(options.dropout * len(names))
    ].tolist()
    # A third of them drops out while masking, which costs most, the others at the other stages.
    # Nobody does so while the graph is drawn, which would end the sum.
    engine.lost = {
        names[k]: (STAGES[2], STAGES[0], STAGES[2], STAGES[1], STAGES[3], STAGES[4])[i % 6]
        for i, k in enumerate(order)
    }
    aggregation = aggregation_for(facts)
    policy = RoundPolicy("local")
    server = Server(method, facts, engine.call, policy, None, aggregation)  # type: ignore[arg-type]

    spent = measured_signatures()
    wall, cpu = time.perf_counter(), time.process_time()
    total = server.sum(method.numbers)["x"]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    left = [
        c for c in engine.clients.values() if engine.lost.get(c.name) in (None, "confirm", "unmask")
    ]
    expected = torch.zeros(options.size, dtype=torch.float64)
    for client in left:
        client.streams.clear()
        expected += method.numbers(client)["x"].double()
    assert torch.equal(total, expected.float()), "the sum differs from that of the survivors"

    stayed = next(c for c in names if c not in engine.lost)
    sent, of_stage = Counter({"up": 0, "down": 0}), Counter[str]()
    for row in server.ledger.rows:
        if row.client == stayed:
            sent[row.direction] += row.bytes
            of_stage[row.phase] += row.bytes
    plain = encoded_size((("x", f"int{options.bits}", (options.size,)),), "numbers")
    print(
        f"{len(names)} clients, k = {options.neighbours}, {len(engine.lost)} dropped out, "
        f"{options.size} numbers of {options.bits} bits"
    )
    print(f"sum of {len(left)} survivors, exact; {wall:.1f} s wall, {cpu:.1f} s CPU on one thread")
    both = sent["up"] + sent["down"]
    print(
        f"a client sends {sent['up']} B and gets {sent['down']} B; "
        f"the plain integers are {plain} B: {both / plain:.3f} x"
    )
    signatures = sum(count for count, _ in spent.values())
    seconds = sum(seconds for _, seconds in spent.values())
    print(
        f"signatures: {spent['sign'][0]} made, {spent['is_signed'][0]} verified, "
        f"{seconds:.2f} s CPU, {1000 * seconds / len(names):.1f} ms a client; "
        f"{signatures / len(names):.0f} a client"
    )
    print(f"bytes of a client by stage, both ways: {dict(of_stage)}")
    # Commitments and nonces of all clients, if a graph is drawn, and signatures of the neighbours.
    allowed = 1.3 * plain + 20_000 + 100 * len(names)
    time_met, size_met = (("MISSED", "met")[goal] for goal in (cpu < 90, both <= allowed))
    print(f"goal: under 90 s of CPU ({time_met}); at most {allowed:.0f} B ({size_met})")


if __name__ == "__main__":
    main()
