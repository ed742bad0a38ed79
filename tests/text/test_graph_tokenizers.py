"""Byte pairs and SentencePiece in the TensorFlow graph: the same ids and texts as outside."""

import base64
import json
import random
import re
import time
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from keras_tx import text
from keras_tx.data import mask_tokens
from keras_tx.text.byte_pair_graph import Merges
from keras_tx.text.graph_ops import StringIndex
from keras_tx.text.sentencepiece_model import read_model
from keras_tx.text.template import Template
from tests.text.made import LLAMA3, TRICKY

KINDS = ["gpt2_prefix", "roberta", "llama3", "qwen2", "t5", "camembert", "llama2", "marian"]
KINDS += ["words", "characters", "pieces"]


@pytest.fixture(scope="module", params=KINDS)
def graph(request, graphs):
    return graphs(request.param)


def without_marks(one):
    """`tokenizers` normalizes a letter and its marks as one, SentencePiece one character after the other."""
    return "".join(c for c in one if unicodedata.category(c)[0] != "M" and unicodedata.category(c) != "Cf")


def differences(ours, texts, found):
    """Texts whose ids are others than outside the graph, unless the two splits have the same score."""
    scores = {}
    if isinstance(ours, text.MarianTokenizer):
        scores = {piece.piece: piece.score for piece in read_model(ours.source_model, "").pieces}
    elif ours.parts["model"]["type"] == "Unigram":
        scores = dict(ours.parts["model"]["vocab"])

    def score(ids):
        return sum(scores.get(ours.vocabulary[i], 0.0) for i in ids), ours.decode(ids, skip_special_tokens=False)

    pairs = zip(texts, ours.tokenize(texts), found, strict=True)
    different = [(one, a, b) for one, a, b in pairs if a != b]
    tied = [score(a) == pytest.approx(score(b), abs=1e-4) for _, a, b in different if scores]
    assert len(tied) < 3
    return [row for i, row in enumerate(different) if not scores or not tied[i]]


def bytes_of(texts):
    return tf.constant([one.encode("utf-8") for one in texts], tf.string)


def ragged(rows):
    return tf.ragged.constant(rows, dtype=tf.int32, ragged_rank=1)


def test_ids_and_texts_are_those_outside(graph, sentences):
    ours, encode, decode, decode_all = graph
    texts = TRICKY + sentences
    assert ours.in_graph and ours.not_in_graph is None
    assert not differences(ours, texts, encode(bytes_of(texts)).to_list())
    rows = ours.tokenize(texts) + np.random.default_rng(7).integers(0, ours.vocabulary_size, (99, 13)).tolist() + [[]]
    for skip, function in ((True, decode), (False, decode_all)):
        texts = [one.decode("utf-8") for one in function(ragged(rows)).numpy()]
        assert texts == ours.decode(rows, skip_special_tokens=skip)


alphabet = st.one_of(
    st.characters(max_codepoint=0x5FF, exclude_characters="\u0345"),
    st.sampled_from(" \n\t<s>/mak'l\u00a0\u3000東京क한각\u200b\u2028İßΣ😀\U0001f468\ufb01①½\x00\x85\ufffd\ue000▁"),
    st.sampled_from(["<s>", "</s>", "<mask>", " <mask> ", "'ll", "<|endoftext|>", "  ", "\n\n"]),
)


@settings(max_examples=8)  # of 40 texts or more
@given(st.lists(st.lists(alphabet, max_size=30).map("".join), min_size=40, max_size=60))
def test_any_text(graph, texts):
    ours, encode, *_ = graph
    if isinstance(ours, text.SentencePieceTokenizer):
        texts = [without_marks(one) for one in texts]
    assert not differences(ours, texts, encode(bytes_of(texts)).to_list())


def test_any_bytes(graph):
    ours, encode, *_ = graph
    blobs = [bytes(row) for row in np.random.default_rng(5).integers(0, 256, (99, 11)).tolist()]
    if isinstance(ours, text.SentencePieceTokenizer):
        blobs = [re.sub(rb"[\xc0-\xf7]", b"z", blob) for blob in blobs]  # no marks
    assert not differences(ours, blobs, encode(tf.constant(blobs)).to_list())


def test_every_character_of_the_basic_plane_is_of_the_same_class(graphs):
    points = [c for c in range(0x10000) if not 0xD800 <= c <= 0xDFFF]
    texts = [f"a{chr(c)}m {chr(c)}" for c in points]
    ours, encode, *_ = graphs("llama3")
    assert encode(bytes_of(texts)).to_list() == ours.tokenize(texts)


