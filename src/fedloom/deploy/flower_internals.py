"""Flower's internals: everything that fedloom uses of Flower outside its public interface.

Flower does not promise to keep these names. They are all here, and all are checked when this module
is imported. If one is missing, a ConfigError names it, the version that is installed and the
versions that have it. The public interface is `flwr.app`, `flwr.clientapp` and `flwr.serverapp`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, cast

from fedloom.deploy.superlink import configure_flower
from fedloom.errors import ConfigError

VERSIONS = ">=1.41,<1.42"  # as in pyproject.toml
PART_SECONDS = 0.1  # between two looks at an answer whose parts are on their way


def unsuitable(missing: str) -> ConfigError:
    """Returns the error for a version of Flower that lacks a name."""
    return ConfigError(
        f"Flower {version('flwr')} is installed and has no {missing}; this fedloom needs "
        f"flwr{VERSIONS}: pip install 'fedloom[flower]'"
    )


def _missing_name(error: ImportError) -> str:
    """Returns the name that an import did not find."""
    found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    return f"{found[2]}.{found[1]}" if found else str(error.name)


configure_flower()
import flwr  # noqa: E402, F401  (if Flower itself is missing, the error is Python's own)

try:
    from flwr.app import Message, Metadata
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import (
        fab_to_proto,
        message_from_proto,
        message_to_proto,
        run_from_proto,
    )
    from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import (
        AcquireTaskRequest,
        PullAppMessagesRequest,
        PullTaskInputRequest,
    )
    from flwr.server.superlink.linkstate import LinkState
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TaskType
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.fab import Fab
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_confirm_message_received_fn_protobuf,
        make_pull_object_fn_protobuf,
        make_push_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError,
        ObjectUnavailableError,
        inflate_object_from_contents,
        pull_objects,
        push_objects,
    )
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
    )
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid
    from flwr.superlink.main import create_app
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as error:
    raise unsuitable(_missing_name(error)) from None

__all__ = [
    "FLEET_HTTP_PUBLIC_KEY_HEADER",
    "AcquireTaskRequest",
    "ActivateNodeRequest",
    "ControlHttpClient",
    "DeactivateNodeRequest",
    "Fab",
    "FleetHttpClient",
    "HeartbeatSender",
    "Node",
    "NodeAuthHttpInterceptor",
    "ObjectPullError",
    "PullMessagesRequest",
    "PullTaskInputRequest",
    "PushMessagesRequest",
    "RegisterNodeRequest",
    "RuntimeGrid",
    "RuntimeHttpClient",
    "RuntimeVersionHttpInterceptor",
    "SendNodeHeartbeatRequest",
    "StartRunRequest",
    "TaskIdentity",
    "TaskType",
    "UnregisterNodeRequest",
    "fab_to_proto",
    "get_all_nested_objects",
    "get_object_tree",
    "inflate_object_from_contents",
    "iterate_object_tree",
    "make_confirm_message_received_fn_protobuf",
    "make_pull_object_fn_protobuf",
    "make_push_object_fn_protobuf",
    "make_task_heartbeat_fn_http",
    "message_from_proto",
    "message_to_proto",
    "no_object_id_recompute",
    "public_key_to_bytes",
    "pull_objects",
    "push_objects",
    "remove_content_from_message",
    "run_from_proto",
    "set_message_id",
    "superlink_app",
]

# Methods and attributes that fedloom calls or sets.
ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    HttpGrid: ("_runtime_client", "run", "set_run", "push_messages", "close"),
    ControlHttpClient: ("RegisterNode", "StartRun", "UnregisterNode"),
    RuntimeHttpClient: (
        "AcquireTask",
        "PullTaskInput",
        "PullMessages",
        "PullObject",
        "ConfirmMessageReceived",
    ),
    FleetHttpClient: (
        "ActivateNode",
        "DeactivateNode",
        "SendNodeHeartbeat",
        "PullMessages",
        "PushMessages",
        "PullObject",
        "PushObject",
        "ConfirmMessageReceived",
    ),
    LinkState: ("get_node_id_by_public_key", "deactivate_node"),
    TaskType: ("SERVER_APP",),
    TaskIdentity: ("_task_id", "_run_id", "_node_id"),
}


def check_attributes() -> None:
    """Raises ConfigError if a class of Flower lacks a method or attribute that fedloom uses."""
    for owner, names in ATTRIBUTES.items():
        for name in names:
            if not hasattr(owner, name):
                raise unsuitable(f"{owner.__module__}.{owner.__qualname__}.{name}")
    if "_message_id" not in Metadata(0, "", 0, 0, "", "", 0.0, 0.0, "query").__dict__:
        raise unsuitable("flwr.app.Metadata._message_id")


check_attributes()


def set_message_id(message: Message, number: str) -> None:
    """Gives a message its id. Flower has no public way to do so."""
    message.metadata.__dict__["_message_id"] = number


class RuntimeGrid(HttpGrid):
    """Flower's grid with a client of our own: other headers, and no retries.

    If the SuperLink is gone, it fails at once. Flower's own grid tries again for minutes.

    Args:
        token: The token of the task, from Flower.
        connect: Returns the client, given the interceptors that Flower needs.
    """

    def __init__(self, token: str, connect: Callable[[Sequence[Any]], RuntimeHttpClient]):
        super().__init__(token=token)
        self._arriving: dict[str, _Arriving] = {}  # by the id of the order
        self._client = connect(
            [RuntimeVersionHttpInterceptor("flwr-serverapp"), RuntimeTokenHttpInterceptor(token)]
        )

    @property
    def client(self) -> RuntimeHttpClient:
        """The client that the grid uses."""
        return self._runtime_client

    def arrived(
        self, numbers: Collection[str], seconds: float
    ) -> Iterator[tuple[str, Message | str]]:
        """Yields the answers that have arrived, by the ids of the orders, or why one cannot arrive.

        It does not wait for the parts of an answer. Flower's `pull_messages` does, so that a party
        that announces an answer and does not send it would stop the coordinator.

        Args:
            numbers: The ids of the orders.
            seconds: How long to wait if all of them are answered and only parts are missing.
        """
        run = self.run.run_id
        if asked := [number for number in numbers if number not in self._arriving]:
            # The door in front of the SuperLink waits until an answer is complete.
            found = self.client.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                about = message.metadata
                parts = [part.object_id for part in iterate_object_tree(tree)]
                self._add(about.reply_to_message_id, about.src_node_id, about.message_id, parts)
        else:
            time.sleep(min(seconds, PART_SECONDS))
        pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
        confirm = make_confirm_message_received_fn_protobuf(
            self.client.ConfirmMessageReceived, self.node, run
        )
        for order in [number for number in numbers if number in self._arriving]:
            answer = self._arriving[order]
            try:
                answer.pull(pull)
            except ObjectUnavailableError:
                continue  # a part has not arrived yet
            except ObjectPullError as error:
                del self._arriving[order]
                yield order, str(error)
                continue
            del self._arriving[order]
            confirm(answer.number)
            whole = cast(Message, inflate_object_from_contents(answer.number, answer.content))
            set_message_id(whole, answer.number)
            yield order, whole

    def _add(self, order: str, node: int, number: str, parts: list[str]) -> None:
        """Adds an answer. A node answers one order at a time: its older answers are dropped."""
        own = self.node.node_id  # of the SuperLink, which answers for nodes that are gone
        self._arriving = {
            before: answer
            for before, answer in self._arriving.items()
            if node == own or answer.node != node
        }
        self._arriving[order] = _Arriving(node, number, parts)


@dataclass
class _Arriving:
    """An answer whose parts may still be on their way.

    Attributes:
        node: The node that it comes from.
        number: The id of the answer.
        parts: The ids of all parts.
        content: The parts that have arrived.
    """

    node: int
    number: str
    parts: list[str]
    content: dict[str, bytes] = field(default_factory=dict)

    def pull(self, pull: Callable[[str], bytes]) -> None:
        """Pulls the parts that are missing. Raises ObjectUnavailableError at the first gap."""
        for part in self.parts:
            if part not in self.content:
                self.content[part] = pull(part)


def superlink_app() -> tuple[Any, Callable[[bytes], None]]:
    """Returns Flower's ASGI application, and a function that makes Flower treat a node as gone.

    The function takes the node's public key. Only the coordinator can register keys. The state is
    in memory; the run folder and the parties hold what must survive.
    """
    app = create_app()
    for name in ("linkstate_factory", "enable_supernode_auth"):
        if not hasattr(app.state, name):
            raise unsuitable(f"flwr.superlink.main.create_app().state.{name}")
    app.state.enable_supernode_auth = True

    def deactivate(key: bytes) -> None:
        state = app.state.linkstate_factory.state()
        if (node := state.get_node_id_by_public_key(key)) is not None:
            state.deactivate_node(node)

    return app, deactivate
