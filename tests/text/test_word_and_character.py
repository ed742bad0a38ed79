"""Tokenizers of words and characters: the ids are those of the `tokenizers` library, in Python and in the graph."""

import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from keras_tx import text
from keras_tx.text import character_tables
from keras_tx.text.graph_ops import normalize_unicode
from tests.text.made import TRICKY

tf = pytest.importorskip("tensorflow")
Words, Characters = text.WordLevelTokenizer, text.CharacterTokenizer
SPECIAL = ["[PAD]", "[UNK]", "[SOS]", "[EOS]"]
BEHAVIORS = ["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"]
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
NORMALIZERS = [None, "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Strip", "BertNormalizer"]
NORMALIZERS += [BERT | {"strip_accents": False, "lowercase": True}, BERT | {"strip_accents": True, "lowercase": False}]
NORMALIZERS += [BERT | {"clean_text": False, "handle_chinese_chars": False, "strip_accents": None, "lowercase": False}]
NORMALIZERS += [normalizers.Strip(left=False), normalizers.Replace("a.", r"\1 b\\"), ["NFKD", ["StripAccents"]]]
SPLITTERS = [None, "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", pre_tokenizers.Digits(True)]
SPLITTERS += [{"type": "Punctuation", "behavior": behavior} for behavior in BEHAVIORS]
SPLITTERS += [pre_tokenizers.CharDelimiterSplit("a"), pre_tokenizers.Split(" ", "merged_with_next")]
SPLITTERS += [["Digits", ["Punctuation", "WhitespaceSplit"]]]
odd = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(
        " \t\n\x00aA1²½._-!e\u0301\u0323\u0345İßΣ东京한각ﬁ①\u200d\ufe0f😀👍🏽\ufdd0\U0001fffe\x85\u3000\u1df6"
    ),
    st.sampled_from(["[SOS]", "[PAD]", "a.", "  ", "don't", "\r\n"]),
)
texts_of_odd = st.lists(st.lists(odd, max_size=12).map("".join), min_size=1, max_size=12)


def library_ids(ours, texts):
    library = tokenizers.Tokenizer.from_str(ours.definition)
    library.encode_special_tokens = ours.split_special_tokens
    return [library.encode(one, add_special_tokens=False).ids for one in texts]


def graph_ids(ours, texts):
    """The ops of the graph, one by one."""
    assert ours.in_graph and ours.not_in_graph is None
    return ours._graph_encode(tf.constant([one.encode() for one in texts], tf.string)).to_list()


@settings(max_examples=15)
@given(texts_of_odd, st.sampled_from(NORMALIZERS), st.sampled_from(SPLITTERS))
def test_any_text_by_any_steps(texts, normalizer, pre_tokenizer):
    """The vocabulary has all words of the texts, so no difference hides behind the unknown token."""
    options = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    ours = Words.train(["a", *texts[::2], "[X]"], 10**6, **options)
    texts = [*texts, ""]
    assert ours.tokenize(texts) == library_ids(ours, texts) == graph_ids(ours, texts)


@pytest.mark.parametrize("index", range(max(len(NORMALIZERS), len(SPLITTERS))))
def test_every_step(index):
    if index < len(SPLITTERS):
        ours = Words.train(TRICKY, 10**6, pre_tokenizer=SPLITTERS[index])
        assert ours.tokenize(TRICKY) == library_ids(ours, TRICKY) == graph_ids(ours, TRICKY)
        assert ours.unknown_id not in sum(ours.tokenize(TRICKY), [])
    if index < len(NORMALIZERS):
        ours = Words.train(TRICKY, 10**6, normalizer=NORMALIZERS[index], pre_tokenizer=None)
        assert ours.tokenize(TRICKY) == library_ids(ours, TRICKY) == graph_ids(ours, TRICKY)
        assert ours.unknown_id not in sum(ours.tokenize(TRICKY), [])


