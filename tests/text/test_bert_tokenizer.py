"""BertTokenizer: shapes, files, graphs, rough input, errors."""

import json
import re
import shutil
import time

import numpy as np
import pytest
import tensorflow as tf
from transformers import BertTokenizer as HuggingFace

from keras_tx.text import BertTokenizer, BytePairTokenizer
from keras_tx.text.vocabulary import read_vocabulary
from tests.pretrained.tiny import checkpoint

BASE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TINY = [*BASE, "hot", "dog", "##s", "un", "##able", "."]  # ids 5 to 10


@pytest.fixture(scope="module")
def tiny():
    return BertTokenizer(TINY)


def test_rows_by_hand(tiny):
    out = tiny(["Hot dogs.", "cat"], ["unable", "dog"])
    assert out["token_ids"].numpy().tolist() == [[2, 5, 6, 7, 10, 3, 8, 9, 3], [2, 1, 3, 6, 3, 0, 0, 0, 0]]
    assert out["segment_ids"].numpy().tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0, 0]]
    assert {ids.dtype for ids in out.values()} == {tf.int32}


def test_one_string_is_one_row(tiny):
    assert tiny("hot dog")["token_ids"].numpy().tolist() == [2, 5, 6, 3]
    assert tiny("hot", "dog", max_length=7, padding="max_length")["segment_ids"].numpy().tolist() == [
        0,
        0,
        0,
        1,
        1,
        0,
        0,
    ]
    assert tiny.tokenize("hot dogs").numpy().tolist() == [5, 6, 7]
    assert tiny.decode([2, 5, 6, 7, 3, 0]) == "hot dogs"
    assert tiny.decode([]) == ""


@pytest.mark.parametrize(
    "texts", [["hot"], ("hot",), [b"hot"], np.array(["hot"]), np.array([b"hot"]), tf.constant(["hot"])]
)
def test_kinds_of_texts(tiny, texts):
    assert tiny(texts)["token_ids"].numpy().tolist() == [[2, 5, 3]]


