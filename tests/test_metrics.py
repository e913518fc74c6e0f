import numpy as np
import pytest

from coterie.runs import metrics

LABELS, GROUPS = np.array([3, 3, 1, 1, 1, 7]), np.array([0, 0, 1, 1, 0, 0])


def test_by_hand():
    assert metrics.contingency(LABELS, GROUPS).tolist() == [[1, 2], [2, 0], [1, 0]]
    assert metrics.matched_accuracy(LABELS, GROUPS) == pytest.approx(4 / 6)
    assert metrics.purity(LABELS, GROUPS) == pytest.approx(5 / 6)


@pytest.mark.parametrize("score", [metrics.ari, metrics.nmi, metrics.purity, metrics.matched_accuracy])
def test_label_numbers_mean_nothing(score):
    rename = np.array([9, 4, 0])
    assert score(rename[GROUPS], GROUPS) == pytest.approx(1)
