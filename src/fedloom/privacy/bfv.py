"""Sums under encryption: one party learns the sum of others' arrays; the server sees ciphertexts.

    owner                        others                       server
    Keys.generate()
    keys.public ───────────────► encrypt(public, values) ───► add(public, blobs)
    keys.decrypt(blob, size) ◄──────────────────────────────── the sum, encrypted

The scheme is BFV (Fan and Vercauteren, 2012), by TenSEAL on Microsoft SEAL. It adds whole numbers,
exactly. Only sums are needed, so there are no keys for products and rotations, and one prime of 60
bits for the data. N = 4096 and 109 bits in all meet 128-bit security in the homomorphic encryption
standard and in SEAL. A ciphertext holds 4096 numbers, and a number costs 16 bytes.

The trust model:

- The server is honest but curious: it adds what it is asked to add and keeps what it sees. It could
  drop, repeat or replace ciphertexts, because anyone with the public part can encrypt. It could
  also distribute its own public part. Only authenticated channels between clients prevent that.
- The server must not collude with the owner. The ciphertexts are under the owner's key, and
  together they could decrypt each one.
- The sum is not hidden from the owner. A sum of one array is that array. Two sums that differ in
  one array reveal it by subtraction.
- Lengths, the number of terms, and which key was used are not hidden.

The operating system provides the noise, never a run's seed. So ciphertexts differ between runs, and
sums do not.

A blob has these parts: a CRC-32 of the rest, 16 bytes that name the key, the number of values, the
number of terms in the sum, the length of every ciphertext, and the ciphertexts. The CRC detects
accidental damage before a C++ parser reads the data. It is no signature.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError, MessageError

Bytes: TypeAlias = NDArray[np.uint8]

DEGREE = 4096
# Bits of the primes: one for the data, and one that only public keys have. The second removes most
# of the noise of encryption.
PRIMES = (60, 49)
SLOTS = DEGREE
# Sums are modulo this prime. It is 1 modulo 2 N, so that a ciphertext holds N numbers. Decryption
# is exact for sums of `TERMS` fresh ciphertexts up to a prime of 45 bits at least.
MODULUS = 4398046486529
BOUND = 2**32  # the largest absolute value of an entry
TERMS = 511  # the most terms of a sum: TERMS · BOUND < MODULUS / 2, so sums do not overflow

_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<16sQI")  # key, values, terms
_LENGTH = np.dtype("<u4")


class Keys:
    """A key pair. The secret half stays in this object and cannot be saved."""

    def __init__(self, context: Any):
        self._context = context
        self._public: bytes = context.serialize(
            save_public_key=True,
            save_secret_key=False,
            save_galois_keys=False,
            save_relin_keys=False,
        )

    @classmethod
    def generate(cls) -> Keys:
        """Returns a new pair, from the operating system's randomness."""
        return cls(_generate())

    @property
    def public(self) -> Bytes:
        """The public part, which encrypts and adds: parameters and public key, about 125 kB."""
        return _array(self._public)

    def decrypt(self, ciphertexts: Bytes, size: int) -> NDArray[np.int64]:
        """Returns the decrypted values.

        Args:
            ciphertexts: The result of `add` or `encrypt` under this key.
            size: The number of values that it must hold.
        """
        require_size(self.public, ciphertexts, size)
        blob = _parse(ciphertexts, _name(self._public))
        values = np.zeros(size, np.int64)
        for i, part in enumerate(blob.parts):
            start, stop = _span(i, size)
            with _damaged("ciphertexts"):
                values[start:stop] = _vector(self._context, part, stop - start).decrypt()
        # A damaged ciphertext decrypts to noise over the whole range of the prime.
        if not bool(np.all(np.abs(values) <= blob.terms * BOUND)):
            raise MessageError(
                f"ciphertexts: do not decrypt to a sum of {blob.terms} arrays within ±{BOUND}; "
                "damaged, or of another key"
            )
        return values


def encrypt(public: Bytes, values: NDArray[np.int64]) -> Bytes:
    """Encrypts values. Returns the ciphertexts as one blob.

    Args:
        public: The owner's public part.
        values: A flat array of whole numbers within ±`BOUND`, of any length.
    """
    if values.ndim != 1 or values.dtype != np.int64:
        raise MessageError(
            f"values to encrypt: must be a flat array of int64, "
            f"not {values.dtype}{list(values.shape)}"
        )
    wrong = (values > BOUND) | (values < -BOUND)
    if wrong.any():
        raise MessageError(
            f"values to encrypt: {values[wrong][0]} at {int(wrong.argmax())}; "
            f"must be within ±{BOUND}"
        )
    data = _bytes(public, "public part")
    context = _load(data)
    parts = [
        _tenseal().bfv_vector(context, values[i : i + SLOTS].tolist()).serialize()
        for i in range(0, len(values), SLOTS)
    ]
    return _pack(_Blob(_name(data), len(values), 1, parts))


def add(public: Bytes, blobs: Sequence[Bytes]) -> Bytes:
    """Adds encrypted arrays. Returns the blob of their sum.

    This needs only the public part. A sum has at most `TERMS` arrays.

    Args:
        public: The owner's public part.
        blobs: Results of `encrypt` or `add` under it, all with the same number of values.
    """
    if len(blobs) == 0:
        raise MessageError("ciphertexts: none to add")
    data = _bytes(public, "public part")
    context, name = _load(data), _name(data)
    total: list[Any] = []
    size = terms = 0
    for number, raw in enumerate(blobs):
        blob = _parse(raw, name, f"ciphertexts {number}")
        if number and blob.size != size:
            raise MessageError(f"ciphertexts {number}: {blob.size} values, others have {size}")
        size, terms = blob.size, terms + blob.terms
        if terms > TERMS:
            raise MessageError(
                f"ciphertexts {number}: the sum would have {terms} terms, at most {TERMS} fit"
            )
        for i, part in enumerate(blob.parts):
            start, stop = _span(i, size)
            vector = _vector(context, part, stop - start, f"ciphertexts {number}")
            if number:
                with _damaged(f"ciphertexts {number}"):
                    total[i] += vector
            else:
                total.append(vector)
    return _pack(_Blob(name, size, terms, [vector.serialize() for vector in total]))


