"""Byte pairs and SentencePiece's pieces that are trained here: every text comes back from its ids, in a graph too."""

import io
import json
import re

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from keras_tx import text
from tests.text.made import TRICKY

tf = pytest.importorskip("tensorflow")
BytePairs, Pieces = text.BytePairTokenizer, text.SentencePieceTokenizer
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
ODD = ["<s>", "</s>", "<pad>", "<0x41>", "<0x4a>", "<0xZZ>", "▁", "▁a", "▅", "\ufffe\uffff", "\U0001fffe", "  ", "\r\n"]
odd = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from([*ODD, *"\0\t aé東😀\u0301"]))
LEARNED = ["<0x41> <0x4a> <s>x</s>", "▁a ▅ ▁a", "x<unk>y", "\U0001fffe\0", "a  b\tc"]


AFTER_SPACE = {"add_prefix_space": True}
KINDS = {"pairs": (BytePairs, {}), "pieces": (Pieces, {}), "pairs after a space": (BytePairs, AFTER_SPACE)}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def trained(request, sentences):
    """A tokenizer over texts that spell what is dangerous; and its methods as functions of a graph."""
    kind, options = request.param
    ours = kind.train((sentences + LEARNED) * 3, 420, **options)
    ids = [tf.RaggedTensorSpec([None, None], tf.int32)]
    encode = tf.function(ours.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    return ours, encode, tf.function(ours.decode, input_signature=ids)


def check(trained, texts):
    ours, encode, decode = trained
    ids = ours.tokenize(texts)
    library = tokenizers.Tokenizer.from_str(ours.definition)
    library.encode_special_tokens = True
    assert ids == [library.encode(one, add_special_tokens=False).ids for one in texts]
    assert ours.decode(ids) == texts == library.decode_batch(ids)
    found = encode(tf.constant([one.encode() for one in texts], tf.string))
    assert found.to_list() == ids
    assert [one.decode() for one in decode(found).numpy()] == texts


def test_hard_texts_come_back(trained, sentences):
    check(trained, [*TRICKY, *sentences, *ODD, *LEARNED, *map(chr, range(256))])


@settings(max_examples=25)
@given(st.lists(st.lists(odd, max_size=20).map("".join), min_size=1, max_size=20))
def test_any_text_comes_back(trained, texts):
    check(trained, texts)


def test_rows_begin_and_end(trained):
    ours, *_ = trained
    row = ours("a dog")["token_ids"].tolist()
    assert row == [ours.cls_id, *ours.tokenize("a dog"), ours.sep_id] and ours.pad_id == 0
    assert ours("a", "b")["token_ids"].tolist()[-1] == ours.sep_id
    assert ours.vocabulary_size == 420 and ours.max_length is None
    bare = type(ours).train(["hot dogs hot dogs"], 300, cls_token=None, sep_token=None, max_length=3)
    assert bare("hot dogs")["token_ids"].tolist() == bare.tokenize("hot dogs")[:3] and bare.max_length == 3
    assert set(bare.special_tokens) == {"pad_token"} | ({"unknown_token"} if isinstance(ours, Pieces) else set())


def test_special_tokens_in_texts_on_request(trained):
    ours = type(trained[0]).train(["hot dogs <s>"] * 3, 300, split_special_tokens=False, mask_token="<mask>")
    assert ours.tokenize("<s>") == [ours.cls_id] and ours.decode([ours.cls_id]) == ""
    found = tf.function(ours.tokenize)(tf.constant(["<s> hot<mask>"])).to_list()
    assert found == ours.tokenize(["<s> hot<mask>"]) and found[0][-1] == ours.mask_id


def test_the_merges_are_those_that_the_library_learns(sentences):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, min_frequency=2, show_progress=False, special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(sentences, trainer)
    ours = BytePairs.train(sentences, 330)
    assert ours.parts["model"] == json.loads(library.to_str())["model"] and ours.vocabulary[:3] == special


def test_after_a_space_words_have_the_same_tokens_at_the_beginning_and_within(sentences, tmp_path):
    ours = BytePairs.train(sentences * 3, 400, add_prefix_space=True)
    one, two = "dog", "a dog dog"
    assert ours.tokenize(two)[-len(ours.tokenize(one)) :] == ours.tokenize(one)
    assert ours.vocabulary[ours.tokenize("x")[0]] == "Ġ" and ours.tokenize("") == [] and ours.decode([]) == ""
    assert ours.decode(ours.tokenize(" x")) == " x" and ours.decode(ours.tokenize("  ")) == "  "
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded = text.load_tokenizer(tmp_path)
    assert type(loaded) is BytePairs and loaded.in_graph
    for string in [*sentences, *TRICKY]:
        assert ours(string)["token_ids"].tolist() == loaded(string)["token_ids"].tolist() == theirs(string)["input_ids"]
        assert theirs.decode(theirs(string)["input_ids"], skip_special_tokens=True) == string


def test_special_tokens_within_a_text_after_a_space(sentences):
    ours = BytePairs.train(sentences * 3, 400, add_prefix_space=True, split_special_tokens=False)
    texts = ["dog<s>dog", "<s>", "<s> dog", "<s><s>dog </s>", " <s> "]
    expected = ours.tokenize(texts)
    assert tf.function(ours.tokenize)(tf.constant(texts)).to_list() == expected
    ids = tf.ragged.constant(expected)
    for skip in (True, False):
        found = tf.function(lambda ids, skip=skip: ours.decode(ids, skip_special_tokens=skip))(ids).numpy()
        assert [one.decode() for one in found] == ours.decode(expected, skip_special_tokens=skip)


def test_the_pieces_are_those_that_sentencepiece_learns(sentences):
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=file, model_type="bpe", vocab_size=397, byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", add_dummy_prefix=False, num_threads=1,
        remove_extra_whitespaces=False, bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    ours = Pieces.train(sentences, 400)
    spell = lambda ids: [ours.vocabulary[i].replace(" ", "▁") for i in ids]
    assert spell(range(4, 400)) == [theirs.id_to_piece(i) for i in range(1, 397)]
    assert ours.vocabulary[:4] == SPECIAL
    texts = [*sentences, "Bush es!!  ", "\ttab", "東 外"]
    assert [spell(row) for row in ours.tokenize(texts)] == theirs.encode(texts, out_type=str)


def test_rare_characters_become_bytes_where_there_is_no_room():
    ours = Pieces.train(["ab" * 9 + "xyz"], 262)
    assert ours.vocabulary[4 + 256 :] == ["a", "b"]
    assert ours.vocabulary[ours.tokenize("z")[0]] == "<0x7A>" and ours.decode(ours.tokenize("zab")) == "zab"
    rare = Pieces.train(["ab" * 9999 + "é"], 300)
    assert "é" not in rare.vocabulary and "abab" in rare.vocabulary


def test_bad_training():
    for kind in (BytePairs, Pieces):
        for options, error, message in (
            (
                {"vocabulary_size": 258},
                ValueError,
                "for the special tokens and 256 bytes. Received: vocabulary_size=258",
            ),
            ({"texts": []}, ValueError, "`texts` must hold "),
            ({"texts": 7}, TypeError, "`texts` must be an iterable of strings, not one string. Received: texts=7"),
            ({"texts": [7]}, TypeError, "`texts` must hold strings. Received: 7"),
            (
                {"cls_token": "_"},
                ValueError,
                "`cls_token` must have at least two characters, because one may occur in a",
            ),
            ({"cls_token": 7}, TypeError, "`cls_token` must be a string or None. Received: cls_token=7"),
        ):
            with pytest.raises(error, match=re.escape(message)):
                kind.train(**({"texts": ["abab"], "vocabulary_size": 300} | options))
    with pytest.raises(
        ValueError, match=r"two bytes together at least `min_frequency` times. Received: texts=\['ab'\]"
    ):
        BytePairs.train(["ab"], 300)
    with pytest.raises(TypeError, match="`add_prefix_space` must be True or False. Received: add_prefix_space=1"):
        BytePairs.train(["abab"], 300, add_prefix_space=1)
    with pytest.raises(ValueError, match=r"`texts` must hold at least one character. Received: texts=\['\\n'\]"):
        Pieces.train(["\n"], 300)


def test_split_special_tokens_beside_others_has_no_graph_form(trained):
    ours, *_ = trained
    library = tokenizers.Tokenizer.from_str(ours.definition)
    library.add_tokens(["<tool>"])
    mixed = type(ours)(library.to_str(), split_special_tokens=True)
    assert "has added tokens that it does not split" in mixed.not_in_graph
    assert type(ours)(library.to_str()).in_graph and mixed.decode(mixed.tokenize("<s><tool>")) == "<s><tool>"


def test_sentencepiece_logs_nothing_when_a_graph_loads_its_model(capfd):
    ours = Pieces.train(["a dog runs"] * 3, 270)
    tf.function(ours.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])(tf.constant(["a dog"]))
    assert "LOG(" not in capfd.readouterr().err
