"""A party's end of the link: says that it is there, receives what the coordinator sends, answers.

It speaks Flower's fleet interface, as Flower's SuperNode does, without the processes in between: a SuperNode asks every three seconds
and starts a new process for every message; here a request for messages waits until there is one, and the party's process stays.
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
from fedloom.deploy.superlink import PARTY_KEY, SETTLED, quiet
from fedloom.errors import FedloomError

quiet()
import httpx  # noqa: E402  (Flower looks at the environment when it is imported)
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
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402

BEAT_SECONDS = 1.0  # between signs of life, also while a phase is being computed
FLOWERS_INTERVAL = 10.0  # what Flower is told instead, since it takes no less
FIRST_LOOK_AGAIN = 0.02  # seconds until what is not there yet is asked for again
PULL_SECONDS = 60.0  # that the parts of a message have to come in

T = TypeVar("T")


class UnreachableError(FedloomError):
    """The coordinator does not answer; it may later."""


class RefusedError(FedloomError):
    """The coordinator answers, and does not know this party, or its certificate is not to be trusted."""


class Order(NamedTuple):
    """Something the coordinator sent: the envelope, and what the answer has to refer to."""

    envelope: bytes
    message: Message


class PartyTransport:
    """A connection to the coordinator at `address` (host:port). authority: the CA's PEM file; None: no TLS."""

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
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def connect(self) -> None:
        """Says that the party is there. UnreachableError or RefusedError if that does not work."""
        self._node = (
            None  # no beats meanwhile: by them Flower would take it for one that is there already
        )
        answer = self._ask(
            self._client.ActivateNode,
            ActivateNodeRequest(public_key=self._public, heartbeat_interval=FLOWERS_INTERVAL),
        )
        self._node = Node(node_id=answer.node_id)
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="fedloom beat", daemon=True)
            self._beating.start()

    def receive(self) -> Order | None:
        """What came, or None if nothing did for a while."""
        node = self._connected()
        answer = self._ask(self._client.PullMessages, PullMessagesRequest(node=node))
        if not answer.messages_list:
            return None
        message, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        run, number = message.metadata.run_id, message.metadata.message_id
        pull = make_pull_object_fn_protobuf(
            lambda request: self._ask(self._client.PullObject, request), node, run
        )
        try:
            parts = pull_objects(
                [part.object_id for part in iterate_object_tree(tree)],
                pull,
                initial_backoff=FIRST_LOOK_AGAIN,
                max_time=PULL_SECONDS,
            )
        except ObjectPullError:
            return (
                None  # it was taken back, or never came whole: the coordinator has to send it again
            )
        whole = cast(Message, inflate_object_from_contents(number, parts))
        whole.metadata.__dict__["_message_id"] = number
        make_confirm_message_received_fn_protobuf(
            lambda request: self._ask(self._client.ConfirmMessageReceived, request), node, run
        )(number)  # fmt: skip
        record = whole.content.config_records.get("fedloom")
        envelope = None if record is None else record.get("envelope")
        return Order(envelope if isinstance(envelope, bytes) else b"", whole)

    def answer(self, order: Order, envelope: bytes) -> None:
        """Sends an envelope back for one that was received."""
        node = self._connected()
        reply = Message(
            RecordDict({"fedloom": ConfigRecord({"envelope": envelope})}), reply_to=order.message
        )
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            bare = message_to_proto(remove_content_from_message(reply))
            accepted = self._ask(
                self._client.PushMessages,
                PushMessagesRequest(
                    node=node,
                    messages_list=[bare],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                ),
            )
            push = make_push_object_fn_protobuf(
                lambda request: self._ask(self._client.PushObject, request),
                node,
                reply.metadata.run_id,
                accepted.session_id,
            )
            push_objects(
                get_all_nested_objects(reply),
                push,
                object_ids_to_push=set(accepted.objects_to_push),
            )
        self._settle()

    def close(self) -> None:
        """Takes leave, if the coordinator is still there."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
        if self._node is not None:
            with suppress(httpx.HTTPError):  # if it is gone, nobody is left to take leave of
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
        self._client.close()

    def _connected(self) -> Node:
        if self._node is None:
            raise UnreachableError(f"not connected to {self.address}")
        return self._node

    def _settle(self) -> None:
        """Tells the link that an answer is complete, so that it lets the coordinator look."""
        headers = {PARTY_KEY: b64encode(self._public).decode("ascii")}
        try:
            self._client._client.post(f"{self._client._base_url}{SETTLED}", headers=headers)
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self.address} does not answer ({error})") from error

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            if (node := self._node) is not None:
                try:
                    self._client.SendNodeHeartbeat(
                        SendNodeHeartbeatRequest(node=node, heartbeat_interval=FLOWERS_INTERVAL)
                    )
                except httpx.HTTPError:
                    continue  # whoever receives or answers finds out, and connects again

    def _ask(self, call: Callable[[Any], T], request: Any) -> T:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (502, 503, 504):
                raise UnreachableError(
                    f"{self.address} does not answer ({error.response.status_code})"
                ) from error
            raise RefusedError(f"{self.address} refuses: {_said(error.response)}") from error
        except httpx.HTTPError as error:
            if isinstance(cause := _root(error), ssl.SSLCertVerificationError):
                raise RefusedError(
                    f"{self.address}: its certificate is not to be trusted ({cause.verify_message})"
                ) from error
            raise UnreachableError(f"{self.address} does not answer ({error})") from error


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return error


def _said(response: httpx.Response) -> str:
    try:
        told = response.json()
        return str(told.get("message") or told.get("detail") or told)
    except ValueError:
        return f"status {response.status_code}"
