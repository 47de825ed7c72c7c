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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from fedloom.deploy.keys import PartyKey
from fedloom.deploy.request_signature import NOT_REGISTERED, SIGNED, sign_request
from fedloom.deploy.superlink import CONFLICT, DELIVERED, PARTY_KEY, configure_flower
from fedloom.errors import FedloomError

configure_flower()
import httpx  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402

from fedloom.deploy.flower_internals import (  # noqa: E402
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    Node,
    NodeAuthHttpInterceptor,
    ObjectPullError,
    PullMessagesRequest,
    PushMessagesRequest,
    RuntimeVersionHttpInterceptor,
    SendNodeHeartbeatRequest,
    get_all_nested_objects,
    get_object_tree,
    inflate_object_from_contents,
    iterate_object_tree,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    message_from_proto,
    message_to_proto,
    no_object_id_recompute,
    public_key_to_bytes,
    pull_objects,
    push_objects,
    remove_content_from_message,
    set_message_id,
)

HEARTBEAT_SECONDS = 1.0  # between signs of life, also while a phase is computed
# The interval that Flower is told. Flower returns the orders of a party that it has not heard from
# for two intervals. The coordinator decides earlier who is gone, by the signs of life at the door.
FLOWER_INTERVAL = 1800.0
FIRST_RETRY = 0.02  # seconds until a part that has not arrived is requested again
NOT_YET_VALID, EXPIRED = 9, 10  # OpenSSL's codes of a certificate whose dates do not fit
PULL_SECONDS = 60.0  # within which all parts of a message must arrive

T = TypeVar("T")


class UnreachableError(FedloomError):
    """The coordinator does not answer. It may answer later."""


class RefusedError(FedloomError):
    """The coordinator refuses this party, or its certificate cannot be trusted."""


class _ConflictError(RefusedError):
    """Flower believes that the party is connected already."""


class Order(NamedTuple):
    """An order from the coordinator: its envelope, and Flower's message, which the answer needs."""

    envelope: bytes
    message: Message


class _Signing:
    """Signs each request as a whole, for the door in front of the SuperLink."""

    def __init__(self, key: PartyKey):
        self.key = key

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Adds the signature to a request of Flower's client."""
        self.sign(context.request)
        return call_next(context)

    def sign(self, request: httpx.Request) -> None:
        """Adds the signature to a request."""
        request.headers[SIGNED] = sign_request(
            self.key.signing, request.method, request.url.path, request.content
        )


class PartyTransport:
    """A connection to the coordinator.

    Args:
        address: The coordinator's host:port.
        authority: The CA's certificate, a PEM file; None for no TLS.
        key: The party's key.
    """

    def __init__(self, address: str, authority: Path | None, key: PartyKey):
        verify: ssl.SSLContext | bool = (
            True if authority is None else ssl.create_default_context(cafile=str(authority))
        )
        url, signing = f"{'http' if authority is None else 'https'}://{address}", _Signing(key)
        self.address, self._public = address, public_key_to_bytes(key.public.node)
        self._client = FleetHttpClient(
            url,
            interceptors=[
                RuntimeVersionHttpInterceptor("SuperNode"),
                NodeAuthHttpInterceptor(key.node, key.public.node),
                signing,
            ],
            verify=verify,
            timeout=30.0,
        )
        self._http = httpx.Client(
            base_url=url,
            headers={PARTY_KEY: b64encode(self._public).decode("ascii")},
            event_hooks={"request": [signing.sign]},
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
        except _ConflictError:  # the door has made Flower let the old connection go
            answer = self._request(self._client.ActivateNode, request)
        except RefusedError as error:
            if NOT_REGISTERED in str(error):
                raise RefusedError(
                    f"{error}. This party's key may have expired, been replaced or been revoked: "
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
        set_message_id(whole, number)
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
            set_message_id(reply, reply.object_id)
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
        self._http.close()

    def _connected(self) -> Node:
        if self._node is None:
            raise UnreachableError(f"not connected to {self.address}")
        return self._node

    def _announce_delivery(self) -> None:
        """Tells the SuperLink that an answer is complete, so that the coordinator reads it."""
        self._request(lambda path: self._http.post(path).raise_for_status(), DELIVERED)

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
            if error.response.status_code in (429, 502, 503, 504):
                raise UnreachableError(
                    f"{self.address} does not answer ({error.response.status_code})"
                ) from error
            kind = _ConflictError if error.response.status_code == CONFLICT else RefusedError
            raise kind(f"{self.address} refuses: {_detail(error.response)}") from error
        except httpx.HTTPError as error:
            if isinstance(cause := _root(error), ssl.SSLCertVerificationError):
                raise RefusedError(
                    f"{self.address}: its certificate is not trusted ({cause.verify_message})"
                    f"{_clock_hint(cause)}"
                ) from error
            raise UnreachableError(f"{self.address} does not answer ({error})") from error


def _root(error: BaseException) -> BaseException:
    """Returns the first error in a chain of errors."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _clock_hint(error: ssl.SSLCertVerificationError) -> str:
    """Returns what this machine's clock says if the dates of a certificate do not fit it."""
    if error.verify_code not in (NOT_YET_VALID, EXPIRED):
        return ""
    return f"; the clock of this machine says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: is it right?"


def _detail(response: httpx.Response) -> str:
    """Returns the error message in an HTTP response."""
    try:
        content = response.json()
        return str(content.get("message") or content.get("detail") or content)
    except ValueError:
        return f"status {response.status_code}"
