"""Run folders and what is in them: their owner's only, whatever the umask."""

import os
import stat
from pathlib import Path

import pytest

import fedloom
from fedloom._system import make_private, write_atomic


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["000", "022", "077"])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder):
    """Returns the modes of the files and of the folders in a folder, itself included."""
    found = [folder, *Path(folder).rglob("*")]
    return {mode(p) for p in found if p.is_file()}, {mode(p) for p in found if p.is_dir()}


@pytest.fixture(scope="module")
def federation():
    graph = fedloom.load("synthetic:nodes=60,classes=3,features=8")
    return fedloom.divide(graph, 2, "random", 0)


QUICK = {"model": "gcn-2x8", "checkpoint_every": 1}


def test_a_run_folder_and_all_its_files_are_private(umask, federation, tmp_path):
    out = tmp_path / "runs" / "x"
    seen = []

    def during(entry):
        seen.append(modes(out))

    fedloom.run("fedavg", federation, rounds=3, out=out, callbacks=during, **QUICK)
    assert (out / "models" / "best" / "server.safetensors").exists()
    assert modes(out) == ({0o600}, {0o700})
    assert set(map(str, seen)) == {str(({0o600}, {0o700}))}  # checkpoint and history meanwhile
    assert mode(tmp_path / "runs") == 0o700


def test_a_stopped_run_leaves_private_checkpoints(umask, federation, tmp_path):
    def stop(entry):
        if entry["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedloom.run("fedavg", federation, rounds=9, out=tmp_path / "x", callbacks=stop, **QUICK)
    assert (tmp_path / "x" / "checkpoint.safetensors").exists()
    assert modes(tmp_path / "x") == ({0o600}, {0o700})


def test_a_folder_that_exists_keeps_its_mode_and_gets_private_files(federation, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    fedloom.run("fedavg", federation, rounds=1, out=shared, **QUICK)
    assert mode(shared) == 0o755
    assert modes(shared)[0] == {0o600}


def test_a_file_of_an_older_version_loses_the_access_of_others(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_atomic(path, b"new")
    assert mode(path) == 0o600


def test_what_a_user_exports_follows_the_umask(federation, tmp_path):
    result = fedloom.run("fedavg", federation, rounds=1, out=tmp_path / "x", **QUICK)
    before = os.umask(0o022)
    try:
        made = (
            result.save(tmp_path / "model.safetensors", client="0"),
            fedloom.report(tmp_path / "x", tmp_path / "report.html"),
        )
    finally:
        os.umask(before)
    assert {mode(path) for path in made} == {0o644}


def test_a_path_that_is_a_file_is_no_folder(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(OSError, match="exists"):
        make_private(tmp_path / "x")
