"""The benchmarks run, and their page shows the kept results."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import speed

    return speed


def run(speed, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["speed.py", *map(str, arguments)])
    speed.main()


@pytest.mark.slow
def test_one_part_runs_again_and_the_others_are_kept(speed, monkeypatch, tmp_path):
    kept, page = tmp_path / "kept.jsonl", tmp_path / "page.md"
    monkeypatch.setitem(
        speed.PARTS,
        "startup",
        lambda quick: [{"what": "fedloom --help", "seconds": 0.25, "least": 0.125}],
    )
    quick = ("--quick", "--keep", kept, "--base", BENCH.parent)
    run(speed, monkeypatch, "small1000", "startup", *quick)
    before = speed.read(kept)
    run(speed, monkeypatch, "small1000", *quick, "--write", page)
    after = speed.read(kept)
    assert list(after) == ["small1000", "startup"]
    assert len(kept.read_text().splitlines()) == 2
    assert after["startup"] == before["startup"]
    assert after["small1000"]["rows"] != before["small1000"]["rows"]
    rows = {row["way"]: row for row in after["small1000"]["rows"]}
    assert list(rows) == ["plain", "loop", "wire", "stacked, before", "stacked"]
    assert all(row["ms"] > 0 and row["load"] >= 0 and row["peak_mb"] > 0 for row in rows.values())
    assert rows["stacked"]["gain"] > 0
    text = page.read_text()
    assert "| `fedloom --help` | 0.25 | 0.12 |" in text
    assert f"| {rows['plain']['ms']:.1f} |" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_every_part_has_a_table(speed):
    import speed_page
    import speed_tools

    assert {*speed_page.ROUNDS, *speed_page.TABLES} == set(speed.PARTS) == set(speed_tools.PARTS)


@pytest.mark.slow
def test_methods_and_workers_are_compared_with_older_code(speed, monkeypatch, tmp_path):
    kept, page = tmp_path / "kept.jsonl", tmp_path / "page.md"
    quick = ("--quick", "--keep", kept, "--base", BENCH.parent)
    run(speed, monkeypatch, "methods", "workers", "command", "products", *quick, "--write", page)
    found = {name: result["rows"] for name, result in speed.read(kept).items()}
    assert [row["method"] for row in found["methods"]] == ["fedavg", "fedproto"]
    assert all({"loop_ms", "before_ms", "stacked_ms"} <= row.keys() for row in found["methods"])
    assert [row["way"] for row in found["workers"]] == ["stacked", "workers", "processes, before"]
    assert [row["what"] for row in found["command"]][-1] == "import torch"
    assert [row.get("older", False) for row in found["products"]] == [True, False, False, False]
    assert "The partition by louvain is " in page.read_text()


def test_goals_are_reached_or_missed(speed):
    import speed_page

    assert speed_page.verdict(13.0, 13) == "reached"
    assert speed_page.verdict(11.7, 13) == "missed by 10 %"


def test_ratios_are_medians_over_turns(speed):
    from speed_tools import Turns

    slow, fast = iter([2.0, 9.0, 4.0]), iter([1.0, 1.0, 1.0])
    turns = Turns({"slow": lambda: next(slow), "fast": lambda: next(fast)}, 3)
    assert turns.ms("slow") == 4000
    assert turns.faster("fast", "slow") == 4
    assert [(row["way"], row["ratio"]) for row in turns.rows("slow")] == [("slow", 1), ("fast", 4)]


def test_the_code_of_a_commit_is_there_for_a_while(speed, monkeypatch, tmp_path):
    import speed_tools

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    package = tmp_path / "src" / "fedloom" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("old")
    git("init")
    git("add", "src")
    git("commit", "-m", "old")
    package.write_text("new")
    monkeypatch.setattr(speed_tools, "ROOT", tmp_path)
    for _ in range(2):
        with speed_tools.older_code("HEAD"):
            folder, environment = speed_tools.code(older=True)
            assert (folder / "src" / "fedloom" / "__init__.py").read_text() == "old"
            assert environment["PYTHONPATH"] == str(folder / "src")
            assert speed_tools.code(older=False)[0] == tmp_path
        assert not folder.exists()


def test_a_worker_refuses_code_from_elsewhere(speed, tmp_path):
    import speed_tools

    with pytest.raises(AssertionError, match=r"fedloom.__init__\.py"):
        speed_tools.serve(tmp_path)


def test_an_unknown_part_is_refused(speed, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(speed, monkeypatch, "cora11", "--keep", tmp_path / "kept.jsonl")
    assert "unknown part cora11. Valid: cora10, " in capsys.readouterr().err


def test_the_plain_loop_learns(speed, node_federation):
    import plain

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        *_, (val, test) = plain.fedavg(node_federation, 10, 3)
    assert min(val, test) > 0.5  # of three classes


def test_exponents(speed):
    assert speed.slope([1, 10, 100], [3, 30, 300]) == pytest.approx(1)
    assert speed.slope([1, 2, 4], [5, 20, 80]) == pytest.approx(2)


@pytest.mark.slow
def test_a_job_returns_its_measurement(speed):
    import speed_large

    row = speed_large.many_clients(count=2, method="fedproto")
    assert row.keys() == {"count", "method", "ms", "mb", "load"}


# ---- sweeps ----
@pytest.fixture
def sweeping(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import sweep

    return sweep


TOY = {
    "data": {"dataset": "synthetic:nodes=60,classes=3,features=8"},
    "partition": {"name": "random", "clients": 3},
    "model": {"name": "gcn-2x4"},
    "method": {"name": "fedavg", "rounds": 2},
}


def test_a_sweep_returns_and_keeps_summaries_by_label_and_seed(sweeping, tmp_path):
    heard = []
    recipes = {"one": TOY, "again": TOY, "local": {**TOY, "method": {"name": "local", "rounds": 2}}}
    found = sweeping.sweep(
        recipes,
        2,
        lambda label, seed, s: heard.append((label, seed, s["method"])),
        tmp_path / "kept",
    )
    assert sorted(heard) == [
        (label, seed, m)
        for label, m in (("again", "fedavg"), ("local", "local"), ("one", "fedavg"))
        for seed in (0, 1)
    ]
    assert [[s["seed"] for s in runs] for runs in found.values()] == [[0, 1]] * 3
    assert found["one"] == found["again"]
    assert not list((tmp_path / "kept").glob("*/models"))
    heard.clear()
    assert sweeping.sweep(recipes, 2, lambda *each: heard.append(each), tmp_path / "kept") == found
    assert (
        sweeping.sweep(
            {**recipes, "more": {**TOY, "model": {"name": "mlp"}}},
            2,
            print,
            tmp_path / "kept",
            run=False,
        )
        == found
    )
    assert not heard
    assert sweeping.spread([s["accuracy"] for s in found["one"]]) != "-"


def test_a_failed_run_is_raised_after_the_others_have_ended(sweeping, tmp_path):
    wrong = {**TOY, "method": {"name": "gcfl+"}}
    with pytest.raises(
        RuntimeError, match=r"1 runs failed, the first of them .*gcfl\+.*does graph tasks"
    ):
        sweeping.sweep({"wrong": wrong, "right": TOY}, 1, lambda *_: None, tmp_path / "kept")
    assert list(
        sweeping.sweep(
            {"wrong": wrong, "right": TOY}, 1, lambda *_: None, tmp_path / "kept", run=False
        )
    ) == ["right"]