def require_size(public: Bytes, ciphertexts: Bytes, size: int) -> None:
    """Raises a MessageError unless a blob is under this public part and has `size` values.

    It does not read the ciphertexts.
    """
    found = _parse(ciphertexts, _name(_bytes(public, "public part"))).size
    if found != size:
        raise MessageError(f"ciphertexts: {found} values, {size} expected")


# ---- TenSEAL ----
def _tenseal() -> Any:
    try:
        import tenseal  # imported here because it is optional
    except ImportError:
        raise ConfigError(
            "method.encrypt needs the package tenseal: pip install 'fedloom[he]'"
        ) from None
    return tenseal


@contextmanager
def _damaged(what: str) -> Iterator[None]:
    """Turns the errors of SEAL's parser into a MessageError."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise MessageError(f"{what}: damaged ({error})") from None


def _generate() -> Any:
    ts = _tenseal()
    # By default TenSEAL starts a thread per core for every context. SEAL refuses parameters below
    # 128-bit security.
    return ts.context(
        ts.SCHEME_TYPE.BFV,
        DEGREE,
        plain_modulus=MODULUS,
        coeff_mod_bit_sizes=list(PRIMES),
        n_threads=1,
    )


@lru_cache(maxsize=1)
def _parameters() -> bytes:
    return _without_keys(_generate())


def _without_keys(context: Any) -> bytes:
    return context.serialize(
        save_public_key=False, save_secret_key=False, save_galois_keys=False, save_relin_keys=False
    )


def _load(public: bytes) -> Any:
    """Returns the context of a public part, after checking that it has no more than it should."""
    ts = _tenseal()
    with _damaged("public part"):
        context = ts.context_from(public, n_threads=1)
        private, usable = context.has_secret_key(), context.has_public_key()
        parameters = _without_keys(context)
    if private:
        raise MessageError("public part: holds a secret key")
    if not usable:
        raise MessageError("public part: holds no public key")
    if parameters != _parameters():  # others could make the encryption readable, or the sum wrong
        raise MessageError(
            f"public part: parameters differ from N = {DEGREE}, primes of {PRIMES} bits, "
            f"sums modulo {MODULUS}"
        )
    return context


def _vector(context: Any, part: bytes, size: int, what: str = "ciphertexts") -> Any:
    """Returns one ciphertext of `size` values.

    TenSEAL trusts the size in the data and could read past the end of the slots, so it is checked.
    """
    with _damaged(what):
        vector = _tenseal().bfv_vector_from(context, part)
        found = vector.ciphertext()
    if len(found) != 1 or vector.size() != size or found[0].size() != 2:
        raise MessageError(f"{what}: not one fresh or added ciphertext of {size} values")
    return vector


# ---- bytes ----
@dataclass(frozen=True)
class _Blob:
    key: bytes  # the name of its public part
    size: int  # values
    terms: int  # arrays in the sum
    parts: list[bytes]  # ciphertexts of SLOTS values each; the last has the rest


def _span(part: int, size: int) -> tuple[int, int]:
    return part * SLOTS, min((part + 1) * SLOTS, size)


def _name(public: bytes) -> bytes:
    return sha256(public).digest()[:16]


def _array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).copy()  # a writable copy: torch warns about others


def _bytes(array: Bytes, what: str) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise MessageError(f"{what}: must be uint8[...], not {array.dtype}{list(array.shape)}")
    return array.tobytes()


def _pack(blob: _Blob) -> Bytes:
    lengths = np.array([len(part) for part in blob.parts], _LENGTH)
    body = b"".join((_HEAD.pack(blob.key, blob.size, blob.terms), lengths.tobytes(), *blob.parts))
    return _array(_CHECKSUM.pack(zlib.crc32(body)) + body)


def _parse(raw: Bytes, key: bytes, what: str = "ciphertexts") -> _Blob:
    """Parses untrusted bytes. TenSEAL parses the ciphertexts themselves later."""
    data = _bytes(raw, what)
    start = _CHECKSUM.size + _HEAD.size
    if len(data) < start:
        raise MessageError(f"{what}: {len(data)} bytes are too few")
    if _CHECKSUM.unpack_from(data)[0] != zlib.crc32(memoryview(data)[_CHECKSUM.size :]):
        raise MessageError(f"{what}: damaged (checksum)")
    name, size, terms = _HEAD.unpack_from(data, _CHECKSUM.size)
    if name != key:
        raise MessageError(f"{what}: encrypted under another key")
    if not 1 <= terms <= TERMS:
        raise MessageError(f"{what}: {terms} terms, valid: 1 to {TERMS}")
    count = -(-size // SLOTS)
    if (
        len(data) < start + count * _LENGTH.itemsize
    ):  # checked before anything of that size is allocated
        raise MessageError(f"{what}: {len(data)} bytes are too few for {size} values")
    lengths = np.frombuffer(data, _LENGTH, count, start).tolist()
    edges = list(accumulate(lengths, initial=start + count * _LENGTH.itemsize))
    if len(data) != edges[-1]:
        raise MessageError(f"{what}: {len(data)} bytes, the lengths of its parts say otherwise")
    return _Blob(name, size, terms, [data[a:b] for a, b in pairwise(edges)])
