"""Tuning: Optuna searches a method's declared ranges by the validation score.

The score is the metric `run.selection`, by default the accuracy.

The best settings become a recipe. A study has a folder: `study.jsonl` (Optuna's journal), a run
folder for each trial and seed under `trials/`, and `recipe.toml`. The first trial is the recipe as
given. The settings of a trial depend only on its number and the trials before it. So a study that
was stopped and continued equals one that was not stopped. This holds for one job: several jobs
finish in varying order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from fedloom._system import locked, write_atomic
from fedloom.core.registry import method_class
from fedloom.core.settings import check_setting
from fedloom.data.federation import Federation
from fedloom.engines import has_workers
from fedloom.errors import ConfigError, DataError, FedloomError, unknown
from fedloom.experiments.display import data_frame, tuned_html, tuned_text
from fedloom.experiments.recipe import TABLES, ModelTable, Recipe, make_recipe, read_value, to_toml
from fedloom.experiments.result import load_run
from fedloom.experiments.run_folder import is_completed, read_config
from fedloom.nn.metric_names import MINIMISED

TUNABLE = ("method", "model")  # tables; other settings would change the task
OnTrial = Callable[["Trial", Sequence["Trial"]], None]  # a trial that ended, all that have ended
ATTEMPTS = 10, 200  # to find a new combination: by the sampler, then at random


@dataclass(frozen=True)
class Range:
    """The values that tuning tries for a setting: from low to high, or one of some choices.

    `text` is the range as a user writes it.
    """

    text: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def distribution(self) -> Any:
        """Returns the range as Optuna's distribution."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def holds(self, value: Any) -> bool:
        """Returns whether a value is in the range."""
        return value in self.choices if self.choices else self.low <= value <= self.high


@dataclass(frozen=True)
class Trial:
    """A trial that has ended.

    Attributes:
        number: The trial's number, from 0.
        settings: {"table.key": value}.
        validation: The mean validation score over the seeds; None if the trial failed.
        error: The reason of a failure.
    """

    number: int
    settings: dict[str, Any]
    validation: float | None
    error: str = ""


@dataclass(frozen=True, repr=False)
class Tuned:
    """The result of a study.

    Attributes:
        trials: The trials in order.
        best: The best trial.
        importance: The importance of each setting; empty if there are too few trials.
        recipe: The path of the recipe.
        ended: Why no further trial was made.
        selection: The metric of the validation scores.
    """

    trials: list[Trial]
    best: Trial
    importance: dict[str, float]
    recipe: Path
    ended: str
    selection: str = "accuracy"

    @property
    def ranked(self) -> list[Trial]:
        """The trials that succeeded, the best first; the first of equal ones."""
        succeeded = [t for t in self.trials if t.validation is not None]
        return sorted(succeeded, key=lambda t: (_rank(t, self.selection), t.number))

    def __repr__(self) -> str:
        return tuned_text(self)

    def _repr_html_(self) -> str:
        return tuned_html(self)

    @property
    def settings(self) -> dict[str, Any]:
        """The best settings as keywords of `fedloom.run`."""
        names = {"model.name": "model"}
        best = self.best.settings.items()
        return {names.get(key, key.partition(".")[2]): value for key, value in best}

    def records(self) -> list[dict[str, Any]]:
        """Returns the trials as records: number, validation score, settings, error."""
        return [
            {"trial": t.number, "validation": t.validation, **t.settings, "error": t.error}
            for t in self.trials
        ]

    def pandas(self) -> Any:
        """Returns the trials as a pandas DataFrame (extra `tables`)."""
        return data_frame(self.records())

    @property
    def given(self) -> Trial | None:
        """The trial of the recipe as given; None if it failed."""
        return self.trials[0] if self.trials[0].validation is not None else None


