"""Run settings: seed, engine, participation, absences and so on, for any method."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fedloom.core.absence import FaultPolicy
from fedloom.core.adversary import ATTACKS
from fedloom.core.class_weight import BALANCED, explicit_weights
from fedloom.core.facts import FEWEST, SecureTerms
from fedloom.core.filters import Filters, TopK, parse_filters
from fedloom.core.method import Method
from fedloom.core.privacy_terms import SAMPLINGS, UNITS
from fedloom.core.robust import AUTOMATIC_CLIP, RULES, Robustness
from fedloom.core.settings import check_setting, setting
from fedloom.engines import AUTO, engine_choices, engine_class, has_workers
from fedloom.errors import ConfigError, unknown
from fedloom.experiments.checkpoint import AUTOMATIC
from fedloom.nn.metric_names import METRICS

LEAST_NOISE = 0.1  # multiplier; with less, a single sum costs ε = 90


@dataclass(frozen=True)
class AdversarySettings:
    """The [adversary] table of a recipe: clients of a simulation that lie."""

    clients: int = setting(0, "number of clients that lie, drawn from the seed", at_least=0)
    attack: str = setting("sign-flip", "what they do", choices=tuple(ATTACKS))
    strength: float = setting(0.0, "how strongly (0 = the attack's default)", at_least=0)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_setting(f, getattr(self, f.name), "adversary"))


@dataclass(frozen=True)
class RunSettings:
    """The [run] table of a recipe."""

    seed: int = setting(0, "root of every random stream", at_least=0)
    engine: str = setting(
        AUTO, "how clients are run (auto = the fastest that fits): see `fedloom run --help`"
    )
    device: str = setting("cpu", "where tensors are computed: cpu")
    evaluation: str = setting(
        "", "which model is scored: local, global or common (empty = the method's default)"
    )
    participation: float = setting(
        1.0, "share of the clients that take part in a round", above=0, at_most=1
    )
    evaluate_every: int = setting(1, "rounds between evaluations", at_least=1)
    patience: int = setting(
        0,
        "stop after this many evaluations without a better validation score (0 = never)",
        at_least=0,
    )
    selection: str = setting(
        "accuracy", "metric whose validation value chooses the best round", choices=METRICS
    )
    top_k: int = setting(100, "items that recall_at_k and precision_at_k look at", at_least=1)
    class_weight: str = setting(
        "", "weights of classes in the training loss: balanced, or a number for each, as in 1,10"
    )
    checkpoint_every: int = setting(
        AUTOMATIC,
        "rounds between checkpoints (0 = none; -1 = automatic, in at most 2 % of the time)",
        at_least=AUTOMATIC,
    )
    auc: bool = setting(
        False, "compute auc, pr_auc and ece also for more than two classes (more time per round)"
    )
    upload: str = setting(
        "", "filters on weights sent to the server: float16, int8, topk=SHARE, or topk=SHARE,int8"
    )
    download: str = setting("", "filters on weights sent to the clients: float16 or int8")
    aggregation: str = setting(
        "mean", "how the server combines the clients' weights", choices=RULES
    )
    byzantine: int = setting(
        0, "clients that may lie, for rules other than mean (0 = 30 % of them)", at_least=0
    )
    bucketing: int = setting(
        0,
        "clients in a random group whose mean the rule gets (0 = none; secure sums: at least 3)",
        at_least=0,
    )
    mixing: bool = setting(
        False, "nearest-neighbour mixing in front of the rule: each reply becomes a local mean"
    )
    reputation: bool = setting(
        False, "leave out clients whose updates have pointed away from the others' so far"
    )
    clip_norms: float = setting(
        AUTOMATIC_CLIP,
        "updates longer than this many times the median one are shortened to the median (0 = none; "
        "-1 = automatic: 2 if the rule is mean, none for summed gradients)",
        at_least=AUTOMATIC_CLIP,
    )
    cap_weights: float = setting(
        3.0,
        "a client's weight is at most so many times the median one (0 = no limit)",
        at_least=0,
    )
    secure: bool = setting(False, "the server sees only masked sums of the replies")
    secure_threshold: float = setting(
        2 / 3,
        "more than this share of a client's neighbourhood must stay to the end",
        at_least=0.5,
        below=1,
    )
    secure_neighbours: int = setting(
        0,
        "clients that a client shares masks with (0 = all; about 100 for a thousand clients)",
        at_least=0,
    )
    secure_bits: int = setting(64, "width of a masked number, 32 or 64", at_least=32, at_most=64)
    secure_range: float = setting(2.0**24, "largest absolute value that a client may add", above=0)
    secure_cohort: float = setting(
        0.0,
        "least share of the clients in every sum (0 = quorum x participation)",
        at_least=0,
        at_most=1,
    )
    secure_clip: float = setting(
        0.0, "longest update that a client masks; it shortens its own (0 = no limit)", at_least=0
    )
    secure_apart: int = setting(
        2, "cohorts of a round and phase are equal or differ in so many clients", at_least=1
    )
    dp_epsilon: float = setting(
        0.0,
        "differential privacy: ε of the run, which chooses the noise (0 = off)",
        at_least=0,
        at_most=100,
    )
    dp_delta: float = setting(1e-5, "differential privacy: δ", above=0, below=1)
    dp_noise: float = setting(
        0.0, "noise multiplier z, instead of the one that dp_epsilon chooses (0 = off)", at_least=0
    )
    dp_clip: float = setting(
        1.0, "length that a client's update, or a node's gradient, is clipped to", above=0
    )
    dp_unit: str = setting("client", "what dp_epsilon protects", choices=UNITS)
    dp_degree: int = setting(
        4, "edges of a node that training uses, with dp_unit node or edge", at_least=1
    )
    dp_sampling: str = setting(
        "fixed", "participants: a fixed number, or coins that nobody else sees", choices=SAMPLINGS
    )
    dp_seeded: bool = setting(
        False, "for tests: noise from the run's seed; the run is then not private"
    )
    edge_epsilon: float = setting(
        0.0, "randomised response on the edges that training sees: its ε (0 = off)", at_least=0
    )
    threads: int = setting(1, "threads of a tensor operation", at_least=1, at_most=1024)
    workers: int = setting(
        0, "worker processes, in engines that have them (0 = as the cores allow)", at_least=0
    )
    quorum: float = setting(
        1.0,
        "share of the asked clients that must answer; below 1 the others may be absent",
        above=0,
        at_most=1,
    )
    deadline: float = setting(
        0.0, "seconds that an exchange may take (0 = no limit; engines with deadlines)", at_least=0
    )
    grace: float = setting(
        0.0,
        "seconds that the others have once a quorum has answered (0 = until the deadline)",
        at_least=0,
    )
    retries: int = setting(
        2, "how often absent clients are asked again before a round fails", at_least=0
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_setting(f, getattr(self, f.name), "run"))
        if self.device != "cpu":
            raise ConfigError(
                f"run.device is {self.device!r}; valid: cpu. Runs on other devices are not "
                "supported yet"
            )
        if self.engine not in engine_choices():
            raise unknown("run.engine", self.engine, engine_choices())
        if self.engine != AUTO:
            self._check_engine()
        if self.upload_filters and self.secure:
            raise ConfigError(
                "run.upload: a secure run sends masked sums, which filters cannot encode; "
                "valid: no filter, or run.secure = false"
            )
        if any(isinstance(step, TopK) for step in self._download.chain):
            raise ConfigError("run.download: topk is for uploads; valid: float16 or int8")
        self._check_robustness()
        if self.is_private:
            self._check_privacy()
        _ = self.terms, explicit_weights(self.class_weight)  # raise if they do not fit

    def _check_robustness(self) -> None:
        """Raises a ConfigError if the settings of robust aggregation do not fit each other."""
        if self.secure and self.aggregation != "mean" and not self.bucketing:
            raise ConfigError(
                f"run.aggregation is {self.aggregation!r}, which needs single replies; a secure "
                "run gives sums only; valid: mean, or run.bucketing = 3 or more"
            )
        if self.secure and 0 < self.bucketing < FEWEST:
            raise ConfigError(
                f"run.bucketing is {self.bucketing}: a secure sum of fewer than {FEWEST} clients "
                f"exposes them; valid: 0, or at least {FEWEST}"
            )
        for name in ("byzantine", "bucketing", "mixing"):
            if getattr(self, name) and self.aggregation == "mean" and not self.secure:
                raise ConfigError(
                    f"run.{name} is for another rule than 'mean'; valid for run.aggregation: "
                    f"{', '.join(RULES[1:])}"
                )
        if self.reputation and self.secure:
            raise ConfigError(
                "run.reputation needs single replies; a secure run gives sums only; valid: false"
            )
        if self.secure_clip and not self.secure:
            raise ConfigError(
                "run.secure_clip is for secure runs; in a plain run set run.clip_norms"
            )

    def _check_engine(self) -> None:
        """Raises a ConfigError if the engine cannot do what the other settings ask for."""
        if not has_workers(self.engine) and self.workers:
            raise ConfigError(
                f"run.workers is {self.workers}, engine {self.engine!r} has none; "
                "valid: 0, or run.engine auto, processes, stacked_processes or ray"
            )
        if self.is_private and self.dp_unit != "client" and self.engine.startswith("stacked"):
            raise ConfigError(
                f"run.dp_unit is {self.dp_unit!r}, engine {self.engine!r} does not compute each "
                "node's gradient on its own; valid: run.engine auto, loop, wire, processes or ray"
            )
        engine = engine_class(self.engine)
        if self.quorum < 1 and not engine.tolerates_failures:
            raise ConfigError(
                f"run.quorum is {self.quorum:g}, engine {self.engine!r} cannot continue without a "
                "client; valid: 1, or run.engine auto, loop, wire, processes, ray or flower"
            )
        for name in ("deadline", "grace"):
            if getattr(self, name) and not engine.supports_deadline:
                raise ConfigError(
                    f"run.{name} is {getattr(self, name):g}, engine {self.engine!r} has none; "
                    "valid: 0, or run.engine auto, processes, ray or flower"
                )

    @property
    def is_private(self) -> bool:
        """Whether the sums of the run have noise."""
        return bool(self.dp_epsilon or self.dp_noise)

    def _check_privacy(self) -> None:
        """Raises a ConfigError if another setting uses data without noise."""
        if 0 < self.dp_noise < LEAST_NOISE:
            raise ConfigError(
                f"run.dp_noise is {self.dp_noise:g}, must be 0 (chosen by run.dp_epsilon) or at "
                f"least {LEAST_NOISE:g}: less protects nothing"
            )
        refused = {
            f"run.aggregation is {self.aggregation!r}: only the mean has a bounded sensitivity "
            "here; valid: mean": self.aggregation != "mean",
            f"run.bucketing is {self.bucketing}; valid: 0": bool(self.bucketing),
            f"run.secure_clip is {self.secure_clip:g}: run.dp_clip limits the replies; "
            "valid: 0": bool(self.secure_clip),
            f"run.patience is {self.patience}: it stops by validation scores, which have no noise; "
            "valid: 0": bool(self.patience),
            "run.class_weight is 'balanced': it counts labels without noise; valid: empty, or a "
            "number for each class": self.class_weight == BALANCED,
            "run.dp_sampling is 'poisson' in a secure run: its server is not trusted, and knows "
            "who takes part; valid: fixed": self.secure and self.dp_sampling == "poisson",
            f"run.dp_sampling is 'poisson' with run.dp_unit = {self.dp_unit!r}; valid: fixed, or "
            "run.dp_unit = 'client'": self.dp_unit != "client" and self.dp_sampling == "poisson",
        }
        for reason, wrong in refused.items():
            if wrong:
                raise ConfigError(f"with run.dp_epsilon, {reason}")

    @property
    def engine_required(self) -> tuple[str, str] | None:
        """The engine that the settings determine, and why; None if it depends on the data."""
        if self.engine != AUTO:
            return self.engine, "run.engine"
        for name in ("deadline", "grace"):
            if getattr(self, name):
                return "processes", f"run.{name} is set"
        if self.is_private and self.dp_unit != "client":
            return "loop", "run.dp_unit: each node's gradient is computed on its own"
        if self.workers:
            engine = "processes" if self.quorum < 1 else "stacked_processes"
            return engine, "run.workers is set"
        return ("loop", "run.quorum is below 1") if self.quorum < 1 else None

    @property
    def terms(self) -> SecureTerms | None:
        """The terms of secure sums; None if the run is not secure."""
        terms = SecureTerms(
            self.secure_threshold,
            self.secure_neighbours,
            self.secure_bits,
            self.secure_range,
            self.secure_cohort or self.quorum * self.participation,
            self.secure_apart,
            self.bucketing,
            self.secure_clip,
        )
        return terms if self.secure else None

    @property
    def robustness(self) -> Robustness:
        """How the server protects means and sums of weights against clients that lie."""
        groups = 0 if self.secure else self.bucketing  # a secure run sums each group by itself
        return Robustness(
            self.aggregation,
            self.byzantine,
            groups,
            self.mixing,
            self.reputation,
            self.clip_norms,
            self.cap_weights,
        )

    @property
    def faults(self) -> FaultPolicy:
        """Which absences an exchange tolerates."""
        return FaultPolicy(self.quorum, self.grace, self.deadline)

    @property
    def upload_filters(self) -> Filters:
        """The filters on what clients send."""
        return parse_filters(self.upload, "run.upload")

    @property
    def _download(self) -> Filters:
        return parse_filters(self.download, "run.download")


def chosen_evaluation(method: Method | type[Method], name: str, asked: str) -> str:
    """Returns which model is scored.

    Args:
        method: The method.
        name: Its name, for the error message.
        asked: "local", "global" or "common"; empty = the method's default.
    """
    if asked and asked not in method.evaluations:
        raise unknown(f"run.evaluation for method {name!r}:", asked, method.evaluations)
    return asked or method.evaluations[0]
