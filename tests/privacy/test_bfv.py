"""Sums under encryption: exactness, damaged ciphertexts, and secrets that must not leave."""

import struct
import sys
import zlib

import numpy as np
import pytest

from fedloom.errors import ConfigError, MessageError
from fedloom.privacy import bfv

ts = pytest.importorskip("tenseal", reason="tenseal is an extra: pip install 'fedloom[he]'")


@pytest.fixture(scope="module")
def keys() -> bfv.Keys:
    return bfv.Keys.generate()


def resealed(blob: np.ndarray, start: int, new: bytes) -> np.ndarray:
    """Returns the blob with other bytes from `start` and a valid checksum: deliberate damage."""
    data = blob.tobytes()
    body = (data[:start] + new + data[start + len(new) :])[4:]
    return np.frombuffer(struct.pack("<I", zlib.crc32(body)) + body, np.uint8)


@pytest.mark.parametrize(
    "size", [0, 1, 7, bfv.SLOTS - 1, bfv.SLOTS, bfv.SLOTS + 1, 3 * bfv.SLOTS + 5]
)
def test_sums_of_arrays_of_any_length(keys, size):
    rng = np.random.default_rng(size)
    arrays = [rng.integers(-bfv.BOUND, bfv.BOUND, size) for _ in range(3)]
    blobs = [bfv.encrypt(keys.public, array) for array in arrays]
    assert all(blob.dtype == np.uint8 and blob.ndim == 1 and blob.flags.writeable for blob in blobs)
    total = keys.decrypt(bfv.add(keys.public, blobs), size)
    assert np.array_equal(total, np.sum(arrays, 0))
    assert np.array_equal(keys.decrypt(blobs[0], size), arrays[0])


def test_the_largest_sum_is_exact(keys):
    """Independent ciphertexts, then the same one over and over: all noise has one sign."""
    rng = np.random.default_rng(0)
    public, blobs, expected = keys.public, [], np.zeros(300, np.int64)
    for _ in range(bfv.TERMS):
        array = rng.integers(-bfv.BOUND, bfv.BOUND, 300)
        array[:2] = bfv.BOUND, -bfv.BOUND
        blobs.append(bfv.encrypt(public, array))
        expected += array
    halves = [bfv.add(public, blobs[:100]), bfv.add(public, blobs[100:])]  # sums add up like terms
    assert np.array_equal(keys.decrypt(bfv.add(public, halves), 300), expected)
    values = np.array([bfv.BOUND, -bfv.BOUND, 0])
    full = bfv.add(public, [bfv.encrypt(public, values)] * bfv.TERMS)
    assert np.array_equal(keys.decrypt(full, 3), bfv.TERMS * values)
    constant = bfv.encrypt(public, np.full(bfv.SLOTS, -bfv.BOUND))
    total = keys.decrypt(bfv.add(public, [constant] * bfv.TERMS), bfv.SLOTS)
    assert (total == -bfv.TERMS * bfv.BOUND).all()
    with pytest.raises(MessageError, match="512 terms, at most 511"):
        bfv.add(public, [full, bfv.encrypt(public, values)])


def test_the_public_part_has_the_public_key_and_no_other(keys):
    context = ts.context_from(keys.public.tobytes(), n_threads=1)
    assert context.is_public()
    assert context.has_public_key()
    assert not context.has_secret_key()
    assert not context.has_galois_keys()
    assert not context.has_relin_keys()
    assert len(keys.public) < 130_000
    with pytest.raises(ValueError, match="doesn't hold a Secret key"):
        context.secret_key()
    part = bfv._parse(
        bfv.encrypt(keys.public, np.ones(3, np.int64)), bfv._name(keys.public.tobytes())
    ).parts[0]
    with pytest.raises(ValueError, match=r"Secret key|secret_key"):
        ts.bfv_vector_from(context, part).decrypt()


