"""A federation on this machine as users run it: `fedloom serve` and `fedloom join` in processes of their own, with keys and TLS."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

import fedloom
from fedloom.cli import main
from fedloom.data.files import to_file
from fedloom.deploy.keys import make_authority, make_party

SLOW = """
import time
from dataclasses import dataclass
from fedloom.nn.training import load_weights, weights
from fedloom.core.method import averaged, phase, setting
from fedloom.methods.fedavg import FedAvg as Quick

@dataclass(frozen=True)
class Slow(Quick):
    seconds: float = setting(0.3, "that a client takes for nothing", at_least=0)
    fails: str = setting("", "who fails in training")

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
    """`fedloom ARGUMENTS` in a child of this process, which has everything imported already. The rest is as in `subprocess.Popen`."""

    def __init__(self, arguments, folder, log):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                os.chdir(folder)
                for number in (1, 2):
                    os.dup2(log, number)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115  (it ends with the process)
                sys.argv = ["fedloom", *arguments]
                main()
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException:  # noqa: BLE001  (a child must never go on with its parent's tests)
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

    def wait(self, seconds=30):
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fedloom", seconds)
            time.sleep(0.02)
        return self.returncode


class Deployment:
    """Everything in `folder`; processes end with the deployment."""

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
    ):
        self.folder, self.parties, self.port, self.processes = (
            Path(folder),
            parties,
            free_port(),
            {},
        )
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
        self.tls, self.model = tls, model
        self.write()

    def write(self, path="federation.toml", address=None, **changed):
        """Writes the agreement, with another way to the coordinator, or other settings of the method, if given."""
        authority = {"authority": "ca.crt"} if self.tls else {}
        tables = {
            "federation": {"address": address or f"127.0.0.1:{self.port}", **authority, "coordinator": "coordinator.pub"},
            "parties": {name: f"{name}.pub" for name in self.parties},
            "data": {"num_features": self.federation.num_features, "num_classes": self.federation.num_classes, "split": "own"},
            "model": {"name": self.model}, "method": {**self.settings, **changed}, "run": self.run,
        }  # fmt: skip
        lines = [
            line
            for name, table in tables.items()
            for line in (f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items()))
        ]
        (self.folder / path).write_text("\n".join(lines) + "\n")
        return self.folder / path

    def start(self, who, *arguments):
        """Starts `fedloom ARGUMENTS`; what it says goes to who.log."""
        with open(self.folder / f"{who}.log", "ab") as log:
            self.processes[who] = Command(
                [str(argument) for argument in arguments], self.folder, log.fileno()
            )
        return self.processes[who]

    def serve(self, *more, out="run"):
        return self.start(
            "coordinator",
            "serve",
            "federation.toml",
            "--keys",
            ".",
            "--out",
            out,
            "--wait",
            60,
            *more,
        )

    def resume(self, out="run"):
        return self.start("coordinator", "resume", out)

    def join(self, name, *more, key=None, agreement="federation.toml"):
        given = [
            "--party",
            name,
            "--key",
            key or f"{name}.key",
            "--data",
            f"{name}.safetensors",
            "--state",
            f"state-{name}",
        ]
        return self.start(name, "join", agreement, *given, *more)

    def join_all(self):
        return [self.join(name) for name in self.parties]

    def said(self, who):
        path = self.folder / f"{who}.log"
        return path.read_text() if path.exists() else ""

    def until(self, condition, seconds=60):
        """Waits until something is so; fails with all that was said if it does not become so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(
                f"{who}:\n{self.said(who)}" for who in self.processes
            )
            time.sleep(0.05)

    def rounds_done(self, out="run"):
        path = self.folder / out / "history.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def completed(self, seconds=90, out="run"):
        """Waits until the coordinator has ended well; gives the summary."""
        try:
            code = self.processes["coordinator"].wait(seconds)
        except subprocess.TimeoutExpired:
            code = "still running"
        assert code == 0, f"{code}\n" + "\n".join(
            f"{who}:\n{self.said(who)}" for who in self.processes
        )
        return self.summary(out)

    def summary(self, out="run"):
        return json.loads((self.folder / out / "summary.json").read_text())

    def history(self, out="run"):
        return [
            json.loads(line)
            for line in (self.folder / out / "history.jsonl").read_text().splitlines()
        ]

    def link(self):
        """The process id of the link."""
        return next(
            pid
            for pid, parent in running("fedloom.deploy.superlink").items()
            if parent == self.processes["coordinator"].pid
        )

    def reference(self, method="fedavg", **settings):
        """What the loop engine makes of the same graphs."""
        from dataclasses import replace

        named = replace(self.federation, names=tuple(self.parties))
        of_method = {k: v for k, v in self.settings.items() if k != "name"}
        chosen = (
            str(self.folder / self.settings["name"])
            if self.settings["name"].endswith(".py")
            else self.settings["name"]
        )
        return fedloom.run(
            chosen, named, model=self.model, seed=self.run["seed"], **{**of_method, **settings}
        )

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def running(module):
    """{process: its parent} of the processes that run a module."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if module in (folder / "cmdline").read_text().split("\0"):
                found[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return found


class Wire:
    """What lies between a port of its own and another one: it can be cut, fall silent, be slow, and spoil what passes.

    delay: seconds that everything takes, each way. rate: bytes a second, each way (0: as fast as it goes).
    """

    def __init__(self, to, delay=0.0, rate=0):
        self.to, self.delay, self.rate = to, delay, rate
        self.whole, self.spoil, self.open = True, 0, []
        self.audible = threading.Event()  # while it is not, nothing passes, and nobody is told
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
                under_way = queue.Queue(64)
                threading.Thread(target=self._take, args=(one, under_way), daemon=True).start()
                threading.Thread(
                    target=self._bring, args=(under_way, one, other), daemon=True
                ).start()

    def _take(self, one, under_way):
        free = 0.0  # when the line is, for the next piece
        with suppress(OSError):  # cut
            while data := one.recv(4096 if self.rate else 65536):
                if self.spoil and len(data) > 100:
                    self.spoil -= 1
                    data = data[:60] + bytes([data[60] ^ 1]) + data[61:]
                free = max(free, time.monotonic()) + (len(data) / self.rate if self.rate else 0.0)
                under_way.put((free + self.delay, data))
        under_way.put(None)

    def _bring(self, under_way, one, other):
        with suppress(OSError):
            while piece := under_way.get():
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


def lines_of(text, pattern):
    return [line for line in text.splitlines() if re.search(pattern, line)]
