"""Requests that a generative model cannot answer are refused by the name of the input."""

import keras
import numpy as np
import pytest

from keras_tx.generation import generate
from keras_tx.layers import DecoderLayer, TokenEmbedding
from keras_tx.models import CausalLM, Seq2Seq
from keras_tx.serving.text_generator import TextGenerator
from tests.serving.generative import RULES, SIZES, TEXTS, V
from tests.tools import assert_close, to_numpy

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

DTYPES = {"max_new_tokens": "int32", "top_k": "int32", "seed": "int64"}  # others are float32


# Outside of graphs, where nothing is traced; the same code is in the graphs.
def refused(rule, function, *arguments):
    with pytest.raises(tf.errors.InvalidArgumentError, match=rule):
        function(*arguments)


def test_numbers_out_of_range_are_refused(generative_models, tokenizer):
    generator = TextGenerator(generative_models["put_together"], tokenizer, None, RULES)
    prompts, right = (
        tf.ragged.constant([[2], [2]]),
        {"max_new_tokens": 4, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0},
    )

    def numbers(**others):
        rows = {key: [value, value] for key, value in right.items()}
        rows.update({key: value if isinstance(value, list) else [right[key], value] for key, value in others.items()})
        return {key: tf.constant(values, DTYPES.get(key, "float32")) for key, values in rows.items()}

    assert generator.check_row_options(prompts, "text", numbers()).to_list() == [[2], [2]]
    for key, value, rule in (
        ("max_new_tokens", 8, r"max_new_tokens must be in \[3, 7\]"),
        ("max_new_tokens", 2, r"max_new_tokens must be in \[3, 7\]"),
        ("temperature", -0.1, "temperature must be 0, which is greedy, or above"),
        ("temperature", float("nan"), "temperature must be 0, which is greedy, or above"),
        ("temperature", float("inf"), "temperature must be 0, which is greedy, or above"),
        ("top_k", -1, "top_k must be 0, which is all tokens, or above"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\]"),
        ("top_p", 1.1, r"top_p must be in \(0, 1\]"),
    ):
        refused(rule, generator.check_row_options, prompts, "text", numbers(**{key: value}))
    for key, value in right.items():
        rule = f"{key} must be one for each text"
        refused(rule, generator.check_row_options, prompts, "text", numbers(**{key: [value]}))


def test_ids_and_lengths_out_of_range_are_refused(generative_models, tokenizer):
    generator = TextGenerator(generative_models["language_model"], tokenizer)
    names = ["token_ids", "lengths"]
    for ids, lengths, rule in (
        ([[V, 3]], [2], rf"token_ids must be in \[0, {V}\)"),
        ([[5, 3]], [3], "lengths must be between 0 and the width"),
        ([[5, 3]], [0], "token_ids must have a token in each row"),
        ([[0, 0]], [2], "token_ids must have a token in each row"),
        ([[5] * 17], [17], "token_ids must be at most 16 tokens long"),
    ):
        refused(rule, generator.rows_of_ids, [tf.constant(ids), tf.constant(lengths)], names)


