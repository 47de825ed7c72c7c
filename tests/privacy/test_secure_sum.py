"""Secure sums: exact for all dropouts, silent when too few are left; clients refuse bad requests.

Every dropout pattern of three and of five parties is tried, and random ones of up to fifty parties.
FEDLOOM_SECURE_CASES sets the number of random ones, and runs all patterns of five.
"""

import hmac
import math
import os
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from functools import partial
from hashlib import sha256
from itertools import combinations, pairwise, product

import networkx as nx
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedloom.core.facts import SecureTerms
from fedloom.errors import ConfigError, FedloomError, MessageError, Refusal
from fedloom.privacy import secure_sum, shamir
from fedloom.privacy.identity import simulated_identity
from fedloom.privacy.secure_sum import (
    Collector,
    Member,
    TooFew,
    decode,
    encode,
    is_complete,
    neighbourhood,
    pieces,
)
from fedloom.privacy.sum_record import SumId

MANY = "FEDLOOM_SECURE_CASES" in os.environ
CASES = int(os.environ.get("FEDLOOM_SECURE_CASES", "200"))
RUN = bytes(range(16))
TAKES = {
    "advertise": "take_keys",
    "draw": "take_nonces",
    "share": "take_shares",
    "mask": "take_vectors",
    "confirm": "take_confirmations",
    "unmask": "take_reveals",
}
DRAWN = tuple(TAKES)  # the stages on a k-regular graph
STAGES = tuple(stage for stage in DRAWN if stage != "draw")  # and on the complete graph
SUM_ID = SumId(RUN, 0).text()


def names(population):
    return tuple(f"c{p}" for p in range(population))


def identity(position, population):
    return simulated_identity(f"c{position}", names(population), 0)


def nonce(position):
    """A party's nonce in these tests, so that they know the graph."""
    return (1000 + int(position)).to_bytes(secure_sum.NONCE_BYTES, "big")


def graph_seed(roster, answered):
    """What the graph is drawn from."""
    nonces = [nonce(p) if answered[p] else bytes(16) for p in np.flatnonzero(roster)]
    rows = np.frombuffer(b"".join(nonces), np.uint8).reshape(-1, secure_sum.NONCE_BYTES)
    return secure_sum._graph_seed(rows, answered)


# ---- driving a sum ----
class Drive:
    """A sum with honest parties, except those in `lost` = {position: stage}.

    `transcript` is all that travels.
    """

    def __init__(
        self,
        terms,
        vectors,
        lost=None,
        population=None,
        number=0,
        member=Member,
        collector=Collector,
    ):
        population = population or max(vectors) + 1
        self.vectors, self.lost, self.transcript = vectors, lost or {}, []
        self.roster = flags(vectors, population)
        about = SumId(RUN, number)
        self.collector = collector(terms, about, self.roster, len(next(iter(vectors.values()))))
        proposal = (terms, about, self.roster, self.collector.threshold)
        self.members = {
            p: member(identity(p, population), names(population), *proposal) for p in vectors
        }
        for p, one in self.members.items():
            one._nonce = nonce(p)
        self.requests = dict.fromkeys(vectors, ())
        self.stage = "advertise"
        self.total = None

    def ask(self, position):
        """One member's reply to what it is asked now."""
        vector = (self.vectors[position],) if self.stage == "mask" else ()
        reply = getattr(self.members[position], self.stage)(*vector, *self.requests[position])
        self.transcript.append((self.stage, position, self.requests[position], reply))
        return reply

    def step(self, change=lambda replies: None):
        """Runs one stage. `change` may tamper with the replies."""
        replies = {p: self.ask(p) for p in self.requests if self.lost.get(p) != self.stage}
        change(replies)
        answer = getattr(self.collector, TAKES[self.stage])(replies.items())
        if self.stage == "unmask":
            self.total = answer
        else:
            self.requests, self.stage = answer, self.collector._expects
        return self

    def until(self, stage):
        """Goes on until a stage is due."""
        while self.stage != stage:
            self.step()
        return self

    def run(self):
        """The sum."""
        return self.until("unmask").step().total


def flags(positions, population):
    chosen = np.zeros(population, bool)
    chosen[list(positions)] = True
    return chosen


def random_vectors(positions, terms, size=3, seed=0):
    rng = np.random.default_rng(seed)
    return {p: rng.integers(0, 2**terms.bits, size, terms.word.type) for p in positions}


def plain_sum(vectors, positions, bits):
    """In Python's whole numbers, so that nothing of NumPy's wrapping is taken for granted."""
    return [
        sum(column) % 2**bits
        for column in zip(*(vectors[p].tolist() for p in positions), strict=True)
    ]


def drive(n=5, stage="advertise", terms=None, lost=None, **kwargs):
    terms = terms or SecureTerms()
    return Drive(terms, random_vectors(range(n), terms), lost, **kwargs).until(stage)


# ---- exactness ----
def verdict(near, threshold, lost, drawn=False):
    """Returns the survivors, or the stage after which there are too few, computed with sets.

    near: {party: its neighbours}.
    """

    def passed(stage):
        return {p for p in near if p not in lost or DRAWN.index(lost[p]) > DRAWN.index(stage)}

    def enough(owners, helpers):
        return all(len((near[p] | {p}) & helpers) >= threshold for p in owners)

    shared, survivors = passed("share"), passed("mask")
    gone = {p for p in shared - survivors if near[p] & survivors}
    if len(passed("advertise")) < 3:
        return "advertise"
    if drawn and passed("draw") != passed("advertise"):
        return "draw"
    for stage in ("draw" if drawn else "advertise", "share"):
        if len(passed(stage)) < 3 or not enough(passed(stage), passed(stage)):
            return stage
    graph = nx.Graph((p, q) for p in survivors for q in near[p] & survivors)
    if (
        len(survivors) < 3
        or not enough(survivors | gone, survivors)
        or nx.number_connected_components(graph) > 1
    ):
        return "mask"
    for stage in ("confirm", "unmask"):
        if not enough(survivors | gone, passed(stage)):
            return stage
    return survivors


def check_case(terms, positions, lost, seed=0, population=None):
    """One sum with dropouts against the verdict; gives the verdict."""
    vectors = random_vectors(positions, terms, 1 + seed % 4, seed)
    sums = Drive(terms, vectors, lost, population, number=seed % 1000)
    drawn, answered = sums.collector.drawn, sums.roster.copy()
    answered[[p for p, stage in lost.items() if stage == "advertise"]] = False
    seed_of_graph = graph_seed(sums.roster, answered)
    near = {
        p: set(neighbourhood(p, sums.roster, terms.neighbours, seed_of_graph).tolist())
        for p in positions
    }
    members = {len(peers) + 1 for peers in near.values()}
    assert len(members) == 1
    threshold = Fraction(terms.threshold).limit_denominator(100) * members.pop() // 1 + 1
    assert sums.collector.threshold == threshold
    expected = verdict(near, threshold, lost, drawn)
    if isinstance(expected, str):
        with pytest.raises(TooFew, match="nothing was released"):
            sums.run()
        assert sums.stage == expected
    else:
        total = sums.run()
        assert total.dtype == terms.word
        assert total.tolist() == plain_sum(vectors, expected, terms.bits)
    return expected if isinstance(expected, str) else "sum"


def every_pattern(n, stages=STAGES):
    for chosen in product((*stages, None), repeat=n):
        yield {p: stage for p, stage in enumerate(chosen) if stage}


@pytest.mark.parametrize("threshold", [0.5, 2 / 3, 0.8])
def test_every_dropout_pattern_of_three(threshold):
    seen = Counter(
        check_case(SecureTerms(threshold, bits=32 + i % 2 * 32), range(3), lost, i)
        for i, lost in enumerate(every_pattern(3))
    )
    assert sum(seen.values()) == 6**3
    assert seen["sum"] == (
        7 if threshold == 0.5 else 1
    )  # all must survive; after that t = 2 of them can do without the third


