"""Encoder models exported by Keras to ONNX and LiteRT answer in onnxruntime and in LiteRT's interpreter as live."""

import functools
import logging

import keras
import numpy as np
import pytest

from keras_tx.layers import Encoder, TokenEmbedding
from keras_tx.layers.activations import apply
from keras_tx.models import MaskedLM, TextClassifier
from keras_tx.pretrained import PretrainedModel
from tests.tools import assert_close, normal, randomize, to_numpy

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:In the future `np.object`:FutureWarning"),  # of Keras' patch of tf2onnx
]
FORMATS = {"onnx": ["tf2onnx", "onnxruntime"], "litert": ["ai_edge_litert"]}
SHAPES = [(2, 5), (1, 1), (3, 7)]
SIZES = dict(num_layers=1, hidden_dim=12, num_heads=3, intermediate_dim=7)
CHECKPOINT = {
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 7,
    "hidden_act": "gelu",
}


def classifier():
    """Segments, learned positions, gates: what the text classifier may have."""
    embedding = {"position_encoding": "learned", "max_length": 11, "num_segments": 2, "normalization": "layer_norm"}
    encoder = {"activation": "gelu", "gated": True, "normalize_first": True}
    return TextClassifier(23, 5, pooling="max", embedding_options=embedding, encoder_options=encoder, **SIZES)


def encoder():
    """Positions of all kinds, grouped heads, a mask beside that of the ids, and attention scores among the outputs."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = keras.Input((None, None), dtype="int32", name="pairs")
    attention = {"rotary": True, "num_key_value_heads": 2, "sliding_window": 4}
    x = TokenEmbedding(23, 16, position_encoding="sinusoidal")(ids)
    layer = Encoder(1, 7, 4, position_bias="relative", attention_options=attention)
    return keras.Model([ids, mask], layer(x, attention_mask=mask, return_attention_scores=True))


def skipping():
    return TextClassifier(23, 5, encoder_options={"skip_padding": True}, **SIZES)


def bert():
    config = {"model_type": "bert", "vocab_size": 23, "max_position_embeddings": 11, "num_labels": 5, **CHECKPOINT}
    return PretrainedModel(config, "sequence_classification")


def vit():
    config = {"model_type": "vit", "image_size": 10, "patch_size": 5, "num_channels": 2, "num_labels": 5, **CHECKPOINT}
    return PretrainedModel(config, "image_classification")


MODELS = {"classifier": classifier, "masked_lm": lambda: MaskedLM(23, **SIZES), "encoder": encoder}
MODELS |= {"skipping": skipping, "bert": bert, "vit": vit}


def arrays(model, batch, length, seed=0):
    """Inputs by name. The first row has no padding, the others have: on the left where the row is odd."""
    generator = np.random.default_rng([seed, batch, length])
    real = np.ones((batch, length), "int32")
    for row in range(1, batch):
        padded = slice(0, row) if row % 2 else slice(length - row, None)
        real[row, padded] = 0
    made = {
        "token_ids": real * generator.integers(1, 23, real.shape),
        "segment_ids": generator.integers(0, 2, real.shape),
        "pairs": generator.random((*real.shape, length)) < 0.7,
        "attention_mask": real,
    }
    made |= {"input_ids": made["token_ids"], "token_type_ids": made["segment_ids"]}
    made["position_ids"] = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    images = normal(batch, 2, 10, 10, seed=seed)
    return {x.name: images if x.name == "pixel_values" else made[x.name].astype("int32") for x in model.inputs}


def live(model, inputs):
    outputs = model(inputs if len(inputs) > 1 else [*inputs.values()][0], training=False)
    return [to_numpy(x) for x in keras.tree.flatten(outputs)]


@functools.cache
def made(name):
    keras.utils.set_random_seed(3)
    model = randomize(MODELS[name](), seed=3)
    live(model, arrays(model, 2, 3))  # Keras exports to ONNX what has been called
    return model


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A model by name, exported to a format -> a function from arrays by name to all outputs."""
    folder = tmp_path_factory.mktemp("formats")

    @functools.cache
    def opened(form, name):
        for package in FORMATS[form]:
            pytest.importorskip(package)
        path = folder / f"{name}.{'onnx' if form == 'onnx' else 'tflite'}"
        made(name).export(path, format=form, verbose=False)
        return (in_onnxruntime if form == "onnx" else in_litert)(str(path))

    return opened


