"""Encrypted blocks (`encrypt`): the server adds up the blocks B_ik without reading them.

A block goes out dense, under the receiver's CKKS key. The server adds ciphertexts, and the receiver
learns only the sum Σ_k B_ik. It costs 32 bytes for each of n_i n numbers, for each pair of clients
and hop, and so suits small federations.
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
from fedloom.methods.fedstruct.state import state_of
from fedloom.privacy import ckks

# Numbers are rounded to multiples of this before encryption and again after decryption, which
# removes the noise of CKKS.
GRID = 2.0**-22


class EncryptedBlocks(ABC):
    """The phases of `encrypt`. They replace `offer` and `absorb`."""

    @abstractmethod
    def _blocks(self, client: Client) -> dict[str, csr_matrix]:
        """Returns B_ik for each client i with edges from here, pruned."""

    @abstractmethod
    def _advance(self, client: Client, arrived: list[csr_matrix]) -> None:
        """Makes the next power the current one."""

    @runs_once
    @peer_messages(read_by="trust", encrypted=False)
    @phase(key="uint8[n]")
    def publish(self, client: Client) -> Message:
        """Generates CKKS keys; sends the public part to each client that will send a block."""
        state = state_of(client)
        state.keys = keys = ckks.Keys.generate()
        return {peer: {"key": torch.from_numpy(keys.public)} for peer in state.adjacency.incoming}

    @phase()
    def trust(self, client: Client, inbox: Message | None = None) -> Message:
        """Keeps the peers' public keys."""
        received = (inbox or {}).items()
        state_of(client).peer_keys = {peer: message["key"].numpy() for peer, message in received}
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
            dense = scatter_rows(block, rows, size).toarray()
            cipher = ckks.encrypt(state.peer_keys[peer], _rounded(dense.ravel().astype(np.float64)))
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
            total = _rounded(state.keys.decrypt(message["cipher"].numpy(), size))
            if total.size and total.min() < 0:
                raise MessageError(
                    f"client {client.name!r}: the sum of its peers' blocks, tensor 'cipher', "
                    "holds a negative number"
                )
            arrived.append(csr_matrix(total.astype(np.float32).reshape(own, -1)))
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
                    ckks.require_size(key, cipher, entries)
                except MessageError as error:
                    raise MessageError(
                        f"client {sender!r} in 'offer_encrypted': tensor '{receiver}/cipher': "
                        f"{error}"
                    ) from None
            total = torch.from_numpy(ckks.add(key, list(ciphers.values())))
            sums.setdefault(min(ciphers), {})[receiver] = {"cipher": total}
        server.deliver(self.offer_encrypted, sums)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.rint(values / GRID) * GRID
