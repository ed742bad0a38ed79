"""Drafts that are looked up, against a search in Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_tx.generation import ngrams
from tests.tools import to_numpy

NO_TOKEN = -1


def by_search(row, longest, count):
    """What follows the best place in one row of tokens."""

    def rank(place):
        equal = [place >= i and row[place - i] == row[-i] for i in range(1, min(longest, len(row)) + 1)]
        others = [i for i, same in enumerate(equal) if not same]
        return sum(equal[: others[1]] if len(others) > 1 else equal), equal[0], place

    best = max(range(len(row)), key=rank)
    known = list(row)
    for i in range(count):
        known.append(known[best + i])  # the draft itself, once the end is reached
    return known[len(row) :]


def looked_up(rows, longest, count, room=3):
    """`look_up` for rows of any lengths, padded on the left, with empty slots on the right."""
    width = max(len(row) for row in rows)
    ids, real = (np.zeros((len(rows), width + room), dtype) for dtype in ("int32", "bool"))
    last = np.full((len(rows), longest), NO_TOKEN, "int32")
    for i, row in enumerate(rows):
        ids[i, width - len(row) : width], real[i, width - len(row) : width] = row, True
        last[i, max(0, longest - len(row)) :] = row[-longest:]
    arrays = [ops.convert_to_tensor(x) for x in (ids, real)]
    return to_numpy(ngrams.look_up(*arrays, np.int32(width), ops.convert_to_tensor(last), count)).tolist()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),  # what followed 5, 6 before
        ([1, 5, 6, 2, 4, 6, 3, 5, 6], [2, 4, 6, 3]),  # two tokens count more than the later place with one
        ([5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6, 2]),  # the later of two places; from there on the text repeats itself
        ([5, 6, 7, 8, 9, 5, 6, 3], [8, 9, 5, 6]),  # 3 instead of 7
        ([5, 6, 7, 8, 4, 3, 2, 1, 5, 6, 3], [8, 4, 3, 2]),  # two tokens and another one count more than 3 alone
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], [3, 3, 3, 3]),  # nothing is the same
        ([9], [9, 9, 9, 9]),
        ([0, 3, 0], [3, 0, 3, 0]),  # the padding id is a token if it is part of the text
    ],
)
def test_what_followed_the_last_tokens_before(row, expected):
    assert looked_up([row], 3, 4) == [expected]


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4),
    longest=st.integers(1, 4),
    count=st.integers(1, 9),
)
def test_rows_of_any_lengths_get_what_a_search_finds(rows, longest, count):
    assert looked_up(rows, longest, count) == [by_search(row, longest, count) for row in rows]