@pytest.mark.parametrize(
    ("threshold", "neighbours", "step"),
    [
        pytest.param(0.5, 0, 1, marks=pytest.mark.slow),
        (0.5, 0, 53),
        (2 / 3, 0, 29),
        (0.8, 0, 29),
        (0.5, 2, 89),
    ],
)
def test_every_dropout_pattern_of_five(threshold, neighbours, step):
    stages = DRAWN if neighbours else STAGES
    patterns = [
        (i, lost)
        for i, lost in enumerate(every_pattern(5, stages))
        if MANY or i % step == 0 or len(lost) <= 1
    ]
    seen = Counter(
        check_case(SecureTerms(threshold, neighbours, 32 + i % 2 * 32), range(5), lost, i)
        for i, lost in patterns
    )
    assert {*stages, "sum"} <= seen.keys()
    if (
        len(patterns) == 6**5 and neighbours == 0
    ):  # any parties, as many as are tolerated, each at any of five stages
        tolerated = 5 - {0.5: 3, 2 / 3: 4, 0.8: 5}[threshold]
        assert seen["sum"] == sum(math.comb(5, gone) * 5**gone for gone in range(tolerated + 1))


@st.composite
def cases(draw):
    """SecureTerms, who takes part, who is lost where: mostly about as many as are tolerated."""
    n, complete = draw(
        st.sampled_from(
            [(10, True)] * 5
            + [(10, False)] * 6
            + [(5, False), (3, True)]
            + [(50, False)] * 3
            + [(50, True)]
        )
    )
    k = 0 if complete else draw(st.sampled_from([2, 4, 5, 8] if n <= 10 else [4, 8, 12, 21]))
    terms = SecureTerms(
        draw(st.sampled_from([0.5, 2 / 3, 0.8])), k, draw(st.sampled_from([32, 64]))
    )
    population = n + draw(st.sampled_from([0, 0, 1, 7]))
    shuffled = draw(st.permutations(range(population)))
    members = n if complete else min(n, k + k % 2 + 1)
    tolerated = members - terms.quorum(members)
    losses = draw(
        st.one_of(
            st.integers(0, tolerated),
            st.integers(max(tolerated - 1, 0), tolerated + 2),
            st.integers(0, n),
        )
    )
    drawn = k and not is_complete(n, k)
    stages = DRAWN if drawn and not draw(st.integers(0, 3)) else STAGES  # a loss in `draw` ends it
    lost = {p: draw(st.sampled_from(stages)) for p in shuffled[: min(losses, n)]}
    return terms, sorted(shuffled[:n]), lost, draw(st.integers(0, 2**32)), population


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(case=cases())
@example(case=(SecureTerms(), range(20), {p: STAGES[p % 5] for p in range(6)}, 2, 20))
def test_some_random_dropout_patterns(case):
    terms, positions, lost, seed, population = case
    check_case(terms, positions, lost, seed, population)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
@given(case=cases())
@example(case=(SecureTerms(), range(50), {}, 1, 50))
@example(
    case=(SecureTerms(), range(50), {p: STAGES[p % 5] for p in range(16)}, 2, 50)
)  # the last loss that is tolerated
@example(
    case=(SecureTerms(), range(50), {p: STAGES[p % 5] for p in range(17)}, 3, 50)
)  # and one too many
def test_random_dropout_patterns(case):
    terms, positions, lost, seed, population = case
    check_case(terms, positions, lost, seed, population)


@pytest.mark.parametrize("stage", STAGES)
def test_a_party_lost_at_any_stage_is_survived(stage):
    """Flower's SecAgg+ ends the round when one is lost in setup or while sharing keys."""
    assert check_case(SecureTerms(), range(10), {4: stage}) == "sum"


def around_the_circle(n, k, answered=None):
    """Returns the parties in the order of the circle: neighbours share the most neighbours."""
    roster = np.ones(n, bool)
    salt = graph_seed(roster, roster if answered is None else answered)
    near = {p: {p, *neighbourhood(p, roster, k, salt).tolist()} for p in range(n)}
    circle = [0]
    while len(circle) < n:
        circle.append(
            max(near[circle[-1]] - set(circle), key=lambda p: len(near[p] & near[circle[-1]]))
        )
    return circle


def test_lost_parties_with_which_no_survivor_padded_are_not_needed():
    """On a ring of ten, two neighbours and all parties around them are lost."""
    ring = around_the_circle(10, 2)
    lost = dict.fromkeys((ring[0], ring[3]), "share") | dict.fromkeys(ring[1:3], "mask")
    assert check_case(SecureTerms(0.5, neighbours=2), range(10), lost) == "sum"


def test_two_sums_in_a_row_have_nothing_in_common():
    first, second = (drive(number=number).until("unmask") for number in (0, 1))
    for (stage, position, _, one), (*_, other) in zip(
        first.transcript, second.transcript, strict=True
    ):
        assert (one != other).any(), (stage, position)


# ---- what clients refuse ----
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"threshold": 3}, "threshold 3 of 5 is too low, the terms ask for at least 4"),
        ({"threshold": 1}, "threshold 1 of 5 is too low"),
        ({"threshold": 6}, "threshold 6 is more than the 5 members"),
        ({"roster": flags([0, 1], 5), "threshold": 2}, "2 parties in the roster, fewer than 3"),
        ({"roster": flags([0, 2, 3, 4], 5)}, "not in the roster"),
        ({"roster": np.ones(6, bool)}, "the roster must be bool"),
        ({"roster": np.ones(5, np.uint8)}, "the roster must be bool"),
        ({"terms": SecureTerms(cohort=1), "roster": flags(range(4), 5)}, "4 parties .* than 5"),
    ],
)
def test_a_proposal_that_breaks_the_terms_is_refused(change, text):
    proposal = {
        "identity": identity(1, 5),
        "names": names(5),
        "terms": SecureTerms(),
        "about": SumId(RUN, 0),
        "roster": np.ones(5, bool),
        "threshold": 4,
    }
    Member(**proposal)
    with pytest.raises(Refusal, match=text):
        Member(**proposal | change)


def test_the_threshold_counts_the_neighbourhood_not_the_roster():
    proposal = {
        "identity": identity(1, 50),
        "names": names(50),
        "about": SumId(RUN, 0),
        "roster": np.ones(50, bool),
        "threshold": 8,
    }
    Member(terms=SecureTerms(neighbours=10), **proposal)
    with pytest.raises(
        Refusal, match="threshold 8 of 50 is too low, the terms ask for at least 34"
    ):
        Member(terms=SecureTerms(), **proposal)


def untimely(member, stage):
    """Asks for a stage that is not due; with what does not matter."""
    request = {
        "advertise": (),
        "share": (None, None),
        "mask": (np.zeros(3, member.terms.word), None),
        "confirm": (None,),
        "unmask": (None, None),
    }
    return getattr(member, stage)(*request[stage])


def refused(text, stage, change, n=5, terms=None, lost=None, position=1, colluding=False):
    """Checks that a member refuses a changed request, deletes its secrets, and stops.

    colluding: the neighbours sign what was changed under their names.
    """
    sums = drive(n, stage, terms, lost)
    sums.requests[position] = change(*[part.copy() for part in sums.requests[position]])
    if colluding:
        keys = sums.requests[position][KEYS]
        for row, peer in enumerate(sums.members[position].neighbours.tolist()):
            keys[row] = signed(sums.members[peer], keys[row, :-64])
    with pytest.raises(Refusal, match=f"party {position} refuses: .*{text}"):
        sums.ask(position)
    member = sums.members[position]
    assert not {"_seed", "_cipher_key", "_mask_key", "_own_share"} & vars(member).keys()
    assert not member._pair_keys
    assert not member._inbox_keys
    for later in STAGES:
        with pytest.raises(Refusal, match=f"asked to {later}, but what is due is: nothing more"):
            untimely(member, later)


def signed(member, content):
    """What a member advertises if these are its keys."""
    signature = member._identity.sign("keys", member._said + content.tobytes())
    return np.r_[content, np.frombuffer(signature, np.uint8)]


