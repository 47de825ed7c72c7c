"""The headline, the classes, the settings and the versions of a report, from small summaries."""

import json

import pytest

from fedloom.experiments.report.class_figures import class_figures, class_scores
from fedloom.experiments.report.comparison import compare
from fedloom.experiments.report.figures import figures
from fedloom.experiments.report.headline import headline
from fedloom.experiments.report.spec import flat
from fedloom.experiments.report.write import make_page
from fedloom.experiments.run_folder import Run

SIZES = (100, 100, 100, 100)
GAINS = (0.05, 0.06, 0.07, 0.08)  # of four clients, each with another gain


@pytest.fixture
def run(tmp_path):
    """Returns a function that makes the completed run of a method and a seed."""

    def make(method, seed=0, accuracy=0.7, gains=(0.0,) * 4, sizes=SIZES, **more) -> Run:
        scores = [accuracy + gain + seed / 1000 for gain in gains]
        clients = [
            {"id": str(k), "nodes": n, "items": n, "train": 1, "val": 1, "test": n, "accuracy": a}
            for k, (n, a) in enumerate(zip(sizes, scores, strict=True))
        ]
        sent = 0 if method in ("local", "central") else 4_000_000
        config = {
            "data": {"dataset": "toy"},
            "partition": {"name": "louvain", "clients": 4},
            "model": {"name": "gcn"},
            "method": {"name": method, "rounds": 2} | more.pop("settings", {}),
            "run": {"seed": seed, "engine": "loop"},
        }
        entry = {"round": 2, "stage": "train", "accuracy": scores[0], "seconds": 1.0}
        folder = tmp_path / f"{method}-{seed}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        entry |= {"bytes_up": sent // 2, "bytes_down": sent // 2}
        (folder / "history.jsonl").write_text(json.dumps(entry | more.pop("entry", {})) + "\n")
        weighted = sum(n * a for n, a in zip(sizes, scores, strict=True)) / sum(sizes)
        summary = {
            "method": method,
            "dataset": "toy",
            "partition": "louvain",
            "clients": len(sizes),
            "model": "gcn",
            "seed": seed,
            "rounds": 2,
            "best_round": 2,
            "accuracy": weighted,
            "val_accuracy": 0.5,
            "per_client": clients,
            "traffic": {"bytes_up": sent // 2, "bytes_down": sent // 2, "phases": {}},
            "seconds": {"train": 1.0, "total": 1.0},
            "history_hash": "0" * 64,
            "versions": {"fedloom": "1", "torch": "2"},
            "config": config,
        }
        return Run(folder, summary | more)

    return make


def several(run, method, seeds=3, **more):
    return [run(method, seed, **more) for seed in range(seeds)]


# ---- the headline ----


def test_a_clear_gain_is_stated_with_its_uncertainty_and_its_traffic(run):
    found = headline(compare([*several(run, "local"), *several(run, "fedavg", gains=GAINS)]))
    assert found.name == "fedavg"
    assert found.text == (
        "fedavg is best: 76.6 % accuracy, 6.5 points above Local (95 % interval 5.8 to 7.1, "
        "p < 0.001, 3 seeds), for 4.0 MB of traffic (1.0 MB per client)."
    )


def test_a_difference_that_may_be_chance_is_called_noise(run):
    gains = (0.05, -0.04, 0.03, -0.02)
    found = headline(compare([*several(run, "local"), *several(run, "fedavg", gains=gains)]))
    assert "0.5 points above Local, but this difference is within noise (p = " in found.text
    assert "is best" not in found.text


@pytest.mark.parametrize(
    ("seeds", "words"),
    [(1, "One seed is too few for a claim."), (2, "2 seeds are too few for a claim.")],
)
def test_few_seeds_make_no_claim(run, seeds, words):
    runs = [*several(run, "local", seeds), *several(run, "fedavg", seeds, gains=GAINS)]
    found = headline(compare(runs))
    assert found.text.endswith(words)
    assert "p " not in found.text


def test_the_gain_is_unknown_without_local(run):
    found = headline(compare(several(run, "fedavg")))
    assert found.text.startswith("fedavg reaches 70.1 % accuracy over 3 seeds, for 4.0 MB")
    assert "No run of Local is in this report" in found.text
    found = headline(compare([*several(run, "fedavg"), *several(run, "fedprox", gains=GAINS)]))
    assert found.text.startswith("fedprox is best: 76.6 % accuracy over 3 seeds")


def test_local_may_be_best(run):
    losses = tuple(-gain for gain in GAINS)
    found = headline(compare([*several(run, "local"), *several(run, "fedavg", gains=losses)]))
    assert found.name == "local"
    assert found.text.startswith("local is best: 70.1 % accuracy without any traffic. ")
    assert "the best of them, fedavg, is 6.5 points below Local (p < 0.001, 3 seeds)" in found.text


def test_central_training_is_a_reference_and_never_the_best(run):
    runs = [*several(run, "local"), *several(run, "fedavg", gains=GAINS)]
    c = compare([*runs, *several(run, "central", accuracy=0.9, sizes=(400,), gains=(0.0,))])
    (task,) = c.tasks
    assert [c.on(task)[row].mark for row in ("central", "fedavg", "local")] == [
        "",
        "best",
        "second",
    ]
    found = headline(c)
    assert found.name == "fedavg"
    assert found.details == (
        "Reference: central, with all data in one place, reaches 90.1 % accuracy.",
    )
    table = next(figure for figure in figures(c) if figure["id"].startswith("scores"))
    assert [row[0]["text"] for row in table["rows"]] == ["central (reference)", "fedavg", "local"]


def test_methods_that_are_as_good_are_named(run):
    runs = [*several(run, "local"), *several(run, "fedavg", gains=GAINS)]
    c = compare([*runs, *several(run, "fedprox", gains=(0.06, 0.05, 0.08, 0.06))])
    assert headline(c).details == ("The test does not distinguish fedprox from fedavg.",)


def test_another_mean_than_that_of_the_table_is_called_so(run):
    # The large client gains nothing: the weighted score rises less than the mean over clients.
    sizes, gains = (10_000, 10, 10, 10), (0.01, 0.06, 0.07, 0.08)
    runs = several(run, "local", sizes=sizes)
    found = headline(compare([*runs, *several(run, "fedavg", gains=gains, sizes=sizes)]))
    assert "71.1 % accuracy, 5.5 points above Local on the mean over clients" in found.text


def test_baselines_alone_have_no_headline_about_federating(run):
    found = headline(compare(several(run, "local")))
    assert found.text.endswith("There is no federated method to compare it with.")


def test_several_tasks_have_one_sentence_and_one_for_each(run):
    runs = []
    for name, gains in (("toy", GAINS), ("other", (-0.01, 0.0, 0.01, -0.02))):
        more = {"dataset": name}
        here = [*several(run, "local", **more), *several(run, "fedavg", gains=gains, **more)]
        for one in here:
            one.config["data"]["dataset"] = name
        runs += here
    found = headline(compare(runs))
    assert found.text == (
        "fedavg has the best mean over the 2 tasks, 73.1 % accuracy, and is the best method on 1 "
        "of them; it is 3.0 points above Local on the mean."
    )
    made = figures(compare(runs))
    # The footnote is below the first table only, and a group's title names the task for its parts.
    captions = [figure["caption"] for figure in made if figure["title"].startswith("Methods")]
    assert captions == ["", ""]
    group = next(figure for figure in made if figure["kind"] == "group")
    assert group["title"] == "Curves: toy, 4 clients by louvain"
    assert group["figures"][0]["short_title"] == "Accuracy by round"
    assert [line.partition(":")[0] for line in found.details] == [
        "toy, 4 clients by louvain",
        "other, 4 clients by louvain",
    ]


def test_a_metric_without_values_is_said(run):
    assert headline(compare(several(run, "local"), metric="auc")).text == (
        "No run has a value of AUC."
    )


def test_the_lowest_calibration_error_is_the_best(run):
    runs = [*several(run, "local", ece=0.2), *several(run, "fedavg", ece=0.1)]
    c = compare(runs, metric="ece")
    assert c.ranked(c.tasks[0]) == ["fedavg", "local"]
    assert headline(c).name == "fedavg"


def test_the_default_metric_is_the_one_that_chose_the_rounds(run):
    chosen = {"selection": "pr_auc", "pr_auc": 0.4, "val_pr_auc": 0.3}
    c = compare(several(run, "fedavg", **chosen))
    assert c.metric == "pr_auc"
    assert headline(c).text.startswith("fedavg reaches 40.0 % PR-AUC")
    table = figures(c)[0]
    assert [column["name"] for column in table["columns"]][1] == "PR-AUC %"
    assert "(by PR-AUC)" in table["caption"]
    mixed = compare([*several(run, "fedavg", **chosen), *several(run, "local")])
    assert mixed.metric == "accuracy"
    assert "(by accuracy or PR-AUC)" in figures(mixed)[0]["caption"]


# ---- classes ----
MATRIX = [[8, 2, 0], [1, 4, 0], [0, 0, 0]]  # the third class has no test item


def test_scores_of_classes_come_from_the_confusion_matrix():
    first, second, absent = class_scores(MATRIX)
    assert first == (10, pytest.approx(8 / 9), pytest.approx(0.8), pytest.approx(16 / 19))
    assert second.precision == pytest.approx(4 / 6)
    assert absent == (0, None, None, None)


def test_confusion_matrices_are_summed_over_seeds_and_shown_by_row(run):
    names = ["fraud", "ok", "unclear"]
    c = compare(several(run, "fedavg", 2, confusion=MATRIX, class_names=names))
    table, every, group = class_figures(c, c.tasks[0])
    assert [row[:2] for row in table["rows"]] == [["fraud", 20], ["ok", 10], ["unclear", 0]]
    assert every["closed"]
    (matrix,) = group["figures"]
    assert (matrix["rows"], matrix["columns"]) == (names, names)
    assert matrix["counts"] == [[16, 4, 0], [2, 8, 0], [0, 0, 0]]
    assert matrix["values"] == [[0.8, 0.2, 0.0], [0.2, 0.8, 0.0], [None] * 3]
    assert matrix["caption"] == "80.0 % of 30 predictions are right."


def test_runs_without_confusion_matrices_are_named_with_the_reason(run):
    c = compare(several(run, "local"))
    (note,) = class_figures(c, c.tasks[0])
    assert (note["kind"], "no confusion matrix" in note["caption"]) == ("note", True)
    c = compare([*several(run, "local"), *several(run, "fedavg", confusion=MATRIX)])
    assert class_figures(c, c.tasks[0])[-1]["caption"].endswith("Not known: local.")


# ---- losses, settings, versions, warnings ----


def by_id(c):
    return {figure["id"].split("-toy")[0]: figure for figure in flat(figures(c))}


def test_losses_are_drawn_or_their_absence_is_said(run):
    made = by_id(compare(several(run, "fedavg", entry={"loss": 0.25})))
    assert made["loss"]["series"][0]["y"] == [0.25]
    assert "no-loss" not in made
    made = by_id(compare(several(run, "fedavg")))
    assert "loss" not in made
    assert "no training loss" in made["no-loss"]["caption"]


def test_settings_that_differ_between_methods_are_listed_first(run):
    c = compare([*several(run, "fedavg"), *several(run, "fedprox", settings={"mu": 0.1})])
    made = by_id(c)
    assert [column["name"] for column in made["differences"]["columns"]] == [
        "setting",
        "fedavg",
        "fedprox",
    ]
    assert made["differences"]["rows"] == [["method.mu", "–", "0.1"]]
    every = {row[0]: row[1:] for row in made["settings"]["rows"]}
    assert every["method.rounds"] == ["2", "2"]
    assert every["run.seed"] == ["0, 1, 2", "0, 1, 2"]
    assert made["settings"]["closed"]


def test_settings_that_differ_between_the_runs_of_a_method_are_listed(run):
    runs = several(run, "fedavg")
    runs[1].config["run"]["engine"] = "stacked"
    made = by_id(compare(runs))
    assert made["differences"]["rows"] == [["run.engine", "loop, stacked"]]
    assert by_id(compare(several(run, "fedavg")))["differences"]["kind"] == "note"


def test_the_page_has_versions_and_says_if_they_differ(run):
    runs = several(run, "fedavg")
    page = make_page(compare(runs))
    assert page["versions"] == [["fedloom", "1"], ["torch", "2"]]
    assert not page["versions_differ"]
    runs[0].summary["versions"] = {"fedloom": "1", "torch": "3"}
    page = make_page(compare(runs))
    assert page["versions"] == [["fedloom", "1"], ["torch", "3 (1 run), 2 (2 runs)"]]
    assert page["versions_differ"]


def test_warnings_of_several_seeds_are_listed_once(run):
    page = make_page(compare(several(run, "fedavg", warnings=["one class only"])))
    assert page["warnings"] == ["fedavg: one class only (3 seeds)"]
    assert page["headline"]["name"] == "fedavg"
    assert ["best round by", "validation accuracy"] in page["facts"]


def test_results_come_before_the_other_sections(run):
    c = compare([*several(run, "local"), *several(run, "fedavg", gains=GAINS)])
    made = figures(c)
    assert made[0]["kind"] == "table"
    scores = [row[1]["sort"] for row in made[0]["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert (made[1]["kind"], made[1]["title"]) == ("group", "Curves")
    assert made[0]["sorted_by"] == {"column": 1, "descending": True}


def test_parts_of_a_whole_have_their_own_colours(run):
    from fedloom.experiments.report.draw import HUES, PARTS
    from fedloom.experiments.report.html import read_parts

    made = by_id(compare(several(run, "fedavg")))
    assert made["seconds"]["palette"] == made["phases"]["palette"] == "parts"
    assert not set(HUES) & set(PARTS)
    style = read_parts("base.css")
    assert all(f"light-dark({color}" in style for color in (*HUES, *PARTS))


def test_axes_name_bytes_and_seconds(run):
    made = by_id(compare([*several(run, "local"), *several(run, "fedavg", gains=GAINS)]))
    for name in ("convergence", "traffic", "time", "gains", "sorted-gains"):
        assert made[name]["x"]["label"]
        assert made[name]["y"]["label"]
    assert "bytes" in made["traffic"]["x"]["label"]
    assert "bytes" in made["phases"]["x"]["label"]
    assert "time" in made["time"]["x"]["label"]
    assert "seconds" in made["seconds"]["x"]["label"]
