"""Sums under encryption: exactness, damaged ciphertexts, and secrets that must not leave."""

import struct
import sys
import zlib

import numpy as np
import pytest

from fedloom.errors import ConfigError, MessageError
from fedloom.privacy import ckks

ts = pytest.importorskip("tenseal", reason="tenseal is an extra: pip install 'fedloom[he]'")


@pytest.fixture(scope="module")
def keys() -> ckks.Keys:
    return ckks.Keys.generate()


def resealed(blob: np.ndarray, start: int, new: bytes) -> np.ndarray:
    """Returns the blob with other bytes from `start` and a valid checksum: deliberate damage."""
    data = blob.tobytes()
    body = (data[:start] + new + data[start + len(new) :])[4:]
    return np.frombuffer(struct.pack("<I", zlib.crc32(body)) + body, np.uint8)


@pytest.mark.parametrize(
    "size", [0, 1, 7, ckks.SLOTS - 1, ckks.SLOTS, ckks.SLOTS + 1, 3 * ckks.SLOTS + 5]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_arrays_of_any_length(keys, size, dtype):
    rng = np.random.default_rng(size)
    arrays = [rng.normal(0, 10, size).astype(dtype) for _ in range(3)]
    blobs = [ckks.encrypt(keys.public, array) for array in arrays]
    assert all(blob.dtype == np.uint8 and blob.ndim == 1 and blob.flags.writeable for blob in blobs)
    total = keys.decrypt(ckks.add(keys.public, blobs), size)
    assert total.dtype == np.float64
    assert np.allclose(total, np.sum(np.array(arrays, np.float64), 0), rtol=0, atol=1e-7)
    assert np.allclose(keys.decrypt(blobs[0], size), arrays[0], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_hundreds_of_arrays_at_the_bound_are_exact_to_a_millionth(keys):
    """Measured: below 1e-7 for 300 independent ciphertexts, whatever the values."""
    rng = np.random.default_rng(0)
    public, size, blobs, expected = keys.public, 300, [], np.zeros(300)
    for _ in range(300):
        array = rng.uniform(-ckks.BOUND, ckks.BOUND, size)
        array[:2] = ckks.BOUND, -ckks.BOUND
        blobs.append(ckks.encrypt(public, array))
        expected += array
    halves = [
        ckks.add(public, blobs[:100]),
        ckks.add(public, blobs[100:]),
    ]  # sums add up like terms
    error = np.abs(keys.decrypt(ckks.add(public, halves), size) - expected).max()
    assert 0 < error < 2e-7


def test_the_largest_sum_does_not_wrap_around(keys):
    """The same ciphertext over and over: all noise has one sign, the worst case."""
    values = np.array([ckks.BOUND, -ckks.BOUND, 0.0])
    full = ckks.add(keys.public, [ckks.encrypt(keys.public, values)] * ckks.TERMS)
    assert np.allclose(keys.decrypt(full, 3), ckks.TERMS * values, rtol=0, atol=5e-6)
    constant = ckks.add(
        keys.public, [ckks.encrypt(keys.public, np.full(ckks.SLOTS, -ckks.BOUND))] * ckks.TERMS
    )
    assert np.allclose(
        keys.decrypt(constant, ckks.SLOTS), -ckks.TERMS * ckks.BOUND, rtol=0, atol=5e-6
    )
    with pytest.raises(MessageError, match="512 terms, at most 511"):
        ckks.add(keys.public, [full, ckks.encrypt(keys.public, values)])


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
    part = ckks._parse(
        ckks.encrypt(keys.public, np.ones(3)), ckks._name(keys.public.tobytes())
    ).parts[0]
    with pytest.raises(ValueError, match=r"Secret key|secret_key"):
        ts.ckks_vector_from(context, part).decrypt()


def test_a_secret_key_in_a_public_part_is_refused(keys):
    leaked = np.frombuffer(keys._context.serialize(save_secret_key=True), np.uint8)
    with pytest.raises(MessageError, match="holds a secret key"):
        ckks.encrypt(leaked, np.ones(3))
    with pytest.raises(MessageError, match="holds a secret key"):
        ckks.add(leaked, [ckks.encrypt(keys.public, np.ones(3))])


def test_a_public_part_with_other_parameters_or_no_key_is_refused(keys):
    other = ts.context(ts.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40], n_threads=1)
    other.global_scale = ckks.SCALE
    coarse = ts.context(
        ts.SCHEME_TYPE.CKKS, ckks.DEGREE, coeff_mod_bit_sizes=list(ckks.PRIMES), n_threads=1
    )
    coarse.global_scale = 2.0**20
    for context in (other, coarse):
        data = np.frombuffer(
            context.serialize(save_galois_keys=False, save_relin_keys=False), np.uint8
        )
        with pytest.raises(MessageError, match="parameters differ from N = 4096"):
            ckks.encrypt(data, np.ones(3))
    with pytest.raises(MessageError, match="no public key"):
        ckks.encrypt(np.frombuffer(ckks._without_keys(keys._context), np.uint8), np.ones(3))


@pytest.mark.parametrize(
    "data", [np.zeros(0, np.uint8), np.zeros(100, np.uint8), np.full(1000, 255, np.uint8)]
)
def test_a_damaged_public_part_is_refused(data):
    with pytest.raises(MessageError, match="public part: "):
        ckks.encrypt(data, np.ones(3))
    with pytest.raises(MessageError, match=r"must be uint8\[...\], not float64\[3\]"):
        ckks.encrypt(np.zeros(3), np.ones(3))


def test_parameters_below_128_bits_are_refused_by_seal():
    with pytest.raises((ValueError, RuntimeError)):
        ts.context(ts.SCHEME_TYPE.CKKS, ckks.DEGREE, coeff_mod_bit_sizes=[60, 50], n_threads=1)


def test_equal_values_have_different_ciphertexts_and_equal_lengths_nearly(keys):
    zero, one = (ckks.encrypt(keys.public, np.full(10, value)) for value in (0.0, 1.0))
    again = ckks.encrypt(keys.public, np.zeros(10))
    assert not np.array_equal(zero, again)
    assert abs(len(zero) - len(one)) < 100  # compression sees random bytes


@pytest.mark.parametrize("value", [1024.001, -2000.0, np.inf, -np.inf, np.nan])
def test_values_out_of_range_name_the_bound(keys, value):
    with pytest.raises(MessageError, match=r"at 1; must be finite and within ±1024"):
        ckks.encrypt(keys.public, np.array([1.0, value, 2.0]))


@pytest.mark.parametrize("values", [np.zeros((2, 2)), np.zeros(3, np.int64), np.array(1.0)])
def test_values_must_be_flat_floats(keys, values):
    with pytest.raises(MessageError, match="flat array of floats"):
        ckks.encrypt(keys.public, values)


def test_another_key(keys):
    other = ckks.Keys.generate()
    blob = ckks.encrypt(other.public, np.ones(5))
    with pytest.raises(MessageError, match="another key"):
        keys.decrypt(blob, 5)
    with pytest.raises(MessageError, match="ciphertexts 1: encrypted under another key"):
        ckks.add(keys.public, [ckks.encrypt(keys.public, np.ones(5)), blob])
    renamed = resealed(
        blob, 4, ckks._name(keys.public.tobytes())
    )  # a label is no proof: what comes out is noise, and noise is noticed
    with pytest.raises(MessageError, match="do not decrypt to a sum of 1 arrays"):
        keys.decrypt(renamed, 5)


def test_blobs_that_do_not_fit_together(keys):
    three, four = ckks.encrypt(keys.public, np.ones(3)), ckks.encrypt(keys.public, np.ones(4))
    with pytest.raises(MessageError, match="none to add"):
        ckks.add(keys.public, [])
    with pytest.raises(MessageError, match="ciphertexts 1: 4 values, others have 3"):
        ckks.add(keys.public, [three, four])
    with pytest.raises(MessageError, match="3 values, 4 expected"):
        keys.decrypt(three, 4)


def test_any_changed_byte_is_noticed(keys):
    blob = ckks.encrypt(keys.public, np.ones(3))
    rng = np.random.default_rng(0)
    for position in [*range(40), *rng.integers(40, len(blob), 60)]:
        damaged = blob.copy()
        damaged[position] ^= 1 << rng.integers(8)
        with pytest.raises(MessageError, match="ciphertexts: damaged"):
            keys.decrypt(damaged, 3)
        with pytest.raises(MessageError, match="ciphertexts 1: damaged"):
            ckks.add(keys.public, [blob, damaged])


@pytest.mark.parametrize("length", [0, 3, 4, 31, 32, 35, 36, 500, -1])
def test_cut_blobs_are_noticed(keys, length):
    blob = ckks.encrypt(keys.public, np.ones(3))
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
    forged = resealed(ckks.encrypt(keys.public, np.ones(3)), start, new)
    with pytest.raises(MessageError, match=message):
        ckks.add(keys.public, [forged])


def test_a_ciphertext_that_lies_about_its_size_or_scale_is_refused(keys):
    """TenSEAL itself would read past the end of the slots."""
    context, name = (
        ts.context_from(keys.public.tobytes(), n_threads=1),
        ckks._name(keys.public.tobytes()),
    )
    wide = ts.ckks_vector(context, [1.0] * 5).serialize()
    other_scale = ts.ckks_vector(context, [1.0] * 3, 2.0**30).serialize()
    for part in (wide, other_scale, b""):
        with pytest.raises(
            MessageError,
            match="ciphertexts 0: not one fresh or added ciphertext of 3 values at scale 2\\^40",
        ):
            ckks.add(keys.public, [ckks._pack(ckks._Blob(name, 3, 1, [part]))])


def test_random_damage_with_a_valid_checksum_never_gives_a_wrong_sum(keys):
    values = np.linspace(-5, 5, 40)
    blob = ckks.encrypt(keys.public, values)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(200):
        position = int(rng.integers(4, 150) if rng.random() < 0.5 else rng.integers(4, len(blob)))
        try:
            result = keys.decrypt(resealed(blob, position, rng.bytes(1)), len(values))
        except MessageError:
            refused += 1
        else:
            assert np.allclose(
                result, values, rtol=0, atol=1e-6
            )  # the byte was the same, or one that nobody reads
    assert refused > 150


def test_without_tenseal(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(
        ConfigError, match=r"method.encrypt needs the package tenseal: pip install 'fedloom\[he\]'"
    ):
        ckks.Keys.generate()
    with pytest.raises(ConfigError, match="needs the package tenseal"):
        ckks.encrypt(np.zeros(10, np.uint8), np.ones(3))