def test_every_character_of_two_planes():
    """Its kinds, and what it becomes."""
    codes = [code for code in [*range(0x10000), *range(0x10000, 0x20000, 5)] if not 0xD800 <= code <= 0xDFFF]
    characters = [chr(code) for code in codes]
    for kind, (name, options, together) in character_tables.KINDS.items():
        split = getattr(pre_tokenizers, name)(**options).pre_tokenize_str
        expected = [(split("a" + one)[0][0] == "a" + one) == together for one in characters]
        found = character_tables.is_inside(tf.constant(codes), character_tables.boundaries(kind))
        assert found.numpy().tolist() == expected
    clean = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": False, "lowercase": False}
    for name, options in (("Lowercase", {}), ("StripAccents", {}), ("Nmt", {}), ("BertNormalizer", clean)):
        normalize = getattr(normalizers, name)(**options).normalize_str
        found = character_tables.library_map(name, **options)(tf.constant([one.encode() for one in characters]))
        assert found.numpy().tolist() == [normalize(one).encode() for one in characters]


@pytest.mark.parametrize("form", ["NFC", "NFKD"])
def test_characters_that_are_newer_than_the_library_s_tables(form):
    """ICU knows them, the library does not: beside them, marks are in the library's order."""
    normalize = getattr(normalizers, form)().normalize_str
    texts = [f"e\u0345{chr(code)}\u0307\u0323" for code in range(0x20000) if not 0xD800 <= code <= 0xDFFF]
    found = normalize_unicode(tf.constant([one.encode() for one in texts]), form).numpy().tolist()
    assert found == [normalize(one).encode() for one in texts]


def test_the_words_are_those_that_the_library_learns():
    """The tokenizer of "Transformer From Scratch With PyTorch"."""
    texts = ["The dog, the cat.", "the dog!", "a dog SOS SOS", "the"]
    library = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, min_frequency=2, show_progress=False)
    library.train_from_iterator(texts, trainer)
    ours = Words.train(texts, 30_000, min_frequency=2)
    assert ours.vocabulary == [*SPECIAL, "dog", "the", "SOS"]
    read = Words(library.to_str(), pad_token="[PAD]", cls_token="[SOS]", sep_token="[EOS]")
    assert read.vocabulary == [library.id_to_token(i) for i in range(7)] and sorted(read.vocabulary) == sorted(
        ours.vocabulary
    )
    assert read.tokenize(texts) == [library.encode(one).ids for one in texts] == graph_ids(read, texts)
    assert [ours.vocabulary[i] for i in ours("The dog")["token_ids"]] == ["[SOS]", "[UNK]", "dog", "[EOS]"]
    assert (ours.pad_id, ours.unknown_id, ours.cls_id, ours.sep_id) == (0, 1, 2, 3)
    assert ours("a", "b")["token_ids"].tolist() == [2, 1, 3, 1, 3]


def test_words_that_are_special_tokens_have_one_id():
    ours = Words.train(["[SOS] a [SOS] b", "a"], 6, pre_tokenizer="WhitespaceSplit")
    assert ours.vocabulary == [*SPECIAL, "a", "b"]
    assert Words.train(["[SOS]"], 9, split_special_tokens=True).vocabulary == [*SPECIAL, "SOS", "[", "]"]
    assert Words.train(["[SOS] a", "[SOS] b"], 6).vocabulary == [*SPECIAL, "a", "b"]  # nor are their parts words
    split = Words(ours.definition, split_special_tokens=True)
    assert ours.tokenize("a[SOS]b") == [4, 2, 5] and split.tokenize("a[SOS]b") == [1]
    assert graph_ids(split, ["a[SOS]b", "a [SOS] b"]) == split.tokenize(["a[SOS]b", "a [SOS] b"]) == [[1], [4, 2, 5]]


