"""A schedule of faults in a run: {(round, phase, client): fault}."""

from fedloom.core.message import Absent
from fedloom.core.server import Server
from fedloom.engines.loop import Engine as Loop

LOST = "lost"  # the client runs the phase, and its reply does not arrive


class Schedule:
    """Injects faults into runs of the loop engine and of engines that inherit from it.

    A round, phase or client of None means any. A fault is one of

    - an exception, which the client raises before its phase
    - LOST: the client runs the phase, and its reply does not arrive
    - an `Absent`, which replaces the reply
    - a function that takes the reply and returns a spoilt one
    - a list of these, each used once; None means no fault

    `asked` lists (round, phase, client) of all calls.
    """

    def __init__(self, monkeypatch, faults=()):
        self.faults, self.asked, self.server, self.now = dict(faults), [], None, {}
        made, perform, call = Server.__init__, Loop.perform, Loop.call

        def init(server, *args):
            made(server, *args)
            self.server = server

        def performed(engine, name, phase, message):
            self.asked.append((self.server.round, phase, name))
            self.now[name] = self.fault(phase, name)
            if isinstance(self.now[name], Exception):
                raise self.now[name]
            return perform(engine, name, phase, message)

        def called(engine, phase, messages):
            replies = dict(call(engine, phase, messages))
            for name, reply in list(replies.items()):
                fault = self.now[name]
                if fault is LOST:
                    del replies[name]
                elif isinstance(fault, Absent):
                    replies[name] = fault
                elif callable(fault) and not isinstance(reply, Absent):
                    replies[name] = fault(reply)
            return replies

        monkeypatch.setattr(Server, "__init__", init)
        monkeypatch.setattr(Loop, "perform", performed)
        monkeypatch.setattr(Loop, "call", called)

    def fault(self, phase, client):
        """Returns the fault of this call, or None."""
        now = (self.server.round, phase, client)
        fault = next(
            (
                f
                for when, f in self.faults.items()
                if all(w in (None, n) for w, n in zip(when, now, strict=True))
            ),
            None,
        )
        return (fault.pop(0) if fault else None) if isinstance(fault, list) else fault
