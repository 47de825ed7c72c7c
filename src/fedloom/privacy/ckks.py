"""Sums under encryption: one party learns the sum of arrays that others hold, and the server that adds them up sees ciphertexts only.

    owner                        others                          server
    Keys.generate()
    keys.public ───────────────► encrypt(public, values) ──────► add(public, blobs) ──► keys.decrypt(blob, size)   back at the owner

The scheme is CKKS (Cheon et al., ASIACRYPT 2017), by TenSEAL on Microsoft SEAL: numbers are rounded to multiples of 1 / `SCALE` and hidden
under noise of about a thousand of them. Only sums are needed, so there are no keys for products and rotations, and one prime of 60 bits for
the data: N = 4096 and 109 bits in all are what the homomorphic encryption standard, and SEAL with it, takes for 128-bit security. A value
costs 32 bytes whatever N is; a smaller N halves the public part and the smallest ciphertext, and has less noise.

Whom to trust, and with what.

- The server is honest but curious: it adds what it was asked to add and keeps what it sees. It can drop, repeat or replace ciphertexts (who
  has the public part can encrypt), and hand out a public part of its own making; only authenticated channels between clients stop that.
- The server must not read together with the owner: the ciphertexts are under the owner's key, and it could decrypt each one.
- The sum is not hidden from the owner. Over one array it is that array; two sums that differ in one array give it away by subtraction.
- What `decrypt` gives stays with the owner. A CKKS result carries the noise of its ciphertexts, which depends on the secret key: who sees
  results together with ciphertexts can compute the key (Li & Micciancio, EUROCRYPT 2021). Neither the server nor those who encrypt may see
  it, or anything from which its last bits could be read.
- Lengths, the number of terms, and which key was used are not hidden.

Noise comes from the operating system, never from a run's seed: ciphertexts, and the last bits of sums, differ from run to run.

A blob is: a CRC-32 of all that follows, 16 bytes that name the key, how many values, how many terms were added up, the length of every
ciphertext, the ciphertexts. The CRC catches accidents before a C++ parser sees them; it is no signature.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError, MessageError

Bytes: TypeAlias = NDArray[np.uint8]

DEGREE = 4096
PRIMES = (
    60,
    49,
)  # bits: one for the data; one that only public keys have, and that takes most of the noise of encryption with it
SLOTS = DEGREE // 2
SCALE = 2.0**40
BOUND = 2.0**10  # of a value
TERMS = 511  # of a sum: TERMS · BOUND · SCALE < 2^59, half of the data prime, beyond which sums would wrap around

_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<16sQI")  # key, values, terms
_LENGTH = np.dtype("<u4")


class Keys:
    """A key pair. The secret half stays in this object: it has no way to be written down."""

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
        """A new pair, from the operating system's randomness."""
        return cls(_generate())

    @property
    def public(self) -> Bytes:
        """What others need to encrypt and add: parameters and the public key, about 125 kB."""
        return _array(self._public)

    def decrypt(self, ciphertexts: Bytes, size: int) -> NDArray[np.float64]:
        """Takes what `add` (or `encrypt`) gave under this key and how many values it must hold; gives them. Not to be shown to others."""
        require_size(self.public, ciphertexts, size)
        blob = _parse(ciphertexts, _name(self._public))
        values = np.zeros(size)
        for i, part in enumerate(blob.parts):
            start, stop = _span(i, size)
            values[start:stop] = _vector(self._context, part, stop - start).decrypt()
        # A damaged ciphertext decrypts to noise over the whole range of the prime, thousands of times what a sum can be.
        if not bool(np.all(np.abs(values) <= blob.terms * BOUND + 1)):
            raise MessageError(
                f"ciphertexts: do not decrypt to a sum of {blob.terms} arrays within ±{BOUND:g}; damaged, or of another key"
            )
        return values


def encrypt(public: Bytes, values: NDArray[np.floating]) -> Bytes:
    """Takes a public part and a flat array of floats, any number of them, each within ±`BOUND`; gives the ciphertexts as one blob."""
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.floating):
        raise MessageError(
            f"values to encrypt: must be a flat array of floats, not {values.dtype}{list(values.shape)}"
        )
    wrong = ~(np.abs(values) <= BOUND)  # true of what is not a number, too
    if wrong.any():
        raise MessageError(
            f"values to encrypt: {values[wrong][0]} at {int(wrong.argmax())}; must be finite and within ±{BOUND:g}"
        )
    data = _bytes(public, "public part")
    context = _load(data)
    plain = values.astype(np.float64)
    parts = [
        _tenseal().ckks_vector(context, plain[i : i + SLOTS].tolist()).serialize()
        for i in range(0, len(plain), SLOTS)
    ]
    return _pack(_Blob(_name(data), len(plain), 1, parts))