def put(place, value):
    """A change of one argument's rows or flags."""

    def change(*request):
        request[place[0]][place[1:]] = value
        return request

    return change


def flip(place):
    """A change of every bit of one byte, whatever it was."""

    def change(*request):
        request[place[0]][place[1:]] ^= 255
        return request

    return change


# Which argument they are.
KEYS, ANSWERED, SHARED, SURVIVORS, CIPHERTEXTS, SIGNATURES = 0, 1, 0, 0, 0, 1
LOW_ORDER = np.frombuffer(bytes([1]) + bytes(31), np.uint8)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (r"there are no keys of parties \[3\]", put((KEYS, 2), 0)),
        (r"there are keys of parties \[3\], which are said to be gone", put((ANSWERED, 3), False)),
        ("it is not among those who answered", put((ANSWERED, 1), False)),
        ("who answered must be bool", lambda keys, answered: (keys, answered.astype(np.uint8))),
        ("who answered must be bool", lambda keys, answered: (keys, answered[:-1])),
        ("keys must be uint8", lambda keys, answered: (keys[:-1], answered)),
        ("keys must be uint8", lambda keys, answered: (keys.astype(np.int64), answered)),
        (r"party 3 \(c3\) has not signed the keys", flip((KEYS, 2, 5))),
        (r"party 3 \(c3\) has not signed the keys", flip((KEYS, 2, 70))),
        (r"party 3 \(c3\) has not signed the keys", flip((KEYS, 2, 100))),
        (
            r"party 2 \(c2\) has not signed the keys",
            lambda keys, answered: (keys[[0, 2, 1, 3]], answered),
        ),
    ],
)
def test_keys_that_are_refused(text, change):
    refused(text, "share", change)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("a key of party 0 is of low order", put((KEYS, 0, slice(0, 32)), LOW_ORDER)),
        ("a key of party 2 is of low order", put((KEYS, 1, slice(32, 64)), LOW_ORDER)),
        ("a key of party 3 is there twice", lambda keys, answered: (keys[[0, 1, 1, 3]], answered)),
        (
            "a key of party 2 is there twice",
            lambda keys, answered: (
                np.c_[keys[:, :32], keys[[0, 0, 2, 3], 32:64], keys[:, 64:]],
                answered,
            ),
        ),
        (
            "a key of party 0 is there twice",
            lambda keys, answered: (np.c_[keys[:, :32], keys[:, :32], keys[:, 64:]], answered),
        ),
    ],
)
def test_keys_that_are_refused_though_their_owners_signed_them(text, change):
    refused(text, "share", change, colluding=True)


@pytest.mark.parametrize("half", [slice(32), slice(32, 64)])
def test_its_own_keys_are_refused(half):
    sums = drive(stage="share")
    keys, answered = sums.requests[1]
    keys[0, half] = np.frombuffer(sums.members[1]._public_keys(), np.uint8)[half]
    keys[0] = signed(sums.members[0], keys[0, :-64])
    with pytest.raises(Refusal, match="a key of party 0 is there twice"):
        sums.members[1].share(keys, answered)


def without(*gone, argument):
    """The request with parties taken out of the flags, and their rows out of the bytes."""

    def change(*request):
        for party in gone:
            request[argument][party] = False
            if len(request) == 2 and argument == ANSWERED:
                request[KEYS][party - (party > 1)] = 0
        return request

    return change


def test_too_few_around_it_are_refused_at_every_stage():
    refused(
        "3 of the 5 parties around it answered, fewer than 4",
        "share",
        without(3, 4, argument=ANSWERED),
    )
    refused(
        "3 of the 5 parties around it shared, fewer than 4", "mask", without(3, 4, argument=SHARED)
    )
    refused(
        "3 of the 5 parties around it survived, fewer than 4",
        "confirm",
        without(3, 4, argument=SURVIVORS),
    )
    half = SecureTerms(0.5)
    refused(
        "2 parties answered, fewer than 3", "share", without(2, argument=ANSWERED), n=3, terms=half
    )
    refused("2 parties shared, fewer than 3", "mask", without(2, argument=SHARED), n=3, terms=half)
    refused(
        "2 parties survived, fewer than 3",
        "confirm",
        without(2, argument=SURVIVORS),
        n=3,
        terms=half,
    )


@pytest.mark.parametrize(
    ("stage", "lost", "did", "argument"),
    [
        ("share", None, "answered", ANSWERED),
        ("mask", {3: "advertise"}, "shared", SHARED),
        ("confirm", {3: "share"}, "survived", SURVIVORS),
    ],
)
def test_parties_from_nowhere_are_refused(stage, lost, did, argument):
    asked = [0, 1, 2, 3, 4] if lost else [0, 1, 2, 4, 5]
    sums = Drive(SecureTerms(), random_vectors(asked, SecureTerms()), lost, population=6).until(
        stage
    )
    sums.requests[1][argument][3] = True
    with pytest.raises(
        Refusal, match=rf"parties \[3\] are said to have {did}, but were not there a stage before"
    ):
        sums.ask(1)


@pytest.mark.parametrize(
    ("stage", "did", "argument"), [("mask", "shared", 0), ("confirm", "survived", 0)]
)
def test_a_sum_without_itself_is_refused(stage, did, argument):
    refused(f"it is not among those who {did}", stage, put((argument, 1), False))


@pytest.mark.parametrize(
    ("text", "change", "lost"),
    [
        (
            "what party 3 encrypted for it did not arrive as it was sent",
            flip((CIPHERTEXTS, 2, 5)),
            None,
        ),
        ("what party 3 encrypted for it", lambda rows, signed: (rows[[0, 1, 3, 2]], signed), None),
        (r"there are no ciphertexts of parties \[4\]", put((CIPHERTEXTS, 3), 0), None),
        (
            r"there are ciphertexts of parties \[4\], which are said to be gone",
            put((CIPHERTEXTS, 3), 1),
            {4: "share"},
        ),
        ("ciphertexts must be uint8", lambda rows, signed: (rows[:, :-1], signed), None),
        ("ciphertexts must be uint8", lambda rows, signed: (rows[:-1], signed), None),
    ],
)
def test_ciphertexts_that_are_refused(text, change, lost):
    refused(text, "unmask", change, lost=lost)


def test_stages_out_of_order_are_refused_and_do_no_harm():
    sums = drive()
    for stage in STAGES:
        for wrong in STAGES:
            if wrong != stage:
                with pytest.raises(
                    Refusal, match=f"party 1 refuses: asked to {wrong}, but what is due is: {stage}"
                ):
                    untimely(sums.members[1], wrong)
        sums.step()
    assert sums.total.tolist() == plain_sum(sums.vectors, range(5), 64)


def test_a_second_masking_is_refused():
    """Two vectors under the same pads would give their difference away."""
    sums = drive(stage="mask")
    member, (shared,) = sums.members[1], sums.requests[1]
    member.mask(sums.vectors[1], shared)
    for vector in (sums.vectors[1], np.zeros_like(sums.vectors[1])):
        with pytest.raises(Refusal, match="asked to mask, but what is due is: confirm"):
            member.mask(vector, shared)


def test_both_kinds_of_share_of_one_peer_are_never_handed_out():
    """Flower's client hands out the share of the pad and the share of the key of the same peer."""
    sums = drive(n=7, stage="unmask")
    member, request = sums.members[1], sums.requests[1]
    first = member.unmask(*request)
    with pytest.raises(Refusal, match="asked to unmask, but what is due is: nothing more"):
        member.unmask(*request)
    for survivors in (member._present, member._present & ~flags([4], 7)):
        with pytest.raises(Refusal, match="asked to confirm, but what is due is: nothing more"):
            member.confirm(survivors)
    assert first.shape == (7, secure_sum.SHARE_BYTES)  # one row a party: there is no room for two
    assert not {"_seed", "_cipher_key", "_mask_key", "_own_share"} & vars(member).keys()
    assert not member._inbox_keys
    assert not member._pair_keys