def test_what_does_not_fit_into_learned_positions_is_refused_as_by_generate(tokenizer):
    long = " ".join(["cat"] * 9)
    options = {"max_new_tokens": 4, "start_token": False}
    model = CausalLM(V, num_layers=1, **SIZES, embedding_options={"position_encoding": "learned", "max_length": 11})
    generator = TextGenerator(model, tokenizer, None, options)
    with pytest.raises(ValueError, match="must fit into the learned positions"):
        generate(model, [long], tokenizer=tokenizer, jit_compile=False, **options)
    prompts, _ = generator.tokenize([tf.constant([long])], ["text"])
    rule = "text and the new tokens must fit into the 11 learned positions"
    refused(rule, generator.generate, prompts, [], "text")
    numbers = {"max_new_tokens": 3, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    numbers = {key: tf.constant([value], DTYPES.get(key, "float32")) for key, value in numbers.items()}
    rule = "text and max_new_tokens must fit into the 11 learned positions"
    refused(rule, generator.check_row_options, prompts, "text", numbers)
    refused("text must have a token in each row", generator.tokenize, [tf.constant([""])], ["text"])
    rule = "text and target must fit into the 11 learned positions"
    refused(rule, generator.score, prompts, [], tf.constant(["one two three"]), "text")
    generator.score(prompts, [], tf.constant(["one two"]), "text")  # the stop token itself needs no position

    short = {"position_encoding": "learned", "max_length": 6}
    generator = TextGenerator(
        Seq2Seq(V, num_layers=1, **SIZES, embedding_options=short), tokenizer, None, {"max_new_tokens": 5}
    )
    rule = "text must fit into the 6 learned positions"
    refused(rule, generator.tokenize, [tf.constant([long])], ["text"])
    generator.tokenize([tf.constant(["cat cat cat cat"])], ["text"])


def test_a_prompt_may_begin_with_the_padding_id(generative_models, tokenizer):
    model, options = generative_models["language_model"], {"start_token": 0, "max_new_tokens": 4}
    generator = TextGenerator(model, tokenizer, None, options)
    prompts, _ = generator.tokenize([tf.constant(["two", ""])], ["text"])
    assert prompts.to_list() == [[0, *tokenizer.tokenize("two").numpy()], [0]]
    ids, lengths, _ = generator.generate(prompts, [], "text")
    expected = generate(model, ["two", ""], tokenizer=tokenizer, jit_compile=False, **options)
    assert [row[0].decode() for row in generator.detokenize(prompts, ids, lengths).numpy()] == expected


def test_long_targets_and_prompts_are_refused(generative_models, tokenizer):
    generator = TextGenerator(generative_models["language_model"], tokenizer)
    prompts, _ = generator.tokenize([tf.constant(["cat"])], ["text"])
    rule = "target must be at most 16 tokens long"
    refused(rule, generator.score, prompts, [], tf.constant(["cat " * 16]), "text")
    refused("target must be one for each text", generator.score, prompts, [], tf.constant(["cat", "cat"]), "text")
    rule = "text must be at most 16 tokens long"
    refused(rule, generator.tokenize, [tf.constant(["cat " * 16])], ["text"])


def test_several_sources_must_have_the_same_number_of_rows(tokenizer):
    ids = {name: keras.Input((None,), dtype="int32", name=name) for name in ("question", "context", "reply")}
    embedding = TokenEmbedding(V, 12)
    question, context, reply = (embedding(one) for one in ids.values())
    for memory in (question, context):
        reply = DecoderLayer(17, 6, cross_attention=True)(reply, memory)
    model = keras.Model(list(ids.values()), keras.layers.Dense(V)(reply))
    generator = TextGenerator(model, tokenizer, None, {"max_new_tokens": 4})
    rule = "context must be one for each question"
    texts = [tf.constant(TEXTS[:2]), tf.constant(TEXTS[:1])]
    refused(rule, generator.tokenize, texts, ["question", "context"])


def test_a_score_follows_the_special_tokens_that_are_forced_at_the_beginning(generative_models, tokenizer):
    """As BART's first token, which texts do not have; a forced word is a part of them."""
    model, (start, stop, source, target) = generative_models["translator"], (2, 3, "the cat sat", "dull cat .")
    found = []
    for forced in ({}, {0: 9}, {0: 3, 1: 2}, {1: 2}):
        options = {"start_token": start, "stop_tokens": stop, "max_new_tokens": 7, "forced_tokens": forced}
        generator = TextGenerator(model, tokenizer, None, options)
        prompts, sources = generator.tokenize([tf.constant([source])], ["text"])
        found.append(generator.score(prompts, sources, tf.constant([target]), "text")["log_probability"][0])
    ids = [*to_numpy(tokenizer.tokenize(target)), stop]
    for got, before in zip(found, ([start], [start], [start, 3, 2], [start]), strict=True):
        logits = model([np.array([to_numpy(tokenizer(source)["token_ids"])]), np.array([[*before, *ids[:-1]]])])
        log_probs = to_numpy(keras.ops.log_softmax(logits))[0, len(before) - 1 :]
        assert_close(got, log_probs[np.arange(len(ids)), ids].sum(), atol=1e-4)
