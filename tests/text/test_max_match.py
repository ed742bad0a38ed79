"""`BertTokenizer.tokenize(dropout=)`: other spellings of the same words, as likely as the paper has it."""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.text import BertTokenizer
from tests.text.test_text_parity import TRICKY

BASE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = [*BASE, "a", "ab", "abc", "##a", "##b", "##c", "##bc"]  # ids 5 to 11
NEVER, ALWAYS = 1e-12, 1 - 1e-12


@pytest.fixture(scope="module")
def small():
    return BertTokenizer(SMALL)


def words_of(tokenizer, ids):
    """The words that rows of ids spell."""
    return [
        " ".join(tokenizer.vocabulary[i] for i in row).replace(" ##", "") if len(row) else "" for row in ids.to_list()
    ]


@pytest.fixture(scope="module")
def in_graph(uncased):
    """From a dropout to the function of texts and seeds, traced once for all examples."""
    signature = [tf.TensorSpec([None], tf.string), tf.TensorSpec([2], tf.int32)]

    @cache
    def function(dropout):
        return tf.function(lambda x, seed: uncased.tokenize(x, dropout=dropout, seed=seed), input_signature=signature)

    return function


@given(st.lists(st.text(max_size=30) | st.sampled_from(TRICKY), max_size=40))
def test_without_luck_nothing_is_dropped(uncased, in_graph, texts):
    blobs = tf.constant([one.encode("utf-8", "replace") for one in texts], tf.string)
    assert in_graph(NEVER)(blobs, (1, 2)).to_list() == uncased.tokenize(blobs).to_list()


@pytest.mark.parametrize("dropout", [0.2, 0.7, ALWAYS])
def test_words_stay_the_same(uncased, in_graph, sentences, dropout):
    texts = [*TRICKY, *sentences]
    ours, plain, sampled = uncased, uncased.tokenize(texts), in_graph(dropout)(texts, (3, 4))
    assert words_of(ours, sampled) == words_of(ours, plain)
    assert sampled.values.shape[0] > plain.values.shape[0]


def test_always_dropped_leaves_the_shortest(small):
    assert small.tokenize(["abc", "a abca"], dropout=ALWAYS).to_list() == [[5, 9, 10], [5, 5, 9, 10, 8]]


def test_how_likely_spellings_are(small):
    rate, count = 0.3, 20000
    rows = [tuple(row) for row in small.tokenize(["abc"] * count, dropout=rate, seed=(1, 2)).to_list()]
    expected = {
        (7,): 1 - rate,
        (6, 10): rate * (1 - rate),
        (5, 11): rate**2 * (1 - rate),
        (5, 9, 10): rate**3,
    }
    assert set(rows) == set(expected)
    for row, likely in expected.items():
        assert abs(rows.count(row) / count - likely) < 4 * np.sqrt(likely * (1 - likely) / count)


def test_words_of_a_text_are_drawn_apart(small):
    (row,) = small.tokenize(["abc " * 50], dropout=0.5, seed=(3, 4)).to_list()
    assert 50 < len(row) < 150


def test_pieces_of_a_word_are_drawn_apart():
    tokenizer = BertTokenizer([*BASE, "x", "##b", "##c", "##bc"])
    drawn = set(map(tuple, tokenizer.tokenize(["xbcbc"] * 40, dropout=0.5, seed=(9, 1)).to_list()))
    assert drawn == {(5, 8, 8), (5, 6, 7, 8), (5, 8, 6, 7), (5, 6, 7, 6, 7)}


def test_what_leads_nowhere_is_spelled_as_without():
    tokenizer = BertTokenizer([*BASE, "a", "ab", "##c"])
    assert tokenizer.tokenize(["abc"] * 40, dropout=0.5).to_list() == [[6, 7]] * 40
    without_inside = BertTokenizer([*BASE, "a", "ab"])
    assert without_inside.tokenize(["ab a abc"], dropout=ALWAYS).to_list() == [[6, 5, 1]]


def test_a_seed_draws_the_same_in_every_graph(small):
    texts = ["abc abcabc", "", "ab"] * 30
    first = small.tokenize(texts, dropout=0.5, seed=(5, 6)).to_list()
    assert small.tokenize(texts, dropout=0.5, seed=(5, 6)).to_list() == first
    assert small.tokenize(texts, dropout=0.5, seed=(5, 7)).to_list() != first
    assert small.tokenize(texts, dropout=0.5).to_list() != small.tokenize(texts, dropout=0.5).to_list()
    batches = tf.data.Dataset.from_tensor_slices(texts).batch(len(texts)).enumerate(6)
    (rows,) = batches.map(lambda number, batch: small.tokenize(batch, dropout=0.5, seed=(5, number)))
    assert rows.to_list() == first


def test_one_string_and_no_string(small):
    assert small.tokenize("abc", dropout=ALWAYS).numpy().tolist() == [5, 9, 10]
    assert small.tokenize([], dropout=0.5).to_list() == []
    assert small.tokenize(["", " "], dropout=0.5).to_list() == [[], []]


@pytest.mark.parametrize("dropout", [1, -0.1, float("nan"), "0.1", True])
def test_a_wrong_dropout(small, dropout):
    with pytest.raises(ValueError, match=r"argument `dropout` must be a number in \[0, 1\)"):
        small.tokenize(["a"], dropout=dropout)


@pytest.mark.parametrize("seed", [7, (1, 2, 3), (0.5, 1.0)])
def test_a_wrong_seed(small, seed):
    with pytest.raises(ValueError, match="`seed` must be two integers. Received: seed="):
        small.tokenize(["a"], dropout=0.5, seed=seed)