def test_survivors_that_fall_apart():
    """On a ring of ten without two opposite parties, the server would see two sums."""
    terms = SecureTerms(0.5, neighbours=2)
    ring = around_the_circle(10, 2)
    lost = {ring[0]: "mask", ring[5]: "mask"}
    with pytest.raises(
        TooFew, match="fall into 2 pieces, and the sum of each would be open; nothing was released"
    ):
        Drive(terms, random_vectors(range(10), terms), lost).run()
    sums = Drive(terms, random_vectors(range(10), terms)).until("confirm")
    (survivors,) = sums.requests[ring[2]]
    survivors[[ring[0], ring[5]]] = False
    with pytest.raises(Refusal, match="the survivors fall into 2 pieces"):
        sums.members[ring[2]].confirm(survivors)


# ---- a server that deviates ----
def opened(told, colluding=(), terms=None, protected=True, n=9):
    """Returns the parties whose seeds, and those whose mask keys, a lying server can combine.

    Args:
        told: Takes a party, returns the survivors that the server tells it.
        colluding: Parties that sign, and reveal, whatever the server wants.
        terms: The terms.
        protected: Whether the parties check signatures of the survivors.
        n: The number of parties.
    """
    sums = drive(n, "confirm", terms)
    members, survivors = sums.members, {p: flags(told(p), n) for p in range(n)}
    signed = {p: members[p].confirm(survivors[p]) for p in range(n) if p not in colluding}
    inbox = sums.collector._ciphertexts.reshape(-1, secure_sum.CIPHERTEXT_BYTES)
    helpers = {kind: {p: set(colluding) for p in range(n)} for kind in ("seed", "key")}
    for p in signed:
        member, rows = members[p], []
        if not protected:
            member._require_confirmed = lambda signatures: None
        for peer in member.neighbours.tolist():
            forger = members[peer]._identity
            willing = forger.sign("survivors", member._confirmed()) if peer in colluding else b""
            rows.append(np.frombuffer(willing, np.uint8) if willing else signed[peer])
        with suppress(Refusal):
            member.unmask(inbox[sums.collector._inbox[p]], np.stack(rows))
            for owner in range(n):
                kind = "seed" if survivors[p][owner] else "key"
                helpers[kind][owner].add(p)
    enough = sums.collector.threshold
    return {kind: {p for p in of if len(of[p]) >= enough} for kind, of in helpers.items()}


def everybody(p):
    return range(9)


def lists_that_leave_two(p):
    """Every party is told that four others are lost, in turn; together all but two are."""
    ring = list(range(2, 9))
    if p in (0, 1):
        gone = ring[:4] if p == 0 else ring[4:]
    else:
        gone = [ring[(p - 2 + step) % 7] for step in range(1, 5)]
    return [q for q in range(9) if q not in gone]


def test_parties_that_are_told_different_survivors_open_nothing():
    """The control: without the consistency round the server gets the sum of two parties."""
    half = SecureTerms(0.5)
    found = opened(lists_that_leave_two, terms=half, protected=False)
    assert found["seed"] >= {0, 1}
    assert found["key"] == set(range(2, 9))
    assert opened(lists_that_leave_two, terms=half) == {"seed": set(), "key": set()}
    assert opened(everybody) == {"seed": set(range(9)), "key": set()}  # an honest sum


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_fewer_than_a_third_that_collude_open_one_secret_of_a_party_at_most(colluders):
    """The victim's seed and its mask key together would open its vector."""
    for split in range(9):
        for protected in (True, False):

            def told(p, split=split):
                return range(9) if p < split or p == 8 else range(8)

            found = opened(told, tuple(range(colluders)), protected=protected)
            assert not found["seed"] & found["key"], (split, protected)


def test_control_more_than_half_that_collude_open_both_secrets_of_a_party():
    def told(p):
        return range(9) if p in (5, 8) else range(8)

    found = opened(told, (0, 1, 2, 3, 4), SecureTerms(0.5))
    assert found["seed"] & found["key"] == set(range(9))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("round", lambda a: a._replace(round=2)),
        ("number", lambda a: a._replace(number=2)),
        ("phase", lambda a: a._replace(phase="other")),
        ("run", lambda a: a._replace(run=bytes(16))),
    ],
)
def test_parties_that_are_told_different_things_refuse_each_others_keys(what, change):
    about, roster, t = SumId(RUN, 1, 1, "train"), np.ones(5, bool), 4
    members = [
        Member(
            identity(p, 5), names(5), SecureTerms(), change(about) if p == 2 else about, roster, t
        )
        for p in range(5)
    ]
    advertised = [member.advertise() for member in members]
    for p in (0, 2):
        keys = np.stack([advertised[q] for q in range(5) if q != p])
        with pytest.raises(Refusal, match="has not signed the keys under its name for this sum"):
            members[p].share(keys, roster)


def test_parties_that_are_told_different_rosters_or_thresholds_refuse_each_others_keys():
    about, roster = SumId(RUN, 1), np.ones(6, bool)
    other = roster & ~flags([5], 6)
    for change in ({"threshold": 6}, {"roster": other, "threshold": 5}):
        said = {"roster": roster, "threshold": 5}
        members = [
            Member(
                identity(p, 6),
                names(6),
                SecureTerms(),
                about,
                **(said | change if p == 2 else said),
            )
            for p in range(5)
        ]
        advertised = [member.advertise() for member in members]
        answered = flags(range(5), 6)
        keys = np.zeros((5, 160), np.uint8)
        keys[:4] = [advertised[q] for q in range(5) if q != 0]
        with pytest.raises(Refusal, match=r"party 2 \(c2\) has not signed"):
            members[0].share(keys, answered)


def test_a_server_in_the_middle_is_refused():
    """The server hands out keys of its own under the names of others."""
    sums = drive(stage="share")
    keys, answered = sums.requests[1]
    forged = drive().step().collector._advertised[0]
    with pytest.raises(Refusal, match=r"party 0 \(c0\) has not signed the keys"):
        sums.members[1].share(np.r_[forged[None] ^ 1, keys[1:]], answered)
    # The control: without the check, the server reads the shares and shares the pads.
    open_one = drive(stage="share").members[1]
    open_one._require_signed_keys = lambda peer, advertised: None
    mine = secure_sum.X25519PrivateKey.generate()
    row = forged.copy()
    row[:32] = np.frombuffer(mine.public_key().public_bytes_raw(), np.uint8)
    sent = open_one.share(np.r_[row[None], keys[1:]], answered)
    secret = secure_sum._agree(mine, open_one._public_keys()[:32])
    key = secure_sum._derive(secret, "shares", open_one._sum_id, 1, 0)
    assert len(AESGCM(key).decrypt(bytes(12), sent[0].tobytes(), None)) == 66


# ---- the drawn graph ----
RING = SecureTerms(0.5, neighbours=4)


def test_a_nonce_is_revealed_only_for_all_commitments():
    sums = drive(10, "draw", RING)
    commitments, answered = sums.requests[1]
    changed = commitments.copy()
    changed[1] ^= 1
    with pytest.raises(Refusal, match="the commitment under its own name is not its own"):
        sums.members[1].draw(changed, answered)
    sums = drive(10, "draw", RING)
    changed = commitments.copy()
    changed[3] = 0
    with pytest.raises(Refusal, match="commitments of exactly the parties that are present"):
        sums.members[1].draw(changed, answered)


def test_a_nonce_that_was_chosen_later_is_refused():
    sums = drive(10, "share", RING)
    keys, answered, nonces = sums.requests[1]
    changed = nonces.copy()
    changed[3] ^= 1
    with pytest.raises(Refusal, match="the nonce of party 3 is not the one that it committed to"):
        sums.members[1].share(keys, answered, changed)


def test_a_nonce_that_is_left_out_ends_the_sum():
    """A server that leaves out nonces would choose among graphs."""
    with pytest.raises(TooFew, match="1 parties did not reveal their nonces"):
        drive(10, "draw", RING, lost={4: "draw"}).step()
    sums = drive(10, "share", RING)
    keys, answered, nonces = sums.requests[1]
    with pytest.raises(Refusal, match="not all parties that committed to a nonce have revealed it"):
        sums.members[1].share(keys, answered & ~flags([4], 10), nonces)


