"""What a deployment over Flower costs and bears, on this machine, with TLS, registered keys and signatures.

    python bench/flower.py                        every part (about a quarter of an hour)
    python bench/flower.py exchange methods       these parts only

exchange   seconds that an exchange of 100 kB each way takes with 10 parties
methods    FedAvg, FedStruct, FedPG, O-pFGL (secure), FedGKC, FedGH on Cora with 4 parties: the loop engine's history hash?
death      seconds until a party that is killed is noticed, three times
twenty     20 parties, 20 rounds, one killed (and started again) every five rounds; memory of each process

Exit code 1 if a hash differs or a run does not complete.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import fedloom
from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport
from fedloom.deploy.engine import Engine, _free_port
from fedloom.deploy.keys import make_authority, make_party, read_party_key, read_public_key
from fedloom.deploy.party_transport import PartyTransport
from fedloom.experiments.run import run

PARTS: dict[str, Callable[[], bool]] = {}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 5},
    "fedstruct": {"rounds": 5},
    "fedpg": {"rounds": 5, "model": "gcn-2x64,gin-2x64,sage-2x64,sgc-2x64"},
    "opfgl": {"secure": True, "condense_steps": 100, "steps": 100},
    "fedgkc": {"rounds": 3, "model": "gcn-2x64,gat-2x64,sage-2x64,sgc-2x64"},
    "fedgh": {"rounds": 3, "vgae_epochs": 20, "diffusion_epochs": 20, "contrast_epochs": 20},
}


def part(function: Callable[[], bool]) -> Callable[[], bool]:
    """Decorator: a part, run by its name; gives whether all was as it should be."""
    PARTS[function.__name__] = function
    return function


def echo(address: str, folder: Path, name: str) -> None:
    """A party that sends back what it gets."""
    with closing(
        PartyTransport(address, folder / "ca.crt", read_party_key(folder / f"{name}.key"))
    ) as transport:
        transport.connect()
        while True:
            if (order := transport.receive()) is not None:
                transport.answer(order, order.envelope)


@part
def exchange(parties: int = 10, size: int = 100_000, times: int = 20) -> bool:
    """Seconds of an exchange."""
    folder, names = Path(tempfile.mkdtemp()), [f"p{k}" for k in range(parties)]
    make_authority(folder, "127.0.0.1")
    for name in names:
        make_party(folder, name)
    files = (folder / "server.crt", folder / "server.key", folder / "ca.crt")
    address = Address("127.0.0.1", _free_port(), *files)
    with closing(
        CoordinatorTransport(
            address,
            {name: read_public_key(folder / f"{name}.pub") for name in names},
            folder / "link.log",
        )
    ) as transport:
        children = [
            subprocess.Popen([sys.executable, __file__, "--echo", address.text, str(folder), name])
            for name in names
        ]
        try:
            while len(transport.seen()) < parties:
                time.sleep(0.1)
            took, body = [], os.urandom(size)
            for _ in range(times):
                began, waiting = time.perf_counter(), transport.post(dict.fromkeys(names, body))
                while waiting:
                    for number, data in transport.collect(waiting, 1.0):
                        assert data == body
                        del waiting[number]
                took.append(time.perf_counter() - began)
        finally:
            for child in children:
                child.kill()
                child.wait()
    print(
        f"exchange: {size / 1000:.0f} kB each way, {parties} parties: {median(took):.2f} s (least {min(took):.2f}, most {max(took):.2f})"
    )
    return True


@part
def methods(clients: int = 4) -> bool:
    """Every method's hash, over Flower and in the loop."""
    right = True
    for name, settings in METHODS.items():
        crosses = "known" if name == "fedstruct" else "none"
        federation = fedloom.divide(
            fedloom.load("cora"), clients, "louvain", 0, cross_edges=crosses
        )
        chosen = {"model": "gcn-2x64", "seed": 1, **settings}
        hashes, took = {}, {}
        for engine in ("loop", "flower"):
            began = time.perf_counter()
            hashes[engine] = run(name, federation, engine=engine, **chosen).summary["history_hash"]
            took[engine] = time.perf_counter() - began
        same = hashes["loop"] == hashes["flower"]
        right &= same
        verdict, times = (
            "same hash" if same else "ANOTHER HASH",
            f"{took['loop']:.1f} s in the loop, {took['flower']:.1f} s over Flower",
        )
        print(f"methods: {name}, Cora, {clients} parties: {verdict} ({times})", flush=True)
    return right


