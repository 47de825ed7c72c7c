"""Encrypted blocks (`encrypt`): the server adds up the blocks B_ik without reading them.

A block goes out dense, under the receiver's BFV key, in multiples of `GRID`. The server adds
ciphertexts, and the receiver learns only the sum Σ_k B_ik. It costs 16 bytes for each of n_i n
numbers, for each pair of clients and hop, and so suits small federations.

No sender knows how many neighbours a target has at others. So with `blocks = "withhold"` the
receiver leaves rows of the sum out by asking for the others only. A receiver that follows the
protocol does so; a sender cannot check it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import peer_messages, phase, runs_once
from fedloom.core.server import Server
from fedloom.errors import MessageError
from fedloom.methods.fedstruct.powers import Numbering, scatter_rows
from fedloom.methods.fedstruct.sharing import among_all, only_rows, sums_that_travel
from fedloom.methods.fedstruct.state import state_of
from fedloom.privacy import bfv

GRID = 2.0**-22  # entries are rounded to multiples of this


class EncryptedBlocks(ABC):
    """The phases of `encrypt`. They replace `offer` and `absorb`."""

    blocks: str
    min_neighbours: int

    @abstractmethod
    def _blocks(self, client: Client) -> dict[str, csr_matrix]:
        """Returns B_ik for each client i with edges from here, pruned."""

    @abstractmethod
    def _note_readable(
        self, client: Client, sums: dict[str, csr_matrix], block: csr_matrix
    ) -> None:
        """Keeps the rows of the second hop that are one other node's own."""

    def _choose_encrypted_rows(self, client: Client) -> None:
        """Decides which rows of the sum this client asks for."""
        state = state_of(client)
        every, numbering = state.adjacency.incoming, state.numbering
        state.sent, state.arriving = {}, {}
        if not every:
            return
        sums = sums_that_travel(among_all(every, numbering), self.blocks, self.min_neighbours)
        asked = np.diff(sums.indptr) > 0
        for peer in every:
            rows = asked[state.adjacency.rows_from(peer)]
            state.arriving[peer] = only_rows(state.adjacency.links_from(peer), rows)

    @abstractmethod
    def _advance(self, client: Client, arrived: list[csr_matrix]) -> None:
        """Makes the next power the current one."""

    @runs_once
    @peer_messages(read_by="trust", encrypted=False)
    @phase(key="uint8[n]", rows="bool[n]")
    def publish(self, client: Client) -> Message:
        """Generates BFV keys; sends the public part to each client that will send a block.

        `rows` says which of the peer's rows to this client are asked for.
        """
        state = state_of(client)
        state.keys = keys = bfv.Keys.generate()
        public = torch.from_numpy(keys.public)
        return {
            peer: {"key": public, "rows": torch.from_numpy(np.diff(sums.indptr) > 0)}
            for peer, sums in state.arriving.items()
        }

    @phase()
    def trust(self, client: Client, inbox: Message | None = None) -> Message:
        """Keeps the peers' public keys, and which rows they ask for."""
        state, received = state_of(client), (inbox or {}).items()
        state.peer_keys = {peer: message["key"].numpy() for peer, message in received}
        for peer, message in received:
            if peer not in state.adjacency.outgoing:
                continue  # nothing is ever sent to it
            links, asked = state.adjacency.links_to(peer), message["rows"].numpy()
            if len(asked) != links.shape[0]:
                raise MessageError(
                    f"client {client.name!r}: peer message from {peer!r}: tensor 'rows' has "
                    f"shape {[len(asked)]}, expected {[links.shape[0]]}"
                )
            state.sent[peer] = only_rows(links, asked)
        return {}

    @runs_once
    @peer_messages(read_by="absorb_encrypted", encrypted=False)
    @phase(cipher="uint8[n]")
    def offer_encrypted(self, client: Client) -> Message:
        """Sends B_ik under the receiver's key.

        All n_i n entries travel: the positions of those that are not 0 would reveal as much as the
        entries themselves.
        """
        state = state_of(client)
        sent = {}
        for peer, block in self._blocks(client).items():
            rows, size = state.adjacency.rows_to(peer), state.numbering.size(peer)
            dense = scatter_rows(block, rows, size).toarray().ravel().astype(np.float64)
            whole = np.rint(dense / GRID).astype(np.int64)
            cipher = bfv.encrypt(state.peer_keys[peer], whole)
            sent[peer] = {"cipher": torch.from_numpy(cipher)}
        return sent

    @runs_once
    @phase()
    def absorb_encrypted(self, client: Client, inbox: Message | None = None) -> Message:
        """As `absorb`, from the sum of all blocks that the server added up."""
        state = state_of(client)
        own = state.adjacency.inner.shape[0]
        arrived = []
        for message in (inbox or {}).values():
            size = own * state.numbering.total
            total = state.keys.decrypt(message["cipher"].numpy(), size) * GRID
            if total.size and total.min() < 0:
                raise MessageError(
                    f"client {client.name!r}: the sum of its peers' blocks, tensor 'cipher', "
                    "holds a negative number"
                )
            block = csr_matrix(total.astype(np.float32).reshape(own, -1))
            rows, adjacency = state.arriving.items(), state.adjacency
            sums = {p: scatter_rows(part, adjacency.rows_from(p), own) for p, part in rows}
            self._note_readable(client, sums, block)
            arrived.append(block)
        self._advance(client, arrived)
        return {}

    def _exchange_keys(self, server: Server) -> dict[str, Tensor]:
        """Has the clients exchange public keys. Returns them by owner."""
        published = server.collect(self.publish)
        server.deliver(self.publish, published)
        return {
            owner: next(iter(sent.values()))["key"] for owner, sent in published.items() if sent
        }

    def _relay_encrypted(
        self, server: Server, keys: dict[str, Tensor], numbering: Numbering
    ) -> None:
        """Collects the ciphertexts and delivers to each client the sum of those addressed to it.

        A client gets one message. Its nominal sender is the first by name of those that wrote.
        """
        written: dict[str, dict[str, NDArray[np.uint8]]] = {}
        for sender, sent in server.collect(self.offer_encrypted).items():
            for receiver, message in sent.items():
                written.setdefault(receiver, {})[sender] = message["cipher"].numpy()
        sums: dict[str, Message] = {}
        for receiver, ciphers in written.items():
            key, entries = keys[receiver].numpy(), numbering.size(receiver) * numbering.total
            for sender, cipher in ciphers.items():
                try:
                    bfv.require_size(key, cipher, entries)
                except MessageError as error:
                    raise MessageError(
                        f"client {sender!r} in 'offer_encrypted': tensor '{receiver}/cipher': "
                        f"{error}"
                    ) from None
            total = torch.from_numpy(bfv.add(key, list(ciphers.values())))
            sums.setdefault(min(ciphers), {})[receiver] = {"cipher": total}
        server.deliver(self.offer_encrypted, sums)