def test_nobody_chooses_the_neighbours_of_a_victim():
    """Before, a server searched run ids until t neighbours of its victim colluded."""
    n, k, colluding = 60, 8, set(range(12))
    roster = np.ones(n, bool)

    def near(salt):
        return len(colluding & set(neighbourhood(30, roster, k, salt).tolist()))

    searched = max(
        near(SumId(bytes([i, j] + [0] * 14), 0).text()) for i in range(64) for j in range(64)
    )
    terms = SecureTerms(neighbours=k)
    assert searched >= terms.quorum(k + 1) - 1  # the search would succeed
    found = []
    for number in range(20):  # fresh nonces: the server cannot prepare anything
        sums = Drive(terms, random_vectors(range(n), terms), number=number)
        for p, member in sums.members.items():
            member._nonce = nonce(p) if p in colluding else os.urandom(16)
        sums.until("share")
        found.append(len(colluding & set(sums.collector._near[30].tolist())))
    assert max(found) < terms.quorum(k + 1)


class Careless(Collector):
    """A server that goes on however few are left."""

    def _require_quorum(self, *_, **__):
        pass


@pytest.mark.parametrize("threshold", [0.5, 2 / 3])
def test_every_client_refuses_what_a_careful_server_would_not_ask(threshold):
    terms, complete_graph = SecureTerms(threshold), {p: set(range(5)) - {p} for p in range(5)}
    vectors = random_vectors(range(5), terms)
    asked = 0
    for lost in [lost for i, lost in enumerate(every_pattern(5)) if i % 17 == 0]:
        stage = verdict(complete_graph, terms.quorum(5), lost)
        if stage not in ("advertise", "share", "mask"):
            continue
        sums = Drive(terms, vectors, lost, collector=Careless)
        while sums.stage != stage:
            sums.step()
        sums.step()
        for position in sums.requests:
            with pytest.raises(Refusal, match="fewer than"):
                sums.ask(position)
            asked += 1
    assert asked > 300


# ---- what the server does not take ----
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda replies: replies.update({2: replies[2][..., :-1]}),
            "party 2 answers {stage} with .*, expected",
        ),
        (
            lambda replies: replies.update({2: replies[2].astype(np.int16)}),
            "party 2 answers {stage} with int16.*, expected u?int",
        ),
        (
            lambda replies: replies.update({2: replies[2].tolist()}),
            "party 2 answers {stage} with list",
        ),
        (lambda replies: replies.update({4: replies[2]}), "party 4 was not asked to {stage}"),
        (lambda replies: replies.update({17: replies[2]}), "party 17 was not asked to {stage}"),
    ],
)
def test_messages_that_are_not_as_they_should_be(stage, change, text):
    terms = SecureTerms()
    sums = Drive(terms, random_vectors([0, 1, 2, 3, 5], terms), population=6).until(stage)
    with pytest.raises(MessageError, match=text.format(stage=stage)):
        sums.step(change)
    with pytest.raises(MessageError, match="nothing more"):
        sums.collector.take_keys([])


def test_who_was_lost_is_not_taken_back():
    sums = drive(n=7, stage="mask", lost={3: "share"})
    with pytest.raises(MessageError, match="party 3 was not asked to mask"):
        sums.step(lambda replies: replies.update({3: replies[2]}))


def test_nobody_answers_twice():
    sums = drive()
    with pytest.raises(
        MessageError, match="party 1 was not asked to advertise, or answered before"
    ):
        sums.collector.take_keys(
            [(p, sums.members[p].advertise()) for p in (0, 1)] + [(1, np.zeros(160, np.uint8))]
        )


def test_nobody_copies_a_key():
    with pytest.raises(MessageError, match="party 3 advertises a key that is there already"):
        drive().step(
            lambda replies: replies.update(
                {3: np.r_[replies[3][:32], replies[0][32:64], replies[3][64:]]}
            )
        )


def test_stages_of_the_server_come_in_order():
    sums = drive(stage="mask")
    with pytest.raises(MessageError, match="replies to unmask, but what is due is: mask"):
        sums.collector.take_reveals([])


def test_a_sum_over_two_is_not_begun():
    with pytest.raises(
        TooFew, match="2 parties are asked, at least 3 are needed; nothing was released"
    ):
        Collector(SecureTerms(), SumId(RUN, 0), flags([0, 3], 5), 4)


def test_too_few_says_how_many():
    for stage, did in zip(
        STAGES,
        (
            "advertised keys",
            "shared their secrets",
            "sent their vectors",
            "confirmed the survivors",
            "revealed their shares",
        ),
        strict=True,
    ):
        lost = dict.fromkeys(range(5, 10), stage)
        with pytest.raises(
            TooFew,
            match=f"5 of the 10 parties around party 0 {did}, 7 are needed; nothing was released",
        ):
            drive(10, lost=lost).run()
    for stage, did in zip(
        STAGES[:3], ("advertised keys", "shared their secrets", "sent their vectors"), strict=True
    ):
        with pytest.raises(
            TooFew, match=f"2 parties {did}, at least 3 are needed; nothing was released"
        ):
            drive(3, terms=SecureTerms(0.5), lost={2: stage}).run()


@pytest.mark.parametrize(("owner", "lost"), [(4, {}), (2, {2: "mask"})], ids=["seed", "mask key"])
@pytest.mark.parametrize("helper", [0, 1])
def test_a_wrong_share_is_noticed(owner, lost, helper):
    def tamper(replies):
        row = owner - (owner > helper)
        replies[helper] = replies[helper].copy()
        replies[helper][row, -1] ^= 1

    sums = drive(stage="unmask", lost=lost)
    with pytest.raises(
        MessageError,
        match=rf"shares of party {owner}'s secret .* one of parties \[0, 1, .*nothing was released",
    ):
        sums.step(tamper)
    assert sums.total is None


def test_a_wrong_share_would_spoil_the_sum(monkeypatch):
    """The control of the test above: with commitments that say nothing, the sum is wrong."""
    monkeypatch.setattr(secure_sum, "_commitment", lambda *_: bytes(32))
    sums = drive(stage="unmask")
    sums.step(lambda replies: replies.update({0: replies[0] ^ 1}))
    assert sums.total.tolist() != plain_sum(sums.vectors, range(5), 64)


def test_wrong_shares_dealt_by_their_owner_are_noticed():
    class Cheat(Member):
        def share(self, keys, answered, nonces=None):
            if self.position == 2:
                self._seed, true = bytes(32), self._seed
            sent = super().share(keys, answered)
            if self.position == 2:
                self._seed = true
            return sent

    with pytest.raises(MessageError, match="shares of party 2's secret"):
        drive(member=Cheat).run()


def test_memory_does_not_hold_the_vectors():
    """Arrivals may come one by one: the server looks at each before it asks for the next."""
    sums = drive(stage="mask")
    alive = []

    def one_by_one():
        for p in sums.requests:
            assert sums.collector._total.tolist() == [
                sum(c) % 2**64 for c in zip([0] * 3, *alive, strict=True)
            ]
            vector = sums.ask(p)
            alive.append(vector.tolist())
            yield p, vector

    sums.collector.take_vectors(one_by_one())
    assert len(alive) == 5


# ---- secrecy ----
def monobit_and_bytes(words):
    """p of the number of ones, and of the counts of byte values."""
    raw = words.view(np.uint8)
    ones = int(np.unpackbits(raw).sum())
    return stats.binomtest(ones, 8 * len(raw)).pvalue, stats.chisquare(
        np.bincount(raw, minlength=256)
    ).pvalue


def test_pads_look_random():
    words = np.zeros(1_000_000, np.uint32)
    secure_sum._add_stream(
        words, bytes(range(32))
    )  # the same every time, so that the test never fails by chance
    assert min(monobit_and_bytes(words)) > 0.001
    apart = [stats.pearsonr(words[:-lag], words[lag:]).pvalue for lag in (1, 2, 4, 16)]
    assert min(apart) > 0.001


