"""Tuning: declared ranges, trials by validation accuracy, resumed studies, the recipe."""

import json
import sys
import tomllib
from dataclasses import fields

import pytest
from tests.faults.forked import crash_at

from fedloom.cli import main
from fedloom.core.registry import method_class, method_names
from fedloom.core.settings import default_of
from fedloom.errors import ConfigError, DataError
from fedloom.experiments import tune as tuning
from fedloom.experiments.recipe import ModelTable, make_recipe
from fedloom.experiments.result import Result, load_run
from fedloom.experiments.tune import Range, declared, read_range, search_space, tune

pytest.importorskip("optuna", reason="the extra 'tune' is not installed")

TOY = {
    "data": {"dataset": "synthetic:nodes=120,classes=3,features=6", "split": "40/30/30"},
    "partition": {"name": "random", "clients": 3},
    "model": {"name": "gcn-2x8"},
    "method": {"name": "fedprox", "rounds": 2},
}
OVER = ["method.lr", "method.mu"]


def toy(**method):
    return {**TOY, "method": {**TOY["method"], **method}}


def field_of(cls, name):
    return next(f for f in fields(cls) if f.name == name)


# ---- ranges ----
@pytest.mark.parametrize("name", method_names())
def test_declared_ranges_are_valid_and_contain_the_default(name):
    recipe = make_recipe({"method": {"name": name}})
    found = declared(recipe)
    defaults = {f"method.{f.name}": default_of(f) for f in fields(method_class(name))} | {
        "model.dropout": ModelTable.dropout
    }
    for key, values in found.items():
        assert values.holds(defaults[key]), key
        values.distribution()
    trains = method_class(name).needs_of_model != "nothing"
    assert any(key.rpartition(".")[2].startswith("lr") for key in found) == trains
    assert "model.dropout" in found


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("lr", "0.001..0.1", Range("0.001..0.1", 0.001, 0.1, log=True)),
        ("lr", "1e-4..0.01", Range("1e-4..0.01", 1e-4, 0.01, log=True)),
        ("lr", "0.01..0.5", Range("0.01..0.5", 0.01, 0.5)),
        ("lr", "1..200", Range("1..200", 1.0, 200.0, log=True)),
        ("mu", "0..1", Range("0..1", 0.0, 1.0)),
        ("epochs", "1..9", Range("1..9", 1, 9)),
        ("epochs", "1, 3", Range("1, 3", choices=(1, 3))),
        ("lr", "1,0.5", Range("1,0.5", choices=(1.0, 0.5))),
        ("optimizer", "sgd,adam", Range("sgd,adam", choices=("sgd", "adam"))),
    ],
)
def test_a_range_is_read(name, text, expected):
    found = read_range(field_of(method_class("fedprox"), name), text, "method")
    assert found == expected
    assert type(found.low) is type(expected.low)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ("method.learning", "unknown setting of method 'fedprox': 'learning'.*Valid: .*lr"),
        ("model.droput", "unknown setting in .model.: 'droput'. Did you mean 'dropout'"),
        ("method.name=fedavg,local", "unknown setting of method"),
        ("data.dataset=cora,pubmed", "data.dataset cannot be tuned.*method and model"),
        ("method.lr=0..0.1", "method.lr is 0, must be a number above 0"),
        ("method.lr=0.1..0.01", "low must be below high"),
        ("method.epochs=1.5..3", "method.epochs is 1.5, must be a whole number at least 1"),
        ("method.optimizer=a..b", "low..high takes numbers"),
        ("method.optimizer=adam,lion", "method.optimizer is 'lion', must be"),
        ("method.lr=0.1", "two choices or more"),
        ("method.lr=0.1,0.1", "each once"),
        (
            "method.finetune",
            r"method.finetune has no declared range; give one.*declared: method.epochs, method.lr",
        ),
        ("lr=0.1..1", "--over takes table.key"),
        ("", "--over takes table.key"),
    ],
)
def test_a_setting_that_cannot_be_tuned_is_named(over, words):
    with pytest.raises(ConfigError, match=words):
        search_space(make_recipe(TOY), [over])


def test_several_settings_may_be_named_at_once():
    recipe = make_recipe(TOY)
    found = search_space(
        recipe, ["method.lr,method.epochs=1,2,5,model.dropout", "method.mu=0.5..0.9"]
    )
    assert {key: values.text for key, values in found.items()} == {
        "method.lr": "0.001..0.1",
        "method.epochs": "1,2,5",
        "model.dropout": "0..0.8",
        "method.mu": "0.5..0.9",
    }


