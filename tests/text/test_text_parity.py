"""Ids and texts are those of transformers.BertTokenizer."""

import gzip
import unicodedata

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer as HuggingFace

from keras_tx.text import BertTokenizer
from tests.tools import SHARED

TRICKY = [
    "", " ", "\t\n\r", "straße STRASSE ẞ", "ﬁne ﬂow oﬃce ﬅ", "½ ² ™ ① Ⅷ ㎏", "ＡＢＣ，！", "… ‥ ﷺ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙",
    "a\x00b", "\x00", "a\x07b\x7fc\x85d", "a\ufffdb", "soft\u00adhyphen", "zero\u200bwidth\u200djoiner\u2060x",
    "\ufeffbom", "e\u0301 = é", "A\u030a Å Å", "q\u0307\u0323 q\u0323\u0307", "\u0301alone", "a\u0363b",
    "한국어 각 가\u11a8", "ㄱㄴ ﾊﾛｰ ハロー ﾊﾟ", "東京タワー", "北京abc上海", "㐀 𠀀 豈 丽", "ไทย ภาษา",
    "हिन्दी में", "עִבְרִית שלום", "مَرْحَبًا سلام", "\u202eabc\u202c", "👩\u200d👩\u200d👧 👍🏽 🇩🇪 🥰", "☺\ufe0f ❤️",
    "ΟΔΟΣ ΣΑΣ Σ σας ΑΣ.Α", "İstanbul ı I i̇", "TITLE I İI", "ǅ ǈ ǋ Ǳ", "Ǆungla", "ÀÉÎÕÜ ŁØÐÞ", "ﬀ ﬆ", "K Å Ω",
    "a" * 99, "a" * 100, "a" * 101, "a" * 200, "ä" * 60, "ä" * 100, "ä" * 101, "東" * 150, "🥰" * 101,
    "я" * 99 + "!", "https://example.com/a?b=c&d=%20#e", "me@example.org", "C++ C# .NET", "$1,000.00 €5 £6 ¥7",
    "a_b-c–d—e", "“quotes” ‘single’ «guillemets»", "don't won’t", "^`~|<>+=", "¡hola! ¿qué?", "§5 ¶ ·", "[MASK]",
    "a [MASK] b", "a[MASK]b", "[mask]", "[Mask]", "[MASK", "MASK]", "[ MASK ]", "[[MASK]]", "[MA\x00SK]",
    "[MASK][MASK]", " [CLS] x [SEP] ", "[PAD][PAD]", "[UNK]s", "é[SEP]\u0301a", "[MASK]ing un[MASK]", "[unused1]",
    "##ing", "a\u00a0b", "a\u3000b", "a\u2028b\u2029c", "a\u1680b\u202fc\u205fd", "a\u180eb", "a\x0bb\x0cc",
    "a\x1cb", "tab\tnew\nline", "\ue000 \uf8ff a\ue000b", "\ufdd0 a\ufdd0b [MASK]\ufdd4", "\ufdd5\ufdd6",
    "\U000e0041tag", "\U0010fffd", "᙭ a᙭b", "1.5e-3", "12:30", "x" * 50 + "-" + "y" * 101, "ßßß", "ŉ ǰ ΐ", "ﬓ",
    "Ꮳ ꭰ", "ⅷ ⓐ", "a\u0345", "ᾳ ᾼ", "\u0130\u0307",
]  # fmt: skip


def ids_of(theirs, texts, **options):
    return theirs(texts, add_special_tokens=False, **options)["input_ids"]


def test_tricky_strings(pair):
    ours, theirs = pair
    assert len(TRICKY) >= 80
    expected = ids_of(theirs, TRICKY)
    different = {
        text: (a, b) for text, a, b in zip(TRICKY, ours.tokenize(TRICKY).to_list(), expected, strict=True) if a != b
    }
    assert not different


NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


@pytest.mark.parametrize("known", [NONCHARACTERS[:2], NONCHARACTERS[4:5], NONCHARACTERS])
def test_characters_that_otherwise_stand_for_special_tokens(tmp_path, known):
    ours = BertTokenizer.train([f"ab {c} ab{c} {c}b [MASK]" for c in known], 500, mask_token=known[0])
    ours.save(tmp_path)
    theirs = HuggingFace.from_pretrained(tmp_path)
    assert set(known) <= set(ours.vocabulary)
    texts = [
        text for c in [*NONCHARACTERS, "\U00040000"] for text in (f"{c} a{c}b", f"ab [SEP]{c}", f"b{c}{known[-1]}")
    ]
    expected = ids_of(theirs, texts)
    assert ours.tokenize(texts).to_list() == expected
    assert tf.function(ours.tokenize)(tf.constant(texts)).to_list() == expected
    assert [ours.decode(ids) for ids in expected] == theirs.batch_decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("strip_accents", [True, False, None])
@pytest.mark.parametrize("split_chinese", [True, False])
@pytest.mark.parametrize("lowercase", [True, False])
def test_every_option(sentences, tmp_path, lowercase, strip_accents, split_chinese):
    ours = BertTokenizer.train(
        sentences * 3, 400, lowercase=lowercase, strip_accents=strip_accents, split_chinese=split_chinese
    )
    ours.save(tmp_path)
    theirs = HuggingFace.from_pretrained(tmp_path)
    texts = TRICKY + sentences
    assert ours.tokenize(texts).to_list() == ids_of(theirs, texts)


