"""One party in two processes: refused on one machine, named by both sides on two."""

import os
import shutil

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def live(deploy, patient):
    """A deployment whose first party takes part and waits for the others."""
    d = deploy(parties=("bank-a", "bank-b"), rounds=2)
    d.serve()
    d.until(lambda: "listening" in d.output("coordinator"))
    d.join("bank-a")
    d.until(lambda: "bank-a has joined" in d.output("coordinator"))
    return d


@pytest.mark.parametrize("state", ["state-bank-a", "another"], ids=["folder", "key"])
def test_a_party_that_joins_twice_is_refused_at_once_with_the_other_process(live, state):
    first = live.processes["bank-a"]
    files = ("--key", "bank-a.key", "--data", "bank-a.safetensors", "--state", state)
    second = live.start("second", "join", "federation.toml", "--party", "bank-a", *files)
    assert second.wait() == 2
    said = live.output("second")
    field = "state" if state == "state-bank-a" else "key"
    assert f"fedloom: {field}: another process works on the " in said
    assert f"(pid {first.pid} on {os.uname().nodename}, since " in said
    assert "fedloom join federation.toml --party bank-a" in said
    assert not (live.folder / "another").exists()
    live.join("bank-b")
    live.completed()  # the first one takes part as before
    assert first.wait() == 0


def test_after_a_kill_the_same_party_joins_again(live):
    os.kill(live.processes["bank-a"].pid, 9)
    live.processes["bank-a"].wait()
    live.join("bank-a")
    live.join("bank-b")
    live.completed()


def test_serve_on_the_folder_of_a_live_coordinator_is_refused_with_its_process(live):
    coordinator = live.processes["coordinator"]
    for words in (("serve", "federation.toml", "--keys", ".", "--out", "run"), ("resume", "run")):
        second = live.start("second", *words)
        assert second.wait() == 2
    said = live.output("second")
    assert said.count(f"another process works on the run in 'run' (pid {coordinator.pid} on ") == 1
    assert "'run' is not a run folder" in said  # it has not begun


def test_serve_into_another_folder_is_refused_with_the_process_that_uses_the_key(live):
    second = live.start("second", "serve", "federation.toml", "--keys", ".", "--out", "another")
    assert second.wait() == 2
    first = live.processes["coordinator"].pid
    assert (
        f"key: another process works on the identity of the coordinator in '.' (pid {first} on "
        in live.output("second")
    )


def test_a_party_on_two_machines_is_named_by_the_coordinator_and_by_the_party(deploy, patient):
    run = {"quorum": 0.5, "deadline": 20.0}
    d = deploy(parties=("bank-a", "bank-b"), rounds=1000, run=run)
    d.serve()
    for name in d.parties:
        d.join(name)
    d.until(lambda: d.rounds_done() > 0)
    away = d.folder / "another machine"
    away.mkdir()
    for path in d.folder.glob("*.*"):
        if path.is_file() and path.suffix != ".log":
            shutil.copy(path, away)
    files = ("--key", away / "bank-a.key", "--data", away / "bank-a.safetensors")
    party = ("--party", "bank-a", *files, "--state", away / "state")
    d.start("second", "join", away / "federation.toml", *party)
    d.until(lambda: "two processes take part as party 'bank-a'" in d.output("coordinator"))
    told = "another process takes part as party 'bank-a', with the same key"
    d.until(lambda: told in d.output("bank-a") or told in d.output("second"))