def add(public: Bytes, blobs: Sequence[Bytes]) -> Bytes:
    """Takes a public part and blobs of equally many values under it (`encrypt`, or `add` itself); gives the blob of their sum.

    Nobody needs to be trusted with more than `public` to do this. At most `TERMS` arrays can be in one sum.
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
                total[i] += vector
            else:
                total.append(vector)
    return _pack(_Blob(name, size, terms, [vector.serialize() for vector in total]))


def require_size(public: Bytes, ciphertexts: Bytes, size: int) -> None:
    """Raises MessageError unless the blob is one under this public part and holds so many values; the ciphertexts are not looked at."""
    found = _parse(ciphertexts, _name(_bytes(public, "public part"))).size
    if found != size:
        raise MessageError(f"ciphertexts: {found} values, {size} expected")


# ---- TenSEAL ----
def _tenseal() -> Any:
    try:
        import tenseal  # at first use: it is optional
    except ImportError:
        raise ConfigError(
            "method.encrypt needs the package tenseal: pip install 'fedloom[he]'"
        ) from None
    return tenseal


def _generate() -> Any:
    ts = _tenseal()
    # One thread: TenSEAL would start as many as there are cores for every context. SEAL refuses parameters below 128 bits.
    context = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(PRIMES), n_threads=1)
    context.global_scale = SCALE
    return context


@lru_cache(maxsize=1)
def _parameters() -> bytes:
    return _without_keys(_generate())


def _without_keys(context: Any) -> bytes:
    return context.serialize(
        save_public_key=False, save_secret_key=False, save_galois_keys=False, save_relin_keys=False
    )


def _load(public: bytes) -> Any:
    """The context of a public part that holds what it should and nothing else."""
    ts = _tenseal()
    try:
        context = ts.context_from(public, n_threads=1)
        private, parameters, usable = (
            context.has_secret_key(),
            _without_keys(context),
            context.has_public_key(),
        )
    except (ValueError, RuntimeError) as error:
        raise MessageError(f"public part: damaged ({error})") from None
    if private:
        raise MessageError("public part: holds a secret key")
    if (
        parameters != _parameters()
    ):  # who chose other parameters could read what is encrypted, or break the sum
        raise MessageError(
            f"public part: parameters differ from N = {DEGREE}, primes of {PRIMES} bits, scale 2^{int(np.log2(SCALE))}"
        )
    if not usable:
        raise MessageError("public part: holds no public key")
    return context


def _vector(context: Any, part: bytes, size: int, what: str = "ciphertexts") -> Any:
    """One ciphertext of `size` values. TenSEAL believes the size that is written in it, and would read past the end of its slots."""
    try:
        vector = _tenseal().ckks_vector_from(context, part)
        found = vector.ciphertext()
    except (ValueError, RuntimeError) as error:
        raise MessageError(f"{what}: damaged ({error})") from None
    if len(found) != 1 or vector.size() != size or found[0].size() != 2 or found[0].scale != SCALE:
        raise MessageError(
            f"{what}: not one fresh or added ciphertext of {size} values at scale 2^{int(np.log2(SCALE))}"
        )
    return vector


# ---- bytes ----
@dataclass(frozen=True)
class _Blob:
    key: bytes  # the name of the public part it is under
    size: int  # values
    terms: int  # arrays added up in it
    parts: list[bytes]  # ciphertexts of SLOTS values each, the last of the rest


def _span(part: int, size: int) -> tuple[int, int]:
    return part * SLOTS, min((part + 1) * SLOTS, size)


def _name(public: bytes) -> bytes:
    return sha256(public).digest()[:16]


def _array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).copy()  # a copy is writable: torch warns of others


def _bytes(array: Bytes, what: str) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise MessageError(f"{what}: must be uint8[...], not {array.dtype}{list(array.shape)}")
    return array.tobytes()


def _pack(blob: _Blob) -> Bytes:
    lengths = np.array([len(part) for part in blob.parts], _LENGTH)
    body = b"".join((_HEAD.pack(blob.key, blob.size, blob.terms), lengths.tobytes(), *blob.parts))
    return _array(_CHECKSUM.pack(zlib.crc32(body)) + body)


def _parse(raw: Bytes, key: bytes, what: str = "ciphertexts") -> _Blob:
    """Takes bytes from anywhere; gives the blob, or says what is wrong with it. The ciphertexts themselves are TenSEAL's to parse."""
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
    if len(data) < start + count * _LENGTH.itemsize:  # before anything of that size is made
        raise MessageError(f"{what}: {len(data)} bytes are too few for {size} values")
    ends = (
        start
        + count * _LENGTH.itemsize
        + np.cumsum(np.frombuffer(data, _LENGTH, count, start), dtype=np.int64)
    )
    if len(data) != (int(ends[-1]) if count else start):
        raise MessageError(f"{what}: {len(data)} bytes, the lengths of its parts say otherwise")
    begins = [start + count * _LENGTH.itemsize, *ends[:-1].tolist()]
    return _Blob(
        name,
        size,
        terms,
        [data[a:b] for a, b in zip(begins, ends.tolist(), strict=True)] if count else [],
    )