class Bare(Member):
    """A client that adds no pads."""

    def mask(self, vector, shared):
        super().mask(vector, shared)
        return vector.copy()


@pytest.mark.parametrize(("member", "hidden"), [(Member, True), (Bare, False)])
def test_what_the_server_sees_looks_random(member, hidden):
    vectors = {p: encode({"w": np.full(200_000, 0.25)}, SecureTerms(), 3) for p in range(3)}
    sums = Drive(SecureTerms(), vectors, member=member).until("mask")
    p_values = monobit_and_bytes(sums.ask(1))
    assert (min(p_values) > 1e-9) == hidden  # fresh secrets every time: by chance once in 10^8


def test_seeds_with_the_same_fold_give_different_pads():
    """Flower's pads depend on 32 bits only, the XOR of the words of a seed."""
    seed = np.frombuffer(bytes(range(100, 132)), np.uint32)
    other = seed[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert np.bitwise_xor.reduce(seed) == np.bitwise_xor.reduce(other)
    assert (stream(own_pad_key(seed.tobytes())) != stream(own_pad_key(other.tobytes()))).all()


def test_every_bit_of_a_seed_counts():
    seed = int.from_bytes(bytes(range(32)), "big")
    seeds = [seed] + [seed ^ (1 << bit) for bit in range(256)]
    for derived in (
        own_pad_key,
        partial(secure_sum._pair_key, sum_id=SUM_ID, one=1, other=2),
    ):
        assert len({stream(derived(s.to_bytes(32, "big"))).tobytes() for s in seeds}) == 257
    assert len({stream(s.to_bytes(32, "big")).tobytes() for s in seeds}) == 257


def own_pad_key(seed):
    return secure_sum._derive(seed, "own pad", SUM_ID, 1)


def stream(key, words=8, dtype=np.uint64):
    total = np.zeros(words, dtype)
    secure_sum._add_stream(total, key)
    return total


def test_a_keystream_goes_on_over_blocks_and_is_taken_off_again():
    size = secure_sum.STREAM_BYTES // 4 + 77
    long = stream(bytes(32), size, np.uint32)
    assert (long == np.frombuffer(aes_counter(bytes(32), 4 * size), np.uint32)).all()
    secure_sum._add_stream(long, bytes(32), minus=True)
    assert not long.any()


QUARTER = 2**30  # the multiples of it modulo 2^32 are the numbers modulo 4: small enough to try all


class OwnPadOnly(Member):
    """A client that does not pad with its neighbours."""

    def mask(self, vector, shared):
        self._pair_keys = dict.fromkeys(self._pair_keys, b"none")
        return super().mask(vector, shared)


def transcripts(sums, survivors, inputs, monkeypatch):
    """Counts, for each set of masked vectors, the pads between survivors that produce it."""
    pads, own = {b"none": 0}, {own_key(sums.members[p]): 3 + p for p in survivors}
    between = list(combinations(survivors, 2))
    others = {
        key: 5 + peer
        for p in survivors
        for peer, key in sums.members[p]._pair_keys.items()
        if peer not in survivors
    }

    def add(total, key, minus=False):
        pad = (pads | own | others)[key] % 4 * QUARTER
        np.add(total, np.uint32((-pad if minus else pad) % 2**32), out=total)

    monkeypatch.setattr(secure_sum, "_add_stream", add)
    seen = Counter()
    keys = {pair: sums.members[pair[0]]._pair_keys[pair[1]] for pair in between}
    for values in product(range(4), repeat=len(between)):
        pads.update({keys[pair]: value for pair, value in zip(between, values, strict=True)})
        row = []
        for p, x in zip(survivors, inputs, strict=True):
            member = sums.members[p]
            member._expects, member._present = "mask", sums.requests[p][0]
            kept = member._pair_keys
            row.append(int(member.mask(np.array([x * QUARTER], np.uint32), sums.requests[p][0])[0]))
            member._pair_keys = kept
        seen[tuple(row)] += 1
    return seen


def own_key(member):
    return secure_sum._derive(member._seed, "own pad", member._sum_id, member.position)


@pytest.mark.parametrize(
    ("survivors", "n"), [((0, 1, 2), 3), ((0, 1, 3), 4)], ids=["all survive", "one is lost"]
)
@pytest.mark.parametrize("member", [Member, OwnPadOnly])
def test_inputs_with_equal_sums_make_the_same_transcripts(survivors, n, member, monkeypatch):
    """Exact: given the own pads and those of a lost party, only the sum of the inputs matters."""
    terms = SecureTerms(0.5, bits=32)
    sums = Drive(terms, random_vectors(range(n), terms), member=member).until("mask")
    by_sum = {}
    for inputs in product(range(4), repeat=3):
        with monkeypatch.context() as patch:
            seen = transcripts(sums, survivors, inputs, patch)
        by_sum.setdefault(sum(inputs) % 4, []).append(seen)
    same = all(seen == group[0] for group in by_sum.values() for seen in group)
    assert same == (member is Member)  # without pads between them the inputs lie open: the control
    if member is Member:
        assert all(
            len(group[0]) == 16 and set(group[0].values()) == {4} for group in by_sum.values()
        )  # uniform over all with that sum
        assert not any(a[0].keys() & b[0].keys() for a, b in combinations(by_sum.values(), 2))


@given(
    seed=st.integers(0, 2**32), bits=st.sampled_from([32, 64]), lost=st.sampled_from([None, 0, 3])
)
@settings(max_examples=20)
def test_other_inputs_with_the_same_sum_explain_what_the_server_sees(seed, bits, lost):
    """Constructive: other vectors with the same sum, and other pads, give the same transcript."""
    terms = SecureTerms(0.5, bits=bits)
    vectors = random_vectors(range(5), terms, 50, seed)
    sums = Drive(terms, vectors).until("mask")
    survivors = [p for p in range(5) if p != lost]
    pads = {
        frozenset((p, q)): stream(sums.members[p]._pair_keys[q], 50, terms.word)
        for p in range(5)
        for q in range(p + 1, 5)
    }
    own = {p: stream(own_key(sums.members[p]), 50, terms.word) for p in survivors}
    seen = {p: sums.ask(p) for p in survivors}

    def masked(inputs, pads):
        total = {p: inputs[p] + own[p] for p in survivors}
        for p in survivors:
            for q in sums.members[p].neighbours.tolist():
                pad = pads[frozenset((p, q))]
                total[p] = total[p] + pad if p < q else total[p] - pad
        return total

    other = random_vectors(range(5), terms, 50, seed + 1)
    last = survivors[-1]
    other[last] = sum(
        (vectors[p] for p in survivors),
        -sum((other[p] for p in survivors[:-1]), np.zeros(50, terms.word)),
    )
    moved, carry = dict(pads), np.zeros(50, terms.word)
    for p, q in pairwise(survivors):  # what p's input lacks its pad with the next party makes up
        carry = carry + vectors[p] - other[p]
        moved[frozenset((p, q))] = pads[frozenset((p, q))] + carry
    assert (other[last] != vectors[last]).any()
    for p in survivors:
        assert (masked(vectors, pads)[p] == seen[p]).all()
        assert (masked(other, moved)[p] == seen[p]).all()


def test_nothing_travels_in_the_clear():
    """Flower sends example counts and metrics unmasked. Here all messages have the same form."""
    forms = []
    for scale in (1, 1000):
        tensors = [
            {"count": np.array(scale * (p + 1)), "weights": np.full(9, 0.5 * scale * p)}
            for p in range(4)
        ]
        vectors = {p: encode(tensors[p], SecureTerms(), 4) for p in range(4)}
        sums = Drive(SecureTerms(), vectors)
        sums.run()
        forms.append(
            [
                (stage, p, [(a.dtype, a.shape) for a in (*request, reply)])
                for stage, p, request, reply in sums.transcript
            ]
        )
        clear = {int(word) for vector in vectors.values() for word in vector} - {0}
        sent = {
            stage: [reply for at, _, _, reply in sums.transcript if at == stage] for stage in STAGES
        }
        assert not clear & {int(word) for vector in sent["mask"] for word in vector}
        assert {(stage, *reply[0].shape) for stage, reply in sent.items()} == {
            ("advertise", 160),
            ("share", 3, 82),
            ("mask", 10),
            ("confirm", 64),
            ("unmask", 4, 33),
        }
        requests = {
            (stage, a.dtype.str) for stage, _, request, _ in sums.transcript for a in request
        }
        assert requests == {
            ("share", "|u1"),
            ("share", "|b1"),
            ("mask", "|b1"),
            ("confirm", "|b1"),
            ("unmask", "|u1"),
        }
        back = decode(
            sums.total, {"count": ("int64", ()), "weights": ("float32", (9,))}, SecureTerms(), 4
        )
        assert back["count"] == 10 * scale
        assert (back["weights"] == 3.0 * scale).all()
    assert forms[0] == forms[1]


# ---- the same by hand ----
def x25519(scalar, u):
    """RFC 7748, the Montgomery ladder."""
    p = 2**255 - 19
    k = int.from_bytes(scalar, "little") & ~7 & ~(128 << 8 * 31) | 64 << 8 * 31
    x1 = int.from_bytes(u, "little") % 2**255
    x2, z2, x3, z3 = 1, 0, x1, 1
    for t in reversed(range(255)):
        if k >> t & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        x3, z3, x2, z2 = (
            (da + cb) ** 2 % p,
            x1 * (da - cb) ** 2 % p,
            aa * bb % p,
            (aa - bb) * (aa + 121665 * (aa - bb)) % p,
        )
        if k >> t & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, p) % p).to_bytes(32, "little")


