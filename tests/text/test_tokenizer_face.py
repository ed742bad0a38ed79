"""What every tokenizer takes, returns and refuses outside a graph; and where it meets a model."""

import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import text
from keras_tx.generation import generate
from keras_tx.models import CausalLM, Seq2Seq
from keras_tx.serving.text_generator import TextGenerator

GPT2 = {"max_length": 1024, "pad_id": None, "cls_id": None}


@pytest.fixture(scope="module")
def roberta(made):
    return text.load_tokenizer(made / "roberta")


@pytest.fixture(scope="module")
def gpt2(made):
    return text.load_tokenizer(made / "gpt2")


def test_rows_by_hand(roberta):
    out = roberta(["a", "a b", ""])
    a, b = roberta.token_to_id("a"), roberta.tokenize("a b")[1:]
    assert list(out) == ["token_ids"] and out["token_ids"].dtype == np.int32
    assert out["token_ids"].tolist() == [[0, a, 2, 1], [0, a, *b, 2], [0, 2, 1, 1]]
    assert roberta("a", "a")["token_ids"].tolist() == [0, a, 2, 2, a, 2]
    assert roberta("a", max_length=5, padding="max_length")["token_ids"].tolist() == [0, a, 2, 1, 1]
    assert roberta([])["token_ids"].shape == (0, 0)
    assert roberta([], max_length=7, padding="max_length")["token_ids"].shape == (0, 7)
    assert roberta.id_to_token(0) == "<s>" and roberta.vocabulary[400] == "<mask>" == roberta.id_to_token(400)


@pytest.mark.parametrize(
    "texts", [["a b"], ("a b",), [b"a b"], np.array(["a b"]), np.array([b"a b"]), np.array(["a b"], object)]
)
def test_kinds_of_texts(roberta, texts):
    assert roberta(texts)["token_ids"].tolist() == [roberta("a b")["token_ids"].tolist()]
    assert roberta.tokenize(texts) == [roberta.tokenize("a b")]


def test_kinds_of_ids(roberta):
    a = roberta.token_to_id("a")
    for rows in ([[a], [a, a]], [np.array([a]), np.array([a, a])], ([a], [a, a])):
        assert roberta.decode(rows) == ["a", "aa"]
    assert roberta.decode(np.array([[a, a], [a, 1]], "uint16")) == ["aa", "a"]
    assert roberta.decode([a]) == roberta.decode(np.array([a])) == "a"
    assert roberta.decode([]) == "" and roberta.decode([[], [a]]) == ["", "a"]
    assert roberta.decode(np.zeros((0, 3), int)) == []
    assert roberta.decode([0, a, 2], skip_special_tokens=False) == "<s>a</s>"


def test_tensors_of_other_libraries(roberta):
    torch = pytest.importorskip("torch")
    a = roberta.token_to_id("a")
    assert roberta.decode(torch.tensor([[a, a], [a, 1]])) == ["aa", "a"]
    tf = pytest.importorskip("tensorflow")
    assert roberta.decode(tf.constant([[a, a]])) == roberta.decode(tf.ragged.constant([[a, a]])) == ["aa"]
    assert roberta(tf.constant(["a"]))["token_ids"].tolist() == roberta(["a"])["token_ids"].tolist()
    assert roberta(tf.constant("a"))["token_ids"].tolist() == roberta("a")["token_ids"].tolist()


def test_what_is_not_utf_8_reads_as_python_replaces_it(roberta):
    assert roberta.tokenize(b"a\xffb") == roberta.tokenize("a\ufffdb")


def test_without_a_pad_token(gpt2):
    assert (gpt2.max_length, gpt2.pad_id, gpt2.cls_id) == tuple(GPT2.values())
    assert gpt2(["a b", "a b"])["token_ids"].shape[0] == 2  # nothing to pad
    with pytest.raises(ValueError, match=r"from_pretrained\(directory, pad_token=...\). Received: pad_token=None"):
        gpt2(["a", "a b"])