@pytest.mark.parametrize(
    ("kind", "own", "options"),
    [
        ("llama3", {"truncation_side": "left", "max_length": 5}, {}),
        ("t5", {}, {"max_length": 7, "padding": "max_length"}),
    ],
)
def test_rows(made, sentences, kind, own, options):
    ours = text.load_tokenizer(made / kind, **own)
    ours = type(ours)(**(ours.get_config() | {"pad_token": ours.vocabulary[3]}))
    texts = [*sentences, "", "a <mask>"]
    rows = tf.function(lambda x: ours(x, **options)["token_ids"], input_signature=[tf.TensorSpec([None], tf.string)])
    found, expected = rows(bytes_of(texts)), ours(texts, **options)["token_ids"]
    assert found.dtype == tf.int32 and expected.dtype == np.int32
    np.testing.assert_array_equal(found, expected)
    assert rows(bytes_of([])).shape == ours([], **options)["token_ids"].shape == (0, options.get("max_length", 0))


def test_one_string(graphs):
    ours, *_ = graphs("t5")
    ids = ours.tokenize("a m")
    row, found = tf.function(lambda one: (ours(one)["token_ids"], ours.tokenize(one)))(tf.constant("a m"))
    assert row.numpy().tolist() == ours("a m")["token_ids"].tolist() and found.numpy().tolist() == ids
    decode = tf.function(lambda one, rows: (ours.decode(one), ours.decode(rows, clean_up_tokenization_spaces=True)))
    plain, tidy = decode(tf.constant(ids), ragged(ours.tokenize(["a ' m , a ."])))
    assert plain.numpy() == b"a m" == ours.decode(ids).encode() and tidy.numpy().tolist() == [b"a'm, a."]


def test_pairs(made):
    ours = text.load_tokenizer(made / "camembert", truncation_side="left")
    first, second = ["a " * a for a in range(7) for _ in range(7)], ["b " * b for _ in range(7) for b in range(7)]
    found = tf.function(lambda a, b: ours(a, b, max_length=8)["token_ids"])(bytes_of(first), bytes_of(second))
    np.testing.assert_array_equal(found, ours(first, second, max_length=8)["token_ids"])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pair", [False, True])
def test_templates_are_filled_alike_in_lists_and_ragged_tensors(side, pair):
    """Every two lengths from 0 to 6 with every limit; `fill` is compared with transformers in test_hub_tokenizers."""
    template = Template((101, 102), (103,), (104, 105, 106))
    first = [[*range(a)] for a in range(7) for _ in range(7)]
    second = [[*range(50, 50 + b)] for _ in range(7) for b in range(7)] if pair else None
    for limit in (None, *range(template.size(pair), 20)):
        rows = template.fill(first, second, limit, side)
        found = template.fill_ragged(ragged(first), None if second is None else ragged(second), limit, side)
        assert found.to_list() == rows
        assert limit is None or max(map(len, rows)) <= limit


def test_ids_outside_the_vocabulary_are_left_out(graph):
    ours, _, decode, _ = graph
    rows = [[*ours.tokenize("a dog"), ours.vocabulary_size, -1], [2**31 - 1, -(2**31)]]
    assert decode(ragged(rows)).numpy().tolist() == [ours.decode(ours.tokenize("a dog")).encode(), b""]


def test_in_a_dataset(graphs):
    ours, *_ = graphs("roberta")
    dataset = tf.data.Dataset.from_tensor_slices(["a man", "the dog barks", ""]).batch(2)
    rows = [row for batch in dataset.map(ours) for row in batch["token_ids"].numpy().tolist()]
    expected = ours(["a man", "the dog barks"])["token_ids"].tolist() + ours([""])["token_ids"].tolist()
    assert rows == expected
    features = {"token_ids": tf.constant([ours("the dog barks")["token_ids"]] * 50)}
    hidden, labels = mask_tokens(features, ours, rate=0.5, seed=[7, 5])
    chosen = labels.numpy() != ours.pad_id
    assert (hidden["token_ids"].numpy()[chosen] == ours.mask_id).mean() > 0.6
    assert chosen.any() and not chosen[:, 0].any() and not chosen[:, -1].any()