def test_added_tokens_in_normalized_texts():
    ours = Words.train(["hot dog"], 9, normalizer="Lowercase")
    library = tokenizers.Tokenizer.from_str(ours.definition)
    library.add_tokens([AddedToken("HOT", normalized=True), AddedToken("Tea", normalized=False)])
    ours = Words(library.to_str())
    texts = ["hOt", "aHOTb", "Tea", "tea", "TeaHot dog[EOS]"]
    assert ours.tokenize(texts) == library_ids(ours, texts) == graph_ids(ours, texts)
    assert ours.tokenize("aHOTb")[1] == ours.token_to_id("HOT") == 6


@settings(max_examples=15)
@given(texts_of_odd)
def test_characters_come_back_exactly(texts):
    ours = Characters.train(["a", *texts])
    assert ours.vocabulary_size == 4 + len(set("a".join(texts) + "a"))
    ids = ours.tokenize(texts)
    assert ids == library_ids(ours, texts) == graph_ids(ours, texts) and list(map(len, ids)) == list(map(len, texts))
    assert ours.decode(ids) == texts == tokenizers.Tokenizer.from_str(ours.definition).decode_batch(ids)
    decoded = ours._graph_decode(tf.ragged.constant(ids, dtype=tf.int32, ragged_rank=1)).numpy()
    assert [one.decode() for one in decoded] == texts


def test_the_characters_that_are_kept():
    texts = ["aab", "a[SOS]"]
    for ours, expected in (
        (Characters.train(texts, 6), "aS"),
        (Characters.train(texts, min_frequency=2), "aS"),
        (Characters.train(tf.data.Dataset.from_tensor_slices(texts).batch(2)), "aSO[]b"),
    ):
        assert ours.vocabulary == [*SPECIAL, *expected]
    assert ours.tokenize("a[SOS]?") == [4, 7, 5, 6, 5, 8, 1] and ours.decode(ours.tokenize("a[SOS]?")) == "a[SOS]"
    assert ours.decode(ours.tokenize("?a"), skip_special_tokens=False) == "[UNK]a"
    whole = Characters(ours.definition, split_special_tokens=False)
    texts = ["a[SOS]?", "[SO", "[SOS][SOS]"]
    assert whole.tokenize(texts) == library_ids(whole, texts) == graph_ids(whole, texts)
    assert whole.tokenize("a[SOS]") == [4, 2]


def test_vocabularies_of_files(tmp_path):
    tokens = [*SPECIAL, "hot", "dog"]
    (tmp_path / "words.txt").write_text("\n".join(tokens) + "\n")
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in reversed([*enumerate(tokens)])}))
    expected = Words.from_vocabulary(tokens).get_config()
    for path in (tmp_path / "words.txt", str(tmp_path / "vocab.json")):
        assert Words.from_vocabulary(path).get_config() == expected
    assert Characters.from_vocabulary([*SPECIAL, "\n", "\0"]).decode([4, 5, 4]) == "\n\0\n"


def test_the_same_as_in_transformers(made, sentences, tmp_path):
    transformers = pytest.importorskip("transformers")
    for kind in ("words", "characters", "pairs", "pieces"):
        ours, theirs = text.load_tokenizer(made / kind), transformers.AutoTokenizer.from_pretrained(made / kind)
        texts = [*TRICKY, *sentences, "[SOS]a<s>", "<pad>[PAD]"]
        assert [ours(one)["token_ids"].tolist() for one in texts] == theirs(texts)["input_ids"]
        rows = ours.tokenize(texts)
        assert ours.decode(rows) == theirs.batch_decode(rows, skip_special_tokens=True)
        again = type(ours).from_transformers(theirs)
        assert again.tokenize(texts) == rows and again.special_tokens == ours.special_tokens
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[U]": 1}, "[U]"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=library, unk_token="[U]", pad_token="[P]")
    ours = Words.from_transformers(fast)
    assert (ours.unknown_id, ours.pad_id, ours.tokenize(["a", "b"])) == (1, 2, [[0], [1]])