def test_options_change_something():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "A", "ä", "東", "東東"]
    text = ["A ä 東東"]
    seen = {
        str(BertTokenizer(vocabulary, **options).tokenize(text).to_list())
        for options in ({}, {"lowercase": False}, {"strip_accents": False}, {"split_chinese": False})
    }
    assert seen == {"[[4, 4, 7, 7]]", "[[5, 6, 7, 7]]", "[[4, 6, 7, 7]]", "[[4, 4, 8]]"}


def test_single_texts_truncated_at_every_length(pairs, sentences):
    ours, theirs = pairs["uncased"]
    for length in range(2, 40):
        expected = theirs(sentences, truncation=True, max_length=length, padding=True)
        got = ours(sentences, max_length=length)
        assert got["token_ids"].numpy().tolist() == expected["input_ids"]
        assert got["segment_ids"].numpy().tolist() == expected["token_type_ids"]


def test_pairs_truncated_at_every_length(pairs):
    ours, theirs = pairs["uncased"]
    first = [" ".join(["a"] * a) for a in range(7) for _ in range(7)]
    second = [" ".join(["km"] * b) for _ in range(7) for b in range(7)]
    for length in range(3, 17):
        expected = theirs(first, second, truncation=True, max_length=length, padding="max_length")
        got = ours(first, second, max_length=length, padding="max_length")
        assert got["token_ids"].numpy().tolist() == expected["input_ids"]
        assert got["segment_ids"].numpy().tolist() == expected["token_type_ids"]


def test_decode(pair, sentences):
    ours, theirs = pair
    texts = [*sentences, "", "He ' s, do not stop ! n't 'm 've . ?", "[MASK] ing [CLS]"]
    ids = theirs(texts)["input_ids"]
    ids += np.random.default_rng(7).integers(0, ours.vocabulary_size, (50, 13)).tolist()
    for skip in (True, False):
        expected = theirs.batch_decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


# Marks, punctuation and controls that Unicode added or reclassified after 8.0, whose tables `tokenizers` has.
NEWER = {"Mn", "Mc", "Po", "Pd", "Ps", "Pe", "Cn", "Cf"}


def test_every_character_of_the_basic_plane(pairs):
    ours, theirs = pairs["uncased"]
    points = [c for c in range(0x10000) if not 0xD800 <= c <= 0xDFFF and not 0xE000 < c < 0xF8FF]
    texts = [f"a{chr(c)}m {chr(c)}" for c in points]
    expected = ids_of(theirs, texts)
    got = ours.tokenize(texts).to_list()
    different = [c for c, a, b in zip(points, got, expected, strict=True) if a != b]
    assert len(different) < 150
    assert {unicodedata.category(chr(c)) for c in different} <= NEWER
    assert not [c for c in different if c < 0x61D]  # Latin, Greek, Cyrillic, Armenian, Hebrew: all equal


# Letters, marks, digits, punctuation, symbols, controls and emoji of Unicode 8.0 up to Hebrew, and some beyond.
alphabet = st.one_of(
    st.characters(max_codepoint=0x5FF),
    st.sampled_from(
        "[]MASKCLEPUN \u0627\u0905\u4e00\uac00\u3042\u200b\u200d\ufe0f\u3000\ufffd\ue000\ufdd0😀\U0001f468ßΣİ"
    ),
)


@given(st.lists(st.text(alphabet, max_size=40), min_size=20, max_size=60))
def test_any_text(pairs, texts):
    texts = [text.encode("utf-8", "replace").decode() for text in texts]  # no lone surrogates
    for name, (ours, theirs) in pairs.items():
        assert ours.tokenize(texts).to_list() == ids_of(theirs, texts), name


@settings(max_examples=15)  # of 200 texts
@given(st.lists(st.binary(max_size=30), min_size=200, max_size=200))
def test_any_bytes_read_as_python_replaces_them(pairs, blobs):
    texts = [blob.decode("utf-8", "replace") for blob in blobs]
    for name, (ours, theirs) in pairs.items():
        assert ours.tokenize(blobs).to_list() == ids_of(theirs, texts), name


@pytest.mark.skipif(
    not (SHARED / "data" / "multi30k").is_dir() or not (SHARED / "data" / "bert_vocab").is_dir(),
    reason="needs Multi30k and BERT's vocabulary in ../shared/data: the repository has no right to hold the sentences",
)
@pytest.mark.parametrize("language", ["en", "de"])
def test_every_sentence_of_multi30k(tmp_path, language):
    vocabulary = SHARED / "data" / "bert_vocab" / "vocab.txt"
    ours = BertTokenizer.from_vocabulary(vocabulary)
    ours.save(tmp_path)
    theirs = HuggingFace.from_pretrained(tmp_path)
    assert len(theirs) == 30522
    files = sorted((SHARED / "data" / "multi30k").glob(f"*.{language}.gz"))
    texts = [line for file in files for line in gzip.open(file, "rt", encoding="utf-8").read().splitlines()]
    assert len(texts) >= 31014
    graph = tf.function(ours.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    assert graph(texts).to_list() == ids_of(theirs, texts)
