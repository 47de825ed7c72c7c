"""A full, read-only or broken disk: the run names the file, and keeps what was complete."""

import errno
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import pytest
from tests.faults.forked import ending, fork

from fedloom import _system
from fedloom._system import AppendLog, write_atomic
from fedloom.experiments import checkpoint
from fedloom.experiments.checkpoint import LATEST
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run

SETTINGS = {"model": "gcn-2x8", "rounds": 30, "checkpoint_every": 1}


def go(federation, folder, **settings):
    return run("fedavg", federation, out=folder, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def unbroken(node_federation, tmp_path_factory):
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken") / "x"
    go(node_federation, folder)
    return folder


def resumes(federation, folder, unbroken, **settings):
    """Whether the run goes on to the end of one that was not disturbed."""
    resumed, whole = go(federation, folder, resume=True, **settings), load_run(unbroken)
    entries = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]
        for result in (resumed, whole)
    ]
    return (
        resumed.summary["history_hash"] == whole.summary["history_hash"]
        and (folder / "ledger.csv").read_bytes() == (unbroken / "ledger.csv").read_bytes()
        and entries[0] == entries[1]
        and not list(folder.rglob("*.new"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "settings"),
    [
        ("history.jsonl", {}),
        (
            "ledger.csv",
            # Without the report on updates, the history is shorter than the ledger.
            {"rounds": 200, "evaluate_every": 200, "checkpoint_every": 50}
            | {"clip_norms": 0.0, "cap_weights": 0.0},
        ),
        (LATEST, {}),
    ],
)
def test_a_full_disk_ends_the_run_with_the_name_of_the_file(
    full, settings, node_federation, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "remove", lambda folder: None)  # so that its size is known
    go(node_federation, tmp_path / "unbroken", **settings)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "unbroken").iterdir()}
    limit = sizes[LATEST] - 100 if full == LATEST else sizes[LATEST] + 100
    assert limit < sizes[full]

    def into_a_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError, match=full) as raised:
            go(node_federation, tmp_path / "x", **settings)
        assert raised.value.errno == errno.EFBIG

    assert ending(fork(into_a_full_disk)) == 0
    kept = load_run(tmp_path / "x")
    assert kept.summary["status"] == "failed"
    assert kept.summary["cause"] == f"OSError: [Errno 27] File too large: '{tmp_path / 'x' / full}'"
    assert not list((tmp_path / "x").rglob("*.new"))
    for file in ("history.jsonl", "ledger.csv"):
        assert (tmp_path / "x" / file).read_bytes().endswith(b"\n")  # no half line
    assert resumes(node_federation, tmp_path / "x", tmp_path / "unbroken", **settings)


def test_a_folder_that_becomes_read_only_ends_the_run(node_federation, unbroken):
    # In /tmp, because the child changes from root to a user that may not write elsewhere.
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        folder = Path(place) / "x"

        def close(entry):
            if entry["round"] == 3:
                os.chmod(folder, 0o555)

        def in_a_folder_that_closes():
            if os.getuid() == 0:
                os.setuid(65534)
            with pytest.raises(PermissionError, match=LATEST) as raised:
                go(node_federation, folder, callbacks=close)
            assert any(
                "summary.json" in note for note in raised.value.__notes__
            )  # it could not be written either

        assert ending(fork(in_a_folder_that_closes)) == 0
        os.chmod(folder, 0o755)
        assert load_run(folder).summary["status"] == "unfinished"
        assert resumes(node_federation, folder, unbroken)


def test_an_error_of_the_disk_is_told_and_survived(
    node_federation, unbroken, tmp_path, monkeypatch
):
    def break_at(entry):
        if entry["round"] == 5:
            monkeypatch.setattr(_system.os, "fsync", broken)

    def broken(handle):
        monkeypatch.undo()  # once
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match=r"Input/output error: .*history\.jsonl"):
        go(node_federation, tmp_path / "x", callbacks=break_at)
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 5)
    assert (
        summary["cause"]
        == f"OSError: [Errno 5] Input/output error: '{tmp_path / 'x' / 'history.jsonl'}'"
    )
    assert resumes(node_federation, tmp_path / "x", unbroken)


@pytest.mark.parametrize("content", [b"", b"x", b"a line\n" * 1000])
def test_what_cannot_be_put_in_place_leaves_what_was_there(content, tmp_path, monkeypatch):
    write_atomic(tmp_path / "file", b"before")
    log = AppendLog(tmp_path / "log")
    log.append(b"before\n")

    def broken(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_system, "_write", broken)
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"):
        write_atomic(tmp_path / "file", content)
    with pytest.raises(OSError, match=r"No space left on device: '.*log'"):
        log.append(content)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "file": b"before",
        "log": b"before\n",
    }
    log.append(b"after\n")
    assert log.read() == "before\nafter\n"


def test_jumps_of_the_clock_change_nothing(node_federation, unbroken, tmp_path, monkeypatch):
    now, jumps = time.time(), 0

    def jumping():
        nonlocal jumps
        jumps += 1
        return now + (3600 if jumps % 2 else -3600)

    monkeypatch.setattr(time, "time", jumping)
    jumped = go(node_federation, tmp_path / "x")
    assert jumped.summary["history_hash"] == load_run(unbroken).summary["history_hash"]
    assert all(0 <= seconds < 60 for seconds in jumped.summary["seconds"].values())
    assert [entry["seconds"] for entry in jumped.history] == sorted(
        entry["seconds"] for entry in jumped.history
    )
