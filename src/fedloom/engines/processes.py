"""Worker processes on this machine, each with a share of the clients: for graphs on which arithmetic dominates. The same bits as the loop.

Workers are forked. So they inherit their clients, of whatever method (a user's own file, a class made a moment ago): no graph is copied or
written out, nothing is imported again, a script needs no `if __name__ == "__main__"`, and a start takes milliseconds where a spawned one
takes seconds. What forking is feared for, a pool of OpenMP threads of which only the memory survives, does not come up: pools belong to the
thread that opened them, and a worker does all its work in a fresh one (torch hangs in the inherited one, as soon as it wants two threads).

    this process                                            worker k
    tensors of all messages ──► memory that all can read ──► copied for each client, as in the loop
    where to look           ──► a pipe                   ──► the phase, one client after another
    copied for `run`        ◄── memory that k writes     ◄── replies
                            ◄── a pipe                   ◄── where to look

What several clients get is written once. Where everything is, and who has failed, is JSON in the same memory: through the pipe go a few
bytes, so that no worker can keep anybody from writing or reading on. The memory has no name (memfd): it grows as needed, does not count
against /dev/shm, and is gone with the last process that holds it, however that ends. A worker ends with its engine, or when this process
is gone.
"""

from __future__ import annotations

import json
import math
import mmap
import multiprocessing
import os
import signal
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import DTYPES, Message, isolate, unflatten
from fedloom.core.method import Method
from fedloom.engines import loop
from fedloom.engines._workers import Content, Failures, WorkerEngine, WorkerError, obey
from fedloom.errors import ConfigError

if not hasattr(os, "memfd_create"):
    raise ConfigError("run.engine 'processes' needs Linux (fork and memfd); use loop here")

ALIGNED = 64  # bytes: where vector instructions like a tensor to begin
Place = tuple[int, int]  # begin and length
Layout = list[
    tuple[list[str], list[tuple[str, str, list[int], int]]]
]  # whose; name, dtype, shape and place of each tensor