def test_an_old_file_without_types(tmp_path):
    parts = json.loads(Words.train(["a b"], 9).definition)
    del parts["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    assert type(text.load_tokenizer(tmp_path)) is Words


def changed(ours, **changes):
    parts = json.loads(ours.definition)
    for name, value in changes.items():
        if value is None or "type" in value:
            parts[name] = value
        else:
            parts[name] |= value
    return parts


def test_what_has_no_graph_form_says_so():
    ours = Words.train(["a b"], 9)
    split = {"type": "Split", "pattern": {"String": "ab"}, "behavior": "Removed", "invert": False}
    for changes, reason in (
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, "its normalizer is Prepend"),
        ({"normalizer": {"type": "ByteLevel"}}, "its normalizer is ByteLevel"),
        (
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "x+"}, "content": ""}},
            "its normalizer is Replace with the pattern {'Regex': 'x+'}",
        ),
        ({"pre_tokenizer": {"type": "UnicodeScripts"}}, "its pre-tokenizer is {'type': 'UnicodeScripts'}"),
        ({"pre_tokenizer": split}, "its pre-tokenizer is {'type': 'Split', 'pattern': {'String': 'ab'}"),
        (
            {"pre_tokenizer": split | {"pattern": {"String": "b"}, "invert": True}},
            "its pre-tokenizer is {'type': 'Split'",
        ),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "its decoder is WordPiece"),
    ):
        other = Words(changed(ours, **changes))
        assert not other.in_graph and reason in other.not_in_graph
        assert other.tokenize("a") == library_ids(other, ["a"])[0]
        with pytest.raises(ValueError, match=re.escape(reason)):
            tf.function(other.tokenize)(tf.constant(["a"]))
    library = tokenizers.Tokenizer.from_str(json.dumps(changed(ours, normalizer={"type": "Lowercase"})))
    library.add_tokens([AddedToken("AB", normalized=True), AddedToken("Ab", normalized=True)])
    assert "two of its added tokens are equal" in Words(library.to_str()).not_in_graph
    assert "has added tokens that it does not split" in Words(library.to_str(), split_special_tokens=True).not_in_graph
    library = tokenizers.Tokenizer.from_str(ours.definition)
    library.add_tokens([AddedToken("one", single_word=True)])
    assert Words(library.to_str()).not_in_graph == "'one' is found only between words"