def test_settings_of_the_other_task_are_not_tuned():
    recipe = make_recipe(TOY)
    assert "method.batch_size" in search_space(recipe, [], "graph")
    assert "method.batch_size" not in search_space(recipe, [], "node")


# ---- a study ----
@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Returns a study without interruption, with more trials than the sampler draws at random."""
    folder = tmp_path_factory.mktemp("tuned") / "x"
    return tune(TOY, folder, over=OVER, trials=13, seeds=2, command="fedloom tune ...")


def test_the_first_trial_is_the_given_recipe_and_the_best_is_written(unbroken, tmp_path):
    given = [
        make_recipe({**TOY, "run": {"seed": seed}}).execute().summary["val_accuracy"]
        for seed in (0, 1)
    ]
    assert unbroken.given.validation == pytest.approx(sum(given) / 2, abs=1e-12)
    assert unbroken.given.settings == {"method.lr": 0.01, "method.mu": 0.001}
    assert (
        unbroken.best.validation
        == max(t.validation for t in unbroken.trials)
        >= unbroken.given.validation
    )
    assert len(unbroken.trials) == len({json.dumps(t.settings) for t in unbroken.trials}) == 13
    text = unbroken.recipe.read_text()
    tables = tomllib.loads(text)
    assert (tables["method"]["lr"], tables["method"]["mu"]) == tuple(
        unbroken.best.settings.values()
    )
    assert tables["partition"]["seed"] == -1  # the partition still follows the run's seed
    again = [
        make_recipe({**tables, "run": {**tables["run"], "seed": s}})
        .execute()
        .summary["val_accuracy"]
        for s in (0, 1)
    ]
    assert sum(again) / 2 == pytest.approx(unbroken.best.validation, abs=1e-12)
    comment = text.partition("\n\n")[0]
    assert "# Tuned by: fedloom tune ..." in comment
    assert "the best of 13 trials" in comment
    assert f"{100 * unbroken.given.validation:.2f} %" in comment


def test_every_trial_has_a_run_folder_for_each_seed(unbroken):
    folder = unbroken.recipe.parent / "trials"
    assert sorted(p.name for p in folder.iterdir()) == [
        f"{n:03d}-s{s}" for n in range(13) for s in (0, 1)
    ]
    marks = [
        load_run(folder / f"{unbroken.best.number:03d}-s{s}").summary["val_accuracy"]
        for s in (0, 1)
    ]
    assert sum(marks) / 2 == unbroken.best.validation


def test_the_journal_is_json_lines_that_optuna_reads(unbroken):
    import optuna

    journal = unbroken.recipe.parent / "study.jsonl"
    for line in journal.read_text().splitlines():
        json.loads(line)
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(journal))
    )
    study = optuna.load_study(study_name="fedloom", storage=storage)
    assert study.best_value == unbroken.best.validation
    assert study.best_params == unbroken.best.settings


@pytest.mark.parametrize(
    "where",
    [
        "round-closed:9",
        *(
            pytest.param(where, marks=pytest.mark.slow)
            for where in ("config-half:2", "summary-half:8", "summary-in-place:24")
        ),
    ],
)
def test_a_killed_study_resumes_with_the_same_result(where, unbroken, tmp_path):
    folder = tmp_path / "x"
    assert crash_at(where, lambda: tune(TOY, folder, over=OVER, trials=13, seeds=2))
    with open(folder / "study.jsonl", "ab") as journal:
        journal.write(b'{"op_code":')  # half a line
    ended = []
    tuned = tune(
        TOY,
        folder,
        over=OVER,
        trials=13,
        seeds=2,
        on_trial=lambda trial, over: ended.append(trial.number),
    )
    assert tuned.trials == unbroken.trials
    assert tuned.best == unbroken.best
    assert ended == list(range(ended[0], 13))  # earlier trials did not run again


def test_only_an_interrupted_trial_runs_again(unbroken, tmp_path, monkeypatch):
    asked, real = [], tuning.validate

    def stopped(tables, seeds, folder, number, federation):
        asked.append(number)
        if asked == [0, 1, 2]:
            raise KeyboardInterrupt
        return real(tables, seeds, folder, number, federation)

    monkeypatch.setattr(tuning, "validate", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(TOY, tmp_path, over=OVER, trials=4, seeds=2)
    tuned = tune(TOY, tmp_path, over=OVER, trials=4, seeds=2)
    assert asked == [0, 1, 2, 2, 3]
    assert tuned.trials == unbroken.trials[:4]


def test_a_larger_budget_continues_the_study(unbroken, tmp_path, monkeypatch):
    settings = {"over": OVER, "seeds": 2}
    tune(TOY, tmp_path, trials=2, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "validate", lambda *a: pytest.fail("a trial was begun"))
        assert tune(TOY, tmp_path, trials=2, **settings).trials == unbroken.trials[:2]
    assert tune(TOY, tmp_path, trials=3, **settings).trials == unbroken.trials[:3]


def test_minutes_count_over_all_starts(tmp_path, monkeypatch):
    clock = [1000.0]

    def a_minute_each(*_):
        clock[0] += 60
        return [0.5]

    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(tuning, "validate", a_minute_each)
    first = tune(TOY, tmp_path, over=OVER, minutes=3)
    assert (len(first.trials), first.ended) == (3, "3 minutes are over")
    clock[0] += 3600  # the study was not running
    assert len(tune(TOY, tmp_path, over=OVER, minutes=3).trials) == 3
    assert len(tune(TOY, tmp_path, over=OVER, minutes=5).trials) == 5


def test_a_failed_trial_is_recorded_and_the_study_goes_on(tmp_path):
    # The sum of α and β of FedGKC may not exceed 1.
    tables = {
        **TOY,
        "method": {"name": "fedgkc", "rounds": 1, "alpha": 0.5, "beta": 0.25, "copilot": "gcn-2x8"},
    }
    tuned = tune(tables, tmp_path, over=["method.alpha=0.5,0.9", "method.beta=0.25,0.5"], trials=9)
    assert len(tuned.trials) == 4
    assert tuned.ended == "no other combination was found"
    failed = {tuple(t.settings.values()): t.error for t in tuned.trials if t.validation is None}
    assert failed.keys() == {(0.9, 0.25), (0.9, 0.5)}
    assert all(error.startswith("ConfigError: ") for error in failed.values())
    assert "4 trials, 2 of them failed" in tuned.recipe.read_text()


def test_if_all_trials_fail_the_first_reason_is_named(tmp_path, monkeypatch):
    def diverges(tables, seeds, folder, number, federation):
        raise RuntimeError(f"no number, {number}")

    monkeypatch.setattr(tuning, "validate", diverges)
    with pytest.raises(
        ConfigError, match="all 2 trials failed; the first: RuntimeError: no number, 0"
    ):
        tune(TOY, tmp_path, over=OVER, trials=2)


def test_a_disk_error_does_not_count_as_a_failed_trial(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "validate", full)
        with pytest.raises(OSError, match="No space"):
            tune(TOY, tmp_path, over=OVER, trials=1)
    assert tune(TOY, tmp_path, over=OVER, trials=1).given is not None


def test_a_given_value_outside_its_range_is_still_tried_first(tmp_path):
    tuned = tune(
        toy(lr=0.5, weight_decay=0.0),
        tmp_path,
        over=["method.lr", "method.weight_decay"],
        trials=12,
    )
    assert tuned.trials[0].settings == {"method.lr": 0.5, "method.weight_decay": 0.0}
    assert all(
        0.001 <= t.settings["method.lr"] <= 0.1 and t.settings["method.weight_decay"] >= 1e-6
        for t in tuned.trials[1:]
    )


def test_tuning_does_not_use_test_scores(tmp_path, monkeypatch):
    class Sealed(dict):
        def __getitem__(self, key):
            assert key in ("val_accuracy",), key
            return super().__getitem__(key)

        def __iter__(self):
            raise AssertionError("all of it is read")

    real = tuning.Recipe.execute
    monkeypatch.setattr(
        tuning.Recipe, "execute", lambda self, *a, **k: Result(Sealed(real(self, *a, **k).summary))
    )
    tuned = tune(TOY, tmp_path, over=OVER, trials=2)
    scores = load_run(tmp_path / "trials" / f"{tuned.best.number:03d}-s0").summary
    assert f"{100 * scores['accuracy']:.2f}" not in tuned.recipe.read_text()


# ---- what cannot be tuned ----
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tables": {**TOY, "data": {**TOY["data"], "split": "60/0/40"}}},
            "no client has a validation item.*'60/0/40'",
        ),
        ({"trials": 0}, "trials is 0, must be a whole number at least 1"),
        ({"seeds": 0}, "seeds is 0"),
        ({"jobs": 0}, "jobs is 0"),
        ({"minutes": -1.0}, "minutes is -1, must be a number at least 0"),
        (
            {"jobs": 2, "tables": {**TOY, "run": {"engine": "processes"}}},
            "engine 'processes' has workers of its own",
        ),
    ],
)
def test_an_impossible_study_is_refused_before_anything_is_written(change, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        tune(change.pop("tables", TOY), tmp_path / "x", over=OVER, **change)
    assert not (tmp_path / "x").exists()


def test_a_method_without_ranges_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "declared", lambda recipe, task="": {})
    with pytest.raises(ConfigError, match="nothing to tune: method 'fedprox' declares no range"):
        tune(TOY, tmp_path)


def test_a_folder_holds_one_study(tmp_path):
    tune(TOY, tmp_path, over=OVER, trials=1)
    for other, words in [
        ({"tables": toy(rounds=3)}, "method.rounds: 2, not 3"),
        ({"over": ["method.lr"]}, "range of method.mu: 1e-4..1, not none"),
        ({"seeds": 2}, r"seeds: \[0\], not \[0, 1\]"),
    ]:
        settings = {"tables": TOY, "over": OVER, **other}
        with pytest.raises(ConfigError, match=f"holds another study .*{words}"):
            tune(settings.pop("tables"), tmp_path, **settings)


def test_two_processes_do_not_tune_in_one_folder(tmp_path):
    with tuning._alone_in(tmp_path), pytest.raises(ConfigError, match="another process works"):
        tune(TOY, tmp_path, over=OVER)


def test_a_damaged_study_and_runs_of_another_one_are_named(tmp_path):
    tune(TOY, tmp_path, over=OVER, trials=2)
    journal = tmp_path / "study.jsonl"
    kept = journal.read_text()
    journal.write_text("no json\n" + kept)
    with pytest.raises(DataError, match=r"study\.jsonl' is damaged"):
        tune(TOY, tmp_path, over=OVER, trials=2)
    journal.unlink()
    with pytest.raises(DataError, match="000-s0' holds another run"):
        tune(toy(rounds=3), tmp_path, over=OVER, trials=2)


# ---- processes ----
@pytest.mark.slow
def test_trials_in_processes_give_the_same_results(unbroken, tmp_path):
    tuned = tune(TOY, tmp_path, over=OVER, trials=3, seeds=2, jobs=2)
    assert tuned.trials[:1] == unbroken.trials[:1]
    for trial in tuned.trials:
        marks = [
            load_run(tmp_path / "trials" / f"{trial.number:03d}-s{s}").summary["val_accuracy"]
            for s in (0, 1)
        ]
        assert trial.validation == sum(marks) / 2


# ---- the command line ----
@pytest.fixture
def here(monkeypatch, capsys, tmp_path):
    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


SMALL = [
    "--dataset",
    TOY["data"]["dataset"],
    "--split",
    "40/30/30",
    "--clients",
    3,
    "--partition",
    "random",
    "--model",
    "gcn-2x8",
]


def test_the_command_prints_the_best_trials_and_writes_a_recipe_that_runs(here, tmp_path):
    code, printed, progress = here(
        "tune",
        *SMALL,
        "--method",
        "fedprox",
        "--rounds",
        2,
        "--over",
        "method.lr,method.mu",
        "--trials",
        3,
    )
    assert code == 0, progress
    assert "0 (as given)" in printed
    assert "points of validation accuracy more than the recipe as given" in printed
    assert "the best of 3 on the same validation items" in printed
    assert "trial 2: val" in progress
    (recipe,) = tmp_path.glob("tuned/*/recipe.toml")
    assert recipe.read_text().startswith("# Tuned by: fedloom tune --dataset synthetic:nodes=120")
    code, printed, progress = here("run", recipe, "--out", "r", "--json")
    assert code == 0, progress
    code, output, _ = here(
        "tune",
        *SMALL,
        "--method",
        "fedprox",
        "--rounds",
        2,
        "--over",
        "method.lr,method.mu",
        "--trials",
        3,
        "--json",
    )
    assert json.loads(output)["best"]["validation"] == json.loads(printed)["val_accuracy"]
    assert json.loads(output)["recipe"] == str(recipe.relative_to(tmp_path))


def test_the_command_names_a_mistake(here, monkeypatch):
    assert here("tune", *SMALL, "--over", "method.lr=5")[::2] == (
        2,
        "fedloom: tune: method.lr from '5': give two choices or more, each once\n",
    )
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert here("tune", *SMALL)[::2] == (
        2,
        "fedloom: tune needs the package 'optuna': pip install 'fedloom[tune]'\n",
    )


def test_the_ranges_of_a_method_are_shown(here):
    assert "1e-4..1" in here("methods", "fedprox")[1]
