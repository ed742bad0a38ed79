"""Definitions, vocabularies and settings that are legal but rare: used as the libraries use them, or refused."""

import itertools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import transformers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from keras_tx import text
from keras_tx.text.sentencepiece_model import merges_of

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "don", "'", "t", "it", "s", "."]
WORDS = {"a": 0, "b": 1, "[C]": 2, "[S]": 3, "[UNK]": 4}


def in_graph(function, *arguments):
    return tf.function(function)(*map(tf.constant, arguments))


def words(normalizer=None, added=(), template=None):
    library = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_special_tokens(["[C]", "[S]"])
    library.add_tokens(list(added))
    if template is not None:
        single, pair = template
        special = [("[C]", 2), ("[S]", 3)]
        library.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return library


@pytest.mark.parametrize(
    ("vocabulary", "error", "message"),
    [
        ({token: i for i, token in enumerate(BERT)}, TypeError, "strings in the order of their ids, as `sorted"),
        (set(BERT), TypeError, "a list of strings in the order of their ids. Received"),
        ([*BERT, "\ud800"], ValueError, "strings that UTF-8 can encode. Received: line 12="),
    ],
)
def test_vocabularies_without_an_order_or_of_no_text(vocabulary, error, message):
    with pytest.raises(error, match=message):
        text.BertTokenizer(vocabulary)
    with pytest.raises(error, match=message):
        text.WordLevelTokenizer.from_vocabulary(vocabulary)


def test_a_token_that_is_no_string_has_no_id():
    with pytest.raises(ValueError, match=r"`token` must be in the vocabulary. Received: token=\['don'\]"):
        text.BertTokenizer(BERT).token_to_id(["don"])


@pytest.mark.parametrize("corpus", [["12 345", "12 34"], [" "], ["☀ ☁☀", "☀"]])
def test_pieces_without_letters_run_in_a_graph(corpus):
    tokenizer = text.SentencePieceTokenizer.train(corpus * 3, 275)
    for one in [*corpus, "a é 12", "", "  "]:
        ids = tokenizer.tokenize([one])
        assert in_graph(tokenizer.tokenize, [one]).to_list() == ids
        assert [x.decode() for x in in_graph(tokenizer.decode, np.array(ids, "int32")).numpy()] == [one]
        assert tokenizer.decode(ids) == [one]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (("$A [S]", "$B [S] $A"), r"a pair after its first text.*Received: texts in the order \[1, 0\] of a pair"),
        (("$A [C] $A", "$A $B"), r"must put every text once.*of one text"),
        (("$A", "$A $B [S] $B"), "must put every text once.*of a pair"),
    ],
)
def test_templates_that_repeat_or_exchange_texts_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        text.WordLevelTokenizer(words(template=template).to_str())


def test_usual_templates_give_what_the_library_gives():
    library = words(template=("[C] $A [S]", "[C] $A [S] $B [S] [S]"))
    tokenizer = text.WordLevelTokenizer(library.to_str())
    assert tokenizer("a b")["token_ids"].tolist() == library.encode("a b").ids
    assert tokenizer("a b", "b")["token_ids"].tolist() == library.encode("a b", "b").ids


@pytest.mark.parametrize(
    ("first", "second", "is_found"),
    [
        (AddedToken("<m>", lstrip=True, normalized=False), AddedToken("  ", normalized=False), False),
        (AddedToken("<m>", lstrip=True, normalized=False), AddedToken("<m><x>", normalized=False), False),
        (AddedToken("<m>", rstrip=True, normalized=True), AddedToken(" <x>", normalized=True), False),
        (AddedToken("<m>", lstrip=True, normalized=False), AddedToken("  ", normalized=True), True),
        (AddedToken("<m>", lstrip=True, normalized=False), AddedToken("<x>", normalized=False), True),
        (AddedToken("<m>", normalized=False), AddedToken("<m><x>", normalized=False), True),
    ],
)
def test_added_tokens_that_take_spaces_beside_others(first, second, is_found):
    library = Tokenizer.from_str(text.BytePairTokenizer.train(["hot dog a hot dog"] * 3, 270).definition)
    library.add_tokens([first, second])
    tokenizer = text.BytePairTokenizer(library.to_str())
    if not is_found:
        assert "takes the spaces beside it, and" in tokenizer.not_in_graph
        return
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(["a", " ", "  ", "<m>", "<x>", "hot"], 7)) for _ in range(300)]
    assert in_graph(tokenizer.tokenize, texts).to_list() == tokenizer.tokenize(texts)


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.Replace("N", "m")])
def test_added_tokens_are_decoded_as_they_are_normalized(normalizer):
    library = words(normalizer, ["NAME"])
    tokenizer = text.WordLevelTokenizer(library.to_str())
    ids = [0, library.token_to_id("NAME"), 1]
    expected = library.decode(ids)
    assert expected != "a NAME b"
    assert tokenizer.decode(ids) == in_graph(tokenizer.decode, ids).numpy().decode() == expected


