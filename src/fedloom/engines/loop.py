"""The reference engine: clients one after another, in this process. Every other engine has to agree with it, bit for bit."""

from collections.abc import Iterable

from fedloom.message import Message, isolate
from fedloom.method import Method
from fedloom.party import Client


class Engine:
    """Calls a phase for one client after another. Copies stand in for the wire, so that nobody shares memory with anybody."""

    def __init__(self, method: Method, clients: Iterable[Client]):
        self.method = method
        self.clients = {client.name: client for client in clients}

    def call(self, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
        """Takes a phase's name and a message per client, gives each client's reply."""
        function = getattr(self.method, phase)
        return {name: isolate(function(self.clients[name], **isolate(message))) for name, message in messages.items()}
