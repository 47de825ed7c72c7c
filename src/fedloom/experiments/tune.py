"""Tuning: Optuna looks through a method's declared ranges, by validation accuracy alone, and the best settings become a recipe.

A study lives in a folder: `study.jsonl` (Optuna's journal), a run folder for each trial and seed under `trials/`, and `recipe.toml`. Its
first trial is the recipe as it was given. What a trial tries follows from the trials before it and its number, so that a study that was
stopped, and goes on, is the one that was not (with one job; several finish in an order of their own).
"""

from __future__ import annotations

import fcntl
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
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from fedloom._system import write_atomic
from fedloom.core.registry import method_class
from fedloom.core.settings import check_setting
from fedloom.data.federation import Federation
from fedloom.engines import has_workers
from fedloom.errors import ConfigError, DataError, FedloomError, unknown
from fedloom.experiments.recipe import TABLES, ModelTable, Recipe, make_recipe, read_value, to_toml
from fedloom.experiments.result import read_run
from fedloom.experiments.run_folder import is_completed, read_config

TUNABLE = ("method", "model")  # tables: by anything else the task would be another one
ATTEMPTS = 10, 200  # at a combination that was not tried yet: the sampler's, then drawn blindly


@dataclass(frozen=True)
class Range:
    """What a setting may be while tuning: from low to high, or one of some choices. `text` says it as the user would."""

    text: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def distribution(self) -> Any:
        """The same for Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def holds(self, value: Any) -> bool:
        """Whether a value is one that the setting may be."""
        return value in self.choices if self.choices else self.low <= value <= self.high


@dataclass(frozen=True)
class Trial:
    """A trial that is over. `validation` is the mean over the seeds of the validation accuracy; None if it failed, and `error` says why."""

    number: int
    settings: dict[str, Any]
    validation: float | None
    error: str = ""


@dataclass(frozen=True)
class Tuned:
    """What a study gives: its trials in order, the best one, and where the recipe is. importance: of each setting, if it could be told."""

    trials: list[Trial]
    best: Trial
    importance: dict[str, float]
    recipe: Path
    ended: str  # why no further trial was made

    @property
    def given(self) -> Trial | None:
        """The trial of the recipe as it was given; None if that failed."""
        return self.trials[0] if self.trials[0].validation is not None else None


# ---- ranges ----
def read_range(f: Any, text: str, where: str) -> Range:
    """The range "low..high" or the choices "a,b,c" of a field; ConfigError if it cannot take one of these values."""
    if ".." in text:
        ends = [read_value(end) for end in text.split("..", 1)]
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            raise ConfigError(
                f"tune: {where}.{f.name} from {text!r}: low..high takes numbers; of anything else give choices: a,b,c"
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
    """The ranges that a recipe's method and model declare; those of the other task's settings not among them, if a task is given."""
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
    """What is tuned: "method.lr" over its declared range, "method.lr=0.001..0.1" over this one; all that is declared if nothing is said.

    An entry may hold several, separated by commas. ConfigError for what is no setting, has no range, or has one that it cannot take.
    """
    known, found = declared(recipe, task), {}
    for key, text in _asked(over):
        table, _, name = key.partition(".")
        if table not in TUNABLE:
            raise ConfigError(
                f"tune: {key} is not tuned: by another task's validation nothing is won; valid: settings of method and model"
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
                f"tune: {key} has no declared range; give one, as in {key}=low..high or {key}=a,b,c; declared: {ranged}"
            )
        found[key] = known[key] if text is None else read_range(of_table[name], text, table)
    if not (found := found or known):
        raise ConfigError(
            f"tune: nothing to tune: method {recipe.method!r} declares no range; give one, as in --over method.lr=0.001..0.1"
        )
    return found


def _asked(over: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Keys with their ranges. What follows a comma and is no key is a further choice of the one before."""
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
    tables: Mapping[str, Any], seeds: Sequence[int], folder: Path, number: int
) -> list[float]:
    """Runs a trial, a run folder for each seed, and gives the validation accuracies. What is done already is read.

    It looks at no test score. Errors are the caller's: a combination that the method refuses, training that diverges.
    """
    marks = []
    for seed in seeds:
        recipe = make_recipe({**tables, "run": {**tables.get("run", {}), "seed": seed}})
        mark = _carry_out(recipe, folder / f"{number:03d}-s{seed}")
        if mark is None:
            raise _nothing_to_choose_by(recipe)
        marks.append(mark)
    return marks


def _carry_out(recipe: Recipe, folder: Path) -> float | None:
    """Runs a recipe in a folder, or goes on with it there, and gives the validation accuracy of the round that counts."""
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # killed before anything was in it
        result = recipe.execute(folder, federation=_federation(recipe))
    elif read_config(folder) != json.loads(json.dumps(recipe.config())):
        raise DataError(
            f"tune: {str(folder)!r} holds another run than the study has there; choose another folder (--out)"
        )
    elif is_completed(folder):
        result = read_run(folder)
    else:
        result = recipe.execute(folder, federation=_federation(recipe), resume=True)
    shutil.rmtree(
        folder / "models", ignore_errors=True
    )  # of hundreds of trials they would fill the disk, and a run can be repeated
    return result.summary["val_accuracy"]


