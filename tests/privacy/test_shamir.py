"""Secret sharing: exhaustive in small fields, where secrecy is counted; random in the real one."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.privacy import shamir


def is_prime(number: int) -> bool:
    """Miller-Rabin to the first 40 prime bases; trial division by them as well."""
    bases = [p for p in range(2, 180) if all(p % q for q in range(2, p))][:40]
    if number in bases:
        return True
    if number < 2 or any(number % p == 0 for p in bases):
        return False
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(
        pow(base, odd, number) in (1, number - 1)
        or any(pow(base, odd << i, number) == number - 1 for i in range(1, twos))
        for base in bases
    )


def test_the_prime_is_the_smallest_above_all_32_byte_secrets():
    assert [n for n in range(2, 60) if is_prime(n)] == [
        2,
        3,
        5,
        7,
        11,
        13,
        17,
        19,
        23,
        29,
        31,
        37,
        41,
        43,
        47,
        53,
        59,
    ]
    assert not is_prime(561)
    assert not is_prime(2**67 - 1)
    assert is_prime(2**127 - 1)
    assert shamir.PRIME > 2**256
    assert [n for n in range(2**256, shamir.PRIME + 1) if is_prime(n)] == [shamir.PRIME]
    assert (shamir.PRIME - 1).bit_length() <= 8 * shamir.SHARE_BYTES


@pytest.mark.parametrize("prime", [5, 7, 11, 13])
def test_every_secret_comes_back_from_every_subset_of_t_shares(prime):
    points = list(range(1, prime))[:6]
    for secret, threshold in product(range(prime), range(1, len(points) + 1)):
        shares = dict(zip(points, shamir.split(secret, threshold, points, prime), strict=True))
        assert all(0 <= share < prime for share in shares.values())
        for size in range(threshold, len(points) + 1):
            for chosen in combinations(points, size):
                assert shamir.combine({point: shares[point] for point in chosen}, prime) == secret


@pytest.mark.parametrize(("prime", "threshold"), [(5, 2), (5, 3), (7, 2), (7, 3), (7, 4), (11, 3)])
def test_fewer_than_t_shares_are_consistent_with_every_secret_equally(prime, threshold):
    """Over all polynomials, every secret explains the shares of t - 1 parties in one way."""
    for chosen in combinations(range(1, prime), threshold - 1):
        ways = Counter()
        for secret, *others in product(range(prime), repeat=threshold):
            ways[tuple(shamir.evaluate([secret, *others], chosen, prime)), secret] += 1
        assert len(ways) == prime**threshold  # every view with every secret
        assert set(ways.values()) == {1}


def test_counting_would_notice_a_coefficient_that_is_not_uniform():
    """The control of the test above: a leading coefficient that is never 0 gives secrets away."""
    views = {
        (tuple(shamir.evaluate([secret, slope], [1], 7)), secret)
        for secret in range(7)
        for slope in range(1, 7)
    }
    assert len(views) < 7**2


def test_split_draws_every_polynomial():
    drawn = {
        tuple(shamir.split(2, 2, [1, 2], 3)) for _ in range(200)
    }  # misses one of three by chance once in 10^35
    assert drawn == {tuple(shamir.evaluate([2, slope], [1, 2], 3)) for slope in range(3)}


@given(data=st.data(), secret=st.integers(0, 2**256 - 1), count=st.integers(1, 40))
def test_the_real_field(data, secret, count):
    points = data.draw(
        st.lists(st.integers(1, 10_000), min_size=count, max_size=count, unique=True)
    )
    threshold = data.draw(st.integers(1, count))
    shares = shamir.split(secret, threshold, points)
    assert all(share < 2 ** (8 * shamir.SHARE_BYTES) for share in shares)
    chosen = data.draw(st.permutations(range(count)))[:threshold]
    held = {points[i]: shares[i] for i in chosen}
    assert shamir.combine(held) == secret
    wrong = dict(held)
    wrong[points[chosen[0]]] = (wrong[points[chosen[0]]] + 1) % shamir.PRIME
    assert shamir.combine(wrong) != secret
    if threshold > 1:
        del held[points[chosen[0]]]
        assert shamir.combine(held) != secret  # by chance once in 2^256


def test_weights_against_the_formula():
    points, prime = (3, 1, 8, 21), shamir.PRIME
    for i, weight in enumerate(shamir._weights(points, prime)):
        top = bottom = 1
        for j, point in enumerate(points):
            if j != i:
                top, bottom = top * point, bottom * (point - points[i])
        assert weight * bottom % prime == top % prime


@pytest.mark.parametrize("points", [[0, 1, 2], [1, 1, 2], [1, 2, 7], []])
def test_points_that_give_the_secret_away_or_do_not_determine_it(points):
    with pytest.raises(ValueError, match=r"points|cannot be asked"):
        shamir.split(3, 2, points, 7)
    if len(set(points)) == len(points):
        with pytest.raises(ValueError, match="points"):
            shamir.combine(dict.fromkeys(points, 1), 7)


def test_secrets_and_thresholds_that_cannot_be():
    with pytest.raises(ValueError, match="number of the field"):
        shamir.split(7, 2, [1, 2, 3], 7)
    with pytest.raises(ValueError, match="4 of 3"):
        shamir.split(3, 4, [1, 2, 3], 7)
    with pytest.raises(ValueError, match="0 of 3"):
        shamir.split(3, 0, [1, 2, 3], 7)