def test_added_tokens_of_byte_pairs_are_decoded_as_they_are_normalized():
    library = Tokenizer.from_str(text.BytePairTokenizer.train(["hot dog a hot dog"] * 3, 270).definition)
    library.normalizer = normalizers.NFD()
    library.add_tokens(["é"])
    tokenizer = text.BytePairTokenizer(library.to_str())
    ids = [library.token_to_id("é"), *library.encode("hot").ids]
    assert tokenizer.decode(ids) == in_graph(tokenizer.decode, ids).numpy().decode() == library.decode(ids)


@pytest.mark.parametrize("by_default", [True, False])
def test_spaces_of_bert_are_cleaned_up_as_in_transformers(by_default, tmp_path):
    tokenizer = text.BertTokenizer(BERT, clean_up_tokenization_spaces=by_default)
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"] is by_default
    theirs, again = transformers.BertTokenizer.from_pretrained(tmp_path), text.load_tokenizer(tmp_path)
    assert again.get_config() == tokenizer.get_config()
    for ids in itertools.product([5, 6, 7, 9, 10], repeat=4):
        for choice in (None, True):
            expected = theirs.decode(ids, clean_up_tokenization_spaces=choice)
            assert again.decode(ids, clean_up_tokenization_spaces=choice) == expected
    assert again.decode([5, 6, 7, 10], clean_up_tokenization_spaces=False) == "don ' t ."
    with pytest.raises(TypeError, match="`clean_up_tokenization_spaces` must be True, False or None"):
        again.decode([5], clean_up_tokenization_spaces=1)


@pytest.mark.parametrize("kind", ["bert", "byte pairs"])
def test_a_folder_has_the_old_tokenizer_or_the_new_one(kind, tmp_path, monkeypatch):
    old, new = text.BytePairTokenizer.train(["hot dog"] * 3, 262), text.BertTokenizer(BERT)
    if kind == "byte pairs":
        new = text.BytePairTokenizer.train(["hot day"] * 3, 262, pad_token="<p>")
    old.save(tmp_path)
    write = pathlib.Path.write_bytes

    def write_one(path, data):
        if path.name == "tokenizer_config.json":
            raise OSError("no space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", write_one)
        with pytest.raises(OSError, match="no space left"):
            new.save(tmp_path)
    assert text.load_tokenizer(tmp_path).get_config() == old.get_config()
    new.save(tmp_path)
    assert text.load_tokenizer(tmp_path).get_config() == new.get_config()
    assert not any(path.is_symlink() or path.name.startswith(".") for path in tmp_path.iterdir())


def test_merges_of_a_vocabulary_are_all_pairs_of_its_tokens():
    random = np.random.default_rng(0)
    for _ in range(200):
        tokens = {"".join(random.choice(["a", "b"], random.integers(1, 7))) for _ in range(random.integers(1, 13))}
        vocabulary = {token: i for i, token in enumerate(sorted(tokens))}
        expected = [pair for pair in itertools.product(vocabulary, repeat=2) if "".join(pair) in vocabulary]
        expected.sort(key=lambda pair: (vocabulary["".join(pair)], len(pair[0])))
        assert merges_of(vocabulary) == expected


def test_a_special_token_that_a_merge_would_give_is_refused():
    with pytest.raises(ValueError, match="`pad_token` must not be spelled as a learned token is.*pad_token='Ġdog'"):
        text.BytePairTokenizer.train(["hot dog hot dog"] * 5, 275, pad_token="Ġdog")


@pytest.mark.parametrize("kind", ["bert", "byte pairs"])
def test_a_known_batch_size_stays_known_in_a_graph(kind):
    tokenizer = text.BertTokenizer(BERT)
    if kind == "byte pairs":
        tokenizer = text.BytePairTokenizer.train(["hot dog"] * 3, 262, pad_token="<p>")
    encode = tf.function(lambda texts: tokenizer(texts, max_length=7, padding="max_length"))
    shapes = encode.get_concrete_function(tf.TensorSpec([3], tf.string)).output_shapes
    assert all(shape == [3, 7] for shape in shapes.values())