def _federation(recipe: Recipe) -> Federation:
    config = recipe.config()
    return _divided(json.dumps({"data": config["data"], "partition": config["partition"]}))


@lru_cache(maxsize=8)
def _divided(tables: str) -> Federation:
    """The federation of a trial: the next one has the same."""
    return make_recipe(json.loads(tables)).federation()


def _nothing_to_choose_by(recipe: Recipe) -> ConfigError:
    return ConfigError(
        f"tune: no client has a validation item to choose by, data.split is {recipe.split!r}; give it a validation share"
    )


# ---- a study ----
def tune(
    tables: Mapping[str, Any], out: Path, *, over: Iterable[str] = (), trials: int = 30, minutes: float = 0.0, seeds: int = 1,
    jobs: int = 1, command: str = "", on_trial: Callable[[Trial, Sequence[Trial]], None] | None = None,
) -> Tuned:  # fmt: skip
    """Tunes a recipe's settings in the folder `out`, or goes on there, and writes `out/recipe.toml`.

    tables: the recipe. over: see `search_space`. trials, minutes: the budget, in all starts together, whichever is used up first; a trial
    that has begun is finished (0 minutes = no limit). seeds: run.seed and those after it; a trial counts by their mean. jobs: trials at a
    time, in processes of their own. command: what the recipe's comment names as its origin. on_trial: called with each trial that ends
    here, and all that are over.
    """
    optuna = _optuna()
    for name, count in (("trials", trials), ("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise ConfigError(f"tune: {name} is {count}, must be a whole number at least 1")
    if not (math.isfinite(minutes) and minutes >= 0):
        raise ConfigError(
            f"tune: minutes is {minutes:g}, must be a number at least 0 (0 = no limit)"
        )
    recipe = make_recipe(tables)
    if jobs > 1 and has_workers(recipe.run.engine):
        raise ConfigError(
            f"tune: jobs is {jobs}, engine {recipe.run.engine!r} has workers of its own; valid: 1, or another run.engine"
        )
    search_space(recipe, over := list(over))  # a misspelt setting should not wait for the data
    federation = _federation(recipe)
    recipe.check(federation)
    if not sum(holding.val for holding in federation.roster.sizes):
        raise _nothing_to_choose_by(recipe)
    space = search_space(recipe, over, federation.roster.task)
    with _alone_in(out):
        study = _Study(
            optuna, out, recipe, tables, space, [recipe.run.seed + k for k in range(seeds)]
        )
        ended = study.go_on(trials, minutes * 60, jobs, on_trial or (lambda trial, over: None))
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
    """Makes the folder, and keeps other processes from tuning in it. However this one ends, the system lets go of the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {str(folder)!r} ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"out: another process is tuning in {str(folder)!r}") from None
        yield


class _Held:
    """Optuna's lock around its journal: `_alone_in` has seen to that, and one of Optuna's own would outlive a kill."""

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
        self.optuna, self.out, self.recipe, self.tables, self.space, self.seeds = (
            optuna,
            out,
            recipe,
            tables,
            space,
            seeds,
        )
        self.given = {
            key: complete[table][name] for key in space for table, _, name in [key.partition(".")]
        }
        self.distributions = {key: values.distribution() for key, values in space.items()}
        journal = out / "study.jsonl"
        if (
            journal.exists()
        ):  # what follows the last line's end was being written when somebody killed the process
            os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        try:
            storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=_Held())
            )
            name, blind = (
                "fedloom",
                optuna.samplers.RandomSampler(seed=0),
            )  # it is never asked: `_suggested` says what is tried
            self.study = optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=blind,
                direction="maximize",
                load_if_exists=True,
            )
        except (ValueError, LookupError) as error:
            raise DataError(f"tune: {str(journal)!r} is damaged ({error})") from error
        self._require_same()

    def _require_same(self) -> None:
        """ConfigError if the folder holds a study of something else."""
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
                f"out: {str(self.out)!r} holds a study of something else ({'; '.join(other[:3])}); choose another --out"
            )

    # ---- trials ----
    def go_on(
        self,
        trials: int,
        seconds: float,
        jobs: int,
        on_trial: Callable[[Trial, Sequence[Trial]], None],
    ) -> str:
        """Makes trials until the budget is used up; says what ended it."""
        began, before = time.monotonic(), self.study.user_attrs.get("seconds", 0.0)
        left = [
            self.optuna.trial.Trial(self.study, t._trial_id) for t in self._in_state("RUNNING")
        ]  # of a process that was killed
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
                                validate, tables, self.seeds, self.out / "trials", trial.number
                            )
                        ] = trial
                done, _ = wait(under_way, return_when=FIRST_COMPLETED) if under_way else ((), ())
                for future in done:
                    self._end(trial := under_way.pop(future), future)
                    self.study.set_user_attr("seconds", before + time.monotonic() - began)
                    over = self.over()
                    on_trial(next(t for t in over if t.number == trial.number), over)
        return ended

    def _in_state(self, *names: str) -> list[Any]:
        return self.study.get_trials(
            deepcopy=False, states=[self.optuna.trial.TrialState[name] for name in names]
        )

    def _new(self, trials: int) -> Any | None:
        """Gives the next trial; None if there is none to make. All that it will try is in the journal in one step."""
        if not self._in_state("WAITING"):
            if (number := len(self.study.trials)) >= trials:
                return None
            tried = self._as_given() if number == 0 else self._suggested(number)
            if tried is None:
                return None
            self.study.enqueue_trial(tried, user_attrs={"tried": tried})
        return self.study.ask()

    def _begin(self, trial: Any) -> dict[str, Any]:
        """A trial's settings; tells Optuna those that are among the ranges."""
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
        """The recipe's own values. One that is not in its range is not for the sampler to learn from."""
        return {
            key: value
            for key, values in self.space.items()
            if values.holds(value := self.given[key])
        }

    def _suggested(self, number: int) -> dict[str, Any] | None:
        """What a trial tries, by the trials so far and its number alone; None if nothing new is found."""
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
            scratch = self.optuna.create_study(sampler=sampler, direction="maximize")
            scratch.add_trials(so_far)
            params = scratch.ask(self.distributions).params
            if self._settings(params) not in tried:
                return params
        return None

    def _end(self, trial: Any, future: Future[list[float]]) -> None:
        """Notes how a trial went. An error of disk or data is not the trial's: it is raised, and the trial is done again another time."""
        error = future.exception()
        if isinstance(error, BrokenExecutor):
            raise FedloomError(
                "tune: a process with a trial died, for lack of memory perhaps; start again, with fewer --jobs"
            ) from error
        if isinstance(error, OSError | DataError):
            raise error
        if error is None:
            marks = future.result()
            trial.set_user_attr("validation", marks)
            self.study.tell(trial, sum(marks) / len(marks))
        else:
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)

    def over(self) -> list[Trial]:
        """All trials that are over, in order."""
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
        """Writes the recipe of the best trial, of several the first. ConfigError if none succeeded."""
        trials = self.over()
        succeeded = [t for t in trials if t.validation is not None]
        if not succeeded:
            reason = (
                f"of {len(trials)} trials none could be run; the first: {trials[0].error}"
                if trials
                else f"no trial was made: {ended}"
            )
            raise ConfigError(f"tune: {reason}")
        best = max(succeeded, key=lambda t: (t.validation, -t.number))
        tuned = Tuned(
            trials, best, self._importance(len(succeeded)), self.out / "recipe.toml", ended
        )
        comment = "".join(f"# {line}\n" for line in _origin(tuned, len(self.seeds), command))
        recipe = make_recipe(_with(self.tables, best.settings))
        write_atomic(tuned.recipe, (comment + "\n" + to_toml(_complete(recipe))).encode())
        return tuned

    def _importance(self, succeeded: int) -> dict[str, float]:
        """How much of the difference between trials each setting makes, as far as so many can tell."""
        if succeeded < 10 or len(self.space) < 2 or len({t.validation for t in self.over()}) < 3:
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
    """Where a recipe comes from. Validation only: whoever chose by it has not seen a test score."""
    failed = sum(t.validation is None for t in tuned.trials)
    count = f"{len(tuned.trials)} trials{f', {failed} of them failed' if failed else ''}"
    of = "one seed" if seeds == 1 else f"the mean of {seeds} seeds"
    before = (
        "the recipe as given failed"
        if tuned.given is None
        else f"the recipe as given had {_percent(tuned.given)}"
    )
    return [
        f"Tuned by: {' '.join(command.split())}" if command else "Tuned by fedloom.tune.tune",
        f"Settings tuned: {', '.join(tuned.best.settings)}.",
        f"Trial {tuned.best.number}, the best of {count}: validation accuracy {_percent(tuned.best)} ({of}); {before}.",
        "It is the best of many on the same validation items, which flatters it: expect less elsewhere.",
    ]


def _percent(trial: Trial) -> str:
    assert trial.validation is not None
    return f"{100 * trial.validation:.2f} %"


def _complete(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The recipe with every default. Its partition still follows the run's seed, if it did."""
    config = recipe.config()
    return {**config, "partition": {**config["partition"], "seed": recipe.partition.seed}}


def _with(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's tables with some settings changed."""
    changed = {name: dict(table) for name, table in tables.items()}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        changed.setdefault(table, {})[name] = value
    return changed


# ---- where trials are run ----
class _Here(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001  (as of any other executor: it is raised, or noted, by who reads the result)
            future.set_exception(error)
        return future


@contextmanager
def _workers(jobs: int) -> Iterator[Executor]:
    """Where trials are run: so many processes, or this one for one job. Whatever ends this process, or the block by an error, ends them."""
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
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # Ctrl-C in a terminal is for all: at once, and without a word

    def follow() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
