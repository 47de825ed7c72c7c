"""Secure sums: a server learns the sum of the parties' vectors and nothing else about them.

Parties may drop out at any stage. The protocol is the double masking of Bonawitz et al. (CCS 2017)
on the k-regular graph of Bell et al. (CCS 2020). Each party adds a pad of its own to its vector,
and one pad per neighbour, which the neighbour subtracts. In the sum, the pads of neighbours cancel.
The server removes the own pads, and the pads shared with parties that dropped out. For that it
combines keys from shares, of which it needs t in a neighbourhood. There are six stages, each with
the parties that finished the stage before:

    Member                                                     Collector
    advertise() ── two public keys, commitments, signed ─────► take_keys
    draw(commitments, answered) ── a nonce ──────────────────► take_nonces  (k-regular graph only)
    share(keys, answered, nonces) ── encrypted shares ───────► take_shares
    mask(vector, shared) ── the padded vector ───────────────► take_vectors
    confirm(survivors) ── a signature of the survivors ──────► take_confirmations
    unmask(ciphertexts, signatures) ── one share each ───────► take_reveals

A party that drops out at `advertise` is not part of the sum. If it drops out at `draw`, the sum
fails. If it drops out at `share`, no other party pads with it. If it drops out at `mask`, the
server combines its mask key. If it drops out later, t others suffice, and its vector is in the sum.

The adversary: a server that deviates from the protocol at will, together with fewer than a third of
the members of every neighbourhood (a party and its neighbours, m in all; in the complete graph all
parties of the sum), with the default threshold t > 2m/3. It learns the sum over one cohort, which
every honest party that helps to open it has signed, and nothing else about the honest vectors:

- Keys are signed by their owners, together with all that the server said about the sum: run,
  number, round, phase, roster, threshold and terms. A server cannot exchange keys, and parties that
  were told different things do not accept each other's keys.
- A party helps to open a sum only after t members of its neighbourhood, itself included, have
  signed the same survivors. An honest party signs once. If two lists had t signatures each in one
  neighbourhood, 2t would be at most m plus the number of colluding members, but it is more.
- An honest party reveals one kind of share of each peer: of its seed if the peer survived, of its
  mask key if not. For both secrets of a party, again 2t would be at most m plus the colluders.
- Members refuse survivors that are not connected: the sum of each piece would be open. On a
  k-regular graph, survivors may also fall apart without the colluding members. A piece then has
  more than m/3 honest parties: an honest party sees t survivors around it, and fewer than m/3 of
  them collude.
- Nobody chooses the graph. Each party commits to a nonce before it knows those of others, and
  reveals it only when it has all commitments. The graph follows from all nonces. If one is missing,
  the sum fails, and a party takes part in few failed draws of the same sum (`SumRecord`).

The server decides who takes part in a sum, and may delay or end it. A party refuses a roster or
survivors below the share of all parties that the terms require (`cohort`).

The sum itself is not hidden. Two sums over parties that differ in one reveal that party exactly, by
subtraction; `SumRecord` says which of those a party refuses. Vectors are not checked: a party can
put any number into the sum.

A wrong share never becomes a wrong sum. A combined secret must match what its owner advertised: a
mask key its public key, and the seed of an own pad its commitment. The commitment is a SHA-256 hash
of 32 random bytes, so it reveals nothing useful.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NoReturn, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import DTypeLike, NDArray

from fedloom.core.facts import FEWEST, SecureTerms
from fedloom.errors import MessageError, Refusal
from fedloom.privacy import shamir
from fedloom.privacy.identity import SIGNATURE_BYTES, Identity
from fedloom.privacy.sum_record import SumId

Bytes: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]  # [population], whether each party takes part
Words: TypeAlias = NDArray[np.uint32] | NDArray[np.uint64]  # numbers modulo 2^bits

VERSION = 2  # of the protocol: parties with another version refuse each other
KEY_BYTES = 32
SHARE_BYTES = shamir.SHARE_BYTES
CIPHERTEXT_BYTES = 2 * SHARE_BYTES + 16  # a share of the mask key and one of the seed, and the tag
NONCE_BYTES = 16  # of a party's part in drawing the graph
COMMITMENT_BYTES = 32
ONCE = bytes(12)  # the nonce of the ciphers: every key encrypts one message only
STREAM_BYTES = 2**18  # of a keystream at a time: fits into the cache


class TooFew(MessageError):  # noqa: N818
    """Too many parties dropped out. Nothing was released."""


# ---- numbers ----
def encode(tensors: Mapping[str, NDArray], terms: SecureTerms, parties: int) -> Words:
    """Returns the entries of all tensors, sorted by name, as one vector modulo 2^bits.

    Integers are exact. Floats are rounded to multiples of 2^-f, halves to even. Raises a
    MessageError that names a tensor that is out of range.

    Args:
        tensors: Arrays by name.
        terms: The terms of the sum.
        parties: The number of parties in the sum.
    """
    parts = [
        _whole_numbers(name, np.asarray(tensors[name]), terms, parties).ravel()
        for name in sorted(tensors)
    ]
    whole = np.concatenate([np.empty(0, np.int64), *parts])
    return whole.view(np.uint64).astype(terms.word)  # the lowest bits of the two's complement


def _whole_numbers(
    name: str, tensor: NDArray, terms: SecureTerms, parties: int
) -> NDArray[np.int64]:
    if tensor.dtype.kind == "f":
        entries = tensor.astype(np.float64)
        bad = ~(np.abs(entries) <= terms.range)  # NaN is not within any range
        if bad.any():
            raise MessageError(
                f"secure sum: tensor {name!r} holds a number that is not within "
                f"±{terms.range:g} (secure_range)"
            )
        return np.rint(np.ldexp(entries, terms.fraction_bits(parties))).astype(np.int64)
    if tensor.dtype.kind in "iub":
        most = terms.largest_integer(parties)
        extremes = [int(tensor.min()), int(tensor.max())] if tensor.size else []
        for extreme in extremes:
            if abs(extreme) > most:
                raise MessageError(
                    f"secure sum: tensor {name!r} holds a number that is not within ±{most} "
                    f"(an integer summed over {parties} parties in secure_bits = {terms.bits})"
                )
        return tensor.astype(np.int64)
    raise MessageError(
        f"secure sum: tensor {name!r} has dtype {tensor.dtype}; "
        "only floats and integers can be summed"
    )


def decode(
    total: Words,
    like: Mapping[str, tuple[DTypeLike, tuple[int, ...]]],
    terms: SecureTerms,
    parties: int,
) -> dict[str, NDArray]:
    """Decodes a sum of encoded vectors. Returns float64 for floats and int64 for integers.

    Args:
        total: The sum.
        like: The dtype and shape of each tensor.
        terms: The terms of the sum.
        parties: The number of parties in the sum.
    """
    sizes = {name: math.prod(like[name][1]) for name in sorted(like)}
    if total.dtype != terms.word or total.shape != (sum(sizes.values()),):
        raise MessageError(
            f"secure sum: got {total.dtype}{list(total.shape)}, "
            f"expected {terms.word}[{sum(sizes.values())}]"
        )
    whole = total.view(f"<i{terms.bits // 8}").astype(np.int64)
    tensors: dict[str, NDArray] = {}
    start = 0
    for name, size in sizes.items():
        dtype, shape = like[name]
        part = whole[start : start + size].reshape(shape)
        is_float = np.dtype(dtype).kind == "f"
        tensors[name] = (
            np.ldexp(part.astype(np.float64), -terms.fraction_bits(parties)) if is_float else part
        )
        start += size
    return tensors


# ---- the graph ----
def neighbourhood(position: int, roster: Flags, k: int, salt: bytes) -> NDArray[np.int64]:
    """Returns the neighbours of a party of the roster, sorted.

    Every party can compute them and needs to trust no other. If k is 0 or large enough, the
    neighbours are all other parties. Otherwise the parties form a circle, in an order drawn from
    the salt, and a party's neighbours are the k/2 on either side. An odd k is rounded up, so that
    all parties have equally many.

    Args:
        position: The party.
        roster: The parties of the sum.
        k: The number of neighbours.
        salt: What the order is drawn from.
    """
    parties = np.flatnonzero(roster)
    if is_complete(len(parties), k):
        return parties[parties != position]
    circle = _circle(parties, salt)
    steps = np.arange(1, _reach(k) + 1)
    place = int(np.flatnonzero(circle == position)[0])
    return np.sort(circle[(place + np.concatenate([-steps, steps])) % len(circle)])


def pieces(present: Flags, roster: Flags, k: int, salt: bytes) -> int:
    """Returns the number of connected pieces of the graph when only some parties are present."""
    parties = np.flatnonzero(roster)
    if is_complete(len(parties), k):
        return int(present.any())
    places = np.flatnonzero(present[_circle(parties, salt)])
    gaps = np.diff(places, append=places[:1] + len(parties))
    # A circle that is cut once is still connected.
    return max(int((gaps > _reach(k)).sum()), int(present.any()))


def is_complete(parties: int, k: int) -> bool:
    """Returns whether all parties are neighbours. Otherwise a graph is drawn."""
    return k == 0 or 2 * _reach(k) >= parties - 1


def advertised_bytes(parties: int, k: int) -> int:
    """Returns the number of bytes that a party advertises.

    Cipher key, mask key, commitment to the seed, commitment to the nonce if a graph is drawn, and
    the signature.
    """
    drawn = not is_complete(parties, k)
    return 2 * KEY_BYTES + (1 + drawn) * COMMITMENT_BYTES + SIGNATURE_BYTES


def _degree(parties: int, k: int) -> int:
    return parties - 1 if is_complete(parties, k) else 2 * _reach(k)


def _reach(k: int) -> int:
    return (k + 1) // 2


def _circle(parties: NDArray[np.int64], salt: bytes) -> NDArray[np.int64]:
    draws = np.zeros(len(parties), np.dtype("<u8"))
    _add_stream(draws, sha256(b"fedloom secure sum: circle" + salt).digest())
    return parties[np.argsort(draws, kind="stable")]


def _graph_commitment(nonce: bytes, sum_id: bytes, position: int) -> bytes:
    party = position.to_bytes(4, "big")
    return sha256(b"fedloom secure sum: nonce" + sum_id + party + nonce).digest()


def _graph_seed(nonces: Bytes, answered: Flags) -> bytes:
    """Returns what the graph is drawn from: the nonces of all parties that answered."""
    return sha256(b"fedloom secure sum: graph" + answered.tobytes() + nonces.tobytes()).digest()


# ---- keys and pads ----
def _sum_id(about: SumId) -> bytes:
    if len(about.run) != 16 or about.number < 0 or about.round < 0:
        raise ValueError(
            "a sum is identified by a run's id of 16 bytes, its number in the run, from 0, "
            "its round, from 0, and its phase"
        )
    return about.text()


def _derive(secret: bytes, purpose: str, sum_id: bytes, *positions: int) -> bytes:
    """Returns a 32-byte key for one purpose, in one sum, of one party or one ordered pair."""
    parties = b"".join(position.to_bytes(4, "big") for position in positions)
    info = b"fedloom secure sum: " + purpose.encode() + sum_id + parties
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def _pair_key(secret: bytes, sum_id: bytes, one: int, other: int) -> bytes:
    return _derive(secret, "pair pad", sum_id, min(one, other), max(one, other))


def _commitment(seed: bytes, sum_id: bytes, position: int) -> bytes:
    party = position.to_bytes(4, "big")
    return sha256(b"fedloom secure sum: seed" + sum_id + party + seed).digest()


def _agree(key: X25519PrivateKey, public: bytes) -> bytes:
    """Returns the secret of two parties. Raises ValueError for a public key of low order."""
    return key.exchange(X25519PublicKey.from_public_bytes(public))


_ZEROS = np.zeros(STREAM_BYTES, np.uint8)


def _add_stream(total: Words, key: bytes, minus: bool = False) -> None:
    """Adds or subtracts the keystream of AES-256 in counter mode, in place, modulo 2^bits."""
    # The counter starts at 0: a key makes only one stream.
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    stream = np.empty(STREAM_BYTES, np.uint8)
    combine = np.subtract if minus else np.add
    step = STREAM_BYTES // total.itemsize
    for start in range(0, len(total), step):
        part = total[start : start + step]
        encryptor.update_into(_ZEROS[: part.nbytes].data, stream[: part.nbytes].data)
        combine(part, stream[: part.nbytes].view(part.dtype), out=part)


# ---- a client's side ----
class Member:
    """One client's side of one sum: each stage once, in the order of the module's description.

    A request that is out of order is refused and changes nothing. Any other refusal ends the sum
    for this client. Secrets come from the operating system. They are fresh for every sum and are
    deleted after the last stage.

    Args:
        identity: The client's signing key and the public keys of all clients.
        names: The names of all clients. A client's position is its place here.
        terms: The terms that the client agreed to.
        about: Which sum it is; the server says so.
        roster: bool[population], the parties that are asked; the server proposes it.
        threshold: t; the server proposes it.

    Attributes:
        position: The client's position.
        parties: The number of parties in the roster.
        drawn: Whether a graph is drawn. Otherwise all parties are neighbours.
        neighbours: The positions of the neighbours, known from the stage `share` on.
    """

    def __init__(
        self,
        identity: Identity,
        names: Sequence[str],
        terms: SecureTerms,
        about: SumId,
        roster: Flags,
        threshold: int,
    ):
        population = len(names)
        self.position, self.terms, self.threshold = names.index(identity.name), terms, threshold
        self._identity, self._names = identity, names
        self._sum_id = _sum_id(about)
        self._expects = "advertise"
        self._present: Flags = np.ones(population, bool)  # finished the last stage
        self._pair_keys: dict[int, bytes] = {}
        self._inbox_keys: dict[int, bytes] = {}
        self._require(_is(roster, bool, (population,)), f"the roster must be bool[{population}]")
        self._require(bool(roster[self.position]), "it is not in the roster")
        self._least = max(FEWEST, terms.least(population))
        self._present = self._roster = roster.copy()
        self.parties = int(roster.sum())
        self._require_cohort(roster, "in the roster")
        self.drawn = not is_complete(self.parties, terms.neighbours)
        members = _degree(self.parties, terms.neighbours) + 1
        least = terms.quorum(members)
        self._require(
            threshold >= least,
            f"threshold {threshold} of {members} is too low, the terms ask for at least {least}",
        )
        self._require(
            threshold <= members,
            f"threshold {threshold} is more than the {members} members of the neighbourhood",
        )
        self._members, self._seed_of_graph = members, b""
        self.neighbours: NDArray[np.int64] = np.empty(0, np.int64)
        if not self.drawn:
            self.neighbours = neighbourhood(self.position, roster, terms.neighbours, b"")
        # What the server said about the sum. Signatures cover it.
        said = (self._sum_id, roster.tobytes(), repr((threshold, terms)).encode())
        self._said = sha256(b"".join(sha256(part).digest() for part in said)).digest()
        self._cipher_key = X25519PrivateKey.generate()
        self._mask_key = X25519PrivateKey.generate()
        self._seed, self._nonce = os.urandom(KEY_BYTES), os.urandom(NONCE_BYTES)
        self._commitments: Bytes = np.zeros((0, COMMITMENT_BYTES), np.uint8)
        self._own_share = self._signature = b""

    def advertise(self) -> Bytes:
        """Returns public cipher key, public mask key, commitments, and a signature of all that.

        The commitments are to the seed and, if a graph is drawn, to the nonce. `advertised_bytes`
        gives the length.
        """
        self._begin("advertise")
        content = self._public_keys() + _commitment(self._seed, self._sum_id, self.position)
        if self.drawn:
            content += self._own_commitment()
        self._expects = "draw" if self.drawn else "share"
        signature = self._identity.sign("keys", self._said + content)
        return np.frombuffer(content + signature, np.uint8)

    def draw(self, commitments: Bytes, answered: Flags) -> Bytes:
        """Returns the nonce, uint8[16].

        Args:
            commitments: The nonces' commitments of all parties of the roster, uint8[parties, 32];
                the rows of parties that did not answer are zeros.
            answered: The parties that advertised.
        """
        self._begin("draw")
        self._narrow(answered, "answered")
        self._require_roster_rows(commitments, COMMITMENT_BYTES, answered, "commitments")
        row = int(self._roster[: self.position].sum())
        self._require(
            commitments[row].tobytes() == self._own_commitment(),
            "the commitment under its own name is not its own",
        )
        self._commitments = commitments.copy()
        self._expects = "share"
        return np.frombuffer(self._nonce, np.uint8)

    def share(self, keys: Bytes, answered: Flags, nonces: Bytes | None = None) -> Bytes:
        """Returns the neighbours' encrypted shares, uint8[m-1, 82].

        There is a row for each neighbour, in the order of `neighbours`. The rows of neighbours that
        did not answer are zeros, in `keys` and in the result.

        Args:
            keys: What the neighbours advertised.
            answered: The parties that advertised and, if a graph is drawn, revealed their nonces.
            nonces: The nonces of all parties of the roster, uint8[parties, 16]; None if no graph is
                drawn.
        """
        self._begin("share")
        if self.drawn:
            self._draw_graph(nonces, answered)
        self._narrow(answered, "answered")
        self._require_rows(keys, advertised_bytes(self.parties, self.terms.neighbours), answered)
        own = self._public_keys()
        seen = {own[:KEY_BYTES], own[KEY_BYTES:]}
        there = [(row, int(peer)) for row, peer in enumerate(self.neighbours) if answered[peer]]
        points = [peer + 1 for _, peer in there] + [self.position + 1]
        mask_key = int.from_bytes(self._mask_key.private_bytes_raw(), "big")
        key_shares = shamir.split(mask_key, self.threshold, points)
        seed_shares = shamir.split(int.from_bytes(self._seed, "big"), self.threshold, points)
        ciphertexts = np.zeros((len(self.neighbours), CIPHERTEXT_BYTES), np.uint8)
        # The last share is the party's own.
        for (row, peer), key_share, seed_share in zip(there, key_shares, seed_shares, strict=False):
            advertised = keys[row].tobytes()
            self._require_signed_keys(peer, advertised)
            cipher_public = advertised[:KEY_BYTES]
            mask_public = advertised[KEY_BYTES : 2 * KEY_BYTES]
            for public in (cipher_public, mask_public):
                self._require(public not in seen, f"a key of party {peer} is there twice")
                seen.add(public)
            try:
                secret = _agree(self._cipher_key, cipher_public)
                self._pair_keys[peer] = _pair_key(
                    _agree(self._mask_key, mask_public), self._sum_id, self.position, peer
                )
            except ValueError:
                self._refuse(f"a key of party {peer} is of low order")
            self._inbox_keys[peer] = _derive(secret, "shares", self._sum_id, peer, self.position)
            outbox_key = _derive(secret, "shares", self._sum_id, self.position, peer)
            plain = key_share.to_bytes(SHARE_BYTES, "big") + seed_share.to_bytes(SHARE_BYTES, "big")
            encrypted = AESGCM(outbox_key).encrypt(ONCE, plain, None)
            ciphertexts[row] = np.frombuffer(encrypted, np.uint8)
        self._own_share = seed_shares[-1].to_bytes(SHARE_BYTES, "big")
        self._expects = "mask"
        return ciphertexts

    def _draw_graph(self, nonces: Bytes | None, answered: Flags) -> None:
        """Checks the nonces against their commitments, and computes the neighbours."""
        self._require(
            _is(answered, bool, self._present.shape) and np.array_equal(answered, self._present),
            "not all parties that committed to a nonce have revealed it",
        )
        self._require(nonces is not None, "there are no nonces")
        assert nonces is not None
        self._require_roster_rows(nonces, NONCE_BYTES, None, "nonces")
        for row, peer in enumerate(np.flatnonzero(self._roster).tolist()):
            if answered[peer]:
                opened = _graph_commitment(nonces[row].tobytes(), self._sum_id, peer)
                self._require(
                    opened == self._commitments[row].tobytes(),
                    f"the nonce of party {peer} is not the one that it committed to",
                )
        self._seed_of_graph = _graph_seed(nonces, answered)
        self.neighbours = neighbourhood(
            self.position, self._roster, self.terms.neighbours, self._seed_of_graph
        )

    def _require_signed_keys(self, peer: int, advertised: bytes) -> None:
        content, signature = advertised[:-SIGNATURE_BYTES], advertised[-SIGNATURE_BYTES:]
        self._require(
            self._identity.is_signed(self._names[peer], "keys", self._said + content, signature),
            f"party {peer} ({self._names[peer]}) has not signed the keys under its name for this "
            "sum, with this roster and these terms",
        )

    def _own_commitment(self) -> bytes:
        return _graph_commitment(self._nonce, self._sum_id, self.position)

    def mask(self, vector: Words, shared: Flags) -> Words:
        """Returns the vector under the own pad and the neighbours' pads.

        Args:
            vector: The result of `encode`.
            shared: The parties that shared.
        """
        if vector.dtype not in (np.uint32, np.uint64) or vector.ndim != 1:
            raise MessageError(
                f"secure sum: the vector is {vector.dtype}{list(vector.shape)}, "
                "expected words of 32 or 64 bits"
            )
        self._begin("mask")
        self._narrow(shared, "shared")
        masked = vector.copy()
        _add_stream(masked, _derive(self._seed, "own pad", self._sum_id, self.position))
        for peer in self.neighbours[shared[self.neighbours]].tolist():
            _add_stream(masked, self._pair_keys[peer], minus=peer < self.position)
        self._expects = "confirm"
        return masked

    def confirm(self, survivors: Flags) -> Bytes:
        """Returns a signature of the survivors, uint8[64].

        survivors: whose vectors arrived.
        """
        self._begin("confirm")
        self._shared = self._present
        self._narrow(survivors, "survived")
        apart = pieces(survivors, self._roster, self.terms.neighbours, self._seed_of_graph)
        self._require(
            apart == 1,
            f"the survivors fall into {apart} pieces, and the sum of each would be open",
        )
        self._signature = self._identity.sign("survivors", self._confirmed())
        self._expects = "unmask"
        return np.frombuffer(self._signature, np.uint8)

    def unmask(self, ciphertexts: Bytes, signatures: Bytes) -> Bytes:
        """Returns uint8[m, 33]: one share of a secret of each member of the neighbourhood.

        It is a share of the seed if the member survived, a share of the mask key if the member
        shared but did not survive, and zeros if it did not share. The order is that of
        `neighbours`, then the party itself.

        Args:
            ciphertexts: What the neighbours encrypted for this party.
            signatures: The neighbours' signatures of the survivors, uint8[m-1, 64]; the rows of
                those that did not confirm are zeros.
        """
        self._begin("unmask")
        shared, survivors = self._shared, self._present
        self._require_rows(ciphertexts, CIPHERTEXT_BYTES, shared, "ciphertexts")
        self._require_confirmed(signatures)
        shares = np.zeros((len(self.neighbours) + 1, SHARE_BYTES), np.uint8)
        for row, peer in enumerate(self.neighbours.tolist()):
            if not shared[peer]:
                continue
            try:
                cipher = AESGCM(self._inbox_keys[peer])
                plain = cipher.decrypt(ONCE, ciphertexts[row].tobytes(), None)
            except InvalidTag:
                self._refuse(f"what party {peer} encrypted for it did not arrive as it was sent")
            chosen = plain[SHARE_BYTES:] if survivors[peer] else plain[:SHARE_BYTES]
            shares[row] = np.frombuffer(chosen, np.uint8)
        shares[-1] = np.frombuffer(self._own_share, np.uint8)
        self._forget()
        return shares

    def _confirmed(self) -> bytes:
        """What a party signs: the sum, its graph and the survivors."""
        return self._said + self._seed_of_graph + self._present.tobytes()

    def _require_confirmed(self, signatures: Bytes) -> None:
        """Refuses unless enough members of the neighbourhood have signed the same survivors."""
        self._require(
            _is(signatures, np.uint8, (len(self.neighbours), SIGNATURE_BYTES)),
            f"signatures must be uint8[{len(self.neighbours)}, {SIGNATURE_BYTES}]",
        )
        said, valid = self._confirmed(), 1  # its own
        for peer, signature in zip(self.neighbours.tolist(), signatures, strict=True):
            if self._present[peer] and signature.any():
                name = self._names[peer]
                valid += self._identity.is_signed(name, "survivors", said, signature.tobytes())
        self._require(
            valid >= self.threshold,
            f"{valid} of the {self._members} parties around it have signed these survivors, "
            f"fewer than {self.threshold}",
        )

    def _public_keys(self) -> bytes:
        keys = (self._cipher_key, self._mask_key)
        return b"".join(key.public_key().public_bytes_raw() for key in keys)

    def _begin(self, stage: str) -> None:
        """Refuses a stage that is not due. Until the stage is done, no other is due."""
        self.require_due(stage)
        self._expects = "nothing more"

    def require_due(self, stage: str) -> None:
        """Refuses a stage that is not due; changes nothing."""
        if stage != self._expects:
            raise Refusal(
                f"party {self.position} refuses: asked to {stage}, "
                f"but what is due is: {self._expects}"
            )

    def _narrow(self, present: Flags, did: str) -> None:
        """Checks and stores the server's list of parties that finished a stage."""
        population = len(self._present)
        self._require(_is(present, bool, (population,)), f"who {did} must be bool[{population}]")
        strangers = np.flatnonzero(present & ~self._present)
        self._require(
            not len(strangers),
            f"parties {strangers.tolist()} are said to have {did}, "
            "but were not there a stage before",
        )
        self._require(bool(present[self.position]), f"it is not among those who {did}")
        self._require_cohort(present, did)
        if len(self.neighbours):
            near = int(present[self.neighbours].sum()) + 1
            self._require(
                near >= self.threshold,
                f"{near} of the {self._members} parties around it {did}, "
                f"fewer than {self.threshold}",
            )
        self._present = present.copy()

    def _require_cohort(self, present: Flags, did: str) -> None:
        """Refuses a sum over too few parties."""
        count = int(present.sum())
        self._require(count >= self._least, f"{count} parties {did}, fewer than {self._least}")

    def _require_roster_rows(
        self, rows: Bytes, width: int, present: Flags | None, what: str
    ) -> None:
        """Checks that there is a row for each party of the roster, filled for those present."""
        self._require(
            _is(rows, np.uint8, (self.parties, width)),
            f"{what} must be uint8[{self.parties}, {width}]",
        )
        if present is not None:
            due = present[self._roster]
            self._require(
                np.array_equal(rows.any(axis=1), due),
                f"there must be {what} of exactly the parties that are present",
            )

    def _require_rows(self, rows: Bytes, width: int, present: Flags, what: str = "keys") -> None:
        """Checks that exactly the neighbours that are present have bytes."""
        self._require(
            _is(rows, np.uint8, (len(self.neighbours), width)),
            f"{what} must be uint8[{len(self.neighbours)}, {width}]",
        )
        filled, due = rows.any(axis=1), present[self.neighbours]
        missing = self.neighbours[due & ~filled].tolist()
        stray = self.neighbours[filled & ~due].tolist()
        self._require(not missing, f"there are no {what} of parties {missing}")
        self._require(not stray, f"there are {what} of parties {stray}, which are said to be gone")

    def _require(self, condition: bool, why: str) -> None:
        if not condition:
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        self._forget()
        raise Refusal(f"party {self.position} refuses: {why}")

    def _forget(self) -> None:
        self._expects = "nothing more"
        self._pair_keys, self._inbox_keys = {}, {}
        for name in ("_cipher_key", "_mask_key", "_seed", "_nonce", "_own_share"):
            self.__dict__.pop(name, None)