def test_a_secret_key_in_a_public_part_is_refused(keys):
    leaked = np.frombuffer(keys._context.serialize(save_secret_key=True), np.uint8)
    with pytest.raises(MessageError, match="holds a secret key"):
        bfv.encrypt(leaked, np.ones(3, np.int64))
    with pytest.raises(MessageError, match="holds a secret key"):
        bfv.add(leaked, [bfv.encrypt(keys.public, np.ones(3, np.int64))])


def test_a_public_part_with_other_parameters_or_no_key_is_refused(keys):
    bits = list(bfv.PRIMES)
    other = ts.context(ts.SCHEME_TYPE.BFV, 8192, bfv.MODULUS, bits, n_threads=1)
    coarse = ts.context(ts.SCHEME_TYPE.BFV, bfv.DEGREE, 1032193, bits, n_threads=1)
    for context in (other, coarse):
        data = np.frombuffer(
            context.serialize(save_galois_keys=False, save_relin_keys=False), np.uint8
        )
        with pytest.raises(MessageError, match="parameters differ from N = 4096"):
            bfv.encrypt(data, np.ones(3, np.int64))
    with pytest.raises(MessageError, match="no public key"):
        bfv.encrypt(np.frombuffer(bfv._without_keys(keys._context), np.uint8), np.ones(3, np.int64))


@pytest.mark.parametrize(
    "data", [np.zeros(0, np.uint8), np.zeros(100, np.uint8), np.full(1000, 255, np.uint8)]
)
def test_a_damaged_public_part_is_refused(data):
    with pytest.raises(MessageError, match="public part: "):
        bfv.encrypt(data, np.ones(3, np.int64))
    with pytest.raises(MessageError, match=r"must be uint8\[...\], not float64\[3\]"):
        bfv.encrypt(np.zeros(3), np.ones(3, np.int64))


def test_parameters_below_128_bits_are_refused_by_seal():
    with pytest.raises((ValueError, RuntimeError)):
        ts.context(ts.SCHEME_TYPE.BFV, bfv.DEGREE, bfv.MODULUS, [60, 50], n_threads=1)


def test_equal_values_have_different_ciphertexts_and_equal_lengths_nearly(keys):
    zero, one = (bfv.encrypt(keys.public, np.full(10, value)) for value in (0, 1))
    again = bfv.encrypt(keys.public, np.zeros(10, np.int64))
    assert not np.array_equal(zero, again)
    assert abs(len(zero) - len(one)) < 100  # compression sees random bytes


@pytest.mark.parametrize("value", [2**32 + 1, -(2**32) - 1, 2**63 - 1, -(2**63)])
def test_values_out_of_range_name_the_bound(keys, value):
    with pytest.raises(MessageError, match=rf"{value} at 1; must be within ±{2**32}"):
        bfv.encrypt(keys.public, np.array([1, value, 2]))


@pytest.mark.parametrize("values", [np.zeros((2, 2), np.int64), np.zeros(3), np.array(1)])
def test_values_must_be_flat_whole_numbers(keys, values):
    with pytest.raises(MessageError, match="flat array of int64"):
        bfv.encrypt(keys.public, values)


def test_another_key(keys):
    other = bfv.Keys.generate()
    blob = bfv.encrypt(other.public, np.ones(5, np.int64))
    with pytest.raises(MessageError, match="another key"):
        keys.decrypt(blob, 5)
    with pytest.raises(MessageError, match="ciphertexts 1: encrypted under another key"):
        bfv.add(keys.public, [bfv.encrypt(keys.public, np.ones(5, np.int64)), blob])
    renamed = resealed(
        blob, 4, bfv._name(keys.public.tobytes())
    )  # a label is no proof: what comes out is noise, and noise is noticed
    with pytest.raises(MessageError, match="do not decrypt to a sum of 1 arrays"):
        keys.decrypt(renamed, 5)


def test_blobs_that_do_not_fit_together(keys):
    three, four = (
        bfv.encrypt(keys.public, np.ones(3, np.int64)),
        bfv.encrypt(keys.public, np.ones(4, np.int64)),
    )
    with pytest.raises(MessageError, match="none to add"):
        bfv.add(keys.public, [])
    with pytest.raises(MessageError, match="ciphertexts 1: 4 values, others have 3"):
        bfv.add(keys.public, [three, four])
    with pytest.raises(MessageError, match="3 values, 4 expected"):
        keys.decrypt(three, 4)


