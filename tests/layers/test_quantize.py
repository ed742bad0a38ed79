"""`quantize`: Keras' own layers = ours, NumPy's product = ours, loaded = saved, exported = live, close to before."""

import gc
import json
import re

import keras
import numpy as np
import pytest

from keras_tx import models, pretrained, serving
from keras_tx.layers import Encoder, MultiHeadAttention, TokenEmbedding
from keras_tx.layers.projection import HeadProjection, Projection, TiedEmbedding
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close, normal, to_numpy

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
GPT2 = {"model_type": "gpt2", "vocab_size": 41, "n_embd": 20, "n_layer": 1, "n_head": 5, "n_positions": 32}
T5 = {"model_type": "t5", "vocab_size": 41, "d_model": 20, "d_kv": 4, "d_ff": 28, "num_layers": 1, "num_heads": 5}
OF_OTHERS = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
# Keras' own int8 layers fail on PyTorch with a GPU, and JAX compiles each operation: int4 alone runs on all backends.
pytestmark = pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors")  # by Keras, on PyTorch


def own_model():
    ids = keras.Input((None,), dtype="int32")
    hidden = TokenEmbedding(41, 20, num_segments=2, embedding_dim=12, name="one")(ids)
    hidden = MultiHeadAttention(5, 4, use_gate=True, name="two")(hidden, hidden)
    return keras.Model(ids, keras.layers.Dense(3, name="four")(Encoder(1, 28, 5, name="three")(hidden)))


