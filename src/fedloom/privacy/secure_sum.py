"""Secure aggregation: a server learns the sum of the parties' vectors and nothing else about them, whoever drops out on the way.

The protocol is the double masking of Bonawitz et al. (CCS 2017) on the k-regular graph of Bell et al. (CCS 2020). Each party adds to its
vector a pad of its own and one pad per neighbour, which the neighbour subtracts. In a sum the neighbours' pads cancel; the own pads, and
those shared with parties that dropped out, the server takes off with keys that it puts together from shares, t of a neighbourhood.
Four stages, each with the parties that finished the one before:

    Member                                             Collector
    advertise() ── two public keys, a commitment ────► take_keys      dropped here: as if never asked
    share(keys, answered) ── encrypted shares ───────► take_shares    dropped here: nobody pads with it
    mask(vector, shared) ── the padded vector ───────► take_vectors   dropped here: its mask key is put together
    unmask(survivors, ciphertexts) ── one share each ► take_reveals   dropped here: t others suffice; gives the sum

Whom to trust. The server is taken to be honest but curious: it follows the protocol and keeps what it sees. It may read together with up to
t - 1 parties of every neighbourhood (a party and its neighbours, m in all) and still learns only the sum of the others. On a k-regular
graph that holds while the others hang together: if the graph falls apart without the colluders and the dropped, it learns the sum of each
piece. On a circle in random order with k in the tens that does not happen by chance; survivors that fall apart are refused.

What a client can check it checks itself, and refuses: a threshold below the terms, parties that appear from nowhere, fewer than three
survivors, a second masking (two vectors under the same pads give their difference away) and a second unmasking (the pad and the key of one
peer together give that peer's vector away; one reply cannot hold both). This bounds what a server that deviates gets from one client. It is
no proof against a server that tells different clients different things, which takes signatures and the consistency round of Bonawitz et
al.; the complete graph and a threshold of 2/3 leave it the least room. There is no public key infrastructure here either: a server that
hands out keys of its own making stands in the middle, and only signed keys stop it. The graph follows from the run's id, which therefore
has to be drawn at random after the parties are fixed: who can choose it can choose its victim's neighbours.

What a sum itself says is not hidden. Two sums over parties that differ in one give that party away exactly by subtraction: sum over a
fixed cohort, or add noise. Nor is a vector checked: a party can put any number into the sum.

A wrong share never becomes a wrong sum: what is put together must fit what its owner advertised, a mask key its public key, the seed of an
own pad its commitment, a SHA-256 hash (of 32 random bytes, so it says nothing that can be used).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import NoReturn, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import DTypeLike, NDArray

from fedloom.core.facts import SecureTerms
from fedloom.errors import MessageError, Refusal
from fedloom.privacy import shamir

Bytes: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]  # [population], who does something
Words: TypeAlias = NDArray[np.uint32] | NDArray[np.uint64]  # numbers modulo 2^bits

KEY_BYTES = 32
SHARE_BYTES = shamir.SHARE_BYTES
CIPHERTEXT_BYTES = 2 * SHARE_BYTES + 16  # a share of the mask key and one of the seed, and the tag
ADVERTISED_BYTES = 3 * KEY_BYTES  # cipher key, mask key, commitment to the seed
FEWEST = 3  # in a sum over two, each knows the other's vector
ONCE = bytes(12)  # the nonce of the ciphers: every key encrypts one message only
STREAM_BYTES = 2**18  # of a keystream at a time: stays in the cache


class TooFew(MessageError):  # noqa: N818
    """So many parties dropped out that there is no sum. Nothing was released."""


# ---- numbers ----
def encode(tensors: Mapping[str, NDArray], terms: SecureTerms, parties: int) -> Words:
    """Takes tensors and over how many parties they will be summed, gives all entries, names sorted, as one vector modulo 2^bits.

    Integers are exact; floats are rounded to multiples of 2^-f, halves to even. MessageError names a tensor that is out of range.
    """
    parts = [
        _whole_numbers(name, np.asarray(tensors[name]), terms, parties).ravel()
        for name in sorted(tensors)
    ]
    whole = np.concatenate([np.empty(0, np.int64), *parts])
    return whole.view(np.uint64).astype(terms.word)  # two's complement, the lowest bits of it


def _whole_numbers(
    name: str, tensor: NDArray, terms: SecureTerms, parties: int
) -> NDArray[np.int64]:
    if tensor.dtype.kind == "f":
        entries = tensor.astype(np.float64)
        bad = ~(np.abs(entries) <= terms.range)  # NaN is not within any range
        if bad.any():
            raise MessageError(
                f"secure sum: tensor {name!r} holds a number that is not within ±{terms.range:g} (secure_range)"
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
        f"secure sum: tensor {name!r} has dtype {tensor.dtype}; only floats and integers can be summed"
    )


def decode(
    total: Words,
    like: Mapping[str, tuple[DTypeLike, tuple[int, ...]]],
    terms: SecureTerms,
    parties: int,
) -> dict[str, NDArray]:
    """Takes a sum of encoded vectors and {name: (dtype, shape)} of the tensors, gives them: float64 for floats, int64 for integers."""
    sizes = {name: math.prod(like[name][1]) for name in sorted(like)}
    if total.dtype != terms.word or total.shape != (sum(sizes.values()),):
        raise MessageError(
            f"secure sum: got {total.dtype}{list(total.shape)}, expected {terms.word}[{sum(sizes.values())}]"
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
    """The neighbours of a party of the roster, sorted, without itself. Anybody can compute it, so nobody has to be believed.

    Everybody else if k is 0 or reaches that far. Else the parties stand in a circle, in an order drawn from the salt, and a party's
    neighbours are the k/2 on either side (an odd k is rounded up, so that everybody has equally many).
    """
    parties = np.flatnonzero(roster)
    if _is_complete(len(parties), k):
        return parties[parties != position]
    circle = _circle(parties, salt)
    steps = np.arange(1, _reach(k) + 1)
    place = int(np.flatnonzero(circle == position)[0])
    return np.sort(circle[(place + np.concatenate([-steps, steps])) % len(circle)])


def pieces(present: Flags, roster: Flags, k: int, salt: bytes) -> int:
    """Into how many pieces the graph of `neighbourhood` falls when only some of its parties are present."""
    parties = np.flatnonzero(roster)
    if _is_complete(len(parties), k):
        return int(present.any())
    places = np.flatnonzero(present[_circle(parties, salt)])
    gaps = np.diff(places, append=places[:1] + len(parties))
    return max(
        int((gaps > _reach(k)).sum()), int(present.any())
    )  # cut once, a circle still hangs together


def _reach(k: int) -> int:
    return (k + 1) // 2


def _is_complete(parties: int, k: int) -> bool:
    return k == 0 or 2 * _reach(k) >= parties - 1


def _circle(parties: NDArray[np.int64], salt: bytes) -> NDArray[np.int64]:
    lots = np.zeros(len(parties), np.dtype("<u8"))
    _add_stream(lots, sha256(b"fedloom secure sum: circle" + salt).digest())
    return parties[np.argsort(lots, kind="stable")]


# ---- keys and pads ----
def _sum_id(run: bytes, number: int) -> bytes:
    if len(run) != 16 or number < 0:
        raise ValueError(
            "a sum is known by a run's id of 16 bytes and its number in the run, from 0"
        )
    return run + number.to_bytes(8, "big")


def _derive(secret: bytes, purpose: str, sum_id: bytes, *positions: int) -> bytes:
    """A 32-byte key for one purpose, in one sum, of one party or one (ordered) pair."""
    info = (
        b"fedloom secure sum: "
        + purpose.encode()
        + sum_id
        + b"".join(position.to_bytes(4, "big") for position in positions)
    )
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def _pair_key(secret: bytes, sum_id: bytes, one: int, other: int) -> bytes:
    return _derive(secret, "pair pad", sum_id, min(one, other), max(one, other))


def _commitment(seed: bytes, sum_id: bytes, position: int) -> bytes:
    return sha256(
        b"fedloom secure sum: seed" + sum_id + position.to_bytes(4, "big") + seed
    ).digest()


def _agree(key: X25519PrivateKey, public: bytes) -> bytes:
    """The secret two parties share; ValueError for a public key of low order, with which there is none."""
    return key.exchange(X25519PublicKey.from_public_bytes(public))


_ZEROS = np.zeros(STREAM_BYTES, np.uint8)


def _add_stream(total: Words, key: bytes, minus: bool = False) -> None:
    """Adds to the words, in place and modulo 2^bits, the keystream of AES-256 in counter mode (or takes it off)."""
    encryptor = Cipher(
        algorithms.AES256(key), modes.CTR(bytes(16))
    ).encryptor()  # from 0: a key makes one stream only
    stream = np.empty(STREAM_BYTES, np.uint8)
    combine = np.subtract if minus else np.add
    step = STREAM_BYTES // total.itemsize
    for start in range(0, len(total), step):
        part = total[start : start + step]
        encryptor.update_into(_ZEROS[: part.nbytes].data, stream[: part.nbytes].data)
        combine(part, stream[: part.nbytes].view(part.dtype), out=part)


# ---- a client's side ----
class Member:
    """One client's side of one sum: advertise, share, mask, unmask, each once and in this order.

    A request that is out of order is refused and changes nothing; any other refusal ends the sum for this client. Secrets come from the
    operating system, are fresh for every sum, and are let go after the last stage.
    """

    def __init__(
        self,
        position: int,
        population: int,
        terms: SecureTerms,
        run: bytes,
        number: int,
        roster: Flags,
        threshold: int,
    ):
        """roster (bool[population], who is asked) and threshold (t) are the server's proposal, the rest is what the client knows.

        run is the run's id, 16 bytes, number counts the sums in it.
        """
        self.position, self.terms, self.threshold = position, terms, threshold
        self._sum_id = _sum_id(run, number)
        self._expects = "advertise"
        self._present: Flags = np.ones(population, bool)  # who finished the last stage
        self._pair_keys: dict[int, bytes] = {}
        self._inbox_keys: dict[int, bytes] = {}
        self._require(_is(roster, bool, (population,)), f"the roster must be bool[{population}]")
        self._require(
            0 <= position < population and bool(roster[position]), "it is not in the roster"
        )
        self._require(
            int(roster.sum()) >= FEWEST,
            f"{int(roster.sum())} parties in the roster, fewer than {FEWEST}",
        )
        self._present = self._roster = roster.copy()
        self.parties = int(roster.sum())
        self.neighbours = neighbourhood(position, roster, terms.neighbours, self._sum_id)
        members = len(self.neighbours) + 1
        least = terms.quorum(members)
        self._require(
            threshold >= least,
            f"threshold {threshold} of {members} is too low, the terms ask for at least {least}",
        )
        self._require(
            threshold <= members,
            f"threshold {threshold} is more than the {members} members of the neighbourhood",
        )
        self._cipher_key = X25519PrivateKey.generate()
        self._mask_key = X25519PrivateKey.generate()
        self._seed = os.urandom(KEY_BYTES)
        self._own_share = b""

    def advertise(self) -> Bytes:
        """Gives uint8[96]: the public cipher key, the public mask key, and a commitment to the seed of the own pad."""
        self._begin("advertise")
        commitment = _commitment(self._seed, self._sum_id, self.position)
        self._expects = "share"
        return np.frombuffer(self._public_keys() + commitment, np.uint8)

    def share(self, keys: Bytes, answered: Flags) -> Bytes:
        """Takes the neighbours' two public keys uint8[m-1, 64] and who answered, gives their encrypted shares uint8[m-1, 82].

        A row for each neighbour, in the order of `neighbours`; zeros, both ways, where one did not answer.
        """
        self._begin("share")
        self._narrow(answered, "answered")
        self._require_rows(keys, 2 * KEY_BYTES, answered, "keys")
        own = self._public_keys()
        seen = {own[:KEY_BYTES], own[KEY_BYTES:]}
        there = [(row, int(peer)) for row, peer in enumerate(self.neighbours) if answered[peer]]
        points = [peer + 1 for _, peer in there] + [self.position + 1]
        key_shares = shamir.split(
            int.from_bytes(self._mask_key.private_bytes_raw(), "big"), self.threshold, points
        )
        seed_shares = shamir.split(int.from_bytes(self._seed, "big"), self.threshold, points)
        ciphertexts = np.zeros((len(self.neighbours), CIPHERTEXT_BYTES), np.uint8)
        for (row, peer), key_share, seed_share in zip(
            there, key_shares, seed_shares, strict=False
        ):  # the last share is its own
            cipher_public, mask_public = (
                keys[row, :KEY_BYTES].tobytes(),
                keys[row, KEY_BYTES:].tobytes(),
            )
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
            ciphertexts[row] = np.frombuffer(
                AESGCM(outbox_key).encrypt(ONCE, plain, None), np.uint8
            )
        self._own_share = seed_shares[-1].to_bytes(SHARE_BYTES, "big")
        self._expects = "mask"
        return ciphertexts

    def mask(self, vector: Words, shared: Flags) -> Words:
        """Takes its vector (as `encode` gives it) and who shared, gives the vector under its own pad and its neighbours'."""
        if vector.dtype not in (np.uint32, np.uint64) or vector.ndim != 1:
            raise MessageError(
                f"secure sum: the vector is {vector.dtype}{list(vector.shape)}, expected words of 32 or 64 bits"
            )
        self._begin("mask")
        self._narrow(shared, "shared")
        masked = vector.copy()
        _add_stream(masked, _derive(self._seed, "own pad", self._sum_id, self.position))
        for peer in self.neighbours[shared[self.neighbours]].tolist():
            _add_stream(masked, self._pair_keys[peer], minus=peer < self.position)
        self._expects = "unmask"
        return masked

    def unmask(self, survivors: Flags, ciphertexts: Bytes) -> Bytes:
        """Takes whose vectors arrived and what the neighbours encrypted for it, gives uint8[m, 33]: one share of each member's secrets.

        Of the seed of its pad if it survived, of its mask key if it shared but did not survive, zeros if it did not share. The order is
        that of `neighbours`, then itself.
        """
        self._begin("unmask")
        shared = self._present
        self._narrow(survivors, "survived")
        apart = pieces(survivors, self._roster, self.terms.neighbours, self._sum_id)
        self._require(
            apart == 1, f"the survivors fall into {apart} pieces, and the sum of each would be open"
        )
        self._require_rows(ciphertexts, CIPHERTEXT_BYTES, shared, "ciphertexts")
        shares = np.zeros((len(self.neighbours) + 1, SHARE_BYTES), np.uint8)
        for row, peer in enumerate(self.neighbours.tolist()):
            if not shared[peer]:
                continue
            try:
                plain = AESGCM(self._inbox_keys[peer]).decrypt(
                    ONCE, ciphertexts[row].tobytes(), None
                )
            except InvalidTag:
                self._refuse(f"what party {peer} encrypted for it did not arrive as it was sent")
            shares[row] = np.frombuffer(
                plain[SHARE_BYTES:] if survivors[peer] else plain[:SHARE_BYTES], np.uint8
            )
        shares[-1] = np.frombuffer(self._own_share, np.uint8)
        self._forget()
        return shares

    def _public_keys(self) -> bytes:
        return (
            self._cipher_key.public_key().public_bytes_raw()
            + self._mask_key.public_key().public_bytes_raw()
        )

    def _begin(self, stage: str) -> None:
        """Refuses a stage that is not due. Until it is through nothing is, so that a refusal on the way is final."""
        self.require_due(stage)
        self._expects = "nothing more"

    def require_due(self, stage: str) -> None:
        """Refuses a stage that is not due; changes nothing."""
        if stage != self._expects:
            raise Refusal(
                f"party {self.position} refuses: asked to {stage}, but what is due is: {self._expects}"
            )

    def _narrow(self, present: Flags, did: str) -> None:
        """Checks who is said to have finished a stage, and takes it over."""
        population, members = len(self._present), len(self.neighbours) + 1
        self._require(_is(present, bool, (population,)), f"who {did} must be bool[{population}]")
        strangers = np.flatnonzero(present & ~self._present)
        self._require(
            not len(strangers),
            f"parties {strangers.tolist()} are said to have {did}, but were not there a stage before",
        )
        self._require(bool(present[self.position]), f"it is not among those who {did}")
        self._require(
            int(present.sum()) >= FEWEST, f"{int(present.sum())} parties {did}, fewer than {FEWEST}"
        )
        near = int(present[self.neighbours].sum()) + 1
        self._require(
            near >= self.threshold,
            f"{near} of the {members} parties around it {did}, fewer than {self.threshold}",
        )
        self._present = present.copy()

    def _require_rows(self, rows: Bytes, width: int, present: Flags, what: str) -> None:
        """Checks that there are bytes for exactly those neighbours that are present."""
        self._require(
            _is(rows, np.uint8, (len(self.neighbours), width)),
            f"{what} must be uint8[{len(self.neighbours)}, {width}]",
        )
        filled, due = rows.any(axis=1), present[self.neighbours]
        missing, stray = (
            self.neighbours[due & ~filled].tolist(),
            self.neighbours[filled & ~due].tolist(),
        )
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
        for name in ("_cipher_key", "_mask_key", "_seed", "_own_share"):
            self.__dict__.pop(name, None)


