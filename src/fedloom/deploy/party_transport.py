"""PartyTransport: a party's connection to the coordinator.

It uses Flower's fleet interface, as Flower's SuperNode does, but without its extra processes. A
SuperNode asks for messages every three seconds and starts a new process for each message. Here, a
request for messages waits until there is one, and the party's process stays alive.
"""

from __future__ import annotations

import ssl
import threading
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from fedloom.deploy.keys import PartyKey
from fedloom.deploy.superlink import DELIVERED, PARTY_KEY, configure_flower
from fedloom.errors import FedloomError

configure_flower()
import httpx  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.common.serde import message_from_proto, message_to_proto  # noqa: E402
from flwr.proto.fleet_pb2 import (  # noqa: E402
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (  # noqa: E402
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (  # noqa: E402
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import (  # noqa: E402
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402

HEARTBEAT_SECONDS = 1.0  # between signs of life, also while a phase is computed
FLOWER_INTERVAL = 10.0  # the interval that Flower is told; it accepts no shorter one
FIRST_RETRY = 0.02  # seconds until a part that has not arrived is requested again
PULL_SECONDS = 60.0  # within which all parts of a message must arrive

T = TypeVar("T")


class UnreachableError(FedloomError):
    """The coordinator does not answer. It may answer later."""


class RefusedError(FedloomError):
    """The coordinator refuses this party, or its certificate cannot be trusted."""


class Order(NamedTuple):
    """An order from the coordinator: its envelope, and Flower's message, which the answer needs."""

    envelope: bytes
    message: Message


class PartyTransport:
    """A connection to the coordinator.

    Args:
        address: The coordinator's host:port.
        authority: The CA's certificate, a PEM file; None for no TLS.
        key: The party's key.
    """

    def __init__(self, address: str, authority: Path | None, key: PartyKey):
        verify: Any = (
            True if authority is None else ssl.create_default_context(cafile=str(authority))
        )
        interceptors: Any = [
            RuntimeVersionHttpInterceptor("SuperNode"),
            NodeAuthHttpInterceptor(key.node, key.public.node),
        ]
        self.address, self._public = address, public_key_to_bytes(key.public.node)
        self._client = FleetHttpClient(
            f"{'http' if authority is None else 'https'}://{address}",
            interceptors=interceptors,
            verify=verify,
            timeout=30.0,
        )
        self._node: Node | None = None
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def connect(self) -> None:
        """Announces the party. Raises UnreachableError or RefusedError if that fails."""
        # No heartbeats meanwhile: Flower would conclude that the party is connected already.
        self._node = None
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=FLOWER_INTERVAL)
        try:
            answer = self._request(self._client.ActivateNode, request)
        except RefusedError as error:
            if isinstance(error.__cause__, httpx.HTTPStatusError):
                raise RefusedError(
                    f"{error} This party's key may have expired, been replaced or been revoked: "
                    "`fedloom keys show` at the coordinator says so"
                ) from error
            raise
        self._node = Node(node_id=answer.node_id)
        if self._heart is None:
            self._heart = threading.Thread(
                target=self._send_heartbeats, name="fedloom heartbeat", daemon=True
            )
            self._heart.start()

    def receive(self) -> Order | None:
        """Returns the next order, or None if none arrives for a while."""
        node = self._connected()
        answer = self._request(self._client.PullMessages, PullMessagesRequest(node=node))
        if not answer.messages_list:
            return None
        message, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        run, number = message.metadata.run_id, message.metadata.message_id
        pull = make_pull_object_fn_protobuf(
            lambda request: self._request(self._client.PullObject, request), node, run
        )
        try:
            parts = pull_objects(
                [part.object_id for part in iterate_object_tree(tree)],
                pull,
                initial_backoff=FIRST_RETRY,
                max_time=PULL_SECONDS,
            )
        except ObjectPullError:
            return None  # withdrawn or incomplete: the coordinator must send it again
        whole = cast(Message, inflate_object_from_contents(number, parts))
        whole.metadata.__dict__["_message_id"] = number
        confirm = make_confirm_message_received_fn_protobuf(
            lambda request: self._request(self._client.ConfirmMessageReceived, request), node, run
        )
        confirm(number)
        record = whole.content.config_records.get("fedloom")
        envelope = None if record is None else record.get("envelope")
        return Order(envelope if isinstance(envelope, bytes) else b"", whole)

    def answer(self, order: Order, envelope: bytes) -> None:
        """Sends the answer to an order."""
        node = self._connected()
        reply = Message(
            RecordDict({"fedloom": ConfigRecord({"envelope": envelope})}), reply_to=order.message
        )
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            bare = message_to_proto(remove_content_from_message(reply))
            accepted = self._request(
                self._client.PushMessages,
                PushMessagesRequest(
                    node=node,
                    messages_list=[bare],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                ),
            )
            push = make_push_object_fn_protobuf(
                lambda request: self._request(self._client.PushObject, request),
                node,
                reply.metadata.run_id,
                accepted.session_id,
            )
            push_objects(
                get_all_nested_objects(reply),
                push,
                object_ids_to_push=set(accepted.objects_to_push),
            )
        self._announce_delivery()

    def close(self) -> None:
        """Disconnects, if the coordinator is still reachable."""
        self._closed.set()
        if self._heart is not None:
            self._heart.join()
        if self._node is not None:
            with suppress(httpx.HTTPError):  # the coordinator is gone: nothing to disconnect from
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
        self._client.close()

    def _connected(self) -> Node:
        if self._node is None:
            raise UnreachableError(f"not connected to {self.address}")
        return self._node

    def _announce_delivery(self) -> None:
        """Tells the SuperLink that an answer is complete, so that the coordinator reads it."""
        headers = {PARTY_KEY: b64encode(self._public).decode("ascii")}
        try:
            self._client._client.post(f"{self._client._base_url}{DELIVERED}", headers=headers)
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self.address} does not answer ({error})") from error

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            if (node := self._node) is not None:
                try:
                    self._client.SendNodeHeartbeat(
                        SendNodeHeartbeatRequest(node=node, heartbeat_interval=FLOWER_INTERVAL)
                    )
                except httpx.HTTPError:
                    continue  # `receive` and `answer` notice it too, and connect again

    def _request(self, call: Callable[[Any], T], request: Any) -> T:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (502, 503, 504):
                raise UnreachableError(
                    f"{self.address} does not answer ({error.response.status_code})"
                ) from error
            raise RefusedError(f"{self.address} refuses: {_detail(error.response)}") from error
        except httpx.HTTPError as error:
            if isinstance(cause := _root(error), ssl.SSLCertVerificationError):
                raise RefusedError(
                    f"{self.address}: its certificate is not trusted ({cause.verify_message})"
                ) from error
            raise UnreachableError(f"{self.address} does not answer ({error})") from error


def _root(error: BaseException) -> BaseException:
    """Returns the first error in a chain of errors."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _detail(response: httpx.Response) -> str:
    """Returns the error message in an HTTP response."""
    try:
        content = response.json()
        return str(content.get("message") or content.get("detail") or content)
    except ValueError:
        return f"status {response.status_code}"
