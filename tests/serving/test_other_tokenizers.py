"""Exports with tokenizers of words and of characters: the graph answers texts as the Keras models do."""

import numpy as np
import pytest

from keras_tx import text
from keras_tx.generation import generate
from keras_tx.models import CausalLM, Seq2Seq, TextClassifier
from keras_tx.serving import export
from keras_tx.serving.exporters import exporter_for
from keras_tx.serving.generator_signatures import generator_signatures
from keras_tx.serving.parity import generator_example
from keras_tx.text import CharacterTokenizer, WordLevelTokenizer
from tests.serving.conftest import only_signatures
from tests.tools import randomize, to_numpy

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

SIZES = dict(num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5)
TEXTS = ["a moving film", "Dull, not a film!", "", "[PAD] \x00 ÉTÉ e\u0301te\u0301 東京"]


def test_a_classifier_of_words(tmp_path):
    tokenizer = WordLevelTokenizer.train(TEXTS, 50, normalizer=["NFC", "Lowercase"], max_length=8)
    model = randomize(TextClassifier(tokenizer.vocabulary_size, 2, **SIZES), seed=3)
    with only_signatures("serving_default"):  # tracing the others takes long
        path = export(model, tmp_path / "words", tokenizer=tokenizer, warmup=TEXTS[:1])
    loaded = tf.saved_model.load(str(path))
    found = loaded.signatures["serving_default"](text=tf.constant([one.encode() for one in TEXTS]))["probabilities"]
    logits = to_numpy(model(tokenizer(TEXTS)["token_ids"])).astype("float64")
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len({tuple(row) for row in expected.round(5)}) == len(TEXTS)


def test_a_language_model_of_characters():
    """What is written of one, `examples/write_text.py` has in a test."""
    tokenizer = CharacterTokenizer.train(TEXTS, max_length=16)
    model = randomize(CausalLM(tokenizer.vocabulary_size, **SIZES), seed=1)
    options = {"max_new_tokens": 5, "min_new_tokens": 3}
    exporter = exporter_for(model, {"tokenizer": tokenizer, "source_tokenizer": None}, options, None)
    prompts = ["a film\x00", "[PAD] É"]
    found = exporter.signatures()["serving_default"](text=tf.constant([one.encode() for one in prompts]))
    expected = generate(model, prompts, tokenizer=tokenizer, jit_compile=False, **options)
    assert [one.decode() for one in found["text"].numpy().ravel()] == expected
    assert all(after.startswith(before) for after, before in zip(expected, prompts, strict=True))


@pytest.mark.parametrize("kind", ["BytePair", "Character", "WordLevel", "SentencePiece"])
@pytest.mark.parametrize("model", [CausalLM, Seq2Seq])
def test_keras_scores_texts_of_every_tokenizer_outside_of_a_graph_as_the_graph_does(model, kind):
    """Exports in half precision keep such scores. Outside of a graph these tokenizers return lists."""
    tokenizer = getattr(text, f"{kind}Tokenizer").train(TEXTS[:2], 300, max_length=32)
    made = randomize(model(tokenizer.vocabulary_size, **SIZES), seed=5)
    score = generator_signatures(made, tokenizer, None, {"max_new_tokens": 2})["score"]
    texts = {"target": ["a", "film"]}
    inputs = {spec.name: tf.constant(texts.get(spec.name, ["a film", "Dull"])) for spec in score.input_signature}
    (found,) = generator_example("score", score, inputs, False, "bfloat16")
    expected = {name: value for name, value in score(**inputs).items() if value.dtype.is_floating}
    assert {"log_probability"} <= expected.keys() <= found["outputs"].keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found["outputs"][name], value, atol=2e-5)