def _is(array: object, dtype: DTypeLike, shape: tuple[int, ...]) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape


# ---- the server's side ----
class Collector:
    """The server's side of one sum. Each `take_*` takes what arrived, as (position, array) pairs, in any order, perhaps one by one.

    The first three give {position: what to send} to those that go on, as arguments of the Member's next stage; the last gives the sum.
    Who is missing among the arrivals has dropped out. TooFew is raised as soon as the rest cannot finish; MessageError names a party
    whose message is not as it should be, and ends the sum.
    """

    def __init__(self, terms: SecureTerms, run: bytes, number: int, roster: Flags, size: int):
        """roster: bool[population], who is asked. size: entries of the vector. `threshold` is then what to propose to the members."""
        self.terms, self.roster, self.size = terms, roster.copy(), size
        self._sum_id = _sum_id(run, number)
        self._positions: list[int] = np.flatnonzero(
            roster
        ).tolist()  # a row of everything below is a party of the roster
        parties = len(self._positions)
        if parties < FEWEST:
            raise TooFew(
                f"secure sum: {parties} parties are asked, at least {FEWEST} are needed; nothing was released"
            )
        row_of = np.cumsum(roster) - 1
        self._near = np.stack(
            [
                row_of[neighbourhood(position, roster, terms.neighbours, self._sum_id)]
                for position in self._positions
            ]
        )
        self.degree = degree = self._near.shape[1]
        # Where the post for a party lies: those of all (party, neighbour) entries in which it is the neighbour, in its neighbours' order.
        self._inbox = np.argsort(self._near.ravel(), kind="stable").reshape(parties, degree)
        self.threshold = terms.quorum(degree + 1)
        self._expects = "advertise"
        self._here = np.ones(parties, bool)  # who finished the last stage
        self._survived = self._lost = np.zeros(
            parties, bool
        )  # whose seed, whose mask key is to be put together
        self._advertised = np.zeros((parties, ADVERTISED_BYTES), np.uint8)
        self._ciphertexts = np.zeros((parties, degree, CIPHERTEXT_BYTES), np.uint8)
        self._total: Words = np.zeros(size, terms.word)

    def take_keys(self, arrivals: Iterable[tuple[int, Bytes]]) -> dict[int, tuple[Bytes, Flags]]:
        """Takes what `advertise` gave, gives what `share` takes: the neighbours' keys, and who answered."""
        seen: set[bytes] = set()
        for row, advertised in self._take("advertise", arrivals, np.uint8, (ADVERTISED_BYTES,)):
            for public in (
                advertised[:KEY_BYTES].tobytes(),
                advertised[KEY_BYTES : 2 * KEY_BYTES].tobytes(),
            ):
                if public in seen:
                    raise MessageError(
                        f"secure sum: party {self._positions[row]} advertises a key that is there already"
                    )
                seen.add(public)
            self._advertised[row] = advertised
        self._require_quorum(self._here, "advertised keys")
        answered, keys = self._flags(self._here), self._advertised[:, : 2 * KEY_BYTES]
        self._expects = "share"
        return {
            self._positions[row]: (keys[self._near[row]], answered)
            for row in np.flatnonzero(self._here)
        }

    def take_shares(self, arrivals: Iterable[tuple[int, Bytes]]) -> dict[int, tuple[Flags]]:
        """Takes what `share` gave, gives what `mask` takes besides the vector: who shared."""
        for row, ciphertexts in self._take(
            "share", arrivals, np.uint8, self._ciphertexts.shape[1:]
        ):
            self._ciphertexts[row] = ciphertexts
        self._require_quorum(self._here, "shared their secrets")
        shared = self._flags(self._here)
        self._expects = "mask"
        return dict.fromkeys(np.flatnonzero(shared).tolist(), (shared,))

    def take_vectors(self, arrivals: Iterable[tuple[int, Words]]) -> dict[int, tuple[Flags, Bytes]]:
        """Takes what `mask` gave, adding it up as it comes, gives what `unmask` takes: who survived, and the neighbours' ciphertexts."""
        shared = self._here
        for _, vector in self._take("mask", arrivals, self.terms.word, (self.size,)):
            self._total += vector
        self._survived = self._here
        self._lost = (
            shared & ~self._survived & self._survived[self._near].any(axis=1)
        )  # else nobody's vector is padded with it
        self._require_quorum(self._survived | self._lost, "sent their vectors")
        survivors = self._flags(self._survived)
        apart = pieces(survivors, self.roster, self.terms.neighbours, self._sum_id)
        if apart > 1:
            raise TooFew(
                f"secure sum: the survivors fall into {apart} pieces, and the sum of each would be open; nothing was released"
            )
        post = self._ciphertexts.reshape(-1, CIPHERTEXT_BYTES)
        self._expects = "unmask"
        return {
            self._positions[row]: (survivors, post[self._inbox[row]])
            for row in np.flatnonzero(self._survived)
        }

    def take_reveals(self, arrivals: Iterable[tuple[int, Bytes]]) -> Words:
        """Takes what `unmask` gave, gives the sum of the survivors' vectors modulo 2^bits."""
        parties, degree = self._near.shape
        revealed = np.zeros((parties, degree + 1, SHARE_BYTES), np.uint8)
        for row, shares in self._take("unmask", arrivals, np.uint8, revealed.shape[1:]):
            revealed[row] = shares
        self._require_quorum(
            self._survived | self._lost, "revealed their shares", fewest=0
        )  # the sum is over those that survived
        of_others, of_itself = revealed[:, :-1].reshape(-1, SHARE_BYTES), revealed[:, -1]
        for row in np.flatnonzero(self._survived | self._lost).tolist():
            shares = dict(
                zip(self._near[row].tolist(), of_others[self._inbox[row]], strict=True)
            ) | {row: of_itself[row]}
            helpers = [helper for helper in sorted(shares) if self._here[helper]][: self.threshold]
            secret = self._put_together(
                row, {self._positions[helper]: shares[helper] for helper in helpers}
            )
            if self._survived[row]:
                _add_stream(
                    self._total,
                    _derive(secret, "own pad", self._sum_id, self._positions[row]),
                    minus=True,
                )
            else:
                self._cancel_pads(row, X25519PrivateKey.from_private_bytes(secret))
        return self._total

    def _put_together(self, row: int, shares: dict[int, Bytes]) -> bytes:
        """Takes {position of the helper: share}, gives a party's seed if it survived, else its mask key, if it is what was advertised."""
        position = self._positions[row]
        number = shamir.combine(
            {helper + 1: int.from_bytes(share.tobytes(), "big") for helper, share in shares.items()}
        )
        secret = (number % 2**256).to_bytes(
            KEY_BYTES, "big"
        )  # of the 297 numbers this changes none can have been a secret
        if self._survived[row]:
            fits = (
                _commitment(secret, self._sum_id, position)
                == self._advertised[row, 2 * KEY_BYTES :].tobytes()
            )
        else:
            public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
            fits = public == self._advertised[row, KEY_BYTES : 2 * KEY_BYTES].tobytes()
        if not fits:
            raise MessageError(
                f"secure sum: the shares of party {position}'s secret do not give what it advertised; it dealt wrong ones, "
                f"or one of parties {list(shares)} handed on a wrong one; nothing was released"
            )
        return secret

    def _cancel_pads(self, row: int, mask_key: X25519PrivateKey) -> None:
        """Takes off the total what the surviving neighbours of a lost party padded with it."""
        position = self._positions[row]
        for near in self._near[row][self._survived[self._near[row]]].tolist():
            peer = self._positions[near]
            secret = _agree(mask_key, self._advertised[near, KEY_BYTES : 2 * KEY_BYTES].tobytes())
            _add_stream(
                self._total, _pair_key(secret, self._sum_id, peer, position), minus=peer < position
            )

    def _take(
        self,
        stage: str,
        arrivals: Iterable[tuple[int, NDArray]],
        dtype: DTypeLike,
        shape: tuple[int, ...],
    ) -> Iterator:
        """Checks arrivals one by one and gives (row, array); then those that arrived are those that are here."""
        if stage != self._expects:
            raise MessageError(
                f"secure sum: replies to {stage}, but what is due is: {self._expects}"
            )
        self._expects = "nothing more"
        arrived = np.zeros(len(self._here), bool)
        asked = {self._positions[row]: row for row in np.flatnonzero(self._here)}
        for position, array in arrivals:
            row = asked.pop(position, None)
            if row is None:
                raise MessageError(
                    f"secure sum: party {position} was not asked to {stage}, or answered before"
                )
            if not _is(array, dtype, shape):
                got = (
                    f"{array.dtype}{list(array.shape)}"
                    if isinstance(array, np.ndarray)
                    else type(array).__name__
                )
                raise MessageError(
                    f"secure sum: party {position} answers {stage} with {got}, expected {np.dtype(dtype)}{list(shape)}"
                )
            arrived[row] = True
            yield row, array
        self._here = arrived

    def _require_quorum(self, owners: Flags, did: str, fewest: int = FEWEST) -> None:
        """Raises TooFew unless enough parties are here, in all and of the neighbourhood of each of the owners of secrets."""
        here = int(self._here.sum())
        if here < fewest:
            raise TooFew(
                f"secure sum: {here} parties {did}, at least {fewest} are needed; nothing was released"
            )
        left = self._here[self._near].sum(axis=1) + self._here
        short = np.flatnonzero(owners & (left < self.threshold))
        if len(short):
            row, members = short[0], self._near.shape[1] + 1
            raise TooFew(
                f"secure sum: {left[row]} of the {members} parties around party {self._positions[row]} {did}, "
                f"{self.threshold} are needed; nothing was released"
            )

    def _flags(self, rows: Flags) -> Flags:
        """The same parties as bool[population]."""
        flags = np.zeros(len(self.roster), bool)
        flags[self.roster] = rows
        return flags