class Block:
    """Memory that this process shares with those it forks. One side writes messages, the other reads them where they are."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedloom")
        self._map: mmap.mmap | None = None
        self.end = 0  # of what was written last

    def write(self, contents: list[Content], begin: int = 0) -> Layout:
        """Writes messages over what was there from `begin` on, each different tensor once; gives where everything is."""
        tensors = {id(t): t for flat, _ in contents for t in flat.values()}
        place, self.end = {}, begin
        for key, tensor in tensors.items():
            place[key] = self.end
            self.end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        if self.end > os.fstat(self._file).st_size:
            os.posix_fallocate(
                self._file, 0, self.end
            )  # an error here, not a bus error later, if there is not that much
        for key, tensor in tensors.items():
            self._at(place[key], tensor.dtype, tensor.shape).copy_(tensor.detach())
        return [
            (
                clients,
                [
                    (name, str(t.dtype).removeprefix("torch."), list(t.shape), place[id(t)])
                    for name, t in flat.items()
                ],
            )
            for flat, clients in contents
        ]

    def append(self, content: Any) -> Place:
        """Writes what JSON can say behind what was written last; gives where it is."""
        text, begin = json.dumps(content).encode(), self.end
        self.write([({"": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, [])], begin)
        return begin, len(text)

    def content(self, place: Place) -> Any:
        """What was appended there."""
        begin, length = place
        return json.loads(self._at(begin, torch.uint8, [length]).numpy().tobytes())

    def read(self, layout: Layout) -> dict[str, Message]:
        """The messages as they lie in the memory, good until the other side writes again: whoever keeps one copies it."""
        read: dict[str, Message] = {}
        for clients, rows in layout:
            message = unflatten(
                {name: self._at(place, DTYPES[dtype], shape) for name, dtype, shape, place in rows}
            )
            read |= dict.fromkeys(clients, message)
        return read

    def _at(self, place: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._map is None or place + count * dtype.itemsize > len(
            self._map
        ):  # the other side may have made it grow
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=place).view(shape)

    def close(self) -> None:
        """Lets go of the memory; tensors that were read stay good."""
        self._map = None
        os.close(self._file)


class Engine(WorkerEngine):
    """Forks its workers when it is made and ends them when it is closed (or forgotten)."""

    def cores(self) -> int:
        """The cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Forks a worker for each group."""
        fork = multiprocessing.get_context("fork")
        self._sent, self._answered = Block(), [Block() for _ in groups]
        self._reads: dict[
            int, int
        ] = {}  # up to where in the memory a worker that has not answered may still read
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        blocks = [self._sent, *self._answered]
        self._ending = weakref.finalize(
            self, _end, os.getpid(), self._workers, self._pipes, blocks
        )  # at the latest when Python ends
        for k, group in enumerate(groups):
            here, there = fork.Pipe()
            self._pipes.append(here)
            # A worker that held on to this process's ends would keep its siblings waiting after this process is gone.
            arguments = (
                method,
                group,
                self.policy,
                self.threads,
                there,
                self._pipes,
                self._sent,
                self._answered[k],
            )
            worker = fork.Process(
                target=_work, args=arguments, name=f"fedloom worker {k}", daemon=True
            )
            worker.start()
            self._workers.append(worker)
            there.close()

    def share_out(self, contents: list[Content]) -> dict[int, Place]:
        """Writes messages into the memory, behind what workers may be reading; gives where each finds those to its clients."""
        shares: dict[int, Layout] = {}
        for clients, rows in self._sent.write(contents, max(self._reads.values(), default=0)):
            for k in sorted({self.home[c] for c in clients}):
                shares.setdefault(k, []).append(([c for c in clients if self.home[c] == k], rows))
        return {k: self._sent.append(share) for k, share in shares.items()}

    def send(self, worker: int, order: str, phase: str, share: Place) -> None:
        """Orders a worker to `obey`. WorkerError if it is gone."""
        try:
            self._pipes[worker].send_bytes(json.dumps([order, phase, share]).encode())
        except OSError:
            raise self._gone(worker) from None
        self._reads[worker] = self._sent.end

    def ready(self, workers: list[int], seconds: float | None) -> list[int]:
        """Waits until some of these workers have answered or died; gives which."""
        heard = wait([self._pipes[k] for k in workers], seconds)
        return [k for k in workers if self._pipes[k] in heard]

    def receive(self, worker: int) -> tuple[dict[str, Message], Failures]:
        """What a worker that is ready has answered. WorkerError if it is gone."""
        del self._reads[worker]
        try:
            layout, failures = self._answered[worker].content(
                json.loads(self._pipes[worker].recv_bytes())
            )
        except (EOFError, OSError):
            raise self._gone(worker) from None
        return {
            client: isolate(message)
            for client, message in self._answered[worker].read(layout).items()
        }, failures

    def stop(self) -> None:
        """Ends the workers, whatever they are at."""
        self._ending()

    def _gone(self, k: int) -> WorkerError:
        self._workers[k].join()
        code = self._workers[k].exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        hint = (
            " (when memory runs out, the system kills: fewer workers need less)"
            if -code == signal.SIGKILL
            else ""
        )
        return WorkerError(f"worker {k} {how}{hint}")


def _end(owner: int, workers: list[Any], pipes: list[Connection], blocks: list[Block]) -> None:
    if os.getpid() != owner:
        return  # a fork's copy of an engine has no say over its workers
    for worker in workers:
        worker.kill()  # it has nothing to put in order
    for worker in workers:
        worker.join()
        worker.close()
    for pipe in pipes:
        pipe.close()
    for block in blocks:
        block.close()


# ---- in the worker ----
def _work(
    method: Method, clients: list[Client], policy: FaultPolicy, threads: int, pipe: Connection, others: list[Connection], sent: Block,
    answered: Block,
) -> None:  # fmt: skip
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to all; this process is told by its pipe
    for other in others:
        other.close()
    answering = Thread(
        target=_answer_all,
        args=(loop.Engine(method, clients, policy), threads, pipe, sent, answered),
    )
    answering.start()
    answering.join()


def _answer_all(
    engine: loop.Engine, threads: int, pipe: Connection, sent: Block, answered: Block
) -> None:
    torch.set_num_threads(threads)
    while True:
        try:
            order, phase, share = json.loads(pipe.recv_bytes())
        except EOFError:
            return  # nobody is there any more
        place = answered.append(
            obey(engine, order, phase, sent.read(sent.content(share)), answered.write)
        )
        pipe.send_bytes(json.dumps(place).encode())
