"""What goes wrong in a run, and when: {(round, phase, client): fault}."""

from fedloom.core.message import Absent
from fedloom.core.server import Server
from fedloom.engines.loop import Engine as Loop

LOST = "lost"  # the client does what it is asked, and its answer does not arrive


class Schedule:
    """Puts faults into runs in the loop (and in engines made of it).

    Round, phase or client may be None: any. A fault is an exception, raised at the client before its phase; LOST; an `Absent`, in place of
    the answer; or a function of the answer, which gives a spoilt one. A list of faults is used up, one each time; None is none. `asked`
    fills with (round, phase, client) of all that were reached.
    """

    def __init__(self, monkeypatch, faults=()):
        self.faults, self.asked, self.server, self.now = dict(faults), [], None, {}
        made, reach, call = Server.__init__, Loop.reach, Loop.call

        def init(server, *args):
            made(server, *args)
            self.server = server

        def reached(engine, name, phase, message):
            self.asked.append((self.server.round, phase, name))
            self.now[name] = self.fault(phase, name)
            if isinstance(self.now[name], Exception):
                raise self.now[name]
            return reach(engine, name, phase, message)

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
        monkeypatch.setattr(Loop, "reach", reached)
        monkeypatch.setattr(Loop, "call", called)

    def fault(self, phase, client):
        """What goes wrong now, if anything."""
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