# ---- ranges ----
def read_range(f: Any, text: str, where: str) -> Range:
    """Reads a range: "low..high" or the choices "a,b,c".

    Raises a ConfigError if the setting cannot take one of these values.

    Args:
        f: The setting's dataclass field.
        text: The range.
        where: The setting's table.
    """
    if ".." in text:
        ends = [read_value(end) for end in text.split("..", 1)]
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            raise ConfigError(
                f"tune: {where}.{f.name} from {text!r}: low..high takes numbers; "
                "for other values give choices: a,b,c"
            )
        low, high = (check_setting(f, end, where) for end in ends)
        if not low < high:
            raise ConfigError(f"tune: {where}.{f.name} from {text!r}: low must be below high")
        return Range(text, low, high, log=low > 0 and high / low >= 100 * (1 - 1e-9))
    values = [check_setting(f, read_value(value.strip()), where) for value in text.split(",")]
    if len(set(values)) < max(2, len(values)):
        raise ConfigError(
            f"tune: {where}.{f.name} from {text!r}: give two choices or more, each once"
        )
    return Range(text, choices=tuple(values))


def declared(recipe: Recipe, task: str = "") -> dict[str, Range]:
    """Returns the ranges that a recipe's method and model declare.

    With a task, it leaves out settings that only the other task uses.
    """
    return {
        f"{table}.{f.name}": read_range(f, f.metadata["tune"], table)
        for table, of_table in _fields(recipe).items()
        for f in of_table.values()
        if f.metadata.get("tune") and (not task or f.metadata["task"] in (None, task))
    }


def _fields(recipe: Recipe) -> dict[str, dict[str, Any]]:
    classes = {"method": method_class(recipe.method, recipe.method_settings), "model": ModelTable}
    return {table: {f.name: f for f in fields(classes[table])} for table in TUNABLE}


def search_space(recipe: Recipe, over: Iterable[str], task: str = "") -> dict[str, Range]:
    """Returns the settings to tune with their ranges.

    Raises a ConfigError for an unknown setting, a missing range, or values that are not valid.

    Args:
        recipe: The recipe.
        over: "method.lr" takes its declared range, "method.lr=0.001..0.1" takes this one. An entry
            may hold several, separated by commas. Empty: all settings with a declared range.
        task: Leave out settings that only the other task uses.
    """
    known, found = declared(recipe, task), {}
    for key, text in _asked(over):
        table, _, name = key.partition(".")
        if table not in TUNABLE:
            raise ConfigError(
                f"tune: {key} cannot be tuned: it would change the task; "
                "valid: settings of method and model"
            )
        if name not in (of_table := _fields(recipe)[table]):
            raise unknown(
                f"setting of {table} {recipe.method!r}:"
                if table == "method"
                else "setting in [model]:",
                name,
                of_table,
            )
        if text is None and key not in known:
            ranged = ", ".join(known) or "none"
            raise ConfigError(
                f"tune: {key} has no declared range; give one, as in {key}=low..high or "
                f"{key}=a,b,c; declared: {ranged}"
            )
        found[key] = known[key] if text is None else read_range(of_table[name], text, table)
    if not (found := found or known):
        raise ConfigError(
            f"tune: nothing to tune: method {recipe.method!r} declares no range; "
            "give one, as in --over method.lr=0.001..0.1"
        )
    return found