def hkdf(secret, purpose, number, *positions):
    """RFC 5869 with SHA-256, no salt, 32 bytes."""
    info = (
        b"fedloom secure sum: "
        + purpose
        + RUN
        + number.to_bytes(8, "big")
        + bytes(8)  # the round
        + b"".join(p.to_bytes(4, "big") for p in positions)
    )
    return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\1", "sha256")


def aes_counter(key, length):
    """AES-256 of 0, 1, 2, ... as blocks."""
    blocks = b"".join(i.to_bytes(16, "big") for i in range(-(-length // 16)))
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)[:length]


@pytest.mark.parametrize("bits", [32, 64])
def test_every_byte_of_a_client_by_hand(bits):
    terms = SecureTerms(bits=bits)
    vectors = random_vectors(range(4), terms, 5)
    sums = Drive(terms, vectors, number=7)
    private = {
        p: (m._cipher_key.private_bytes_raw(), m._mask_key.private_bytes_raw(), m._seed)
        for p, m in sums.members.items()
    }
    base = bytes([9]) + bytes(31)
    for p, member in sums.members.items():
        public = np.frombuffer(member._public_keys(), np.uint8)
        assert public.tobytes() == x25519(private[p][0], base) + x25519(private[p][1], base)
    sums.step()
    keys = {p: advertised[:64].tobytes() for _, p, _, advertised in sums.transcript}
    sums.step()
    plain = {}
    for _, p, _, sent in sums.transcript[4:]:
        for row, peer in enumerate(q for q in range(4) if q != p):
            key = hkdf(x25519(private[p][0], keys[peer][:32]), b"shares", 7, p, peer)
            plain[p, peer] = AESGCM(key).decrypt(bytes(12), sent[row].tobytes(), None)
    for p in range(4):
        dealt = {peer + 1: plain[p, peer] for peer in range(4) if peer != p}
        for secret, part in ((private[p][1], slice(33)), (private[p][2], slice(33, 66))):
            shares = {point: int.from_bytes(both[part], "big") for point, both in dealt.items()}
            assert shamir.combine(shares).to_bytes(32, "big") == secret
    for p in range(4):
        expected = [int(x) for x in vectors[p]]
        pads = [(hkdf(private[p][2], b"own pad", 7, p), 1)]
        for peer in set(range(4)) - {p}:
            agreed = x25519(private[p][1], keys[peer][32:])
            pads.append(
                (hkdf(agreed, b"pair pad", 7, min(p, peer), max(p, peer)), 1 if p < peer else -1)
            )
        for key, sign in pads:
            raw = aes_counter(key, 5 * bits // 8)
            words = [
                int.from_bytes(raw[i : i + bits // 8], "little")
                for i in range(0, len(raw), bits // 8)
            ]
            expected = [
                (x + sign * word) % 2**bits for x, word in zip(expected, words, strict=True)
            ]
        assert sums.ask(p).tolist() == expected


def test_no_key_encrypts_two_messages(monkeypatch):
    """The nonce is always the same, so a key must never be."""
    used = []

    def watched(key):
        used.append(key)
        return AESGCM(key)

    monkeypatch.setattr(secure_sum, "AESGCM", watched)
    drive(6, stage="mask")
    assert len(used) == len(set(used)) == 30


# ---- terms ----
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"threshold": 0.49}, "secure_threshold is 0.49, must be at least 0.5 and below 1"),
        ({"threshold": 1.0}, "secure_threshold is 1.0"),
        ({"threshold": math.nan}, "secure_threshold is nan"),
        ({"neighbours": -1}, "secure_neighbours is -1, must be at least 0"),
        ({"bits": 16}, "secure_bits is 16, must be 32 or 64"),
        ({"range": 0.0}, "secure_range is 0.0, must be above 0 and finite"),
        ({"range": math.inf}, "secure_range is inf"),
        ({"range": math.nan}, "secure_range is nan"),
    ],
)
def test_terms_that_cannot_be(change, text):
    with pytest.raises(ConfigError, match=text):
        SecureTerms(**change)


@pytest.mark.parametrize(("bits", "largest"), [(32, 2.0**24), (64, 2.0**56)])
def test_no_room_for_fractions_names_the_settings(bits, largest):
    with pytest.raises(
        ConfigError,
        match=f"secure_range is .* 1000 parties in secure_bits = {bits} leaves no bit",
    ):
        SecureTerms(bits=bits, range=largest).fraction_bits(1000)


@pytest.mark.parametrize(
    ("threshold", "share"),
    [
        (0.5, Fraction(1, 2)),
        (2 / 3, Fraction(2, 3)),
        (0.8, Fraction(4, 5)),
        (0.57, Fraction(57, 100)),
    ],
)
def test_t_is_the_smallest_number_above_the_share(threshold, share):
    for members in range(3, 300):
        assert SecureTerms(threshold).quorum(members) == min(
            t for t in range(1, members + 1) if t > share * members
        )


def test_a_threshold_of_nearly_all_is_all():
    assert SecureTerms(0.99999999).quorum(10) == 10


@pytest.mark.parametrize("run", [bytes(15), bytes(17)])
def test_a_run_has_an_id_of_16_bytes(run):
    with pytest.raises(ValueError, match="16 bytes"):
        Collector(SecureTerms(), SumId(run, 0), np.ones(3, bool), 1)


# ---- numbers ----
@given(
    parties=st.sampled_from([3, 5, 10, 50, 1000]),
    bits=st.sampled_from([32, 64]),
    largest=st.sampled_from([1e-30, 0.3, 1.0, 2.5, 8.0, 1000.0, 2.0**20]),
    data=st.data(),
)
def test_floats_to_the_nearest_multiple_and_no_sum_wraps(parties, bits, largest, data):
    terms = SecureTerms(bits=bits, range=largest)
    try:
        f = terms.fraction_bits(parties)
    except ConfigError:
        assert parties * math.ceil(Fraction(largest) * 2) >= 2 ** (bits - 1)
        return
    assert (
        parties * math.ceil(Fraction(largest) * 2**f)
        < 2 ** (bits - 1)
        <= parties * math.ceil(Fraction(largest) * 2 ** (f + 1))
    )
    finite = st.floats(-largest, largest)
    values = data.draw(hnp.arrays(np.float64, 4, elements=finite))
    values[0], values[1] = largest, -largest
    vector = encode({"x": values}, terms, parties)
    assert vector.dtype == terms.word
    assert vector.tolist() == [
        round(Fraction(x) * 2**f) % 2**bits for x in values.tolist()
    ]  # Python too rounds halves to even
    total = np.zeros(4, terms.word)
    for _ in range(parties):
        total += vector
    back = decode(total, {"x": ("float32", (4,))}, terms, parties)["x"]
    assert back.dtype == np.float64
    assert back.tolist() == [
        float(parties * round(Fraction(x) * 2**f) / Fraction(2) ** f) for x in values.tolist()
    ]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("parties", [3, 10, 1000])
def test_integers_are_exact_up_to_the_limit(bits, parties):
    terms = SecureTerms(bits=bits)
    most = terms.largest_integer(parties)
    assert parties * most < 2 ** (bits - 1) <= parties * (most + 1)
    values = np.array([[most, -most], [0, 1]])
    total = np.zeros(4, terms.word)
    for _ in range(parties):
        total += encode({"n": values}, terms, parties)
    back = decode(total, {"n": ("int32", (2, 2))}, terms, parties)["n"]
    assert back.dtype == np.int64
    assert back.tolist() == [[parties * most, -parties * most], [0, parties]]
    for bad in (most + 1, -most - 1):
        with pytest.raises(
            MessageError,
            match=f"tensor 'n' holds a number that is not within ±{most} .*secure_bits = {bits}",
        ):
            encode({"n": np.array([0, bad])}, terms, parties)


@pytest.mark.parametrize(
    "bad", [np.iinfo(np.int64).min, np.iinfo(np.int64).max, np.uint64(2**64 - 1)]
)
def test_integers_whose_absolute_value_would_overflow(bad):
    with pytest.raises(MessageError, match="tensor 'layer/count' holds"):
        encode({"layer/count": np.array([bad])}, SecureTerms(), 3)


@pytest.mark.parametrize("bad", [8.0000001, -9.0, 1e300, math.nan, math.inf, -math.inf])
def test_values_out_of_range_are_an_error_and_never_clipped(bad):
    """Flower clips beyond 8 and says nothing."""
    with pytest.raises(
        MessageError,
        match=r"tensor 'model/w' holds a number that is not within ±8 \(secure_range\)",
    ):
        encode({"model/a": np.ones(3), "model/w": np.array([1.0, bad])}, SecureTerms(range=8.0), 5)


def test_rounding_is_reproducible_and_halves_go_to_even():
    """Flower rounds at random."""
    terms = SecureTerms(bits=32, range=2.0**20)
    unit = 2.0 ** -terms.fraction_bits(100)
    values = {"x": np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.4999]) * unit}
    for _ in range(3):
        assert encode(values, terms, 100).view(np.int32).tolist() == [0, 2, 2, 0, -2, 0]


