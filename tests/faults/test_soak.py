"""Memory does not grow with the rounds of a run in a folder; see also `bench/soak.py`."""

import gc
import tracemalloc

import pytest

from fedloom.experiments.run import run
from fedloom.experiments.run_folder import read_history


def growth(federation, rounds, out):
    """Returns the growth of Python's memory per round, in bytes, after a third of the rounds."""
    held = {}

    def look(entry):
        if entry["round"] in (rounds // 3, rounds):
            gc.collect()
            held[entry["round"]] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(
            "fedavg",
            federation,
            model="gcn-2x8",
            epochs=1,
            rounds=rounds,
            checkpoint_every=10,
            out=out,
            callbacks=look,
        )
    finally:
        tracemalloc.stop()
    return (held[rounds] - held[rounds // 3]) / (rounds - rounds // 3)


@pytest.mark.slow
def test_what_is_in_the_folder_is_not_in_memory(node_federation, tmp_path):
    assert growth(node_federation, 150, tmp_path / "x") < 1024
    assert len(read_history(tmp_path / "x")) == 150


@pytest.mark.slow
def test_without_a_folder_everything_is(node_federation):
    """The control: without a folder, memory grows."""
    assert growth(node_federation, 150, None) > 2000


def test_the_history_is_read_when_it_is_asked_for(node_federation, tmp_path):
    result = run("fedavg", node_federation, model="gcn-2x8", rounds=3, out=tmp_path / "x")
    assert result.entries == []
    assert [entry["round"] for entry in result.history] == [1, 2, 3]
    assert result.history is result.history