CONFIGS = {  # and how much the outputs of a model correlate with those before
    "int8": (keras.quantizers.Int8QuantizationConfig(), 0.99),
    "int4": (keras.quantizers.Int4QuantizationConfig(), 0.95),
    "int4 in blocks": (keras.quantizers.Int4QuantizationConfig(block_size=12), 0.95),
    "int4 by channel": (keras.quantizers.Int4QuantizationConfig(block_size=None), 0.95),
}
INT4 = [name for name in CONFIGS if name != "int8"]


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    """Keras' own layers collect the garbage of the whole suite when they are quantized; ours do not."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


# Layers


def layers_and_inputs():
    """Each kind of layer, built, and its inputs."""
    pairs = [
        (
            HeadProjection("abcd,cdef->abef", (None, 7, 11), bias_axes="ef", bias_initializer="normal"),
            normal(2, 3, 5, 6),
        ),
        (Projection(7, activation="relu", bias_initializer="normal"), normal(2, 31)),
        (TiedEmbedding(41, 29), IDS),
    ]
    for layer, inputs in pairs:
        layer(inputs)
    return pairs


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_equal_those_of_keras(name):
    for ours, inputs in layers_and_inputs():
        kind = next(base for base in type(ours).__mro__ if base.__module__.startswith("keras.src"))
        theirs = kind.from_config(ours.get_config())
        theirs(inputs)
        theirs.set_weights(ours.get_weights())
        for layer in (ours, theirs):
            layer.quantize(config=CONFIGS[name][0])
        assert ours.dtype_policy == theirs.dtype_policy
        assert_close(ours(inputs), theirs(inputs), atol=0, rtol=0)
        if kind is keras.layers.ReversibleEmbedding:
            vectors = normal(2, 29)
            assert_close(ours(vectors, reverse=True), theirs(vectors, reverse=True), atol=0, rtol=0)


def unpacked(packed, width):
    """By NumPy: the integers of 4 bits, two in each byte of the last axis."""
    nibbles = np.stack([packed & 15, packed >> 4 & 15], axis=-1).reshape(len(packed), -1)[:, :width]
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype("float64")


def dequantized(integers, scale, zero, block):
    """By NumPy: the weights (D, F), and the size of a step (D, F)."""
    if zero is None:
        return integers / scale, np.broadcast_to(1 / scale, integers.shape)
    blocks = np.arange(len(integers)) // block
    return (integers - zero[blocks]) * scale[blocks], scale[blocks]


@pytest.mark.parametrize(("name", "positive"), [("int4", False), ("int4", True), *[(name, True) for name in INT4[1:]]])
def test_int4_is_the_product_with_what_numpy_makes_of_the_bytes(name, positive):
    """A weight is off by at most a step: half of one by its own rounding, and half by that of the zero point."""
    config = CONFIGS[name][0]
    for layer, inputs in layers_and_inputs():
        weights = layer.get_weights()
        before = np.abs(weights[0]) + 0.3 if positive else weights[0]
        layer.set_weights([before, *weights[1:]])
        layer.quantize(config=config)
        assert layer.quantization_mode == "int4"
        stored, is_table = {w.name: to_numpy(w) for w in layer.weights}, isinstance(layer, TiedEmbedding)
        part = "embeddings" if is_table else "kernel"
        packed, scale, zero = (stored.get(f"{part}{end}") for end in ("", "_scale", "_zero"))
        before = before if is_table else before.reshape(-1, stored["bias"].size)
        assert packed.dtype == "int8" and packed.shape == (len(before), -(-before.shape[1] // 2))
        integers = unpacked(packed, before.shape[1])
        if is_table:  # the blocks are along its last axis
            weights, step = dequantized(integers.T, scale.T, None if zero is None else zero.T, config.block_size)
            assert (np.abs(weights - before.T) <= 1.01 * step).all()
            assert_close(layer(inputs), weights.T[inputs], atol=1e-5)
            vectors = normal(2, before.shape[1])
            assert_close(layer(vectors, reverse=True), vectors @ weights, atol=1e-4, rtol=1e-5)
        else:
            weights, step = dequantized(integers, scale, zero, config.block_size)
            assert (np.abs(weights - before) <= 1.01 * step).all()
            product = inputs.reshape(-1, len(before)) @ weights + stored["bias"].ravel()
            product = np.maximum(product, 0) if isinstance(layer, Projection) else product
            assert_close(np.reshape(to_numpy(layer(inputs)), product.shape), product, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        keras.quantizers.Int8QuantizationConfig(activation_quantizer=None),
        keras.quantizers.Int4QuantizationConfig(
            keras.quantizers.AbsMaxQuantizer(axis=0, value_range=(-8, 7)), block_size=None
        ),
    ],
)
def test_quantizers_that_no_file_keeps_are_refused(config):
    layer = Projection(7)
    layer.build((None, 5))
    with pytest.raises(ValueError, match="`config` must have the default quantizers: .* Received: config={"):
        layer.quantize(config=config)
    assert layer.quantization_mode is None


def calibrated(kind):
    return kind(dataset=["ab"], tokenizer=str.split)


@OF_OTHERS
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: models.CausalLM(41, **SIZES), "embedding/tokens"),
        (lambda: pretrained.PretrainedModel(T5, "conditional_generation", tied=False), "embedding/tokens"),
        (own_model, "one/projection"),
    ],
)
def test_other_modes_are_refused_by_the_name_of_the_first_layer(make, path):
    model = make()
    for mode, config in (
        ("float8", None),
        ("gptq", calibrated(keras.quantizers.GPTQConfig)),
        ("awq", calibrated(keras.quantizers.AWQConfig)),
    ):
        message = (
            f"`mode` must be one of ('int8', 'int4') for the layers of keras_tx. Received: mode='{mode}' for the layer"
        )
        with pytest.raises(ValueError, match=re.escape(f"{message} '{path}'")):
            model.quantize(mode, config=config)
        assert all("int" not in w.dtype and "float8" not in w.dtype for w in model.weights)


# Models


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("causal_lm", "int4"),  # on all backends
        # Each model, each mode, and each kind of layer with each mode.
        *[pytest.param(name, "int8", marks=pytest.mark.tensorflow) for name in ("causal_lm", "untied", "seq2seq")],
        *[
            pytest.param(name, "int4", marks=pytest.mark.tensorflow)
            for name in ("gated", "biased", "masked_lm", "classifier")
        ],
        pytest.param("seq2seq", "int4 in blocks", marks=pytest.mark.tensorflow),
        pytest.param("untied", "int4 by channel", marks=pytest.mark.tensorflow),
        pytest.param("of layers", "int8", marks=[pytest.mark.tensorflow, OF_OTHERS]),
        pytest.param("of layers", "int4", marks=[pytest.mark.tensorflow, OF_OTHERS]),
    ],
)
def test_loaded_equals_saved(name, mode, tmp_path):
    """Without a warning, except in models of users, where Keras warns of every layer that has no kernel."""
    (make, inputs), (config, least) = {**MODELS, "of layers": (own_model, IDS)}[name], CONFIGS[mode]
    model = make()
    before = to_numpy(keras.ops.cast(model(inputs), "float32"))
    model.quantize(config=config)
    kernels = [w for w in model.weights if w.name in ("kernel", "embeddings")]
    assert kernels and all(w.dtype == "int8" for w in kernels)
    after = to_numpy(keras.ops.cast(model(inputs), "float32"))
    correlation = np.corrcoef(before.ravel(), after.ravel())[0, 1]
    assert least < correlation < 1 - 1e-9
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded(inputs), after, atol=0)
    assert [w.dtype for w in loaded.weights] == [w.dtype for w in model.weights]
    if name == "of layers":
        loaded.save(tmp_path / "again.keras")
        assert_close(keras.saving.load_model(tmp_path / "again.keras")(inputs), after, atol=0)


@OF_OTHERS
@pytest.mark.tensorflow
def test_a_model_with_rotary_positions_is_quantized_before_its_first_call():
    x = keras.Input((None, 20))
    model = keras.Model(x, Encoder(1, 28, 5, attention_options={"rotary": True})(x))
    before = np.asarray(model.get_layer(index=1)(normal(2, 3, 20)))
    fresh = keras.models.clone_model(model)
    fresh.set_weights(model.get_weights())
    fresh.quantize("int8")
    assert np.corrcoef(before.ravel(), np.asarray(fresh(normal(2, 3, 20))).ravel())[0, 1] > 0.99


def both(model):
    """Quantizes the feed-forward networks of a model to int8, and everything else to int4."""
    model.quantize("int8", filters=lambda layer: "feed_forward" in layer.path)
    model.quantize("int4", filters=lambda layer: "feed_forward" not in layer.path)


def tokens_of_its_own_logits(model, **options):
    rows = [IDS[0, :5].tolist(), IDS[1, :2].tolist()]
    for row, generated in zip(rows, model.generate(rows, max_new_tokens=4, **options), strict=True):
        logits = to_numpy(model(np.array([generated])))[0]
        for place, new in enumerate(generated[len(row) :], len(row) - 1):
            assert logits[place, new] > logits[place].max() - 1e-3  # int8 rounds activations, too: near ties


@pytest.mark.tensorflow
def test_a_quantized_model_generates_the_tokens_of_its_own_logits():
    model = models.CausalLM(41, **SIZES)
    both(model)
    tokens_of_its_own_logits(model)


@pytest.mark.tensorflow
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_it_does_so_step_by_step(mode, eager):
    model = models.CausalLM(41, **SIZES)
    model.quantize(mode)
    tokens_of_its_own_logits(model, jit_compile=False)


@pytest.mark.tensorflow
def test_what_a_map_of_policies_says_stays(tmp_path):
    policies = keras.dtype_policies.DTypePolicyMap("float32", {"encoder/layer_1/.*": keras.DTypePolicy("bfloat16")})
    x = keras.Input((None, 20))
    model = keras.Model(x, Encoder(2, 28, 5, dtype=policies, name="encoder")(x))
    encoder = model.layers[1]
    encoder.layers[0].feed_forward.output_dense.quantize("int8")
    encoder.layers[0].feed_forward.intermediate_dense.quantize("int4")
    encoder.layers[1].feed_forward.output_dense.quantize("int4")  # which the pattern names, too
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").layers[1]
    assert [one.self_attention.query_dense.compute_dtype for one in loaded.layers] == ["float32", "bfloat16"]
    assert [one.feed_forward.output_dense.quantization_mode for one in loaded.layers] == ["int8", "int4"]
    assert [one.feed_forward.intermediate_dense.quantization_mode for one in loaded.layers] == ["int4", None]


@pytest.mark.tensorflow
@pytest.mark.parametrize("filters", ["output$", ["output", "key"], lambda layer: layer.name.endswith("output")])
def test_filters_choose_the_layers(filters):
    model = models.CausalLM(41, **SIZES)
    model.quantize("int4", filters=filters)
    modes = {w.path.split("/")[-2]: w.dtype for w in model.weights if w.name in ("kernel", "embeddings")}
    chosen = {"attention_output", "output", *(["key"] if isinstance(filters, list) else [])}
    assert {name for name, dtype in modes.items() if dtype == "int8"} == chosen and len(modes) > 4


@pytest.mark.tensorflow
def test_filters_that_choose_nothing_are_refused():
    model = models.TextClassifier(41, 3, **SIZES)
    with pytest.raises(ValueError, match="`filters` must match the name of a layer .* Received: filters='dropout'"):
        model.quantize("int4", filters="dropout")
    with pytest.raises(ValueError, match="`filters` must be a regular expression, .* Received: filters=3"):
        model.quantize("int4", filters=3)
    model.quantize("int4", filters="head")
    with pytest.raises(ValueError, match="Layer 'head' is already quantized"):
        model.quantize("int4", filters="head")


@pytest.mark.tensorflow
def test_a_quantized_model_is_not_trained_in_chunks():
    model = models.CausalLM(41, **SIZES)
    model.quantize("int4")
    model.compile("sgd", PaddedCrossentropy(chunk_size=4), run_eagerly=True)
    with pytest.raises(ValueError, match="`chunk_size` of the loss must be None .* Received: chunk_size=4"):
        model.train_on_batch(IDS, IDS)


@pytest.mark.tensorflow
@pytest.mark.parametrize(("config", "options", "mode"), [(GPT2, {}, "int4"), (T5, {"start_token": 0}, "int8")])
def test_a_checkpoint_is_quantized_and_saved(config, options, mode, tmp_path, eager):
    model = pretrained.PretrainedModel(config, "conditional_generation" if options else "causal_lm", tied=not options)
    model.quantize(mode)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]} if options else IDS
    after = to_numpy(model(inputs)["logits"])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded(inputs)["logits"], after, atol=0)
    options = {"max_new_tokens": 2, "jit_compile": False, **options}
    np.testing.assert_array_equal(loaded.generate(IDS, **options), model.generate(IDS, **options))
    with pytest.raises(ValueError, match="must have floating weights"):
        pretrained.save_pretrained(model, tmp_path)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "quantize", "options"),
    [
        ("classifier", lambda model: model.quantize("int4"), {"labels": ["a", "b", "c"]}),
        ("masked_lm", lambda model: model.quantize("int8"), {}),
        ("seq2seq", both, {"generation": {"max_new_tokens": 2, "start_token": 2, "stop_tokens": 3}}),
    ],
)
def test_a_quantized_model_is_exported(name, quantize, options, tmp_path):
    """`export` compares the answers of the loaded version, which runs without XLA, with those of the Keras model."""
    import tensorflow as tf

    model = MODELS[name][0]()
    quantize(model)
    version = serving.export(model, tmp_path, **options)
    figures = json.loads((version / "MODEL_CARD.json").read_text())["parity"]
    assert figures and all(one["largest_difference"] < 1e-6 and one["others_equal"] for one in figures.values())
    stored = tf.train.load_checkpoint(str(version / "variables" / "variables")).get_variable_to_dtype_map()
    assert tf.int8 in stored.values()