def _asked(over: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yields keys with their ranges.

    A piece after a comma that is not a key is a further choice of the key before it.
    """
    pieces: list[str] = []
    for entry in over:
        for k, piece in enumerate(entry.split(",")):
            is_key = re.match(r"\s*(\w+)\.[A-Za-z_]\w*\s*(=|$)", piece)
            if k == 0 or (is_key and is_key[1] in (*TABLES, "method")):
                pieces.append(piece)
            else:
                pieces[-1] += f",{piece}"
    for piece in pieces:
        match = re.fullmatch(r"\s*(\w+\.\w+)\s*(?:=\s*(.*?)\s*)?", piece)
        if match is None:
            raise ConfigError(
                f"--over takes table.key, table.key=low..high or table.key=a,b,c; got {piece!r}"
            )
        yield match[1], match[2]


# ---- one trial ----
def validate(
    tables: Mapping[str, Any],
    seeds: Sequence[int],
    folder: Path,
    number: int,
    federation: Federation | None = None,
) -> list[float]:
    """Runs a trial and returns the validation score of each seed.

    Each seed has a run folder. Finished runs are read from it. Test scores are not used. Errors are
    raised: a combination that the method refuses, or training that diverges.

    Args:
        tables: The recipe.
        seeds: The seeds.
        folder: The folder of the run folders.
        number: The trial's number.
        federation: The data, if they are in memory.
    """
    scores = []
    for seed in seeds:
        chosen = {**tables, "run": {**tables.get("run", {}), "seed": seed}}
        recipe = make_recipe(chosen, federation)
        score = _run(recipe, folder / f"{number:03d}-s{seed}")
        if score is None:
            raise _no_validation_items(recipe)
        scores.append(score)
    return scores


def _run(recipe: Recipe, folder: Path) -> float | None:
    """Runs or resumes a recipe in a folder. Returns the best validation score."""
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # the process was killed before the first file
        result = recipe.execute(folder, federation=_federation(recipe))
    elif read_config(folder) != json.loads(json.dumps(recipe.config())):
        raise DataError(
            f"tune: {str(folder)!r} holds another run than that of the study; "
            "choose another folder (--out)"
        )
    elif is_completed(folder):
        result = load_run(folder)
    else:
        result = recipe.execute(folder, federation=_federation(recipe), resume=True)
    # The models of hundreds of trials would fill the disk, and a run can be repeated.
    shutil.rmtree(folder / "models", ignore_errors=True)
    score: float | None = result.summary[f"val_{recipe.run.selection}"]
    return score


def _federation(recipe: Recipe) -> Federation:
    if recipe.given is not None:
        return recipe.given
    config = recipe.config()
    return _divided(json.dumps({"data": config["data"], "partition": config["partition"]}))


@lru_cache(maxsize=8)
def _divided(tables: str) -> Federation:
    """Returns the federation of a trial, cached for the next trials."""
    return make_recipe(json.loads(tables)).federation()


def _no_validation_items(recipe: Recipe) -> ConfigError:
    if recipe.run.selection != "accuracy":
        return ConfigError(
            f"tune: no client has validation items that define run.selection = "
            f"{recipe.run.selection!r}, data.split is {recipe.split!r}; give it a larger "
            "validation share, or choose another metric"
        )
    return ConfigError(
        f"tune: no client has a validation item, data.split is {recipe.split!r}; "
        "give it a validation share"
    )


# ---- a study ----
def tune(
    tables: Mapping[str, Any],
    out: Path,
    *,
    federation: Federation | None = None,
    over: Iterable[str] = (),
    trials: int = 30,
    minutes: float = 0.0,
    seeds: int = 1,
    jobs: int = 1,
    command: str = "",
    on_trial: OnTrial | None = None,
) -> Tuned:
    """Tunes the settings of a recipe and writes `out/recipe.toml`.

    It continues the study in `out` if there is one. The budget is `trials` or `minutes`, whichever
    is used up first, over all starts of the study. A trial that has started is finished.

    Args:
        tables: The recipe.
        out: The folder of the study.
        federation: The data, if they are in memory.
        over: The settings to tune, see `search_space`.
        trials: The number of trials.
        minutes: The time in which trials start (0 = no limit).
        seeds: How many seeds from run.seed on; a trial counts by their mean.
        jobs: Concurrent trials, each in a process of its own.
        command: The origin that the recipe's comment names.
        on_trial: Called with each trial that ends here, and all trials that have ended.
    """
    optuna = _optuna()
    for name, count in (("trials", trials), ("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise ConfigError(f"tune: {name} is {count}, must be a whole number at least 1")
    if not (math.isfinite(minutes) and minutes >= 0):
        raise ConfigError(
            f"tune: minutes is {minutes:g}, must be a number at least 0 (0 = no limit)"
        )
    recipe = make_recipe(tables, federation)
    required = recipe.run.engine_required
    if jobs > 1 and required and has_workers(required[0]):
        raise ConfigError(
            f"tune: jobs is {jobs}, engine {required[0]!r} has workers of its own; "
            "valid: 1, or another run.engine"
        )
    search_space(recipe, over := list(over))  # a misspelt setting fails before the data are loaded
    divided = _federation(recipe)
    recipe.check(divided)
    if not sum(size.val for size in divided.roster.sizes):
        raise _no_validation_items(recipe)
    space = search_space(recipe, over, divided.roster.task)
    with _alone_in(out):
        study = _Study(
            optuna, out, recipe, tables, space, [recipe.run.seed + k for k in range(seeds)]
        )
        ended = study.run(trials, minutes * 60, jobs, on_trial or (lambda trial, ended: None))
        return study.conclude(ended, command)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tune needs the package {error.name!r}: pip install 'fedloom[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it. The system releases the lock when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        lock.enter_context(locked(folder, "study"))
    except OSError as error:
        raise ConfigError(f"out: cannot write to {str(folder)!r} ({error.strerror})") from error
    with lock:
        yield


class _Held:
    """A lock for Optuna's journal that does nothing.

    `_alone_in` locks the folder. A lock file of Optuna's would stay after the process is killed.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


class _Study:
    """Optuna's study of a recipe, in a folder of its own."""

    def __init__(
        self,
        optuna: Any,
        out: Path,
        recipe: Recipe,
        tables: Mapping[str, Any],
        space: Mapping[str, Range],
        seeds: list[int],
    ):
        complete = _complete(recipe)
        self.optuna, self.out, self.recipe = optuna, out, recipe
        self.tables, self.space, self.seeds = tables, space, seeds
        self.direction = "minimize" if recipe.run.selection in MINIMISED else "maximize"
        self.given = {
            key: complete[table][name] for key in space for table, _, name in [key.partition(".")]
        }
        self.distributions = {key: values.distribution() for key, values in space.items()}
        journal = out / "study.jsonl"
        if journal.exists():  # a last line without an end was being written at a kill
            os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        try:
            storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=_Held())
            )
            self.study = optuna.create_study(
                study_name="fedloom",
                storage=storage,
                sampler=optuna.samplers.RandomSampler(seed=0),  # not used: see `_suggested`
                direction=self.direction,
                load_if_exists=True,
            )
        except (ValueError, LookupError) as error:
            raise DataError(f"tune: {str(journal)!r} is damaged ({error})") from error
        self._require_same()

    def _require_same(self) -> None:
        """Raises a ConfigError if the folder holds a study of another recipe or other ranges."""
        of_recipe = {
            f"{t}.{k}": v for t, table in _complete(self.recipe).items() for k, v in table.items()
        }
        about = {
            **of_recipe,
            **{f"range of {key}": values.text for key, values in self.space.items()},
            "seeds": self.seeds,
        }
        about = json.loads(json.dumps(about))
        kept = self.study.user_attrs.get("of")
        if kept is None:
            self.study.set_user_attr("of", about)
        elif kept != about:
            other = [
                f"{k}: {kept.get(k, 'none')}, not {about.get(k, 'none')}"
                for k in {**kept, **about}
                if kept.get(k) != about.get(k)
            ]
            raise ConfigError(
                f"out: {str(self.out)!r} holds another study ({'; '.join(other[:3])}); "
                "choose another --out"
            )

    # ---- trials ----
    def run(self, trials: int, seconds: float, jobs: int, on_trial: OnTrial) -> str:
        """Makes trials until the budget is used up. Returns what ended the study."""
        began, before = time.monotonic(), self.study.user_attrs.get("seconds", 0.0)
        # Trials of a process that was killed.
        left = [self.optuna.trial.Trial(self.study, t._trial_id) for t in self._in_state("RUNNING")]
        under_way: dict[Future[list[float]], Any] = {}
        ended = ""
        with _workers(jobs) as pool:
            while under_way or not ended:
                while len(under_way) < jobs and not ended:
                    spent = before + time.monotonic() - began
                    if seconds and spent >= seconds:
                        ended = f"{seconds / 60:g} minutes are over"
                    elif (trial := left.pop(0) if left else self._new(trials)) is None:
                        ended = (
                            f"{trials} trials are over"
                            if len(self.study.trials) >= trials
                            else "no other combination was found"
                        )
                    else:
                        tables = _with(self.tables, self._begin(trial))
                        under_way[
                            pool.submit(
                                validate,
                                tables,
                                self.seeds,
                                self.out / "trials",
                                trial.number,
                                self.recipe.given,
                            )
                        ] = trial
                done, _ = wait(under_way, return_when=FIRST_COMPLETED) if under_way else ((), ())
                for future in done:
                    self._end(trial := under_way.pop(future), future)
                    self.study.set_user_attr("seconds", before + time.monotonic() - began)
                    trials_so_far = self.trials()
                    (last,) = (t for t in trials_so_far if t.number == trial.number)
                    on_trial(last, trials_so_far)
        return ended

    def _in_state(self, *names: str) -> list[Any]:
        return self.study.get_trials(
            deepcopy=False, states=[self.optuna.trial.TrialState[name] for name in names]
        )

    def _new(self, trials: int) -> Any | None:
        """Returns the next trial; None if there is none. Writes its settings in one step."""
        if not self._in_state("WAITING"):
            if (number := len(self.study.trials)) >= trials:
                return None
            tried = self._as_given() if number == 0 else self._suggested(number)
            if tried is None:
                return None
            self.study.enqueue_trial(tried, user_attrs={"tried": tried})
        return self.study.ask()

    def _begin(self, trial: Any) -> dict[str, Any]:
        """Returns a trial's settings, and tells Optuna those that are in their ranges."""
        tried = trial.user_attrs["tried"]
        for key in tried:
            values = self.space[key]
            if values.choices:
                trial.suggest_categorical(key, values.choices)
            elif isinstance(values.low, int):
                trial.suggest_int(key, values.low, int(values.high), log=values.log)
            else:
                trial.suggest_float(key, values.low, values.high, log=values.log)
        return self._settings(tried)

    def _settings(self, tried: Mapping[str, Any]) -> dict[str, Any]:
        return {key: tried.get(key, self.given[key]) for key in self.space}

    def _as_given(self) -> dict[str, Any]:
        """Returns the recipe's own values. The sampler does not see those outside their ranges."""
        return {
            key: value
            for key, values in self.space.items()
            if values.holds(value := self.given[key])
        }

    def _suggested(self, number: int) -> dict[str, Any] | None:
        """Returns the settings of a trial; None if no new combination is found.

        They depend only on the trials so far and the trial's number.
        """
        so_far = self._in_state("COMPLETE", "FAIL", "RUNNING")
        tried = [self._settings(t.user_attrs["tried"]) for t in so_far]
        samplers = self.optuna.samplers
        for attempt in range(sum(ATTEMPTS)):
            seed = int.from_bytes(
                hashlib.sha256(f"{self.recipe.run.seed}/{number}/{attempt}".encode()).digest()[:4]
            )
            sampler = (
                samplers.TPESampler(seed=seed)
                if attempt < ATTEMPTS[0]
                else samplers.RandomSampler(seed=seed)
            )
            scratch = self.optuna.create_study(sampler=sampler, direction=self.direction)
            scratch.add_trials(so_far)
            params = scratch.ask(self.distributions).params
            if self._settings(params) not in tried:
                return params
        return None

    def _end(self, trial: Any, future: Future[list[float]]) -> None:
        """Records the end of a trial.

        An error of the disk or the data is raised: the trial runs again when the study continues.
        """
        error = future.exception()
        if isinstance(error, BrokenExecutor):
            raise FedloomError(
                "tune: a trial's process died, maybe for lack of memory; "
                "start again, with fewer --jobs"
            ) from error
        if isinstance(error, OSError | DataError):
            raise error
        if error is None:
            scores = future.result()
            trial.set_user_attr("validation", scores)
            self.study.tell(trial, sum(scores) / len(scores))
        else:
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)

    def trials(self) -> list[Trial]:
        """Returns all trials that have ended, in order."""
        ended = self._in_state("COMPLETE", "FAIL")
        return [
            Trial(
                t.number,
                self._settings(t.user_attrs["tried"]),
                t.value,
                t.user_attrs.get("error", ""),
            )
            for t in ended
        ]

    # ---- the end ----
    def conclude(self, ended: str, command: str) -> Tuned:
        """Writes the recipe of the best trial, the first of equal ones.

        Raises a ConfigError if no trial succeeded.
        """
        trials = self.trials()
        succeeded = [t for t in trials if t.validation is not None]
        if not succeeded:
            reason = (
                f"all {len(trials)} trials failed; the first: {trials[0].error}"
                if trials
                else f"no trial was made: {ended}"
            )
            raise ConfigError(f"tune: {reason}")
        selection = self.recipe.run.selection
        best = min(succeeded, key=lambda t: (_rank(t, selection), t.number))
        importance = self._importance(len(succeeded))
        tuned = Tuned(trials, best, importance, self.out / "recipe.toml", ended, selection)
        comment = "".join(f"# {line}\n" for line in _origin(tuned, len(self.seeds), command))
        complete = _complete(make_recipe(_with(self.tables, best.settings), self.recipe.given))
        if self.recipe.given is not None:  # a recipe cannot describe data that are in memory
            del complete["data"]
        content = (comment + "\n" + to_toml(complete)).encode()
        write_atomic(tuned.recipe, content, shared=True)
        return tuned

    def _importance(self, succeeded: int) -> dict[str, float]:
        """Returns each setting's share of the differences; empty if there are too few trials."""
        if succeeded < 10 or len(self.space) < 2 or len({t.validation for t in self.trials()}) < 3:
            return {}
        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator()
        shared = [
            key for key in self.space if all(key in t.params for t in self._in_state("COMPLETE"))
        ]
        return (
            dict(
                self.optuna.importance.get_param_importances(
                    self.study, evaluator=evaluator, params=shared
                )
            )
            if shared
            else {}
        )


