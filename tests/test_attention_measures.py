"""The measures of an attention map, against maps small enough to work out by hand."""

import math

import numpy as np
import pytest
import torch

from labkit.attention import measures
from labkit.errors import MaskError

# queries      a     b     c      keys a, b, c
CAUSAL = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]
OPEN = [[0.0, 0.5, 0.5], [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]]
BOTH = np.array([[CAUSAL, OPEN]])  # (layers 1, heads 2, 3, 3)
LN2 = math.log(2)
BY_HAND = {
    measures.entropy: [(0 + LN2 + 1.5 * LN2) / 3, (LN2 + 1.5 * LN2 + 0) / 3],
    measures.mean_distance: [(0 + 0.5 + 0.75) / 3, (1.5 + 0.5 + 2) / 3],
    measures.future_mass: [0, (1 + 0.25) / 3],
    measures.first_token_mass: [(0.5 + 0.25) / 2, (0.25 + 1) / 2],
}


@pytest.mark.parametrize("measure", BY_HAND)
def test_each_measure_is_what_it_is_by_hand(measure):
    by_hand = pytest.approx(BY_HAND[measure], abs=1e-3)
    assert measure(BOTH)[0] == by_hand and measure(BOTH.astype(np.float16))[0] == by_hand
    assert measure(torch.tensor(BOTH, dtype=torch.bfloat16))[0] == by_hand
    assert measure(CAUSAL).shape == () and float(measure(CAUSAL)) == pytest.approx(BY_HAND[measure][0])


def test_queries_are_the_last_positions_and_entropy_is_at_most_that_of_all_keys():
    last_two = np.array(CAUSAL)[1:]  # 2 queries, 3 keys: b and c
    assert float(measures.future_mass(last_two)) == 0
    assert float(measures.first_token_mass(last_two)) == pytest.approx((0.5 + 0.25) / 2)
    assert float(measures.entropy(np.eye(5))) == 0
    assert float(measures.entropy(np.full((4, 5), 0.2))) == pytest.approx(math.log(5))


@pytest.mark.parametrize(
    ("measure", "weights", "message"),
    [
        (measures.entropy, [[0.5, np.nan]], "at least 0 and finite"),
        (measures.future_mass, [[0.5, -0.5]], "at least 0 and finite"),
        (measures.entropy, [0.5, 0.5], "shape"),
        (measures.entropy, np.zeros((3, 2)), "one key for each query"),
        (measures.first_token_mass, [[1.0]], "one token"),
    ],
)
def test_what_cannot_be_measured_is_refused(measure, weights, message):
    with pytest.raises(MaskError, match=message):
        measure(weights)