def test_any_changed_byte_is_noticed(keys):
    blob = bfv.encrypt(keys.public, np.ones(3, np.int64))
    rng = np.random.default_rng(0)
    for position in [*range(40), *rng.integers(40, len(blob), 60)]:
        damaged = blob.copy()
        damaged[position] ^= 1 << rng.integers(8)
        with pytest.raises(MessageError, match="ciphertexts: damaged"):
            keys.decrypt(damaged, 3)
        with pytest.raises(MessageError, match="ciphertexts 1: damaged"):
            bfv.add(keys.public, [blob, damaged])


@pytest.mark.parametrize("length", [0, 3, 4, 31, 32, 35, 36, 500, -1])
def test_cut_blobs_are_noticed(keys, length):
    blob = bfv.encrypt(keys.public, np.ones(3, np.int64))
    for cut in (
        blob[:length],
        resealed(blob[:length], 4, b"") if len(blob[:length]) >= 4 else blob[:length],
    ):
        with pytest.raises(MessageError, match=r"too few|damaged|lengths of its parts"):
            keys.decrypt(cut, 3)
    with pytest.raises(MessageError, match="lengths of its parts"):
        keys.decrypt(resealed(np.append(blob, np.uint8(0)), 4, b""), 3)
    with pytest.raises(MessageError, match="must be uint8"):
        keys.decrypt(blob.reshape(1, -1), 3)


@pytest.mark.parametrize(
    ("start", "new", "message"),
    [
        (20, struct.pack("<Q", 2**62), "too few for 4611686018427387904 values"),
        (20, struct.pack("<Q", 2), "not one fresh or added ciphertext of 2 values"),
        (28, struct.pack("<I", 0), "0 terms, valid: 1 to 511"),
        (28, struct.pack("<I", 512), "512 terms, valid: 1 to 511"),
        (32, struct.pack("<I", 2**32 - 1), "lengths of its parts"),
        (36, bytes(50), "damaged"),
    ],
)
def test_forged_headers_are_refused(keys, start, new, message):
    forged = resealed(bfv.encrypt(keys.public, np.ones(3, np.int64)), start, new)
    with pytest.raises(MessageError, match=message):
        bfv.add(keys.public, [forged])


def test_a_ciphertext_that_lies_about_its_size_is_refused(keys):
    """TenSEAL itself would read past the end of the slots."""
    context, name = (
        ts.context_from(keys.public.tobytes(), n_threads=1),
        bfv._name(keys.public.tobytes()),
    )
    wide = ts.bfv_vector(context, [1] * 5).serialize()
    for part in (wide, b""):
        with pytest.raises(
            MessageError,
            match="ciphertexts 0: not one fresh or added ciphertext of 3 values",
        ):
            bfv.add(keys.public, [bfv._pack(bfv._Blob(name, 3, 1, [part]))])


def test_random_damage_with_a_valid_checksum_never_gives_a_wrong_sum(keys):
    values = np.arange(-20, 20)
    blob = bfv.encrypt(keys.public, values)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(200):
        position = int(rng.integers(4, 150) if rng.random() < 0.5 else rng.integers(4, len(blob)))
        try:
            result = keys.decrypt(resealed(blob, position, rng.bytes(1)), len(values))
        except MessageError:
            refused += 1
        else:
            # The byte was the same, or one that nobody reads.
            assert np.array_equal(result, values)
    assert refused > 150


def test_without_tenseal(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(
        ConfigError, match=r"method.encrypt needs the package tenseal: pip install 'fedloom\[he\]'"
    ):
        bfv.Keys.generate()
    with pytest.raises(ConfigError, match="needs the package tenseal"):
        bfv.encrypt(np.zeros(10, np.uint8), np.ones(3, np.int64))
