"""Deployments on this machine, for tests and for bench/faults.py.

`Deployment` runs `fedloom serve` and `fedloom join` as users do: one process each, keys, TLS.
`Wire` is a TCP proxy that can fail. `InProcessTransport` connects a coordinator to parties in this
process, without a network.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

import fedloom
from fedloom.cli import main
from fedloom.data.files import to_file
from fedloom.deploy.envelope import EnvelopeError
from fedloom.deploy.keys import make_authority, make_party
from fedloom.deploy.transport import PartyStatus

WAIT_SECONDS = 240  # for an event; generous, since the machine may be busy
SLOW = """
import time
from dataclasses import dataclass
from fedloom.api import averaged, phase, setting
from fedloom.methods.fedavg import FedAvg as Quick

@dataclass(frozen=True)
class Slow(Quick):
    seconds: float = setting(0.3, "that training takes longer", at_least=0)
    fails: str = setting("", "clients that fail in training")

    @averaged(by="size")
    @phase(model="=model")
    def train(self, client, model):
        time.sleep(self.seconds)
        if client.name in self.fails.split(","):
            raise RuntimeError("the disk of this party is full of sand")
        return super().train(client, model)
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Command:
    """`fedloom ARGUMENTS` in a fork of this process. The methods are those of `Popen`.

    This process has imported everything already, so that a command starts at once.
    """

    def __init__(self, arguments, folder, log):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                os.chdir(folder)
                for number in (1, 2):
                    os.dup2(log, number)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (ends with the process)
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
                sys.argv = ["fedloom", *arguments]
                main()
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException:  # noqa: BLE001  (a child must never run its parent's tests)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds=WAIT_SECONDS):
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fedloom", seconds)
            time.sleep(0.02)
        return self.returncode


class Deployment:
    """A federation in a folder. `end` ends all its processes."""

    def __init__(
        self,
        folder,
        parties=("bank-a", "bank-b", "bank-c"),
        rounds=4,
        method="fedavg",
        run=None,
        settings=None,
        tls=True,
        model="gcn-2x8",
        federation=None,
    ):
        self.folder, self.parties = Path(folder), parties
        self.port, self.processes = free_port(), {}
        make_authority(self.folder, "127.0.0.1")
        for name in ("coordinator", *parties):
            make_party(self.folder, name)
        (self.folder / "slow.py").write_text(SLOW)
        graph = fedloom.load("synthetic:nodes=120,features=8")
        self.federation = fedloom.divide(graph, len(parties), "random", 0)
        for name, own in zip(parties, self.federation.graphs, strict=True):
            to_file(own, self.folder / f"{name}.safetensors")
        self.settings = {"name": method, "rounds": rounds, **(settings or {})}
        self.run = {"seed": 7, "checkpoint_every": 1, **(run or {})}
        self.tls, self.model, self.settings_of_federation = tls, model, federation or {}
        # Its agreement names Python files.
        self.trust = ("--trust",) if ".py" in f"{method} {model}" else ()
        self.write()

    def write(self, path="federation.toml", address=None, **changed):
        """Writes an agreement. Returns its path.

        address: another address of the coordinator. changed: other settings of the method.
        """
        authority = {"authority": "ca.crt"} if self.tls else {}
        tables = {
            "federation": {
                "address": address or f"127.0.0.1:{self.port}",
                "coordinator": "coordinator.pub",
                **authority,
                **self.settings_of_federation,
            },
            "parties": {name: f"{name}.pub" for name in self.parties},
            "data": {
                "num_features": self.federation.num_features,
                "num_classes": self.federation.num_classes,
                "split": "own",
            },
            "model": {"name": self.model},
            "method": {**self.settings, **changed},
            "run": self.run,
        }
        lines = [
            line
            for name, table in tables.items()
            for line in (f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items()))
        ]
        (self.folder / path).write_text("\n".join(lines) + "\n")
        return self.folder / path

    def start(self, who, *arguments):
        """Starts `fedloom ARGUMENTS`. Its output goes to WHO.log."""
        with open(self.folder / f"{who}.log", "ab") as log:
            self.processes[who] = Command(
                [str(argument) for argument in arguments], self.folder, log.fileno()
            )
        return self.processes[who]

    def serve(self, *more, out="run"):
        given = ("--keys", ".", "--out", out, "--wait", WAIT_SECONDS)
        return self.start("coordinator", "serve", "federation.toml", *given, *self.trust, *more)

    def resume(self, out="run"):
        return self.start("coordinator", "resume", out, *self.trust)

    def join(self, name, *more, key=None, agreement="federation.toml"):
        files = {"--key": key or f"{name}.key", "--data": f"{name}.safetensors"}
        given = {"--party": name, **files, "--state": f"state-{name}"}
        flat = [word for option in given.items() for word in option]
        return self.start(name, "join", agreement, *flat, *self.trust, *more)

    def join_all(self):
        return [self.join(name) for name in self.parties]

    def output(self, who):
        """Returns the output of a process, in one line."""
        path = self.folder / f"{who}.log"
        return " ".join(path.read_text().split()) if path.exists() else ""

    def outputs(self):
        return "\n".join(f"{who}:\n{self.output(who)}" for who in self.processes)

    def until(self, condition, seconds=WAIT_SECONDS):
        """Waits until a condition holds. Fails with the output of all processes if it does not."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.outputs()
            time.sleep(0.05)

    def rounds_done(self, out="run"):
        path = self.folder / out / "history.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def completed(self, seconds=2 * WAIT_SECONDS, out="run"):
        """Waits until the coordinator has ended with exit code 0. Returns the summary."""
        try:
            code = self.processes["coordinator"].wait(seconds)
        except subprocess.TimeoutExpired:
            code = "still running"
        assert code == 0, f"{code}\n{self.outputs()}"
        return self.summary(out)

    def summary(self, out="run"):
        return json.loads((self.folder / out / "summary.json").read_text())

    def history(self, out="run"):
        path = self.folder / out / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def superlink(self):
        """Returns the process id of the SuperLink."""
        from fedloom.deploy import coordinator_transport  # it needs Flower

        return next(
            pid
            for pid, parent in running(coordinator_transport.PROGRAM).items()
            if parent == self.processes["coordinator"].pid
        )

    def reference(self, **settings):
        """Returns the result of the loop engine on the same graphs."""
        named = replace(self.federation, names=tuple(self.parties))
        own = {k: v for k, v in self.settings.items() if k != "name"}
        name = self.settings["name"]
        method = str(self.folder / name) if name.endswith(".py") else name
        given = {"model": self.model, "seed": self.run["seed"], "engine": "loop", **own, **settings}
        return fedloom.run(method, named, **given)

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def kill(process):
    """Kills a process as a power cut would."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def absent_in(entry):
    """Returns the clients that were absent in a round, from its history entry."""
    return {absence["client"] for absence in entry.get("absent", ())}


