"""Measures deployments over Flower on this machine, with TLS, registered keys and signatures.

    python bench/flower.py                        all parts (about a quarter of an hour)
    python bench/flower.py exchange methods       these parts only

exchange   time of an exchange of 100 kB each way with 10 parties
methods    FedAvg, FedStruct, FedPG, O-pFGL (secure), FedGKC, FedGH on Cora with 4 parties: whether
           the history hash is that of the loop engine
death      time until a killed party is noticed, three times
twenty     20 parties, 20 rounds; one party is killed and started again every five rounds; memory of
           each process

The exit code is 1 if a hash differs or a run does not complete.
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
from typing import Any, Literal
from unittest.mock import patch

import fedloom
from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport
from fedloom.deploy.engine import Engine, free_port
from fedloom.deploy.keys import make_authority, make_party, read_party_key, read_public_key
from fedloom.deploy.party_transport import PartyTransport
from fedloom.experiments.result import Result
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
    """Registers a part by its name. It returns whether all is as expected."""
    PARTS[function.__name__] = function
    return function


def echo(address: str, folder: Path, name: str) -> None:
    """Runs a party that sends each message back."""
    key = read_party_key(folder / f"{name}.key")
    with closing(PartyTransport(address, folder / "ca.crt", key)) as transport:
        transport.connect()
        while True:
            if (order := transport.receive()) is not None:
                transport.answer(order, order.envelope)


@part
def exchange(parties: int = 10, size: int = 100_000, times: int = 20) -> bool:
    """Measures the time of an exchange."""
    folder, names = Path(tempfile.mkdtemp()), [f"p{k}" for k in range(parties)]
    make_authority(folder, "127.0.0.1")
    for name in names:
        make_party(folder, name)
    files = (folder / "server.crt", folder / "server.key", folder / "ca.crt")
    address = Address("127.0.0.1", free_port(), *files)
    keys = {name: read_public_key(folder / f"{name}.pub") for name in names}
    with closing(CoordinatorTransport(address, keys, folder / "superlink.log")) as transport:
        children = [
            subprocess.Popen([sys.executable, __file__, "--echo", address.text, str(folder), name])
            for name in names
        ]
        try:
            while len(transport.status()) < parties:
                time.sleep(0.1)
            took, body = [], os.urandom(size)
            for _ in range(times):
                began, pending = time.perf_counter(), transport.send(dict.fromkeys(names, body))
                while pending:
                    for number, data in transport.receive(pending, 1.0):
                        assert data == body
                        del pending[number]
                took.append(time.perf_counter() - began)
        finally:
            for child in children:
                child.kill()
                child.wait()
    print(
        f"exchange: {size / 1000:.0f} kB each way, {parties} parties: {median(took):.2f} s "
        f"(minimum {min(took):.2f}, maximum {max(took):.2f})"
    )
    return True


@part
def methods(clients: int = 4) -> bool:
    """Compares the history hashes over Flower with those of the loop engine."""
    all_same = True
    for name, settings in METHODS.items():
        edges: Literal["known", "none"] = "known" if name == "fedstruct" else "none"
        federation = fedloom.divide(fedloom.load("cora"), clients, "louvain", 0, cross_edges=edges)
        chosen = {"model": "gcn-2x64", "seed": 1, **settings}
        hashes, took = {}, {}
        for engine in ("loop", "flower"):
            began = time.perf_counter()
            hashes[engine] = run(name, federation, engine=engine, **chosen).summary["history_hash"]
            took[engine] = time.perf_counter() - began
        same = hashes["loop"] == hashes["flower"]
        all_same &= same
        verdict = "same hash" if same else "ANOTHER HASH"
        times = f"{took['loop']:.1f} s in the loop, {took['flower']:.1f} s over Flower"
        print(f"methods: {name}, Cora, {clients} parties: {verdict} ({times})", flush=True)
    return all_same


def run_with_engine(
    parties: int, rounds: int, on_round: Callable[[dict[str, Any], Engine], None]
) -> Result:
    """Runs FedAvg over Flower. `on_round` receives the engine and may kill its parties."""
    graph = fedloom.load("synthetic:nodes=2000,features=32")
    federation = fedloom.divide(graph, parties, "random", 0)
    engines: list[Engine] = []
    original = Engine.__init__

    def recording(engine: Engine, *args: Any, **settings: Any) -> None:
        original(engine, *args, **settings)
        engines.append(engine)

    with patch.object(Engine, "__init__", recording):
        return run(
            "fedavg",
            federation,
            model="gcn-2x16",
            rounds=rounds,
            engine="flower",
            quorum=0.5,
            callbacks=lambda entry: on_round(entry, engines[-1]),
        )


@part
def death(times: int = 3) -> bool:
    """Measures the time from a kill to the end of the round that noticed it."""
    killed: list[float] = []
    took: list[float] = []

    def on_round(entry: dict[str, Any], engine: Engine) -> None:
        causes = [absence["cause"] for absence in entry.get("absent", ())]
        if killed and any(cause.startswith("no sign") for cause in causes):
            took.append(time.perf_counter() - killed.pop())
        if not killed and len(took) < times and entry["round"] % 2 == 0:
            victim = engine.parties[1 + len(took)]  # another party each time
            os.kill(victim.process.pid, signal.SIGKILL)
            killed.append(time.perf_counter())

    run_with_engine(8, 3 * times, on_round)
    seconds = ", ".join(f"{t:.1f}" for t in took)
    print(f"death: noticed after {seconds} s (including the other exchanges of the round)")
    return bool(took) and max(took) < 20


@part
def twenty() -> bool:
    """Runs 20 parties for 20 rounds, with a kill every five rounds."""
    memory: dict[str, float] = {}

    def on_round(entry: dict[str, Any], engine: Engine) -> None:
        if entry["round"] % 5 == 0 and entry["round"] < 20:
            victim = engine.parties[entry["round"] // 5]
            os.kill(victim.process.pid, signal.SIGKILL)
            victim.process.wait()
            victim.start()
        if entry["round"] == 19:
            transport = engine.coordinator.transport
            assert isinstance(transport, CoordinatorTransport)
            memory["a party"] = max(_rss(party.process.pid) for party in engine.parties)
            memory["the SuperLink"] = _rss(transport._process.pid)
            memory["the coordinator"] = _rss(os.getpid())

    began = time.perf_counter()
    result = run_with_engine(20, 20, on_round)
    summary = result.summary
    took, absences = time.perf_counter() - began, summary["absences"]
    print(
        f"twenty: 20 parties, 20 rounds, three killed and started again: {summary['status']} "
        f"after {took:.0f} s; absences {absences}"
    )
    print("twenty: memory, MB: " + ", ".join(f"{who} {mb:.0f}" for who, mb in memory.items()))
    absent = {a["client"] for a in result.history[-1].get("absent", ())}
    back = [client for client in summary["absences"] if client not in absent]
    print(f"twenty: present again in the last round: {', '.join(back) or 'none'}")
    return summary["status"] == "completed"


def _rss(pid: int) -> float:
    """Returns the memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


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
