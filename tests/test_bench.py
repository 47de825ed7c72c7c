"""The benchmarks run, and their page says what was kept."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import speed

    return speed


def run(speed, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["speed.py", *map(str, arguments)])
    speed.main()


def test_a_part_is_kept_and_run_again_without_the_others(speed, monkeypatch, tmp_path):
    kept, page = tmp_path / "kept.jsonl", tmp_path / "page.md"
    monkeypatch.setitem(speed.PARTS, "startup", lambda quick: [{"what": "fedloom --help", "seconds": 0.25, "least": 0.125}])
    run(speed, monkeypatch, "small1000", "startup", "--quick", "--keep", kept)
    before = speed.read(kept)
    run(speed, monkeypatch, "small1000", "--quick", "--keep", kept, "--write", page)
    after = speed.read(kept)
    assert list(after) == ["small1000", "startup"]
    assert len(kept.read_text().splitlines()) == 2
    assert after["startup"] == before["startup"]
    assert after["small1000"]["rows"] != before["small1000"]["rows"]
    assert [row["way"] for row in after["small1000"]["rows"]] == ["plain", *speed.ENGINES]
    text = page.read_text()
    assert "| `fedloom --help` | 0.25 | 0.12 |" in text
    assert f"| {after['small1000']['rows'][0]['ms']:.1f} |" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_every_part_has_a_table(speed):
    import speed_page

    assert {*speed_page.ROUNDS, *speed_page.TABLES} == set(speed.PARTS)


def test_an_unknown_part_is_refused(speed, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(speed, monkeypatch, "cora11", "--keep", tmp_path / "kept.jsonl")
    assert "no part cora11; there are cora10, " in capsys.readouterr().err


def test_the_plain_loop_learns(speed, node_federation):
    import plain

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        *_, (val, test) = plain.fedavg(node_federation, 10, 3)
    assert min(val, test) > 0.5  # of three classes


def test_exponents(speed):
    assert speed.slope([1, 10, 100], [3, 30, 300]) == pytest.approx(1)
    assert speed.slope([1, 2, 4], [5, 20, 80]) == pytest.approx(2)


def test_a_job_prints_what_it_measured(speed, capsys, monkeypatch):
    run(speed, monkeypatch, "--job", "crowded", json.dumps({"count": 2, "method": "fedproto"}))
    assert json.loads(capsys.readouterr().out).keys() == {"ms", "mb"}