def running(module):
    """Returns {process: its parent} of the processes that run a module."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if module in (folder / "cmdline").read_text().split("\0"):
                stat = (folder / "stat").read_text()
                found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


class InProcessTransport:
    """A `Transport` to `Party` objects in this process.

    Attributes:
        parties: The parties that have joined, by name.
        silence: Seconds since a party was last heard from; 0 if it is not here.
        connections: How often a party has connected; 1 if it is not here.
        closed: Parties that have closed their connections.
        held: Parties whose answers are held back.
        returns: How often Flower returns the next orders of a party.
        sent: The number of orders that each party was sent.
    """

    def __init__(self, parties):
        self.parties = dict(parties)
        self.silence, self.connections, self.returns = {}, {}, Counter()
        self.held, self.sent, self._answers, self._numbers = set(), Counter(), {}, count()
        self.closed = set()

    def send(self, envelopes, limit=2**30):
        pending = {str(next(self._numbers)): name for name in envelopes}
        for number, name in pending.items():
            self.sent[name] += 1
            if self.returns[name]:
                self.returns[name] -= 1
                self._answers[number] = name, "Flower: the node is not available"
                continue
            with suppress(EnvelopeError):  # a party does not answer an order that it refuses
                self._answers[number] = name, self.parties[name].answer(envelopes[name])
        return pending

    def receive(self, pending, seconds):
        ready = [n for n in pending if n in self._answers and self._answers[n][0] not in self.held]
        if not ready:
            time.sleep(min(seconds, 0.01))
        return [(number, self._answers.pop(number)[1]) for number in ready]

    def status(self):
        return {
            name: PartyStatus(
                self.silence.get(name, 0.0), self.connections.get(name, 1), name in self.closed
            )
            for name in self.parties
        }

    def admit(self, parties):
        self.admitted = dict(parties)

    def close(self):
        pass


class Wire:
    """A TCP proxy in front of a port. It can be cut, fall silent, be slow, and corrupt bytes.

    Args:
        to: The port that it leads to.
        delay: Seconds of delay in each direction.
        rate: Bytes per second in each direction; 0 for no limit.
    """

    def __init__(self, to, delay=0.0, rate=0):
        self.to, self.delay, self.rate = to, delay, rate
        self.whole, self.corrupt, self.open = True, 0, []
        self.audible = threading.Event()  # while it is not set, nothing passes, without an error
        self.audible.set()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            try:
                if not self.whole:
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            self.open += [near, far]
            for one, other in ((near, far), (far, near)):
                buffer = queue.Queue(64)
                reader = threading.Thread(target=self._read, args=(one, buffer), daemon=True)
                writer = threading.Thread(
                    target=self._write, args=(buffer, one, other), daemon=True
                )
                reader.start()
                writer.start()

    def _read(self, one, buffer):
        free = 0.0  # when the line is free for the next piece
        with suppress(OSError):  # cut
            while data := one.recv(4096 if self.rate else 65536):
                if self.corrupt and len(data) > 100:
                    self.corrupt -= 1
                    data = data[:60] + bytes([data[60] ^ 1]) + data[61:]
                free = max(free, time.monotonic()) + (len(data) / self.rate if self.rate else 0.0)
                buffer.put((free + self.delay, data))
        buffer.put(None)

    def _write(self, buffer, one, other):
        with suppress(OSError):
            while piece := buffer.get():
                due, data = piece
                time.sleep(max(0.0, due - time.monotonic()))
                self.audible.wait()
                other.sendall(data)
        for end in (one, other):
            end.close()

    def cut(self):
        self.whole = False
        ends, self.open = self.open, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def fall_silent(self):
        self.audible.clear()

    def mend(self):
        self.whole = True
        self.audible.set()

    def close(self):
        self.listening.close()
        self.mend()
        self.cut()


def port_is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
