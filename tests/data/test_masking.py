"""Random masking as in BERT's training."""

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from keras_tx.data import mask_tokens  # noqa: E402
from keras_tx.text import BertTokenizer, BytePairTokenizer  # noqa: E402

WORDS = [f"word{i}" for i in range(53)]
TOKENIZER = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
SPECIAL = [0, 1, 2, 3, 4]


def sentences(count=3001, length=17):
    ids = np.random.default_rng(1).integers(5, 58, size=(count, length)).astype("int32")
    ids[:, 0], ids[:, 13], ids[:, 14:] = 2, 3, 0
    ids[::7, 5] = 1
    return ids


def test_of_the_chosen_tokens_80_percent_are_masked_10_replaced_and_10_kept():
    ids = sentences()
    features, labels = mask_tokens({"token_ids": tf.constant(ids), "other": 1}, TOKENIZER, rate=0.23, seed=(1, 2))
    hidden, labels = features["token_ids"].numpy(), labels.numpy()
    chosen = labels != 0
    ordinary = ~np.isin(ids, SPECIAL)
    assert features["other"] == 1
    np.testing.assert_array_equal(hidden[~chosen], ids[~chosen])
    np.testing.assert_array_equal(labels[chosen], ids[chosen])
    assert not chosen[~ordinary].any()
    share = chosen[ordinary].mean()
    assert abs(share - 0.23) < 4 * np.sqrt(0.23 * 0.77 / ordinary.sum())
    masked, same = hidden[chosen] == 4, hidden[chosen] == ids[chosen]
    for observed, expected in ((masked, 0.8), (same, 0.1 + 0.1 / 53)):
        assert abs(observed.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / chosen.sum())
    replaced = hidden[chosen][~masked & ~same]
    assert set(np.unique(replaced)) == set(range(5, 58))


def test_each_pass_over_a_dataset_chooses_others_and_a_seed_the_same():
    rows = tf.data.Dataset.from_tensors(sentences(31)).repeat(2)
    again = [labels.numpy() for _, labels in rows.map(lambda x: mask_tokens(x, TOKENIZER))]
    assert (again[0] != again[1]).any()
    seeded = [mask_tokens(sentences(31), TOKENIZER, seed=(3, n))[1].numpy() for n in (1, 1, 2)]
    assert (seeded[0] == seeded[1]).all() and (seeded[0] != seeded[2]).any()


def test_additional_special_tokens_are_neither_chosen_nor_drawn():
    """Such as <extra_id_0> of T5, which are no arguments of a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_str(BytePairTokenizer.train(["hot dogs"] * 3, 300).get_config()["definition"])
    made.add_special_tokens(["<mask>", "<extra_0>", "<extra_1>"])
    tokenizer = BytePairTokenizer(made.to_str(), pad_token="<pad>", mask_token="<mask>")
    extra, ordinary = [tokenizer.token_to_id(f"<extra_{i}>") for i in (0, 1)], tokenizer.token_to_id("h")
    masked, labels = mask_tokens(np.full((99, 31), extra[0]), tokenizer, rate=0.9)
    assert (masked == extra[0]).numpy().all() and (labels == tokenizer.pad_id).numpy().all()
    masked, _ = mask_tokens(np.full((999, 31), ordinary), tokenizer, rate=0.9)
    assert not np.isin(masked, extra).any() and len(np.unique(masked)) > 100


def test_a_seed_may_come_from_a_dataset_whose_shapes_are_unknown():
    seeds = tf.data.Dataset.range(4).batch(2)  # (None,)
    rows = tf.data.Dataset.from_tensors(sentences(31)).repeat()
    for i, (_, labels) in enumerate(
        tf.data.Dataset.zip(rows, seeds).map(lambda x, seed: mask_tokens(x, TOKENIZER, seed=seed))
    ):
        expected = mask_tokens(sentences(31), TOKENIZER, seed=(2 * i, 2 * i + 1))[1]
        np.testing.assert_array_equal(labels, expected)


def test_numpy_numbers_are_numbers():
    ids = sentences(31)
    for rate in (np.float32(0.5), np.float64(0.5)):
        hidden, labels = mask_tokens(ids, TOKENIZER, rate=rate, seed=np.array([1, 2]))
        expected = mask_tokens(ids, TOKENIZER, rate=0.5, seed=(1, 2))
        np.testing.assert_array_equal(hidden, expected[0])
        np.testing.assert_array_equal(labels, expected[1])


def test_ragged_rows_are_masked_as_one_row_of_all_tokens():
    tokens = sentences(31)
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(tokens, [-1]), [5, 0, tf.size(tokens) - 5])
    expected = mask_tokens(ragged.values, TOKENIZER, seed=(1, 2))
    features, labels = mask_tokens({"token_ids": ragged, "more": 3}, TOKENIZER, seed=(1, 2))
    assert features["more"] == 3
    for found, values in zip((features["token_ids"], labels), expected, strict=True):
        np.testing.assert_array_equal(found.row_lengths(), ragged.row_lengths())
        np.testing.assert_array_equal(found.values, values)
    rows = tf.data.Dataset.from_tensors(ragged).map(lambda row: mask_tokens(row, TOKENIZER, seed=(1, 2)))
    np.testing.assert_array_equal(next(iter(rows))[0].values, expected[0])


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(ValueError, match=r"`rate` must be a number in \(0, 1\). Received: rate=0"):
        mask_tokens(sentences(2), TOKENIZER, rate=0)
    with pytest.raises(ValueError, match=r"`rate` must be a number in \(0, 1\). Received: rate=1.5"):
        mask_tokens(sentences(2), TOKENIZER, rate=1.5)
    for seed in (3, (1, 2, 3)):
        with pytest.raises(ValueError, match=r"`seed` must be two integers. Received: seed="):
            mask_tokens(sentences(2), TOKENIZER, seed=seed)
    with pytest.raises(ValueError, match=r"`features` must have 'token_ids'. Received: features \['ids'\]"):
        mask_tokens({"ids": sentences(2)}, TOKENIZER)
    without = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "word"])
    with pytest.raises(ValueError, match="`tokenizer` must have a mask token. Received: special tokens"):
        mask_tokens(sentences(2), without)
    unpadded = BytePairTokenizer.train(["hot dogs"] * 3, 300, pad_token=None, mask_token="<mask>")
    with pytest.raises(ValueError, match="`tokenizer` must have a padding token. Received: special tokens"):
        mask_tokens(sentences(2), unpadded)
    for floats in (np.ones((2, 3), "float32"), {"token_ids": tf.ones((2, 3))}):
        with pytest.raises(ValueError, match="`features` must hold token ids, .* Received: ids of dtype float32"):
            mask_tokens(floats, TOKENIZER)
