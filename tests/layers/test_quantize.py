"""`quantize`: Keras' own layers = ours, loaded = saved, close to what was before."""

import keras
import numpy as np
import pytest

from keras_tx import models, pretrained, serving
from keras_tx.layers import Encoder, MultiHeadAttention, TokenEmbedding
from keras_tx.layers.projection import HeadProjection, Projection, TiedEmbedding
from keras_tx.text import BertTokenizer
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close, normal

# Keras warns of each layer that has no kernel.
pytestmark = [
    pytest.mark.tensorflow,  # Keras' own int8 layers fail on PyTorch
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method"),
]

IDS = np.random.default_rng(3).integers(1, 41, (3, 7))
SIZES = {"num_layers": 1, "hidden_dim": 20, "num_heads": 5, "intermediate_dim": 28}
MODELS = {
    "causal_lm": (lambda: models.CausalLM(41, **SIZES), IDS),
    "untied": (lambda: models.CausalLM(41, **SIZES, tie_embeddings=False, dtype="mixed_bfloat16"), IDS),
    "gated": (lambda: models.CausalLM(41, **SIZES, decoder_options={"gated": True, "normalize_first": True}), IDS),
    "biased": (lambda: models.CausalLM(41, **SIZES, use_output_bias=True), IDS),
    "masked_lm": (lambda: models.MaskedLM(41, **SIZES), IDS),
    "classifier": (lambda: models.TextClassifier(41, 3, **SIZES), IDS),
    "seq2seq": (lambda: models.Seq2Seq(41, **SIZES), [IDS, IDS[:, 2:]]),
}


def own_model():
    ids = keras.Input((None,), dtype="int32")
    hidden = TokenEmbedding(41, 20, num_segments=2, embedding_dim=12, name="one")(ids)
    hidden = MultiHeadAttention(5, 4, use_gate=True, name="two")(hidden, hidden)
    return keras.Model(ids, keras.layers.Dense(3, name="four")(Encoder(1, 28, 5, name="three")(hidden)))


MODELS["of layers"] = own_model, IDS


@pytest.mark.parametrize("name", MODELS)
def test_loaded_equals_saved(name, tmp_path):
    make, inputs = MODELS[name]
    model = make()
    before = np.asarray(model(inputs), "float32")
    model.quantize("int8")
    kernels = [w for w in model.weights if w.name in ("kernel", "embeddings")]
    assert kernels and all(w.dtype == "int8" for w in kernels)
    after = np.asarray(model(inputs), "float32")
    correlation = np.corrcoef(before.ravel(), after.ravel())[0, 1]
    assert 0.99 < correlation < 1 - 1e-9
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded(inputs), after, atol=0)
    assert [w.dtype for w in loaded.weights] == [w.dtype for w in model.weights]
    if name == "of layers":
        loaded.save(tmp_path / "again.keras")
        assert_close(keras.saving.load_model(tmp_path / "again.keras")(inputs), after, atol=0)


def test_a_model_with_rotary_positions_is_quantized_before_its_first_call():
    x = keras.Input((None, 20))
    model = keras.Model(x, Encoder(1, 28, 5, attention_options={"rotary": True})(x))
    before = np.asarray(model.get_layer(index=1)(normal(2, 3, 20)))
    fresh = keras.models.clone_model(model)
    fresh.set_weights(model.get_weights())
    fresh.quantize("int8")
    assert np.corrcoef(before.ravel(), np.asarray(fresh(normal(2, 3, 20))).ravel())[0, 1] > 0.99


def test_layers_equal_those_of_keras():
    x, ids = normal(2, 3, 5, 4), IDS[:, :3]
    pairs = [
        (HeadProjection("abcd,cdef->abef", (None, 7, 11), bias_axes="ef"), keras.layers.EinsumDense, x),
        (Projection(7, activation="relu"), keras.layers.Dense, x),
        (TiedEmbedding(41, 13), keras.layers.ReversibleEmbedding, ids),
    ]
    for ours, kind, inputs in pairs:
        ours(inputs)
        theirs = kind.from_config(ours.get_config())
        theirs(inputs)
        theirs.set_weights(ours.get_weights())
        for layer in (ours, theirs):
            layer.quantize("int8")
        assert_close(ours(inputs), theirs(inputs), atol=0)
        if kind is keras.layers.ReversibleEmbedding:
            assert_close(ours(normal(2, 13), reverse=True), theirs(normal(2, 13), reverse=True), atol=0)