def _origin(tuned: Tuned, seeds: int, command: str) -> list[str]:
    """Returns the comment on a recipe's origin. It contains validation scores, no test scores."""
    failed = sum(t.validation is None for t in tuned.trials)
    count = f"{len(tuned.trials)} trials{f', {failed} of them failed' if failed else ''}"
    of = "one seed" if seeds == 1 else f"the mean of {seeds} seeds"
    before = (
        "the recipe as given failed"
        if tuned.given is None
        else f"the recipe as given had {_percent(tuned.given)}"
    )
    return [
        f"Tuned by: {' '.join(command.split())}"
        if command
        else "Tuned by fedloom.experiments.tune.tune",
        f"Settings tuned: {', '.join(tuned.best.settings)}.",
        f"Trial {tuned.best.number}, the best of {count}: "
        f"validation {tuned.selection} {_percent(tuned.best)} ({of}); {before}.",
        "It is the best of many on the same validation items, so expect less on other items.",
    ]


def _rank(trial: Trial, selection: str) -> float:
    """Returns a number that is the lower, the better the trial is."""
    assert trial.validation is not None
    return trial.validation if selection in MINIMISED else -trial.validation


def _percent(trial: Trial) -> str:
    assert trial.validation is not None
    return f"{100 * trial.validation:.2f} %"


def _complete(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns the recipe with every default. Its partition still follows the run's seed."""
    config = recipe.config()
    if recipe.given is not None:
        return config
    return {**config, "partition": {**config["partition"], "seed": recipe.partition.seed}}


def _with(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's tables with some settings changed."""
    changed = {name: dict(table) for name, table in tables.items()}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        changed.setdefault(table, {})[name] = value
    return changed


# ---- where trials run ----
class _Here(Executor):
    """Runs work at once, in this process."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001  (`Future.result` raises it)
            future.set_exception(error)
        return future


@contextmanager
def _workers(jobs: int) -> Iterator[Executor]:
    """Yields an executor of `jobs` processes; of this process for one job.

    The processes end when this process ends, or when the block ends by an error.
    """
    if jobs == 1:
        yield _Here()
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C in a terminal reaches all processes. This one ends at once and prints nothing.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def follow() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
