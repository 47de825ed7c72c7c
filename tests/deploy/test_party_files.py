"""What a coordinator and its parties write: their owner's only, whatever the umask."""

import os
import stat

import pytest
from in_process import InProcess


@pytest.fixture(params=[0o000, 0o022], ids=["000", "022"])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_states_models_scores_and_errors_of_parties_are_private(umask, tmp_path):
    settings = {"seconds": 0, "fails": "bank-b"}
    run = {"quorum": 0.5}
    deployed = InProcess(tmp_path, rounds=2, method="slow.py", settings=settings, run=run)
    deployed.serve()
    for party in deployed.transport.parties.values():
        party.conclude()
    for folder in (tmp_path / "run", tmp_path / "state-bank-a", tmp_path / "state-bank-b"):
        inside = [folder, *folder.rglob("*")]
        assert {stat.S_IMODE(p.stat().st_mode) for p in inside if p.is_dir()} == {0o700}
        assert {stat.S_IMODE(p.stat().st_mode) for p in inside if p.is_file()} == {0o600}
    names = {path.name for path in (tmp_path / "state-bank-a").rglob("*")}
    assert {"model.safetensors", "scores.json", "history.jsonl", "states"} <= names
    assert (tmp_path / "state-bank-b" / "errors.log").exists()
