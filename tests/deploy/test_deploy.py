"""`fedloom serve` and `fedloom join` as users run them, and the failures that a run survives."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from deployment import (
    WAIT_SECONDS,
    Wire,
    absent_in,
    free_port,
    kill,
    port_is_free,
    same_weights,
)
from safetensors.torch import load_file
from torch_geometric.data import Data

import fedloom
from fedloom.data.files import to_folder
from fedloom.deploy import request_signature

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
patient = pytest.mark.usefixtures("patient")


# ---- one run that does not end, shared by the tests below ----
@pytest.fixture(scope="module")
def shared_run(deploy_once):
    """A run of 100,000 rounds that bank-c joins late. Tests leave it with all parties running."""
    d = deploy_once(
        rounds=100_000,
        method="slow.py",
        settings={"seconds": 0.2},
        run={"quorum": 0.5, "retries": 100},
    )
    for name in d.parties[:2]:
        d.join(name)
    d.serve("--wait", 15)
    d.until(lambda: d.rounds_done() >= 2)
    d.join("bank-c")
    return d


def takes_part(d, name):
    """Returns whether a party was present in the last round."""
    entry = d.history()[-1]
    return name not in absent_in(entry) and any(row["id"] == name for row in entry["clients"])


@pytest.fixture
def endless(shared_run):
    """The shared run, with its coordinator and all parties present."""
    d = shared_run
    if d.processes["coordinator"].poll() is not None:
        d.resume()
    before = d.rounds_done()
    d.until(lambda: d.rounds_done() > before and all(takes_part(d, name) for name in d.parties))
    return d


def test_a_party_that_joins_late_takes_part_from_then_on(endless):
    first = endless.history()[0]
    assert "bank-c" in absent_in(first)
    causes = [a["cause"] for a in first["absent"] if a["client"] == "bank-c"]
    assert all(cause.endswith("has not joined") for cause in causes)
    assert "bank-c has joined late: 36 items" in endless.output("coordinator")


def test_a_killed_party_is_left_out_and_comes_back(endless):
    d = endless
    kill(d.processes["bank-b"])
    d.until(lambda: "bank-b" in absent_in(d.history()[-1]))
    d.join("bank-b")
    d.until(lambda: takes_part(d, "bank-b"))
    absences = [a for entry in d.history() for a in entry.get("absent", ())]
    causes = [a["cause"] for a in absences if a["client"] == "bank-b"]
    assert any("no sign of life" in cause for cause in causes)
    assert any("was restarted" in cause for cause in causes)


def test_ctrl_c_stops_the_coordinator_and_nothing_is_left(endless):
    d = endless
    process, superlink = d.processes["coordinator"], d.superlink()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert d.summary()["status"] == "stopped"
    assert (d.folder / "run" / "checkpoint.safetensors").exists()
    d.until(lambda: not Path(f"/proc/{superlink}").exists())
    assert port_is_free(d.port)
    waiting = [d.processes[name].poll() is None for name in d.parties]
    assert waiting == [True, True, True]  # the parties wait for the coordinator


# ---- runs of their own ----
@patient
def test_a_run_is_bit_identical_to_the_loop_and_models_stay_with_their_parties(deploy):
    d = deploy(rounds=2)
    d.serve()
    joined = d.join_all()
    summary = d.completed()
    reference = d.reference()
    assert summary["history_hash"] == reference.summary["history_hash"]
    assert summary["accuracy"] == reference.accuracy
    assert summary["traffic"] == reference.traffic
    assert summary["engine_details"]["refused"] == {}
    assert [process.wait() for process in joined] == [0, 0, 0]
    for name in d.parties:
        model = load_file(d.folder / f"state-{name}" / "model.safetensors")
        assert same_weights(model, reference.models[name])
    saved = {path.name for path in (d.folder / "run" / "models").glob("*/*")}
    assert saved == {"server.safetensors"}  # the coordinator has only the global model
    assert port_is_free(d.port)


@patient
def test_after_kills_of_superlink_coordinator_and_all_the_result_is_bit_identical(deploy):
    d = deploy(rounds=6, method="slow.py")
    d.serve()
    parties = d.join_all()
    d.until(lambda: d.rounds_done() >= 1)

    os.kill(d.superlink(), signal.SIGKILL)  # the coordinator starts it again
    d.until(lambda: "starting it again" in d.output("coordinator"))
    d.until(lambda: d.rounds_done() >= 2)

    kill(d.processes["coordinator"])  # the SuperLink ends with it; parties need no restart
    d.until(lambda: port_is_free(d.port))
    d.resume()
    d.until(lambda: d.rounds_done() >= 4)
    assert [process.poll() for process in parties] == [None, None, None]

    for process in d.processes.values():
        kill(process)
    d.until(lambda: port_is_free(d.port))
    d.join_all()  # with the states that they have saved
    d.resume()
    summary = d.completed()
    reference = d.reference()
    assert summary["history_hash"] == reference.summary["history_hash"]
    assert [entry["round"] for entry in d.history()] == [1, 2, 3, 4, 5, 6]
    for name in d.parties:
        assert d.processes[name].wait() == 0
        model = load_file(d.folder / f"state-{name}" / "model.safetensors")
        assert same_weights(model, reference.models[name])


@patient
def test_on_this_machine_a_run_without_tls_works_with_insecure(deploy):
    d = deploy(parties=("bank-a", "bank-b"), rounds=1, tls=False)
    d.serve("--insecure")
    for name in d.parties:
        d.join(name, "--insecure")
    assert d.completed()["history_hash"] == d.reference().summary["history_hash"]
    refused = d.start("other", "serve", "federation.toml", "--keys", ".", "--out", "other")
    assert refused.wait() == 2
    assert "--insecure" in d.output("other")


@patient
def test_a_party_that_is_cut_off_for_a_while_loses_nothing(deploy):
    d = deploy(rounds=5, method="slow.py", settings={"seconds": 0.8})
    wire = Wire(d.port)
    d.write("through.toml", address=f"127.0.0.1:{wire.port}")
    d.serve()
    for name in d.parties:
        d.join(name, agreement="through.toml" if name == "bank-b" else "federation.toml")
    try:
        d.until(lambda: d.rounds_done() >= 1)
        wire.cut()
        d.until(lambda: "lost the coordinator" in d.output("bank-b"))
        time.sleep(2)
        wire.mend()
        d.until(lambda: d.rounds_done() >= 3)
        wire.corrupt = 1  # TLS notices it, and both ends close the connection
        summary = d.completed()
    finally:
        wire.close()
    assert wire.corrupt == 0
    assert summary["absences"] == {}
    assert summary["history_hash"] == d.reference().summary["history_hash"]


def cut_off(d):
    """Starts a deployment. Returns the lines of bank-b and bank-c, which can be cut."""
    wires = {name: Wire(d.port) for name in ("bank-b", "bank-c")}
    d.serve()
    d.join("bank-a")
    for name, wire in wires.items():
        d.join(name, agreement=d.write(f"{name}.toml", address=f"127.0.0.1:{wire.port}").name)
    d.until(lambda: d.rounds_done() >= 1)
    wires["bank-b"].cut()  # connections are closed, new ones are refused
    wires["bank-c"].fall_silent()  # nothing passes, without an error
    return wires.values()


def test_parties_that_are_cut_off_for_30_s_finish_their_round_if_the_deadline_allows(deploy):
    run = {"quorum": 0.3, "deadline": 600.0}
    d = deploy(rounds=4, method="slow.py", settings={"seconds": 1.0}, run=run)
    wires = cut_off(d)
    try:
        before = d.rounds_done()
        time.sleep(30)
        assert d.rounds_done() <= before + 1  # a round that was nearly done may complete
        for wire in wires:
            wire.mend()
        summary = d.completed()
    finally:
        for wire in wires:
            wire.close()
    assert summary["absences"] == {}
    assert summary["history_hash"] == d.reference().summary["history_hash"]


def test_with_a_short_silence_parties_that_are_cut_off_are_left_out(deploy):
    run, federation = {"quorum": 0.3, "deadline": 600.0}, {"silence": 7, "closed": 7}
    settings = {"seconds": 0.3}
    d = deploy(rounds=9999, method="slow.py", settings=settings, run=run, federation=federation)
    wires = cut_off(d)
    try:
        d.until(lambda: absent_in(d.history()[-1]) >= {"bank-b", "bank-c"})
    finally:
        for wire in wires:
            wire.close()
    causes = [a["cause"] for entry in d.history() for a in entry.get("absent", ())]
    assert any("no sign of life" in cause for cause in causes)


@patient
def test_a_party_that_raises_is_absent_and_its_error_message_stays_with_it(deploy):
    settings = {"seconds": 0.0, "fails": "bank-b,bank-c"}
    d = deploy(rounds=2, method="slow.py", settings=settings, run={"quorum": 0.3})
    d.serve()
    d.join("bank-a")
    d.join("bank-b")
    d.join("bank-c", "--tell-errors")
    summary = d.completed()
    absences = [a for entry in d.history() for a in entry["absent"] if a["phase"] == "train"]
    causes = {name: [a["cause"] for a in absences if a["client"] == name] for name in d.parties}
    assert causes["bank-c"] == 2 * ["RuntimeError: the disk of this party is full of sand"]
    assert len(causes["bank-b"]) == 2
    assert d.processes["bank-b"].wait() == 0
    log = (d.folder / "state-bank-b" / "errors.log").read_text()
    pattern = "RuntimeError: the message stays with the party, (as error [0-9a-f]{8})"
    for cause in causes["bank-b"]:
        assert re.fullmatch(pattern, cause)[1] in log
    assert log.count("RuntimeError: the disk of this party is full of sand") == 2
    assert "errors.log" in d.output("bank-b")
    assert not (d.folder / "state-bank-c" / "errors.log").exists()
    assert summary["absences"]["bank-c"] == summary["absences"]["bank-b"] == 2
    assert summary["history_hash"] == d.reference(quorum=0.3).summary["history_hash"]


@patient
def test_a_stopped_party_is_late_and_its_late_answer_does_not_count(deploy):
    d = deploy(
        rounds=100_000,
        method="slow.py",
        settings={"seconds": 0.2},
        # Without checkpoints, only phases are ordered: control orders have another deadline.
        run={"quorum": 0.5, "deadline": 10.0, "retries": 100, "checkpoint_every": 0},
    )
    d.serve()
    d.join_all()
    d.until(lambda: d.rounds_done() >= 1 and takes_part(d, "bank-a"))
    process = d.processes["bank-a"]
    os.kill(process.pid, signal.SIGSTOP)
    d.until(lambda: "bank-a" in absent_in(d.history()[-1]))
    os.kill(process.pid, signal.SIGCONT)
    d.until(lambda: takes_part(d, "bank-a"))
    absences = [a for entry in d.history() for a in entry.get("absent", ())]
    causes = [a["cause"] for a in absences if a["client"] == "bank-a"]
    assert any(cause.startswith("late: no answer within") for cause in causes)
    os.kill(d.processes["coordinator"].pid, signal.SIGINT)
    d.processes["coordinator"].wait()
    assert d.summary()["engine_details"]["refused"]["late"] >= 1


def test_a_party_whose_clock_is_off_ends_with_one_line_that_has_the_offset(deploy, monkeypatch):
    d = deploy(parties=("bank-a", "bank-b"), rounds=1)
    d.serve()
    d.until(lambda: "listening" in d.output("coordinator"))
    right = time.time
    monkeypatch.setattr(request_signature.time, "time", lambda: right() - 1000)
    assert d.join("bank-a").wait() == 2
    words = "the clock of this party is 1000 s behind the coordinator's, which allows 5 s ahead and"
    assert f"refuses: {words} 300 s behind; set the clock" in d.output("bank-a")
    assert "Traceback" not in d.output("bank-a")


def test_a_graph_that_does_not_match_the_agreement_ends_join_with_exit_code_2(deploy):
    d = deploy(rounds=2)
    to_folder(fedloom.load("synthetic:nodes=60,features=5"), d.folder / "narrow")
    given = ("--party", "bank-a", "--key", "bank-a.key", "--data", "narrow")
    assert d.start("bank-a", "join", "federation.toml", *given).wait() == 2
    assert "num_features of 'narrow' is 5, the agreement says 8" in d.output("bank-a")


def test_the_commands_of_the_page_run(tmp_path):
    """The commands of docs/deploy.md, with 127.0.0.1 in place of the example's host."""
    page, port = (ROOT / "docs" / "deploy.md").read_text(), free_port()
    blocks = re.findall(r"```bash\n(.*?)\n```", page, re.S)
    commands = [block.replace("fed.example.org", "127.0.0.1") for block in blocks]
    agreement = re.search(r"```toml\n(.*?)```", page, re.S)[1]
    keys, (serve, *joins, show, predict), life = commands[:3], commands[3:8], commands[8:]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {
        "shell": True,
        "cwd": tmp_path,
        "env": {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    for command in keys:
        subprocess.run(command, check=True, **options)
    files = {"ca.crt": "keys", "coordinator.pub": "keys"}
    for name, folder in {**files, "bank-a.pub": "bank-a", "bank-b.pub": "bank-b"}.items():
        (tmp_path / name).write_bytes((tmp_path / folder / name).read_bytes())
    address = agreement.replace("fed.example.org:8443", f"127.0.0.1:{port}")
    (tmp_path / "federation.toml").write_text(address)
    graph = fedloom.load("synthetic:nodes=200,features=16,classes=4")
    one, other = fedloom.divide(graph, 2, "random", 0).graphs
    to_folder(one, tmp_path / "graph-a")
    torch.save(Data(x=other.x, edge_index=other.edge_index, y=other.y), tmp_path / "graph-b.pt")
    started = [
        subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, **options)
        for command in (serve, *joins)
    ]
    try:
        outputs = [process.communicate(timeout=WAIT_SECONDS) for process in started]
        assert [process.returncode for process in started] == [0, 0, 0], outputs
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert "completed" in subprocess.run(show, check=True, **options).stdout
    assert "federating" in outputs[1][1]  # what join printed
    to_folder(other, tmp_path / "new-a")
    subprocess.run(predict, check=True, **options)
    with open(tmp_path / "predictions.csv") as table:
        assert len(table.readlines()) == 1 + other.num_nodes
    for command in life:
        subprocess.run(command, check=True, **options)
    assert (tmp_path / "bank-a" / "bank-a.2.pub").exists()
    assert "revoked on" in subprocess.run(life[0], check=True, **options).stdout


# ---- refusals: one line, exit code 2 ----
def joined(d, data, *more, agreement="federation.toml", party="bank-a"):
    """Returns the exit code and the output of a `fedloom join` that is refused."""
    given = ("--party", party, "--key", f"{party}.key", "--data", data)
    code = d.start(party, "join", agreement, *given, *more).wait()
    return code, d.output(party)


def write_tables(folder, labels, columns="sum", values=("1", "2", "3", "4")):
    folder.mkdir()
    rows = zip("abcd", labels, values, strict=True)
    lines = [f"id,label,{columns}", *(",".join(row) for row in rows)]
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    (folder / "edges.csv").write_text("source,target\na,b\nc,d\n")


def test_a_party_whose_data_do_not_match_is_refused_with_one_line_and_exit_code_2(deploy):
    d = deploy(rounds=2)
    text = (d.folder / "federation.toml").read_text()
    named = re.sub(
        r"num_features = .*\nnum_classes = .*\n",
        'class_names = ["ok", "fraud"]\nfeature_names = ["sum"]\n',
        text,
    )
    (d.folder / "named.toml").write_text(named)
    raw = named.replace('feature_names = ["sum"]\n', "").replace(
        "[model]", '[data.columns]\nsum = "number"\n[model]'
    )
    (d.folder / "raw.toml").write_text(raw)
    write_tables(d.folder / "theft", ("ok", "theft", "ok", "theft"))
    write_tables(d.folder / "income", ("ok", "fraud", "ok", "fraud"), columns="income")
    write_tables(d.folder / "words", ("ok", "fraud", "ok", "fraud"), values=("1", "2", "x", "4"))
    cases = {
        ("theft", "named.toml"): "its classes: ok, theft; agreed classes: ok, fraud",
        ("income", "named.toml"): "it lacks sum; it has, besides those of the agreement, income",
        ("theft", "federation.toml"): "num_features of 'theft' is 1, the agreement says 8",
        ("words", "raw.toml"): "column 'sum': 'x' is not a finite number",
        ("income", "raw.toml"): "no column 'sum'. Columns there: id, label, income",
    }
    for (data, agreement), words in cases.items():
        (d.folder / "bank-a.log").unlink(missing_ok=True)
        code, output = joined(d, data, agreement=agreement)
        assert (code, words in output) == (2, True), output
        assert output.startswith("fedloom: "), output
        assert (d.folder / "bank-a.log").read_text().count("\n") == 1
    assert not (d.folder / "fedloom-bank-a").exists()


def test_a_party_with_another_agreement_ends_and_so_does_the_coordinator(deploy):
    d = deploy(parties=("bank-a", "bank-b"), rounds=1)
    d.write("other.toml", rounds=9)
    coordinator = d.serve()
    code, output = joined(d, "bank-a.safetensors", agreement="other.toml")
    assert code == 2
    words = "method.rounds is 9 at the party and 1 at the coordinator"
    assert f"the coordinator refuses party 'bank-a': it has agreed to something else: {words}" in (
        output
    )
    assert coordinator.wait() == 2
    assert words in d.output("coordinator")
