"""Facts: what every party knows before training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from fedloom.core.adversary import Adversary
from fedloom.core.message import Schema, schema_of
from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.data.graph import Task
from fedloom.data.seeds import stream_seed
from fedloom.errors import ConfigError
from fedloom.nn.build import build_model, parse_spec
from fedloom.nn.model import Model
from fedloom.nn.own_model import is_own
from fedloom.nn.weights import weights

FEWEST = 3  # clients in a secure sum: in a sum of two vectors, each learns the other one


@dataclass(frozen=True)
class SecureTerms:
    """The terms of secure sums. All parties agree on them, and every client enforces them.

    Args:
        threshold: More than this share of a neighbourhood (a party and its neighbours) must help to
            open a secret of that party.
        neighbours: k of the k-regular graph, rounded up to even. 0, or as many as there are other
            parties, means all of them.
        bits: Sums are modulo 2^bits.
        range: The largest |x| that an entry of one party's float tensors may have.
        cohort: The least share of all clients in every sum. A client refuses smaller sums.
        apart: Two cohorts of a round and phase must be equal, or differ in so many clients.
        bucket: If it is not 0, weights are summed over disjoint groups of so many clients or more.
        clip: The longest update that a client adds. 0: any.
    """

    threshold: float = 2 / 3
    neighbours: int = 0
    bits: int = 64
    range: float = 2.0**24
    cohort: float = 0.0
    apart: int = 2
    bucket: int = 0
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.threshold < 1:
            raise ConfigError(
                f"secure_threshold is {self.threshold!r}, must be at least 0.5 and below 1"
            )
        if self.neighbours < 0:
            raise ConfigError(f"secure_neighbours is {self.neighbours!r}, must be at least 0")
        if self.bits not in (32, 64):
            raise ConfigError(f"secure_bits is {self.bits!r}, must be 32 or 64")
        if not (self.range > 0 and math.isfinite(self.range)):
            raise ConfigError(f"secure_range is {self.range!r}, must be above 0 and finite")
        if not 0 <= self.cohort <= 1:
            raise ConfigError(f"secure_cohort is {self.cohort!r}, must be from 0 to 1")
        if self.apart < 1:
            raise ConfigError(f"secure_apart is {self.apart!r}, must be at least 1")

    def for_bucket(self, population: int) -> SecureTerms:
        """Returns the terms of a sum over one group.

        The share `cohort` then is one of a group, and a sum has at least 3 clients.
        """
        share = Fraction(self.cohort).limit_denominator(10**6)
        return replace(self, cohort=max(FEWEST, math.floor(share * self.bucket)) / population)

    def least(self, population: int) -> int:
        """Returns how many clients every sum must cover."""
        return math.floor(Fraction(self.cohort).limit_denominator(10**6) * population)

    def quorum(self, members: int) -> int:
        """Returns t: the fewest members of a neighbourhood that exceed the threshold."""
        # The float nearest to 2/3 must not decide whether 2/3 of 9 is 6.
        share = Fraction(self.threshold).limit_denominator(10**6)
        return min(math.floor(share * members) + 1, members)

    @property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """The dtype of numbers modulo 2^bits."""
        return np.dtype(f"<u{self.bits // 8}")

    def largest_integer(self, parties: int) -> int:
        """Returns the largest |x| of an integer whose sum over the parties cannot overflow."""
        return (2 ** (self.bits - 1) - 1) // parties

    def fraction_bits(self, parties: int) -> int:
        """Returns f: floats travel as round(x * 2^f).

        f is the largest number for which the sum over the parties cannot overflow.
        """
        most = self.largest_integer(parties)
        # The logarithm gives the right number of bits, or a few too many.
        bits = math.floor(math.log2(max(most, 1)) - math.log2(self.range)) + 1
        while math.ceil(Fraction(self.range) * Fraction(2) ** bits) > most and bits > 0:
            bits -= 1
        if bits < 1:
            raise ConfigError(
                f"secure_range is {self.range:g}: a sum over {parties} parties in secure_bits = "
                f"{self.bits} leaves no bit for fractions; use a smaller range or more bits"
            )
        return bits


@dataclass(frozen=True)
class Facts:
    """Sizes, the task, and each client's model. Nothing about a client's data.

    Args:
        num_features: Width of the node features.
        num_classes: Number of classes.
        task: "node" or "graph".
        clients: The clients' names.
        models: One model spec per client, such as "gcn-2x64".
        dropout: Share of hidden units dropped in training.
        seed: The root of every random stream.
        auc: Whether evaluation computes the metrics that need probabilities.
        secure: The terms of secure sums. None: replies travel as they are.
        upload, download: The filters on weights that travel; see `fedloom.core.filters`.
        selection: The metric whose validation value chooses the best round.
        top_k: The number of items of `recall_at_k` and `precision_at_k`.
        class_weight: The weights of classes in the training loss; see `fedloom.core.class_weight`.
        adversary: The clients of a simulation that lie. None: all are honest.
        privacy: The terms of differential privacy. None: there is no noise.
        edge_epsilon: ε of randomised response on each client's edges; 0: training sees them all.
        edges_seeded: The flips of edges come from the run's seed. Such a run is not private.
    """

    num_features: int
    num_classes: int
    task: Task
    clients: tuple[str, ...]
    models: tuple[str, ...]
    dropout: float = 0.5
    seed: int = 0
    auc: bool = False
    secure: SecureTerms | None = None
    upload: str = ""
    download: str = ""
    selection: str = "accuracy"
    top_k: int = 100
    class_weight: str = ""
    adversary: Adversary | None = None
    privacy: PrivacyTerms | None = None
    edge_epsilon: float = 0.0
    edges_seeded: bool = False

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @cached_property
    def model_of(self) -> dict[str, str]:
        """The model spec of each client."""
        return dict(zip(self.clients, self.models, strict=True))

    @property
    def width(self) -> int:
        """Embedding width p, the same for every client's model."""
        return self.width_of(self.models[0])

    def width_of(self, spec: str) -> int:
        """Returns the embedding width of a model."""
        return _width_of_own(spec, self) if is_own(spec) else parse_spec(spec).width

    def build(self, spec: str, *stream: object) -> Model:
        """Returns a model for this task, initialised from the random stream of the given names."""
        seed = stream_seed(self.seed, "model", *stream)
        return build_model(
            spec, self.num_features, self.num_classes, self.task, dropout=self.dropout, seed=seed
        )


@lru_cache(maxsize=64)
def _width_of_own(spec: str, facts: Facts) -> int:
    return facts.build(spec, "server").width


@lru_cache(maxsize=64)
def model_schema(spec: str, facts: Facts) -> Schema:
    """Returns the schema of a model's weights as they travel."""
    return schema_of(dict(weights(facts.build(spec, "server"))))