def in_onnxruntime(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)


def in_litert(path):
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(path).get_signature_runner("serving_default")
    return lambda inputs: [*run(**inputs).values()]


def assert_same(answers, expected):
    """Every expected array is among the answers; each format has an order of its own for several outputs."""
    assert len(answers) == len(expected)
    for one in expected:
        (other,) = [answer for answer in answers if answer.shape == one.shape]
        assert_close(other, one, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_shape_is_answered_as_by_the_live_model(opened, form, name):
    run, model = opened(form, name), made(name)
    for batch, length in SHAPES:
        inputs = arrays(model, batch, length, seed=1)
        assert_same(run(inputs), live(model, inputs))


@pytest.mark.parametrize("form", FORMATS)
def test_a_padded_row_is_answered_as_alone(opened, form):
    run, model = opened(form, "classifier"), made("classifier")
    inputs = arrays(model, 3, 7)
    (together,) = run(inputs)
    real = inputs["token_ids"] != 0
    for row, kept in enumerate(real):
        assert kept.sum() == 7 - row
        (alone,) = run({key: x[row : row + 1, kept] for key, x in inputs.items()})
        assert_close(alone[0], together[row], atol=1e-5)
    (other,) = run({**inputs, "segment_ids": 1 - inputs["segment_ids"]})
    assert np.abs(other - together).max() > 1e-3


@pytest.mark.parametrize("form", FORMATS)
def test_an_id_outside_the_vocabulary_is_an_error(opened, form, capfd):
    run, inputs = opened(form, "classifier"), arrays(made("classifier"), 1, 3)
    for token in (23, -1):
        inputs["token_ids"][0, 1] = token
        with pytest.raises(Exception, match="out of data bounds|index out of bounds"):
            run(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_hard_attention_has_no_form_there(form, tmp_path, caplog):
    """If this fails, a limit that the README names is gone."""
    for package in FORMATS[form]:
        pytest.importorskip(package)
    caplog.set_level(logging.CRITICAL, "tf2onnx")
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    model = keras.Model(ids, Encoder(1, 5, 2, attention_options={"hard_attention": True})(TokenEmbedding(7, 6)(ids)))
    inputs = {"token_ids": np.array([[1, 2, 3]], "int32")}
    live(model, inputs)
    path = tmp_path / ("model.onnx" if form == "onnx" else "model.tflite")
    model.export(path, format=form, verbose=False)
    with pytest.raises(Exception, match="invalid model|Select TensorFlow op"):
        (in_onnxruntime if form == "onnx" else in_litert)(str(path))(inputs)


@pytest.mark.parametrize("dtype, atol", [("float32", 2e-6), ("float64", 1e-12), ("bfloat16", 2e-2)])
def test_gelu_is_that_of_keras_and_in_float32_without_an_operation_that_onnx_has_not(dtype, atol):
    import tensorflow as tf

    x = tf.cast(np.linspace(-6, 6, 173), dtype)
    gelu = keras.activations.gelu
    assert_close(tf.cast(apply(gelu, x), "float64"), tf.cast(gelu(x), "float64"), atol=atol, rtol=0)
    traced = tf.function(lambda x: apply(gelu, x)).get_concrete_function(x)
    kinds = {operation.type for operation in traced.graph.get_operations()}
    assert ("Erfc" in kinds) == (dtype != "float32")
    assert_close(apply(keras.activations.silu, x), keras.activations.silu(x), atol=0)
