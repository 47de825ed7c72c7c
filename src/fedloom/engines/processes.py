"""The processes engine: worker processes on this machine, each with a share of the clients.

It is for graphs on which arithmetic dominates. Bit-identical to the loop engine.

Workers are forked, so they inherit their clients and any method: a user's own file, or a class that
was just made. No graph is copied or written to a file, and nothing is imported again. A script
needs no `if __name__ == "__main__"`. A start takes milliseconds; a spawned process takes seconds.
A forked process has the memory of its parent's OpenMP threads but not the threads themselves.
Torch hangs in such an inherited thread pool as soon as it wants two threads. A thread pool belongs
to the thread that opened it, so a worker does all its work in a fresh thread.

    this process                                          worker k
    tensors of all messages ──► memory that all read   ──► copied for each client, as in the loop
    their places            ──► a pipe                 ──► the phase, in an engine of its own
    copied for `run`        ◄── memory that k writes   ◄── replies
                            ◄── a pipe                 ◄── their places

A tensor that several clients get is written once. A batch of replies is one tensor for each name,
and `joined_batches` copies the workers' batches into one. The list of places and the failures are
JSON in the same memory. Only a few bytes pass through the pipe, so no worker can block on it. The
memory has no name (memfd). It grows as needed, does not count against /dev/shm, and is released
with the last process that holds it, even if that is killed. A worker ends when its engine is closed
or when this process is gone.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import multiprocessing
import os
import signal
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from fedloom._system import allocate_from_one_arena, cores, forking
from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import DTYPES, Batch, Message, isolate
from fedloom.core.method import Method
from fedloom.engines._workers import (
    Content,
    Failures,
    WorkerEngine,
    WorkerError,
    execute,
    messages_of,
)
from fedloom.engines.base import Engine as EngineInside
from fedloom.engines.base import EngineFactory
from fedloom.errors import ConfigError

if not hasattr(os, "memfd_create"):
    raise ConfigError("engines with worker processes need Linux (fork and memfd); use stacked here")

ALIGNED = 64  # bytes: the alignment of tensors that vector instructions prefer
Place = tuple[int, int]  # begin and length
Row = tuple[str, str, list[int], int]  # a tensor's name, dtype, shape and place
# A content: its clients (None: all that the worker has), whether it is stacked, and its tensors.
Entry = tuple[Sequence[str] | None, bool, list[Row]]
Layout = list[Entry]


class Block:
    """Memory that this process shares with its forks. One side writes messages, the other reads.

    Reading does not copy.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("fedloom")
        self._map: mmap.mmap | None = None
        self.end = 0  # of the last content

    def write(self, contents: list[Content], begin: int = 0) -> Layout:
        """Overwrites the memory from `begin` on with messages. Returns their places.

        A tensor that several messages have is written once.
        """
        tensors = {id(t): t for content in contents for t in content.tensors.values()}
        place, self.end = {}, begin
        for key, tensor in tensors.items():
            place[key] = self.end
            self.end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        if self.end > os.fstat(self._file).st_size:
            # If memory is short, this raises an error here. Otherwise a bus error follows later.
            os.posix_fallocate(self._file, 0, self.end)
        for key, tensor in tensors.items():
            self._at(place[key], tensor.dtype, tensor.shape).copy_(tensor.detach())

        def row(name: str, tensor: Tensor) -> Row:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return name, dtype, list(tensor.shape), place[id(tensor)]

        return [
            (clients, stacked, [row(name, tensor) for name, tensor in tensors.items()])
            for tensors, clients, stacked in contents
        ]

    def append(self, content: object) -> Place:
        """Writes JSON behind the last content. Returns its place."""
        text, begin = json.dumps(content).encode(), self.end
        self.write([Content({"": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, ())], begin)
        return begin, len(text)

    def content(self, place: Place) -> Any:
        """Returns the JSON at a place."""
        begin, length = place
        return json.loads(self._at(begin, torch.uint8, [length]).numpy().tobytes())

    def read(self, layout: Layout, everyone: Sequence[str] = ()) -> Mapping[str, Message]:
        """Returns {client: message} without copying.

        The messages are valid until the other side writes again.

        everyone: the clients of the worker.
        """
        return messages_of(
            [
                Content(
                    {name: self._at(at, DTYPES[dtype], shape) for name, dtype, shape, at in rows},
                    everyone if clients is None else clients,
                    stacked,
                )
                for clients, stacked, rows in layout
            ]
        )

    def _at(self, place: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        end = place + count * dtype.itemsize
        if self._map is None or end > len(self._map):  # the other side may have made it grow
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=place).view(shape)

    def close(self) -> None:
        """Releases the memory. Tensors that were read stay valid."""
        self._map = None
        os.close(self._file)


class Engine(WorkerEngine[Place]):
    """Forks its workers when it is made. Ends them when it is closed or garbage-collected."""

    def cores(self) -> int:
        """Returns the number of cores that this process may use."""
        return cores()

    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Forks a worker for each group."""
        fork = multiprocessing.get_context("fork")
        self._sent, self._answered = Block(), [Block() for _ in groups]
        self._reads: dict[int, int] = {}  # a busy worker: the end of the memory that it may read
        self._pipes: list[Connection] = []
        self._workers: list[ForkProcess] = []
        blocks = [self._sent, *self._answered]
        # Runs when Python ends, at the latest.
        self._ending = weakref.finalize(self, _end, os.getpid(), self._workers, self._pipes, blocks)
        for k, group in enumerate(groups):
            here, there = fork.Pipe()
            self._pipes.append(here)
            # A worker closes this process's ends of all pipes. Otherwise its siblings would not
            # notice that this process is gone.
            blocks_of_worker = (self._sent, self._answered[k])
            arguments = (
                self.inside, method, group, self.policy, self.threads, there, self._pipes,
                *blocks_of_worker,
            )  # fmt: skip
            name = f"fedloom worker {k}"
            worker = fork.Process(target=_work, args=arguments, name=name, daemon=True)
            with forking():
                worker.start()
            self._workers.append(worker)
            there.close()

    def shares(self, contents: list[Content]) -> dict[int, Place]:
        """Writes messages behind those that workers may be reading.

        Returns {worker: the place of its list of messages}.
        """
        layouts: dict[int, Layout] = {}
        written = self._sent.write(contents, max(self._reads.values(), default=0))
        for content, (_, _, rows) in zip(contents, written, strict=True):
            for k, clients in self._by_worker(content.clients).items():
                layouts.setdefault(k, []).append((clients, False, rows))
        return {k: self._sent.append(layout) for k, layout in layouts.items()}

    def _by_worker(self, clients: Sequence[str]) -> dict[int, list[str] | None]:
        """Divides clients among their workers. None: all clients of a worker."""
        if len(clients) == len(self.names):
            return dict.fromkeys(range(len(self.held)))
        found: dict[int, list[str] | None] = {}
        for client in clients:
            part = found.setdefault(self.home[client], [])
            assert part is not None
            part.append(client)
        return found

    def send(self, worker: int, command: str, phase: str, share: Place) -> None:
        """Sends a command through the pipe. Raises a WorkerError if the worker is gone."""
        try:
            order = [command, phase, self.round, share]
            self._pipes[worker].send_bytes(json.dumps(order).encode())
        except OSError:
            raise self._gone(worker) from None
        self._reads[worker] = self._sent.end

    def ready(self, workers: list[int], seconds: float | None) -> list[int]:
        """Waits until some of the workers have answered or died. Returns those."""
        heard = wait([self._pipes[k] for k in workers], seconds)
        return [k for k in workers if self._pipes[k] in heard]

    def receive(self, worker: int) -> tuple[Mapping[str, Message], Failures]:
        """Returns the replies: a batch as it is in the memory, or copies of single messages.

        Raises a WorkerError if the worker is gone.
        """
        del self._reads[worker]
        block = self._answered[worker]
        try:
            layout, failures = block.content(json.loads(self._pipes[worker].recv_bytes()))
        except (EOFError, OSError):
            raise self._gone(worker) from None
        replies = block.read(layout, self.held[worker])
        if isinstance(replies, Batch):
            return replies, failures
        return {client: isolate(reply) for client, reply in replies.items()}, failures

    def stop(self) -> None:
        """Kills the workers."""
        self._ending()

    def _gone(self, k: int) -> WorkerError:
        self._workers[k].join()
        code = self._workers[k].exitcode
        assert code is not None  # it has ended
        if code >= 0:
            return WorkerError(f"worker {k} ended with exit code {code}")
        hint = ""
        if -code == signal.SIGKILL:
            hint = " (the system kills processes when memory runs out; fewer workers need less)"
        return WorkerError(f"worker {k} was killed by {signal.Signals(-code).name}{hint}")


def _end(
    owner: int, workers: list[ForkProcess], pipes: list[Connection], blocks: list[Block]
) -> None:
    if os.getpid() != owner:
        return  # a fork has a copy of the engine, but the workers are not its own
    for worker in workers:
        worker.kill()  # it has nothing to clean up
    for worker in workers:
        worker.join()
        worker.close()
    for pipe in pipes:
        pipe.close()
    for block in blocks:
        block.close()


# ---- in the worker ----
def _work(
    inside: EngineFactory,
    method: Method,
    clients: list[Client],
    policy: FaultPolicy,
    threads: int,
    pipe: Connection,
    others: list[Connection],
    sent: Block,
    answered: Block,
) -> None:
    # Ctrl-C reaches all processes of a terminal. The engine ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    allocate_from_one_arena()
    engine, names = inside(method, clients, policy), [client.name for client in clients]
    answering = Thread(target=_answer_all, args=(engine, names, threads, pipe, sent, answered))
    answering.start()
    answering.join()


def _answer_all(
    engine: EngineInside,
    names: list[str],
    threads: int,
    pipe: Connection,
    sent: Block,
    answered: Block,
) -> None:
    torch.set_num_threads(threads)

    def pack(contents: list[Content]) -> Layout:
        """Writes replies. Leaves out the names, if all clients of this worker have answered."""
        return [
            (None if clients is None or list(clients) == names else clients, stacked, rows)
            for clients, stacked, rows in answered.write(contents)
        ]

    while True:
        try:
            command, phase, round, share = json.loads(pipe.recv_bytes())
        except EOFError:
            return  # the engine's process is gone
        if round and not engine.round:
            gc.freeze()  # as the recorder does: the clients stay, so the collector may skip them
        engine.round = round
        messages = sent.read(sent.content(share), names)
        place = answered.append(execute(engine, command, phase, messages, pack))
        pipe.send_bytes(json.dumps(place).encode())