@pytest.mark.parametrize("kind", [Words, Characters])
def test_bad_vocabularies(kind):
    for vocabulary, options, error, message in (
        (7, {}, TypeError, "`vocabulary` must be a list of strings. Received: vocabulary=7"),
        (["a", 7], {}, TypeError, "`vocabulary` must be a list of strings. Received: line 2=7"),
        (["a", ""], {}, ValueError, "`vocabulary` must hold tokens that are not empty. Received: line 2=''"),
        (["a", "a"], {}, ValueError, "`vocabulary` must hold every token once. Received: 'a' in lines 1 and 2"),
        (["[PAD]", "[UNK]", "a"], {}, ValueError, "must contain `cls_token`. Received: cls_token='[SOS]', not among"),
        ("none.json", {}, ValueError, "the path of a vocabulary file. Received: vocabulary='none.json': [Errno 2]"),
        ("none", {}, ValueError, "`vocabulary` must be a list of tokens or the path of a vocabulary file. Received: v"),
        ([*SPECIAL, "a"], {"unknown_token": None}, TypeError, "`unknown_token` must be a string. Received: unknown"),
        ([*SPECIAL, "a"], {"pad_token": 7}, TypeError, "`pad_token` must be a string or None. Received: pad_token=7"),
        ([*SPECIAL, "a"], {"pad_token": ""}, ValueError, "`pad_token` must have at least"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            kind.from_vocabulary(vocabulary, **options)


def test_bad_definitions_of_words():
    ours = Words.train(["a b"], 9)
    with pytest.raises(ValueError, match="`definition` must be word-level. Received: {'model': 'BPE'}"):
        Words(changed(ours, model={"type": "BPE", "vocab": ours.parts["model"]["vocab"], "merges": []}))
    rule = "`definition` must have its unknown token in the vocabulary of its model. Received: '<unk>', not among the 6"
    with pytest.raises(ValueError, match=rule):
        Words(changed(ours, model={"unk_token": "<unk>"}), unknown_token="a")
    with pytest.raises(
        TypeError, match="`split_special_tokens` must be True or False. Received: split_special_toke.*=1"
    ):
        Words(ours.definition, split_special_tokens=1)


def test_bad_definitions_of_characters():
    ours = Characters.train(["ab"])
    with pytest.raises(
        ValueError, match="must have no normalizer, the decoder Fuse, and .*Received: {'normalizer': {'t"
    ):
        Characters(changed(ours, normalizer={"type": "NFC"}))
    with pytest.raises(ValueError, match="`definition` must be word-level. Received: {'model': 'BPE'}"):
        Characters(text.BytePairTokenizer.train(["abab"], 300).definition)
    rule = "must have at least two characters, because one may occur in a text. Received: "
    with pytest.raises(ValueError, match=f"`pad_token` {rule}pad_token='a'"):
        Characters(ours.definition, pad_token="a")
    with pytest.raises(ValueError, match=f"`sep_token` {rule}sep_token='!'"):
        Characters.train(["ab"], sep_token="!")
    with pytest.raises(ValueError, match=r"must have at least one character in its vocabulary. Received: \['\[PAD\]'"):
        Characters.from_vocabulary(SPECIAL)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"normalizer": "Uppercase"},
            ValueError,
            "`normalizer` must name a step of the `tokenizers` library. Received: n",
        ),
        (
            {"pre_tokenizer": "PreTokenizer"},
            ValueError,
            "must be an object if the step needs arguments. Received: pre_to",
        ),
        ({"pre_tokenizer": 7}, TypeError, "a tokenizer.json or an object of tokenizers.pre_tokenizers, or a list of t"),
        (
            {"normalizer": pre_tokenizers.Whitespace()},
            TypeError,
            "`normalizer` must be None, the name of a step, its fo",
        ),
        (
            {"normalizer": {"type": "Upper"}},
            ValueError,
            "`normalizer` must be a step that the `tokenizers` library can read. Rec",
        ),
        ({"min_frequency": 0}, ValueError, "`min_frequency` must be a positive integer. Received: min_frequency=0"),
        (
            {"min_frequency": 3},
            ValueError,
            "`texts` must hold a word at least `min_frequency` times. Received: texts=['",
        ),
        (
            {"vocabulary_size": 4},
            ValueError,
            "must be larger than 4, for the special tokens. Received: vocabulary_size=4",
        ),
        ({"vocabulary_size": "9"}, ValueError, "`vocabulary_size` must be a positive integer. Received: vocabulary_si"),
        ({"texts": "a b"}, TypeError, "`texts` must be an iterable of strings, not one string. Received: texts='a b'"),
        ({"texts": 7}, TypeError, "`texts` must be an iterable of strings, not one string. Received: texts=7"),
        ({"texts": ["a", 7]}, TypeError, "`texts` must hold strings. Received: 7"),
        ({"texts": ["\ud800"]}, TypeError, "`texts` must hold strings that UTF-8 can encode. Received: '\\ud800'"),
        ({"max_lenght": 7}, TypeError, "unexpected keyword argument 'max_lenght'"),
    ],
)
def test_bad_training(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Words.train(**({"texts": ["a b"], "vocabulary_size": 9} | options))


def test_bad_training_of_characters():
    with pytest.raises(
        ValueError, match=r"`texts` must hold a character at least `min_frequency` times. Received: texts=\[''\]"
    ):
        Characters.train([""])
    with pytest.raises(ValueError, match="`vocabulary_size` must be larger than 4, for the special tokens"):
        Characters.train(["a"], 3)


def test_numpy_numbers_in_training():
    assert Words.train(["a b"], np.int64(5)).vocabulary == [*SPECIAL, "a"]
    assert Characters.train(["aab"], np.int64(5), min_frequency=np.int32(1)).vocabulary == [*SPECIAL, "a"]