@pytest.mark.parametrize("ids", [[[5, 6], [7]], tf.ragged.constant([[5, 6], [7]]), [np.array([5, 6]), np.array([7])]])
def test_kinds_of_ids(tiny, ids):
    assert tiny.decode(ids) == ["hot dog", "##s"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_rectangles_of_ids(tiny, dtype):
    ids = np.array([[2, 5, 6, 3], [2, 8, 9, 3]], dtype)
    assert tiny.decode(ids) == tiny.decode(tf.constant(ids)) == ["hot dog", "unable"]
    assert tiny.decode(np.zeros((0, 3), dtype)) == []
    assert tiny.decode([[], [5]]) == ["", "hot"]


def test_empty_batches_and_texts(tiny):
    assert tiny([])["token_ids"].shape == (0, 0)
    assert tiny([], [])["segment_ids"].shape == (0, 0)
    assert tiny([], padding="max_length", max_length=7)["token_ids"].shape == (0, 7)
    assert tiny(["", " \t"])["token_ids"].numpy().tolist() == [[2, 3], [2, 3]]
    assert tiny.tokenize([]).shape[0] == 0


def test_max_length_of_the_constructor_holds():
    tokenizer = BertTokenizer(TINY, max_length=3)
    assert tokenizer(["hot dogs"])["token_ids"].shape == (1, 3)
    assert tokenizer(["hot dogs"], max_length=4)["token_ids"].shape == (1, 4)
    assert tokenizer([""], padding="max_length")["token_ids"].numpy().tolist() == [[2, 3, 0]]


def test_other_special_tokens():
    names = dict(unknown_token="<unk>", pad_token="<pad>", cls_token="<s>", sep_token="</s>", mask_token="<mask>")
    tokenizer = BertTokenizer(["<pad>", "<unk>", "<s>", "</s>", "<mask>", "a", "[", "]"], **names)
    assert tokenizer("A<mask>[cat]")["token_ids"].numpy().tolist() == [2, 5, 4, 6, 1, 7, 3]
    ids = (tokenizer.pad_id, tokenizer.unknown_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert BertTokenizer(BASE[:4]).mask_id is None
    assert tokenizer.token_to_id("[") == 6 and tokenizer.id_to_token(6) == "["


def test_training_keeps_to_the_size_and_fills_it(sentences):
    for size in (6, 23, 111, 300):
        tokenizer = BertTokenizer.train(sentences * 3, size)
        assert tokenizer.vocabulary[:5] == BASE
        assert tokenizer.vocabulary_size <= size
    assert tokenizer.vocabulary_size == 300
    assert BertTokenizer.train(["ab ab", "Ab cb"], 50).vocabulary == [*BASE, "a", "b", "c", "##b", "ab"]


def test_training_texts_of_every_kind(sentences):
    expected = BertTokenizer.train(sentences, 150).vocabulary
    dataset = tf.data.Dataset.from_tensor_slices(sentences)
    for texts in (iter(sentences), np.array(sentences), dataset, dataset.batch(3), sentences[::-1]):
        assert BertTokenizer.train(texts, 150).vocabulary == expected
    assert "Μ" not in expected and "M" in BertTokenizer.train(["M"], 9, lowercase=False, cls_token="<s>").vocabulary


def test_words_that_become_unknown_are_left_out_of_the_training(sentences):
    expected = BertTokenizer.train(sentences, 150).vocabulary
    for word in ("z" * 101, "ab" * 150, "กขคง" * 26):
        assert BertTokenizer.train([*sentences, *[word] * 9], 150).vocabulary == expected


def test_tokens_of_a_long_word_have_at_most_256_bytes():
    word = "กขคงจฉชซฌญ" * 10  # 300 bytes
    tokenizer = BertTokenizer.train([word] * 3, 500)
    longest = max(tokenizer.vocabulary, key=len)
    assert longest == word[: 256 // 3]
    assert tokenizer.decode(tokenizer.tokenize([word])) == [word]


def test_saved_and_read_back(pair, sentences, tmp_path):
    ours, theirs = pair
    ours.save(tmp_path)
    again = BertTokenizer.from_pretrained(tmp_path)
    assert again.get_config() == ours.get_config()
    assert BertTokenizer.from_transformers(theirs).get_config() == ours.get_config()
    assert BertTokenizer.from_vocabulary(tmp_path / "vocab.txt", lowercase=ours.lowercase).vocabulary == ours.vocabulary
    assert BertTokenizer.from_pretrained(tmp_path, max_length=7).max_length == 7
    theirs.save_pretrained(tmp_path / "theirs")  # tokenizer.json without vocab.txt
    assert not (tmp_path / "theirs" / "vocab.txt").exists()
    assert BertTokenizer.from_pretrained(tmp_path / "theirs").get_config() == ours.get_config()
    config = tmp_path / "theirs" / "tokenizer_config.json"
    config.unlink()  # tokenizer.json alone
    assert (
        BertTokenizer.from_pretrained(tmp_path / "theirs").tokenize(sentences).to_list()
        == ours.tokenize(sentences).to_list()
    )


def test_configuration_with_tokens_as_dictionaries(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(TINY) + "\n\n", encoding="utf-8")
    config = {"mask_token": {"content": "hot"}, "do_lower_case": False, "model_max_length": 10**30}
    config["added_tokens_decoder"] = {"5": {"content": "hot"}, "2": {"content": "[CLS]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = BertTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.vocabulary, tokenizer.mask_id, tokenizer.max_length) == (TINY, 5, 512)
    assert tokenizer.lowercase is False


def test_special_tokens_beside_the_vocabulary(tmp_path):
    BertTokenizer(["<pad>", "[UNK]", "[CLS]", "[SEP]", "hot"], pad_token="<pad>").save(tmp_path)
    theirs = HuggingFace.from_pretrained(tmp_path)  # adds [MASK] at the end
    ours = BertTokenizer.from_transformers(theirs)
    assert (ours.mask_id, ours.pad_id) == (theirs.mask_token_id, theirs.pad_token_id) == (5, 0)
    assert ours("hot[MASK]")["token_ids"].numpy().tolist() == theirs("hot[MASK]")["input_ids"]


@pytest.mark.parametrize("drop", ["vocab.txt", "tokenizer.json"])
def test_the_files_beside_a_checkpoint(tmp_path, drop):
    source = checkpoint("bert")
    for name in {"vocab.txt", "tokenizer.json", "tokenizer_config.json"} - {drop}:
        shutil.copyfile(source / name, tmp_path / name)
    ours, theirs = BertTokenizer.from_pretrained(tmp_path), HuggingFace.from_pretrained(source)
    for line in ("The quick brown fox, 42!", "Ünïcödé naïve café — 東京 \U0001f600", "  repeated   spaces ", ""):
        ids = theirs(line)["input_ids"]
        assert ours(line)["token_ids"].numpy().tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_in_a_dataset_with_the_batch_size_unknown(tiny):
    dataset = tf.data.Dataset.from_tensor_slices(["hot dogs", "cat", "unable."]).batch(2)
    pairs = {"max_length": 6, "padding": "max_length"}
    dataset = dataset.map(lambda texts: (tiny(texts), tiny(texts, texts, **pairs)))
    rows = [row for batch, _ in dataset for row in batch["token_ids"].numpy().tolist()]
    assert rows == [[2, 5, 6, 7, 3], [2, 1, 3, 0, 0], [2, 8, 9, 10, 3]]
    assert dataset.element_spec[1]["token_ids"].shape[1] == 6


def test_built_inside_a_graph_it_works_outside(tiny):
    made = []

    @tf.function
    def graph(texts):
        made.append(BertTokenizer(TINY))
        return made[0].decode(made[0](texts)["token_ids"])

    assert graph(tf.constant(["hot dogs"])).numpy().tolist() == [b"hot dogs"]
    assert made[0].decode(made[0]("hot dogs")["token_ids"]) == "hot dogs"


def test_ids_outside_the_vocabulary_in_a_graph_read_as_unknown(tiny):
    decode = tf.function(lambda ids: tiny.decode(ids, skip_special_tokens=False))
    ids = tf.constant([[5, 11, -1], [2**31 - 1, -(2**31), 6]])
    assert decode(ids).numpy().tolist() == [b"hot [UNK] [UNK]", b"[UNK] [UNK] dog"]
    assert tf.function(tiny.decode)(ids).numpy().tolist() == [b"hot", b"dog"]


def test_a_megabyte_in_one_string(tiny):
    started = time.perf_counter()
    huge = [
        "a" * 10**6,
        "dog " * 250_000,
        "\u0301" * 500_000,
        "." * 10**6,
        "[MASK]" * 160_000,
        "ß" * 500_000,
        b"\xff" * 10**6,
    ]
    lengths = tiny.tokenize(huge).row_lengths().numpy().tolist()
    assert lengths == [1, 250_000, 0, 10**6, 160_000, 1, 0]
    assert tiny(huge)["token_ids"].shape == (7, 512)
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize(
    "vocabulary, error, message",
    [
        ([], ValueError, "`vocabulary` must not be empty. Received: vocabulary=[]"),
        ("abc", TypeError, "`vocabulary` must be a list of strings. Received: vocabulary='abc'"),
        (7, TypeError, "`vocabulary` must be a list of strings. Received: vocabulary=7"),
        ([*BASE, 7], TypeError, "`vocabulary` must be a list of strings. Received: line 6=7"),
        ([*BASE, ""], ValueError, "`vocabulary` must hold tokens of one line, not empty. Received: line 6=''"),
        ([*BASE, "a\0"], ValueError, r"of at most 256 bytes without the character '\0', as TensorFlow Text requires."),
        ([*BASE, "é" * 129], ValueError, f"as TensorFlow Text requires. Received: line 6='{'é' * 129}'"),
        ([*BASE, "a\n"], ValueError, "Received: line 6='a\\n'"),
        ([*BASE, "a", "b", "a", "b"], ValueError, "every token once. Received: 'a' in lines 6 and 8"),
        (
            ["[PAD]", "[CLS]", "[SEP]"],
            ValueError,
            "must contain `unknown_token`. Received: unknown_token='[UNK]'",
        ),
        (["[UNK]", "[CLS]", "[SEP]"], ValueError, "must contain `pad_token`. Received: pad_token='[PAD]'"),
        (["[UNK]", "[PAD]", "[SEP]"], ValueError, "must contain `cls_token`. Received: cls_token='[CLS]'"),
        (
            ["[UNK]", "[PAD]", "[CLS]"],
            ValueError,
            "must contain `sep_token`. Received: sep_token='[SEP]', not among",
        ),
    ],
)
def test_bad_vocabularies(vocabulary, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BertTokenizer(vocabulary)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"lowercase": 1}, TypeError, "`lowercase` must be True or False. Received: lowercase=1"),
        (
            {"strip_accents": "no"},
            TypeError,
            "must be True, False or None. Received: strip_accents='no'",
        ),
        ({"split_chinese": None}, TypeError, "`split_chinese` must be True or False. Received: split_chinese=None"),
        (
            {"max_length": 1},
            ValueError,
            "must be at least 2, for the special tokens. Received: max_length=1",
        ),
        ({"max_length": 7.5}, ValueError, "`max_length` must be a positive integer. Received: max_length=7.5"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BertTokenizer(TINY, **options)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        (([1, 2],), {}, TypeError, "`texts` must be a string, or a list or tensor of strings. Received: texts=[1, 2]"),
        (
            (tf.constant([1]),),
            {},
            TypeError,
            "`texts` must be a string, or a list or tensor of strings. Received: texts=",
        ),
        ((None,), {}, TypeError, "Received: texts=None"),
        (("\ud800",), {}, TypeError, "Received: texts='\\ud800'"),
        ((["a", ["b"]],), {}, TypeError, "Received: texts=['a', ['b']]"),
        (([["a"]],), {}, ValueError, "`texts` must have rank 0 or 1. Received: texts of shape (1, 1)"),
        ((["a"], [7]), {}, TypeError, "`pairs` must be a string, or a list or tensor of strings. Received: pairs=[7]"),
        (
            (["a"], ["b", "c"]),
            {},
            ValueError,
            "the same length as `texts`. Received: shapes texts=(1,), pairs=(2,)",
        ),
        (("a", ["b"]), {}, ValueError, "Received: shapes texts=(), pairs=(1,)"),
        (
            ("a",),
            {"padding": "left"},
            ValueError,
            "must be one of ['longest', 'max_length']. Received: padding='left'",
        ),
        (
            ("a",),
            {"max_length": 1},
            ValueError,
            "must be at least 2, for the special tokens. Received: max_length=1",
        ),
        (
            ("a", "b"),
            {"max_length": 2},
            ValueError,
            "must be at least 3, for the special tokens. Received: max_length=2",
        ),
    ],
)
def test_bad_calls(tiny, arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tiny(*arguments, **options)


@pytest.mark.parametrize(
    "ids, error, message",
    [
        ([5, 11], ValueError, "`ids` must be in [0, 11), the vocabulary. Received: id 11"),
        ([[5], [-1]], ValueError, "`ids` must be in [0, 11), the vocabulary. Received: id -1"),
        ([0.5], TypeError, "`ids` must be integers. Received: ids of dtype float32"),
        (["a"], TypeError, "`ids` must be integers. Received: ids of dtype string"),
        ([[1], 2], TypeError, "`ids` must be integers. Received: ids=[[1], 2]"),
        (3, ValueError, "`ids` must have rank 1 or 2. Received: ids of shape ()"),
        (np.zeros((1, 2, 3), int), ValueError, "`ids` must have rank 1 or 2. Received: ids of shape (1, 2, 3)"),
    ],
)
def test_bad_ids(tiny, ids, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tiny.decode(ids)


@pytest.mark.parametrize(
    "texts, size, error, message",
    [
        ([], 50, ValueError, "`texts` must hold at least one word of at most 100 characters. Received: texts=[]"),
        ([" "], 50, ValueError, "at least one word of at most 100 characters. Received: texts=[' ']"),
        (["z" * 101], 50, ValueError, "at least one word of at most 100 characters. Received: texts=['zzz"),
        ("text", 50, TypeError, "`texts` must be an iterable of strings, not one string. Received: texts='text'"),
        ([7], 50, TypeError, "`texts` must hold strings. Received: 7"),
        (
            ["a"],
            5,
            ValueError,
            "larger than the number of special tokens. Received: vocabulary_size=5",
        ),
        (["a"], 0, ValueError, "`vocabulary_size` must be a positive integer. Received: vocabulary_size=0"),
    ],
)
def test_bad_training(texts, size, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BertTokenizer.train(texts, size)


def test_bad_places(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must be a vocabulary file, .*Received: path='.*none.txt'"):
        read_vocabulary(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"`directory` must be a directory. Received: directory='.*none'"):
        BertTokenizer.from_pretrained(tmp_path / "none")
    (tmp_path / "a.bin").touch()
    with pytest.raises(ValueError, match=r"must contain vocab.txt or tokenizer.json. .*which contains \['a.bin'\]"):
        BertTokenizer.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="`tokenizer` must be a tokenizer of transformers. Received: tokenizer=7"):
        BertTokenizer.from_transformers(7)


def test_other_tokenizers_are_refused(tiny, tmp_path):
    tiny.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for name in ("tokenize_chinese_chars", "strip_accents", "do_lower_case"):
        config.write_text(json.dumps({name: 1}))
        with pytest.raises(ValueError, match=rf"must give one of \(True, False.*Received: {name}=1 in .*_config.json"):
            BertTokenizer.from_pretrained(tmp_path)
    config.write_text(json.dumps({"sep_token": None}))
    with pytest.raises(
        ValueError, match="each of BERT's special tokens, or .*Received: sep_token=None in .*_config.js"
    ):
        BertTokenizer.from_pretrained(tmp_path)
    config.write_text(json.dumps({"tokenizer_class": "EsmTokenizer"}))
    with pytest.raises(ValueError, match="must hold a BERT tokenizer. Received: tokenizer_class='EsmTokenizer'"):
        BertTokenizer.from_pretrained(tmp_path)
    config.write_text(json.dumps({"added_tokens_decoder": {"11": {"content": "[E1]"}}}))
    with pytest.raises(ValueError, match=r"must have no special tokens except BERT's five. Received: \['\[E1\]'\] in"):
        BertTokenizer.from_pretrained(tmp_path)
    tiny.save(tmp_path)
    HuggingFace.from_pretrained(tmp_path).save_pretrained(tmp_path / "json")
    path = tmp_path / "json" / "tokenizer.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "normalizer": {**data["normalizer"], "lowercase": "x"}}))
    with pytest.raises(
        ValueError, match=r"must give one of \(True, False\). Received: lowercase='x' in .*tokenizer.json"
    ):
        BertTokenizer.from_pretrained(tmp_path / "json")
    data["model"]["type"] = "BPE"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="BERT tokenizer: model.type='WordPiece'. Received: model.type='BPE' in"):
        BertTokenizer.from_pretrained(tmp_path / "json")
    BytePairTokenizer.train(["hot dogs, hot dogs"], 300).save(tmp_path / "byte_pairs")
    with pytest.raises(ValueError, match="BERT tokenizer: model.type='WordPiece'. Received: model.type='BPE' in"):
        BertTokenizer.from_pretrained(tmp_path / "byte_pairs")
    data["model"]["type"] = "WordPiece"
    path.write_text(json.dumps(data | {"added_tokens": [{"content": "[SEP]", "id": 9}]}))
    with pytest.raises(ValueError, match=r"without gaps. Received: '\[SEP\]' with id 9 at place 3 in"):
        BertTokenizer.from_pretrained(tmp_path / "json")
    data["model"]["vocab"].pop("un")
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"without gaps. Received: '##able' with id 9 at place 8 in"):
        BertTokenizer.from_pretrained(tmp_path / "json")
