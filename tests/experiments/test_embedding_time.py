"""The expected time of embeddings grows with the items and includes what a run repeats."""

import numpy as np
import pytest

from fedloom.experiments.embedding_time import TRIAL, estimated_seconds, growth


def summary(items, **seconds):
    rows = [{"items": items // 2}, {"items": items - items // 2}]
    return {"seconds": seconds, "rounds": 10, "per_client": rows}


def nothing(rows, how):
    """A projection that takes no time worth mentioning."""
    return np.zeros((len(rows), 2))


def test_time_grows_a_little_faster_than_the_items():
    assert growth(TRIAL) == pytest.approx(1)
    assert 2 < growth(2 * TRIAL) < 2.5
    assert growth(3) == 0


def test_loading_set_up_and_one_evaluation_are_repeated():
    about = summary(1000, load=20.0, setup=30.0, train=9999.0, evaluate=100.0, total=10149.0)
    assert estimated_seconds(about, nothing) == pytest.approx(60, abs=1)


def test_no_more_items_count_than_the_figure_shows():
    def counted(rows, how):
        sizes.append(len(rows))
        return rows

    sizes = []
    few, many = (estimated_seconds(summary(n), counted) for n in (2000, 10**9))
    assert many == pytest.approx(few)
    assert max(sizes) == TRIAL  # the trial ran once, on its own items