def test_it_generates(made):
    ours = text.load_tokenizer(made / "llama3")
    lm = CausalLM(ours.vocabulary_size, num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5)
    options = {"max_new_tokens": 3, "tokenizer": ours, "jit_compile": False, "stop_tokens": ()}
    found = generate(lm, ["a dog", "Hi"], **options)
    rows = generate(
        lm, [[ours.cls_id, *ours.tokenize(one)] for one in ("a dog", "Hi")], **options | {"tokenizer": None}
    )
    assert found == ours.decode(rows) and found[0].startswith("a dog")
    marian = text.load_tokenizer(made / "marian")
    sizes = {"num_layers": 1, "hidden_dim": 6, "num_heads": 2, "intermediate_dim": 5}
    translator = Seq2Seq(marian.vocabulary_size, embedding_options={"padding_id": marian.pad_id}, **sizes)
    options = {"max_new_tokens": 3, "start_token": marian.pad_id, "jit_compile": False}
    rows = generate(translator, marian(["a dog", "Hi"])["token_ids"], stop_tokens=marian.sep_id, **options)
    assert generate(translator, ["a dog", "Hi"], tokenizer=marian, **options) == marian.decode(rows)


def test_targets_of_marian_are_cut_by_the_model_of_their_language(made, sentences):
    marian = text.load_tokenizer(made / "marian")
    words = " ".join(sentences).split()
    targets = [word for word in words if marian.target.tokenize(word) != marian.tokenize(word)][:2]
    ids = [marian.target.tokenize(one) for one in targets]
    assert len(ids) == 2
    sizes = {"num_layers": 1, "hidden_dim": 6, "num_heads": 2, "intermediate_dim": 5}
    model = Seq2Seq(marian.vocabulary_size, embedding_options={"padding_id": marian.pad_id}, **sizes)
    options = {"max_new_tokens": 3, "jit_compile": False, "stop_tokens": marian.sep_id, "tokenizer": marian}
    begun = {"source_ids": ["a dog", "a"], "target_ids": targets}
    found = generate(model, begun, start_token=marian.pad_id, **options)
    given = {"source_ids": begun["source_ids"], "target_ids": [[marian.pad_id, *row] for row in ids]}
    assert found == generate(model, given, **options)
    if keras.backend.backend() == "tensorflow":
        made_of = {"start_token": marian.pad_id, "stop_tokens": marian.sep_id, "max_new_tokens": 3}
        for generator in (
            TextGenerator(model, marian, None, made_of),
            TextGenerator(model, marian.target, marian, made_of),
        ):
            prompts, sources = generator.tokenize([ops.convert_to_tensor(["a dog", "a"])], ["text"])
            score = generator.score(prompts, sources, ops.convert_to_tensor(targets), "text")
            assert score["num_tokens"].numpy().tolist() == [len(row) + 1 for row in ids]
            strings = [[token.decode() for token in row if token] for row in score["tokens"].numpy()]
            assert strings == [[*[marian.vocabulary[token] for token in row], "</s>"] for row in ids]


WITHOUT_TENSORFLOW = """
import json, sys
sys.modules["tensorflow"] = None
from keras_tx import text
folders, sentences = map(json.loads, sys.argv[1:])
tokenizers = map(text.load_tokenizer, folders)
found = [[t("a dog")["token_ids"].tolist(), t.decode(t.tokenize("a dog"))] for t in tokenizers]
print(json.dumps([found, text.BertTokenizer.train(sentences, 300).vocabulary]))
"""