def byte_pairs(vocabulary, merges, **options):
    """A byte-level tokenizer of these merges, as `tokenizers` makes it."""
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return text.BytePairTokenizer(tokenizer.to_str())


def merges_of(seed, letters):
    """Tokens over the letters, merges in order or not, with one merge for a token or all that there are, and words."""
    draw = random.Random(seed)
    grown = [*letters]
    for _ in range(500):
        new = draw.choice(grown) + draw.choice(grown)
        if new not in grown and len(new) < 14 and len(grown) < 60:
            grown.append(new)
    splits = [[(one[:i], one[i:]) for i in range(1, len(one)) if {one[:i], one[i:]} <= set(grown)] for one in grown]
    merges = sum(splits, []) if seed % 3 else [draw.choice(ways) for ways in splits if ways]
    if seed % 2:
        draw.shuffle(merges)
    words = ["".join(draw.choices(letters, k=draw.randint(0, 40))) for _ in range(60)]
    return grown, merges, words + [letters[0] * n for n in range(9)]


def test_merges_in_any_order():
    """24 lists of merges at once, each over letters of its own: as if a human merged pair by pair."""
    tokens, merges, words = [], [], []
    for seed in range(24):
        letters = "".join(chr(0x100 + 4 * seed + i) for i in range(1 + seed % 4))
        for known, more in zip((tokens, merges, words), merges_of(seed, letters), strict=True):
            known += more
    id_of = {token: i for i, token in enumerate(tokens)}
    flat = [(id_of[letter], i) for i, word in enumerate(words) for letter in word]
    ids, owner = (tf.constant(column) for column in zip(*flat, strict=True))
    ids, owner = Merges(id_of, merges, len(tokens)).apply(ids, tf.cast(owner, "int64"), tf.size(words, tf.int64))
    found = tf.RaggedTensor.from_value_rowids(ids, owner, nrows=len(words)).to_list()
    rank_of = {merge: rank for rank, merge in enumerate(merges)}
    for word, row in zip(words, found, strict=True):
        pieces = list(word)
        while pairs := [(rank_of[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in rank_of]:
            i = min(pairs)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        assert [tokens[i] for i in row] == pieces
    assert found == [one.ids for one in Tokenizer(models.BPE(id_of, merges)).encode_batch(words)]


def test_no_merges_at_all():
    ours = byte_pairs({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    assert tf.function(ours.tokenize)(tf.constant(["ab é"])).to_list() == ours.tokenize(["ab é"])


def test_huge_strings(graphs):
    huge = ["a" * 10**5, "dog " * 20_000, ".\n" * 20_000, "<mask>" * 10_000, " " * 10**5, "\u6771" * 10_000]
    huge += ["".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))]
    started = time.perf_counter()
    for kind in ("roberta", "llama3", "t5"):
        ours, encode, *_ = graphs(kind)
        found = encode(tf.constant(huge))
        assert found.row_lengths().numpy().tolist() == [len(row) for row in ours.tokenize(huge)]
    assert time.perf_counter() - started < 60


def test_what_has_no_graph_form_says_so(made):
    def refused(kind, change, reason):
        parts = json.loads(text.load_tokenizer(made / kind).definition)
        change(parts)
        ours = type(text.load_tokenizer(made / kind))(parts)
        assert ours.tokenize("a") is not None and ours.decode([5]) is not None
        assert not ours.in_graph and re.search(reason, ours.not_in_graph)
        with pytest.raises(
            ValueError, match=r"`texts` must be Python values, .*no TensorFlow form. Received.*" + reason
        ):
            tf.function(ours)(tf.constant(["a"]))
        with pytest.raises(ValueError, match=r"`ids` must be Python values, .*no TensorFlow form. Received.*" + reason):
            tf.function(ours.decode)(tf.constant([[1]]))
        with pytest.raises(ValueError, match="`texts` must be Python values"):
            tf.function(ours.tokenize)(tf.constant(["a"]))

    def put(*keys):
        def change(parts):
            *path, last, value = keys
            for key in path:
                parts = parts[key]
            parts[last] = value

        return change

    refused("gpt2", put("normalizer", {"type": "Lowercase"}), "its normalizer is Lowercase")
    refused("gpt2", put("model", "dropout", 0.1), "dropout")
    steps = [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, {"type": "Fuse"}]
    refused("gpt2", put("decoder", {"type": "Sequence", "decoders": steps}), "its decoder is .*Fuse")
    refused("gpt2", put("pre_tokenizer", "use_regex", False), "its pre-tokenizer is")
    refused("gpt2", put("pre_tokenizer", {"type": "Whitespace"}), "its pre-tokenizer is .*Whitespace")
    refused("llama3", put("pre_tokenizer", "pretokenizers", 0, "pattern", {"Regex": r"\s"}), "its pre-tokenizer is")
    refused("llama3", put("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", True), "its pre-tokenizer is")
    refused("roberta", put("added_tokens", 4, "single_word", True), "'<mask>' is found only between words")
    refused("t5", put("pre_tokenizer", {"type": "Whitespace"}), "its normalizer and pre-tokenizer are .*Whitespace")
    refused("t5", put("pre_tokenizer", "pretokenizers", 1, "prepend_scheme", "never"), "its normalizer and pre")
    refused("t5", put("normalizer", None), "its normalizer and pre-tokenizer are None")
    refused("t5", put("model", "unk_id", None), "no unknown token")
    table = (0).to_bytes(1, "little") * 1024  # a double array of one empty block, and no texts
    table = base64.b64encode((1024).to_bytes(4, "little") + table + b"\0").decode("ascii")
    refused("t5", put("normalizer", "precompiled_charsmap", table), "its normalizer leaves '▁' in a text")
    refused("llama2", put("pre_tokenizer", {"type": "Whitespace"}), "its normalizer and pre-tokenizer are None")
    refused("llama2", put("model", "byte_fallback", False), "no bytes for what it lacks")
    refused("llama2", lambda parts: parts["model"]["merges"].reverse(), "its merges are not all")
    added = {"id": 450, "content": " x", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False}
    refused("llama2", lambda parts: parts["added_tokens"].append(added | {"special": False}), "' x' has spaces at its")
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}
    prepend["normalizers"].append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    change = lambda parts: parts.update(normalizer=prepend, pre_tokenizer=None)
    refused(
        "llama2", lambda parts: (change(parts), put("added_tokens", 0, "normalized", True)(parts)), "are normalized"
    )


def test_llama_2_with_a_normalizer(made):
    """The older form of the same tokenizer: a space before every text, whatever it begins with."""
    parts = json.loads(text.load_tokenizer(made / "llama2").definition)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    both = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    for normalizer in (both, replace):
        ours = text.SentencePieceTokenizer(parts | {"normalizer": normalizer, "pre_tokenizer": None})
        assert tf.function(ours.tokenize)(bytes_of(TRICKY)).to_list() == ours.tokenize(TRICKY)


def test_unigram_without_splits_at_white_space(made):
    """The form in which newer converters write the same tokenizer, and one that also collapses spaces."""
    parts = json.loads(text.load_tokenizer(made / "t5").definition)
    before = parts["pre_tokenizer"]["pretokenizers"][1]
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    collapse = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    for steps, changes in (([strip, collapse], {"pre_tokenizer": before}), ([collapse | {"content": " "}], {})):
        normalizer = {"type": "Sequence", "normalizers": [parts["normalizer"], *steps]}
        ours = text.SentencePieceTokenizer(parts | {"normalizer": normalizer} | changes)
        texts = [*TRICKY, "  a  b  ", "a ", "a   "]
        assert not differences(ours, texts, tf.function(ours.tokenize)(bytes_of(texts)).to_list())


def test_padding_in_a_graph_needs_a_token(made):
    ours = text.load_tokenizer(made / "gpt2")
    with pytest.raises(ValueError, match=r"`pad_token` must be given to pad rows: .*Received: pad_token=None"):
        tf.function(ours)(tf.constant(["a", "b c"]))
    assert tf.function(ours)(tf.constant("a"))["token_ids"].numpy().tolist() == ours("a")["token_ids"].tolist()
    pair = tf.function(text.load_tokenizer(made / "t5"))
    with pytest.raises(ValueError, match=r"the same length as `texts`. Received: shapes texts=\(1,\), pairs=\(2,\)"):
        pair(tf.constant(["a"]), tf.constant(["b", "c"]))


def test_strings_are_found_by_their_hash():
    index = StringIndex({"a": 7, b"\xff": 5, "東京": 0})
    assert index.find(tf.constant([b"a", b"\xff", "東京".encode(), b"", b"b"])).numpy().tolist() == [7, 5, 0, -1, -1]
    assert LLAMA3  # the pattern that the tests train with is among those that the graph knows
