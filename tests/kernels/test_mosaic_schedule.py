"""Which tiles the programs of a causal launch take."""

import numpy as np
import pytest

from pallas_kernels.mosaic import schedule


def lists_of(table):
    return [x[1 : 1 + x[0]] for x in table]


# Rows (sequences times heads) and tiles of queries: 8 x 2,048 with 32 heads, and shorter ones.
@pytest.mark.parametrize(("rows", "tiles"), [(256, 16), (256, 8), (128, 16), (64, 16)])
def test_every_tile_once_and_programs_have_less_at_most(rows, tiles):
    lists = lists_of(schedule.causal(rows, tiles, 132))
    assert sorted(np.concatenate(lists)) == list(range(rows * tiles))
    costs = tiles - np.arange(rows * tiles) // rows + 1.3
    in_turn = np.zeros(132)
    for number, cost in enumerate(costs):
        turn, place = divmod(number, 132)
        in_turn[place if turn % 2 == 0 else 131 - place] += cost
    assert max(costs[x].sum() for x in lists) < 0.995 * in_turn.max()


@pytest.mark.parametrize(("rows", "tiles"), [(64, 64), (32, 1024), (3, 5), (200, 1), (1, 1)])
def test_no_table_where_turns_are_as_good(rows, tiles):
    assert schedule.causal(rows, tiles, min(132, rows * tiles)) is None