@pytest.mark.slow
@pytest.mark.process
def test_another_process_without_tensorflow_does_the_same(made, sentences):
    """Training too, for which the `tokenizers` library has a seed of its own in every process."""
    kinds = ["gpt2", "t5", "marian", "words", "characters", "pieces"]
    arguments = [json.dumps([str(made / kind) for kind in kinds]), json.dumps(sentences * 2)]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "jax"},
    )
    assert run.returncode == 0, run.stderr
    found, vocabulary = json.loads(run.stdout.splitlines()[-1])
    for kind, answer in zip(kinds, found, strict=True):
        ours = text.load_tokenizer(made / kind)
        assert answer == [ours("a dog")["token_ids"].tolist(), ours.decode(ours.tokenize("a dog"))]
    assert vocabulary == text.BertTokenizer.train(sentences * 2, 300).vocabulary


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        (([1, 2],), {}, TypeError, "`texts` must be a string, or a list or tensor of strings. Received: texts=[1, 2]"),
        ((None,), {}, TypeError, "Received: texts=None"),
        (("\ud800",), {}, TypeError, "Received: texts='\\ud800'"),
        ((["a", ["b"]],), {}, TypeError, "Received: texts=['a', ['b']]"),
        (([["a"]],), {}, ValueError, "`texts` must have rank 0 or 1. Received: texts=[['a']]"),
        (([("a", "b")],), {}, ValueError, "rank 0 or 1, and second texts come in a list of their own. Received: texts"),
        ((np.array([["a"]]),), {}, ValueError, "`texts` must have rank 0 or 1. Received: texts of shape (1, 1)"),
        ((["a"], [7]), {}, TypeError, "`pairs` must be a string, or a list or tensor of strings. Received: pairs=[7]"),
        (
            (["a"], ["b", "c"]),
            {},
            ValueError,
            "`pairs` must have the same length as `texts`. Received: 1 texts, 2 pairs",
        ),
        (("a", ["b"]), {}, ValueError, "Received: one string and a list of strings"),
        (("a",), {"padding": "left"}, ValueError, "one of ['longest', 'max_length']. Received: padding='left'"),
        (("a",), {"max_length": 1}, ValueError, "at least 2, for the special tokens. Received: max_length=1"),
        (("a", "b"), {"max_length": 3}, ValueError, "at least 4, for the special tokens. Received: max_length=3"),
    ],
)
def test_bad_calls(roberta, arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        roberta(*arguments, **options)


def test_a_length_is_needed_to_pad_to_it(made):
    with pytest.raises(ValueError, match='given with `padding="max_length"`. Received: max_length=None'):
        text.load_tokenizer(made / "t5")("a", padding="max_length")


@pytest.mark.parametrize(
    "ids, error, message",
    [
        ([5, 401], ValueError, "`ids` must be in [0, 401), the vocabulary. Received: id 401"),
        ([[5], [-1]], ValueError, "`ids` must be in [0, 401), the vocabulary. Received: id -1"),
        ([0.5], TypeError, "`ids` must be integers. Received: ids of dtype float64"),
        (["a"], TypeError, "`ids` must be integers. Received: ids of dtype str"),
        ([[1], 2], TypeError, "`ids` must be integers. Received: ids=[[1], 2]"),
        ([[[1]], [[2]]], ValueError, "`ids` must have rank 1 or 2. Received: ids=[[[1]], [[2]]]"),
        (3, ValueError, "`ids` must have rank 1 or 2. Received: ids of shape ()"),
        (np.zeros((1, 2, 3), int), ValueError, "`ids` must have rank 1 or 2. Received: ids of shape (1, 2, 3)"),
    ],
)
def test_bad_ids(roberta, ids, error, message):
    with pytest.raises(error, match=re.escape(message)):
        roberta.decode(ids)


def test_bad_arguments(made):
    for options, message in (
        ({"pad_token": "<x>"}, r"`pad_token` must be in the vocabulary. Received: pad_token='<x>', not among the 401"),
        ({"max_length": 3}, "`max_length` must be at least 4, for the special tokens. Received: max_length=3"),
        ({"truncation_side": "up"}, r"must be one of \['right', 'left'\]. Received: truncation_side='up'"),
    ):
        with pytest.raises(ValueError, match=message):
            text.load_tokenizer(made / "roberta", **options)
    with pytest.raises(TypeError, match="`clean_up_tokenization_spaces` must be True or False. Received"):
        text.load_tokenizer(made / "roberta", clean_up_tokenization_spaces=1)


def test_whether_a_tokenizer_fits_a_model(roberta, gpt2):
    text.check_fits(roberta, 401)
    text.check_fits(roberta, 1009, padding_id=1, max_length=512)
    for tokenizer, arguments, message in (
        (roberta, (400,), "more tokens than the model. Received: tokenizer.vocabulary_size=401, vocabulary_size=400"),
        (roberta, (0,), "`vocabulary_size` must be a positive integer. Received: vocabulary_size=0"),
    ):
        with pytest.raises(ValueError, match=message):
            text.check_fits(tokenizer, *arguments)
    with pytest.raises(ValueError, match="for padding. Received: tokenizer.pad_id=1, padding_id=0"):
        text.check_fits(roberta, 401, padding_id=0)
    with pytest.raises(ValueError, match="for padding. Received: tokenizer.pad_id=None, padding_id=0"):
        text.check_fits(gpt2, 401, padding_id=0)
    with pytest.raises(
        ValueError, match="positions that the model has. Received: tokenizer.max_length=512, and 511 positions"
    ):
        text.check_fits(roberta, 401, max_length=511)
