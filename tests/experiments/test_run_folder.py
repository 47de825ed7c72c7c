"""Run folders: which can be used, and why others cannot."""

import json
import re
import subprocess
import sys

import pytest

from fedloom import commands
from fedloom._system import without_control
from fedloom.experiments.run import run
from fedloom.experiments.run_folder import (
    FORMAT,
    find,
    gather,
    open_run,
    read_history,
    read_summary,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, node_federation):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run("fedavg", node_federation, model="gcn-2x8", rounds=3, out=folder)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """Returns a function that copies the folder and changes entries of the summary."""

    def make(name, **changed):
        folder = tmp_path / name
        folder.mkdir()
        for path in finished.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
        summary = {
            key: value
            for key, value in (json.loads((folder / "summary.json").read_text()) | changed).items()
            if value != "gone"
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


def test_a_finished_run_is_read_back(finished):
    found = open_run(finished)
    assert found.summary["format"] == FORMAT
    assert [entry["round"] for entry in found.curve] == [1, 2, 3]
    assert found.curve[-1]["bytes_up"] == found.summary["traffic"]["bytes_up"]
    assert found.curve[-1]["bytes_down"] == found.summary["traffic"]["bytes_down"]
    assert "clients" not in found.curve[0]
    assert "clients" in read_history(finished)[0]
    assert [c["name"] for c in found.partition["clients"]] == ["0", "1", "2", "3"]


def test_traffic_by_round_only_grows(finished):
    sent = [entry["bytes_up"] for entry in open_run(finished).curve]
    assert sent == sorted(sent)
    assert sent[0] > 0


REASONS = {
    "another version": (
        lambda copy: copy("x", format="fedloom-run/9"),
        "from another version: its summary says fedloom-run/9",
    ),
    "before versions": (
        lambda copy: copy("x", format="gone"),
        "from another version: .* before there were any",
    ),
    "failed": (
        lambda copy: copy("x", status="failed", cause="ValueError: no"),
        r"unfinished: failed \(ValueError: no\)",
    ),
    "stopped": (
        lambda copy: copy("x", status="stopped", cause="interrupted"),
        r"unfinished: stopped \(interrupted\)",
    ),
    "an entry is gone": (
        lambda copy: copy("x", traffic="gone"),
        "damaged: summary.json has no traffic",
    ),
    "another's history": (
        lambda copy: copy("x", rounds=7),
        "damaged: history.jsonl ends with round 3, summary.json with 7",
    ),
    "killed": (
        lambda copy: _without(copy("x"), "summary.json"),
        "unfinished: under way or killed, last round 3",
    ),
    "half a summary": (lambda copy: _spoilt(copy("x"), "summary.json"), r"damaged \(summary.json"),
    "half a line": (
        lambda copy: _spoilt(copy("x"), "history.jsonl", "{\n"),
        "damaged: JSONDecodeError",
    ),
    "history gone": (
        lambda copy: _without(copy("x"), "history.jsonl"),
        "damaged: history.jsonl ends with round 0",
    ),
    "partition": (lambda copy: _spoilt(copy("x"), "partition.json", "[]"), "damaged: ValueError"),
}


def _without(folder, name):
    (folder / name).unlink()
    return folder


def _spoilt(folder, name, text='{"status": "comp'):
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("case", REASONS)
def test_an_unusable_folder_is_left_out_with_a_reason(case, copy, finished):
    make, words = REASONS[case]
    bad = make(copy)
    runs, left_out = gather([finished, bad])
    assert [r.folder for r in runs] == [finished]
    ((folder, reason),) = left_out
    assert folder == str(bad)
    assert re.search(words, reason)


def test_an_incomplete_line_does_not_count(copy):
    folder = copy("x")
    with open(folder / "history.jsonl", "a") as file:
        file.write('{"round": 4, "acc')
    assert [entry["round"] for entry in read_history(folder)] == [1, 2, 3]
    assert open_run(folder).summary["rounds"] == 3


def test_folders_are_found_below_others(copy, tmp_path, finished):
    one, two = copy("b"), copy("a")
    assert find(tmp_path) == [two, one]
    assert find(one) == [one]
    assert find(tmp_path / "nothing") == []
    runs, left_out = gather([tmp_path / "nothing", tmp_path])
    assert [r.folder for r in runs] == [two, one]
    assert left_out == [(str(tmp_path / "nothing"), "there is no run folder")]
    assert read_summary(tmp_path) is None


def test_reading_folders_does_not_import_torch():
    script = (
        "import sys\n"
        "from fedloom.experiments.report import comparison, figures\n"
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def test_the_escape_sequences_of_a_stranger_do_not_reach_the_terminal(copy, monkeypatch, capsys):
    folder = copy("stranger", method="fed\x1b[2Javg\x07", cause="\x9b31m gone")
    commands.show(folder, as_json=False)
    assert "fed\ufffd[2Javg\ufffd" in capsys.readouterr().out
    # The control: without the cleaning the terminal gets them.
    monkeypatch.setattr("fedloom.experiments.run_folder.without_control", lambda content: content)
    commands.show(folder, as_json=False)
    assert "\x1b[2J" in capsys.readouterr().out


def test_newlines_tabs_and_other_scripts_stay():
    content = {"a\nb\tc": ["γ 図 👩‍🔬", 1, None, True]}
    assert without_control(content) == content