def _is(array: object, dtype: DTypeLike, shape: tuple[int, ...]) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape


# ---- the server's side ----
class Collector:
    """The server's side of one sum.

    Each `take_*` takes the replies as (position, array) pairs, in any order. They may arrive one by
    one. All but the last return {position: arguments of the member's next stage} for the parties
    that continue. The last returns the sum. A party without a reply has dropped out. TooFew is
    raised as soon as the others cannot finish. A MessageError names a party whose reply is
    malformed, and ends the sum.

    Args:
        terms: The terms of the sum.
        about: Which sum it is.
        roster: bool[population], the parties that are asked.
        size: The number of entries of a vector.

    Attributes:
        threshold: t, which the server proposes to the members.
        degree: The number of neighbours of each party.
        drawn: Whether a graph is drawn.
        advertised: The number of bytes that a party advertises.
    """

    def __init__(self, terms: SecureTerms, about: SumId, roster: Flags, size: int):
        self.terms, self.roster, self.size = terms, roster.copy(), size
        self._sum_id = _sum_id(about)
        # The position of each party of the roster. Rows of all arrays below are in this order.
        self._positions: list[int] = np.flatnonzero(roster).tolist()
        parties = len(self._positions)
        self._least = max(FEWEST, terms.least(len(roster)))
        if parties < self._least:
            raise TooFew(
                f"secure sum: {parties} parties are asked, at least {self._least} are needed; "
                "nothing was released"
            )
        self.drawn = not is_complete(parties, terms.neighbours)
        self.degree = degree = _degree(parties, terms.neighbours)
        self.threshold = terms.quorum(degree + 1)
        self.advertised = advertised_bytes(parties, terms.neighbours)
        self._seed_of_graph = b""
        if not self.drawn:
            self._connect()
        self._expects = "advertise"
        self._here = np.ones(parties, bool)  # finished the last stage
        # The parties whose seed, and whose mask key, the server combines.
        self._survived = self._lost = np.zeros(parties, bool)
        self._advertised = np.zeros((parties, self.advertised), np.uint8)
        self._nonces = np.zeros((parties, NONCE_BYTES), np.uint8)
        self._ciphertexts = np.zeros((parties, degree, CIPHERTEXT_BYTES), np.uint8)
        self._total: Words = np.zeros(size, terms.word)

    def _connect(self) -> None:
        """Computes the graph."""
        k, seed, row_of = self.terms.neighbours, self._seed_of_graph, np.cumsum(self.roster) - 1
        near = [neighbourhood(p, self.roster, k, seed) for p in self._positions]
        self._near = np.stack([row_of[neighbours] for neighbours in near])
        # The messages to a party: the (party, neighbour) entries in which it is the neighbour, in
        # the order of its neighbours.
        self._inbox = np.argsort(self._near.ravel(), kind="stable").reshape(self._near.shape)

    def take_keys(self, arrivals: Iterable[tuple[int, Bytes]]) -> dict[int, tuple[Any, ...]]:
        """Takes results of `advertise`. Returns the arguments of `draw`, or of `share`."""
        seen: set[bytes] = set()
        for row, advertised in self._take("advertise", arrivals, np.uint8, (self.advertised,)):
            raw = advertised.tobytes()
            for public in (raw[:KEY_BYTES], raw[KEY_BYTES : 2 * KEY_BYTES]):
                if public in seen:
                    raise MessageError(
                        f"secure sum: party {self._positions[row]} advertises a key "
                        "that is there already"
                    )
                seen.add(public)
            self._advertised[row] = advertised
        if not self.drawn:
            return self._keys()
        self._require_count(self._here, "advertised keys", self._least)
        start = 2 * KEY_BYTES + COMMITMENT_BYTES
        commitments = self._advertised[:, start : start + COMMITMENT_BYTES]
        answered = self._flags(self._here)
        self._expects = "draw"
        return dict.fromkeys(np.flatnonzero(answered).tolist(), (commitments, answered))

    def take_nonces(self, arrivals: Iterable[tuple[int, Bytes]]) -> dict[int, tuple[Any, ...]]:
        """Takes results of `draw`. Returns the arguments of `share`.

        Raises TooFew if a nonce is missing: a server that could leave some out would choose among
        graphs.
        """
        asked = self._here
        for row, nonce in self._take("draw", arrivals, np.uint8, (NONCE_BYTES,)):
            self._nonces[row] = nonce
        if missing := int((asked & ~self._here).sum()):
            raise TooFew(
                f"secure sum: {missing} parties did not reveal their nonces, and the graph needs "
                "all of them; nothing was released"
            )
        self._seed_of_graph = _graph_seed(self._nonces, self._flags(self._here))
        self._connect()
        return {at: (*request, self._nonces) for at, request in self._keys().items()}

    def _keys(self) -> dict[int, tuple[Any, ...]]:
        self._require_quorum(self._here, "advertised keys")
        answered = self._flags(self._here)
        self._expects = "share"
        return {
            self._positions[row]: (self._advertised[self._near[row]], answered)
            for row in np.flatnonzero(self._here)
        }

    def take_shares(self, arrivals: Iterable[tuple[int, Bytes]]) -> dict[int, tuple[Flags]]:
        """Takes results of `share`. Returns the arguments of `mask` except the vector."""
        for row, ciphertexts in self._take(
            "share", arrivals, np.uint8, self._ciphertexts.shape[1:]
        ):
            self._ciphertexts[row] = ciphertexts
        self._require_quorum(self._here, "shared their secrets")
        shared = self._flags(self._here)
        self._expects = "mask"
        return dict.fromkeys(np.flatnonzero(shared).tolist(), (shared,))

    def take_vectors(self, arrivals: Iterable[tuple[int, Words]]) -> dict[int, tuple[Flags]]:
        """Adds results of `mask` as they arrive. Returns the arguments of `confirm`."""
        shared = self._here
        for _, vector in self._take("mask", arrivals, self.terms.word, (self.size,)):
            self._total += vector
        self._survived = self._here
        # A party without a surviving neighbour is in no remaining pad.
        self._lost = shared & ~self._survived & self._survived[self._near].any(axis=1)
        self._require_quorum(self._survived | self._lost, "sent their vectors")
        survivors = self._flags(self._survived)
        apart = pieces(survivors, self.roster, self.terms.neighbours, self._seed_of_graph)
        if apart > 1:
            raise TooFew(
                f"secure sum: the survivors fall into {apart} pieces, and the sum of each would "
                "be open; nothing was released"
            )
        self._expects = "confirm"
        return dict.fromkeys(np.flatnonzero(survivors).tolist(), (survivors,))

    def take_confirmations(
        self, arrivals: Iterable[tuple[int, Bytes]]
    ) -> dict[int, tuple[Bytes, Bytes]]:
        """Takes results of `confirm`. Returns the arguments of `unmask`."""
        signatures = np.zeros((len(self._positions), SIGNATURE_BYTES), np.uint8)
        for row, signature in self._take("confirm", arrivals, np.uint8, (SIGNATURE_BYTES,)):
            signatures[row] = signature
        owners = self._survived | self._lost
        self._require_quorum(owners, "confirmed the survivors", fewest=0)
        ciphertexts = self._ciphertexts.reshape(-1, CIPHERTEXT_BYTES)
        self._expects = "unmask"
        return {
            self._positions[row]: (ciphertexts[self._inbox[row]], signatures[self._near[row]])
            for row in np.flatnonzero(self._here)
        }

    def take_reveals(self, arrivals: Iterable[tuple[int, Bytes]]) -> Words:
        """Takes results of `unmask`. Returns the sum of the survivors' vectors modulo 2^bits."""
        parties, degree = self._near.shape
        revealed = np.zeros((parties, degree + 1, SHARE_BYTES), np.uint8)
        for row, reply in self._take("unmask", arrivals, np.uint8, revealed.shape[1:]):
            revealed[row] = reply
        # The sum is over the survivors, so any number of helpers above the threshold is enough.
        self._require_quorum(self._survived | self._lost, "revealed their shares", fewest=0)
        of_others, of_itself = revealed[:, :-1].reshape(-1, SHARE_BYTES), revealed[:, -1]
        for row in np.flatnonzero(self._survived | self._lost).tolist():
            near = self._near[row].tolist()
            shares = dict(zip(near, of_others[self._inbox[row]], strict=True))
            shares[row] = of_itself[row]
            helpers = [helper for helper in sorted(shares) if self._here[helper]][: self.threshold]
            secret = self._combine(
                row, {self._positions[helper]: shares[helper] for helper in helpers}
            )
            if self._survived[row]:
                pad = _derive(secret, "own pad", self._sum_id, self._positions[row])
                _add_stream(self._total, pad, minus=True)
            else:
                self._cancel_pads(row, X25519PrivateKey.from_private_bytes(secret))
        return self._total

    def _combine(self, row: int, shares: dict[int, Bytes]) -> bytes:
        """Returns a party's seed if it survived, otherwise its mask key.

        Raises a MessageError if the secret does not match what the party advertised.

        shares: by the position of the helper.
        """
        position = self._positions[row]
        number = shamir.combine(
            {helper + 1: int.from_bytes(share.tobytes(), "big") for helper, share in shares.items()}
        )
        # The modulus changes 297 numbers of the field. None of them can be a secret.
        secret = (number % 2**256).to_bytes(KEY_BYTES, "big")
        advertised = self._advertised[row].tobytes()
        if self._survived[row]:
            start = 2 * KEY_BYTES
            committed = advertised[start : start + COMMITMENT_BYTES]
            matches = _commitment(secret, self._sum_id, position) == committed
        else:
            public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
            matches = public == advertised[KEY_BYTES : 2 * KEY_BYTES]
        if not matches:
            raise MessageError(
                f"secure sum: the shares of party {position}'s secret do not give what it "
                f"advertised; it dealt wrong ones, or one of parties {list(shares)} handed on a "
                "wrong one; nothing was released"
            )
        return secret

    def _cancel_pads(self, row: int, mask_key: X25519PrivateKey) -> None:
        """Removes the pads that the surviving neighbours of a lost party share with it."""
        position = self._positions[row]
        for near in self._near[row][self._survived[self._near[row]]].tolist():
            peer = self._positions[near]
            secret = _agree(mask_key, self._advertised[near, KEY_BYTES : 2 * KEY_BYTES].tobytes())
            pad = _pair_key(secret, self._sum_id, peer, position)
            _add_stream(self._total, pad, minus=peer < position)

    def _take(
        self,
        stage: str,
        arrivals: Iterable[tuple[int, NDArray]],
        dtype: DTypeLike,
        shape: tuple[int, ...],
    ) -> Iterator[tuple[int, NDArray]]:
        """Checks replies one by one and yields (row, array). Then stores which parties replied."""
        if stage != self._expects:
            raise MessageError(
                f"secure sum: replies to {stage}, but what is due is: {self._expects}"
            )
        self._expects = "nothing more"
        arrived = np.zeros(len(self._here), bool)
        asked = {self._positions[row]: row for row in np.flatnonzero(self._here).tolist()}
        for position, array in arrivals:
            row = asked.pop(position, None)
            if row is None:
                raise MessageError(
                    f"secure sum: party {position} was not asked to {stage}, or answered before"
                )
            if not _is(array, dtype, shape):
                is_array = isinstance(array, np.ndarray)
                got = f"{array.dtype}{list(array.shape)}" if is_array else type(array).__name__
                raise MessageError(
                    f"secure sum: party {position} answers {stage} with {got}, "
                    f"expected {np.dtype(dtype)}{list(shape)}"
                )
            arrived[row] = True
            yield row, array
        self._here = arrived

    def _require_count(self, present: Flags, did: str, fewest: int) -> None:
        if (here := int(present.sum())) < fewest:
            raise TooFew(
                f"secure sum: {here} parties {did}, at least {fewest} are needed; "
                "nothing was released"
            )

    def _require_quorum(self, owners: Flags, did: str, fewest: int | None = None) -> None:
        """Raises TooFew unless enough parties are here, in all and near each owner of a secret."""
        self._require_count(self._here, did, self._least if fewest is None else fewest)
        left = self._here[self._near].sum(axis=1) + self._here
        short = np.flatnonzero(owners & (left < self.threshold))
        if len(short):
            row, members = short[0], self._near.shape[1] + 1
            raise TooFew(
                f"secure sum: {left[row]} of the {members} parties around party "
                f"{self._positions[row]} {did}, {self.threshold} are needed; nothing was released"
            )

    def _flags(self, rows: Flags) -> Flags:
        """Returns rows of the roster as bool[population]."""
        flags = np.zeros(len(self.roster), bool)
        flags[self.roster] = rows
        return flags