def test_a_quantized_model_generates_the_tokens_of_its_own_logits():
    model = models.CausalLM(41, **SIZES)
    model.quantize("int8")
    rows = [IDS[0, :5].tolist(), IDS[1, :2].tolist()]
    for compiled in (True, False):
        for row, generated in zip(rows, model.generate(rows, max_new_tokens=4, jit_compile=compiled), strict=True):
            for new in np.asarray(generated)[len(row) :]:
                logits = np.asarray(model(np.array([row])))[0, -1]
                assert logits[new] > logits.max() - 1e-3  # of activations, too, are rounded: equal up to near ties
                row = [*row, int(new)]


def test_what_a_map_of_policies_says_stays(tmp_path):
    policies = keras.dtype_policies.DTypePolicyMap("float32", {"encoder/layer_1/.*": keras.DTypePolicy("bfloat16")})
    x = keras.Input((None, 20))
    model = keras.Model(x, Encoder(2, 28, 5, dtype=policies, name="encoder")(x))
    encoder = model.layers[1]
    encoder.layers[0].feed_forward.output_dense.quantize("int8")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").layers[1]
    assert [one.self_attention.query_dense.compute_dtype for one in loaded.layers] == ["float32", "bfloat16"]
    assert [one.feed_forward.output_dense.quantization_mode for one in loaded.layers] == ["int8", None]


def test_modes_and_configs_that_no_file_keeps_are_refused():
    layer = Projection(7)
    layer.build((None, 5))
    config = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    with pytest.raises(ValueError, match="`config` must be the default: .* Received: config={"):
        layer.quantize(config=config)
    with pytest.raises(NotImplementedError, match="Projection does not have a `quantize` method"):
        layer.quantize("float8")
    assert layer.quantization_mode is None


def test_a_quantized_model_is_not_trained_in_chunks():
    model = models.CausalLM(41, **SIZES)
    model.quantize("int8")
    model.compile("sgd", PaddedCrossentropy(chunk_size=4))
    with pytest.raises(ValueError, match="`chunk_size` of the loss must be None .* Received: chunk_size=4"):
        model.train_on_batch(IDS, IDS)


def test_a_loaded_checkpoint_is_quantized_and_saved(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 41, "n_embd": 20, "n_layer": 1, "n_head": 5, "n_positions": 32}
    model = pretrained.PretrainedModel(config, "causal_lm")
    model.quantize("int8")
    after = np.asarray(model(IDS)["logits"])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded(IDS)["logits"], after, atol=0)
    np.testing.assert_array_equal(loaded.generate(IDS, max_new_tokens=3), model.generate(IDS, max_new_tokens=3))


# A tokenizer adds signatures, each with a graph of its own, but none with other kernels: one kind shows that it works.
EXPORTED = {
    "classifier": (lambda: models.TextClassifier(41, 3, **SIZES), {"labels": ["a", "b", "c"]}, True),
    "causal_lm": (lambda: models.CausalLM(41, **SIZES), {"generation": {"max_new_tokens": 2}}, False),
    "seq2seq": (
        lambda: models.Seq2Seq(41, **SIZES),
        {"generation": {"max_new_tokens": 2, "start_token": 2, "stop_tokens": 3}},
        False,
    ),
    "masked_lm": (lambda: models.MaskedLM(41, **SIZES), {}, False),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", EXPORTED)
def test_a_quantized_model_is_exported(name, tmp_path):
    import tensorflow as tf

    make, options, has_tokenizer = EXPORTED[name]
    model = make()
    model.quantize("int8")
    if has_tokenizer:
        options = {**options, "tokenizer": BertTokenizer.train(["ab abc bcd cde"] * 9, 41)}
    version = serving.export(model, tmp_path, **options)
    assert serving.check(version).ok
    stored = tf.train.load_checkpoint(str(version / "variables" / "variables")).get_variable_to_dtype_map()
    assert tf.int8 in stored.values()