class Watched:
    """A run over Flower whose parties can be killed and started again."""

    def __init__(
        self, parties: int, rounds: int, on_round: Callable[[Any, Engine], None], **settings: Any
    ):
        federation = fedloom.divide(
            fedloom.load("synthetic:nodes=2000,features=32"), parties, "random", 0
        )
        self.engine: Any = None
        made = Engine.__init__

        def noted(engine: Engine, *given: Any, **more: Any) -> None:
            made(engine, *given, **more)
            self.engine = engine

        Engine.__init__ = noted  # type: ignore[method-assign]
        try:
            self.result = run(
                "fedavg", federation, model="gcn-2x16", rounds=rounds, engine="flower", quorum=0.5,
                on_round=lambda entry, planned: on_round(entry, self.engine), **settings,
            )  # fmt: skip
        finally:
            Engine.__init__ = made  # type: ignore[method-assign]


@part
def death(times: int = 3) -> bool:
    """Seconds from a kill to the end of the exchange that noticed it."""
    killed, took = [], []

    def on_round(entry: Any, engine: Engine) -> None:
        if killed and any(
            absence["cause"].startswith("no sign") for absence in entry.get("absent", ())
        ):
            took.append(time.perf_counter() - killed.pop())
        if not killed and len(took) < times and entry["round"] % 2 == 0:
            victim = engine.parties[1 + len(took)]  # another one each time
            os.kill(victim.process.pid, signal.SIGKILL)
            killed.append(time.perf_counter())

    Watched(8, 3 * times, on_round)
    print(
        f"death: noticed after {', '.join(f'{t:.1f}' for t in took)} s (a round's other exchanges counted)"
    )
    return bool(took) and max(took) < 20


@part
def twenty() -> bool:
    """20 parties, 20 rounds, a kill every five."""
    memory: dict[str, float] = {}

    def on_round(entry: Any, engine: Engine) -> None:
        if entry["round"] % 5 == 0 and entry["round"] < 20:
            victim = engine.parties[entry["round"] // 5]
            os.kill(victim.process.pid, signal.SIGKILL)
            victim.process.wait()
            victim.start()
        if entry["round"] == 19:
            memory["a party"] = max(_rss(party.process.pid) for party in engine.parties)
            memory["the link"] = _rss(engine.coordinator.transport._process.pid)
            memory["the coordinator"] = _rss(os.getpid())

    began = time.perf_counter()
    result = Watched(20, 20, on_round).result
    summary = result.summary
    took, absences = time.perf_counter() - began, summary["absences"]
    print(
        f"twenty: 20 parties, 20 rounds, three killed and started again: {summary['status']} after {took:.0f} s; absences {absences}"
    )
    print("twenty: memory, MB: " + ", ".join(f"{who} {mb:.0f}" for who, mb in memory.items()))
    back = [
        client
        for client in summary["absences"]
        if not any(a["client"] == client for a in result.history[-1].get("absent", ()))
    ]
    print(f"twenty: back in the last round: {', '.join(back) or 'nobody'}")
    return summary["status"] == "completed"


def _rss(pid: int) -> float:
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--echo"]:
        echo(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts (default: all)")
    chosen = parser.parse_args().parts or list(PARTS)
    verdicts = [PARTS[name]() for name in chosen]
    sys.exit(0 if all(verdicts) else 1)