def test_tensors_of_all_kinds_side_by_side():
    rng = np.random.default_rng(0)
    tensors = {
        "b/half": rng.normal(size=(2, 3)).astype(np.float16),
        "a/flag": np.array([True, False]),
        "c": np.float32(0.75),
        "d/none": np.empty((0, 4)),
        "e/none": np.empty(0, np.int32),
        "ab": np.array([7, 250], np.uint8),
    }
    like = {
        name: (np.asarray(t).dtype, np.asarray(t).shape) for name, t in reversed(tensors.items())
    }
    total = encode(tensors, SecureTerms(), 3) * np.uint64(3)
    back = decode(total, like, SecureTerms(), 3)
    assert list(back) == sorted(tensors)
    for name, tensor in tensors.items():
        assert back[name].shape == np.shape(tensor)
        assert back[name].dtype == (np.float64 if like[name][0].kind == "f" else np.int64)
        assert (back[name] == 3 * np.asarray(tensor).astype(back[name].dtype)).all()
    assert encode({}, SecureTerms(), 3).shape == (0,)


def test_what_is_not_a_number_or_does_not_fit():
    with pytest.raises(MessageError, match="tensor 'x' has dtype complex128"):
        encode({"x": np.zeros(2, complex)}, SecureTerms(), 3)
    with pytest.raises(MessageError, match=r"got uint64\[4\], expected uint64\[3\]"):
        decode(np.zeros(4, np.uint64), {"x": ("float32", (3,))}, SecureTerms(), 3)
    with pytest.raises(MessageError, match=r"got uint64\[3\], expected uint32\[3\]"):
        decode(np.zeros(3, np.uint64), {"x": ("float32", (3,))}, SecureTerms(bits=32), 3)
    sums = drive(stage="mask")
    with pytest.raises(
        MessageError, match=r"the vector is int64\[3\], expected words of 32 or 64 bits"
    ):
        sums.members[0].mask(np.zeros(3, np.int64), *sums.requests[0])
    sums.step()  # an error of its own is no refusal: it may still mask


# ---- the graph ----
@given(
    population=st.integers(3, 40),
    k=st.one_of(st.integers(0, 8), st.integers(0, 41)),
    salt=st.binary(min_size=1, max_size=24),
    data=st.data(),
)
def test_neighbourhoods_are_symmetric_and_equally_large(population, k, salt, data):
    absent = data.draw(st.sets(st.integers(0, population - 1), max_size=min(5, population - 3)))
    roster = ~flags(absent, population)
    parties = np.flatnonzero(roster).tolist()
    near = {p: neighbourhood(p, roster, k, salt).tolist() for p in parties}
    even = k + k % 2
    size = len(parties) - 1 if k == 0 or even >= len(parties) - 1 else even
    for p, peers in near.items():
        assert peers == sorted(set(peers) - {p})
        assert set(peers) <= set(parties)
        assert len(peers) == size
        assert all(p in near[q] for q in peers)
    present = roster & data.draw(hnp.arrays(bool, population))
    graph = nx.Graph(near).subgraph(np.flatnonzero(present).tolist())
    assert pieces(present, roster, k, salt) == nx.number_connected_components(graph)


@pytest.mark.parametrize(
    ("k", "n", "size"),
    [
        (1, 9, 2),
        (2, 9, 2),
        (3, 9, 4),
        (5, 9, 6),
        (6, 9, 6),
        (7, 9, 8),
        (7, 10, 8),
        (8, 10, 8),
        (9, 10, 9),
    ],
)
def test_an_odd_number_of_neighbours_is_rounded_up(k, n, size):
    assert {len(neighbourhood(p, np.ones(n, bool), k, b"salt")) for p in range(n)} == {size}


def test_the_circle_hangs_on_the_salt_alone():
    roster = np.ones(100, bool)
    assert (
        neighbourhood(5, roster, 10, b"a").tolist() == neighbourhood(5, roster, 10, b"a").tolist()
    )
    assert (
        neighbourhood(5, roster, 10, b"a").tolist() != neighbourhood(5, roster, 10, b"b").tolist()
    )
    met = Counter(
        int(q) for i in range(2000) for q in neighbourhood(5, roster, 10, i.to_bytes(4, "big"))
    )
    assert (
        stats.chisquare([met[q] for q in range(100) if q != 5]).pvalue > 0.001
    )  # the same every time


def test_every_party_computes_the_same_graph_in_every_version():
    salt = RUN + bytes(8)
    lots = aes_counter(sha256(b"fedloom secure sum: circle" + salt).digest(), 20 * 8)
    circle = sorted(range(20), key=lambda p: int.from_bytes(lots[8 * p : 8 * p + 8], "little"))
    place = circle.index(0)
    by_hand = sorted(circle[(place + step) % 20] for step in (-2, -1, 1, 2))
    assert neighbourhood(0, np.ones(20, bool), 4, salt).tolist() == by_hand == [3, 14, 16, 19]


def test_errors_are_the_inputs_fault():
    assert issubclass(Refusal, MessageError)
    assert issubclass(TooFew, MessageError)
    assert issubclass(MessageError, FedloomError)
