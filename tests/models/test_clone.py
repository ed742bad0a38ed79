"""`keras.models.clone_model` gives a model of the same class, with weights and methods of its own."""

import keras
import numpy as np
import pytest

from keras_tx import models
from keras_tx.layers import LearnedPositionalEncoding
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close, to_numpy

IDS = np.random.default_rng(3).integers(1, 31, (3, 7))
SIZES = {"num_layers": 1, "hidden_dim": 10, "num_heads": 2, "intermediate_dim": 14}
LEARNED = {"position_encoding": LearnedPositionalEncoding(12), "padding_id": 5}
MODELS = {
    "causal_lm": (lambda: models.CausalLM(31, **SIZES, name="mine", embedding_options=LEARNED), IDS),
    "packed": (lambda: models.CausalLM(31, **SIZES, packed=True, tie_embeddings=False), [IDS, IDS > 9, IDS * 0]),
    "seq2seq": (lambda: models.Seq2Seq(31, 37, **SIZES, encoder_options={"activation": "gelu"}), [IDS, IDS[:, 2:]]),
    "masked_lm": (lambda: models.MaskedLM(31, **SIZES, embedding_options={"num_segments": 2}), [IDS, IDS % 2]),
    "classifier": (lambda: models.TextClassifier(31, 3, **SIZES, pooling="max", activation="softmax"), IDS),
}


@pytest.mark.parametrize("name", MODELS if keras.backend.backend() != "jax" else ["classifier"])  # JAX takes seconds
def test_a_clone_is_a_model_of_the_same_class(name, eager):
    make, inputs = MODELS[name]
    model = make()
    clone = keras.models.clone_model(model)
    assert type(clone) is type(model) and clone.name == model.name
    assert clone.get_config() == type(model).from_config(model.get_config()).get_config()
    assert not {id(v) for v in model.variables} & {id(v) for v in clone.variables}
    assert not {*map(id, model.layers)} & {*map(id, clone.layers)}
    assert [w.path for w in clone.trainable_weights] == [w.path for w in model.trainable_weights]
    before = to_numpy(clone(inputs))
    clone.set_weights(model.get_weights())
    assert_close(clone(inputs), model(inputs), atol=0)
    assert np.abs(before - to_numpy(clone(inputs))).max() > 1e-3
    if name != "packed":
        for one, other in zip(*[keras.tree.flatten(x.attention_scores(inputs)) for x in (clone, model)], strict=True):
            assert_close(one, other, atol=0)
    if hasattr(model, "generate"):
        options = {"max_new_tokens": 3, "jit_compile": False, "start_token": 1 if name == "seq2seq" else None}
        prompts = IDS[:, :3].tolist()
        assert clone.generate(prompts, **options) == model.generate(prompts, **options)


def test_a_clone_checks_its_ids():
    clone = keras.models.clone_model(models.TextClassifier(31, 3, **SIZES))
    with pytest.raises(ValueError, match=r"`token_ids` must be in \[0, 31\). Received: 31 in token_ids"):
        clone(np.array([[31]]))


@pytest.mark.tensorflow
def test_a_clone_of_a_compiled_model_trains_its_own_weights(tmp_path):
    model = models.CausalLM(31, **SIZES, dropout=0.0)
    model.compile("sgd", PaddedCrossentropy(chunk_size=4), run_eagerly=True)
    clone = keras.models.clone_model(model)
    clone.run_eagerly = True
    clone.set_weights(model.get_weights())
    before = model.get_weights()
    losses = [one.train_on_batch(IDS[:, :-1], IDS[:, 1:]) for one in (clone, model)]
    assert losses[0] == pytest.approx(losses[1])
    for ours, theirs, old in zip(clone.get_weights(), model.get_weights(), before, strict=True):
        assert_close(ours, theirs)
        assert np.abs(ours - old).max() > 0
    clone.save(tmp_path / "model.keras")
    assert_close(keras.saving.load_model(tmp_path / "model.keras")(IDS), clone(IDS), atol=0)


@pytest.mark.tensorflow
def test_a_clone_of_a_quantized_model_is_quantized():
    model = models.CausalLM(31, **SIZES)
    model.quantize("int4")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert_close(clone(IDS), model(IDS), atol=0)
    assert [w.dtype for w in clone.weights] == [w.dtype for w in model.weights]


@keras.saving.register_keras_serializable(package="tests")
class OwnClassifier(models.TextClassifier):
    def predicted(self, inputs):
        return to_numpy(self(inputs)).argmax(axis=-1)


def test_a_clone_of_a_subclass_has_its_methods():
    model = OwnClassifier(31, 3, **SIZES)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.predicted(IDS).tolist() == model.predicted(IDS).tolist()


def test_layers_that_are_not_cloned_are_shared():
    model = models.CausalLM(31, **SIZES)
    clone = keras.models.clone_model(model, clone_function=lambda layer: layer)
    assert type(clone) is models.CausalLM and clone.decoder is model.decoder
    assert {id(v) for v in model.variables} == {id(v) for v in clone.variables}


@pytest.mark.parametrize("change", ["call_function", "clone_function", "input_tensors"])
def test_a_changed_graph_is_that_of_a_plain_functional_model(change):
    """Its config would be that of another model."""

    def call(layer, *args, **kwargs):
        outputs = layer(*args, **kwargs)
        return keras.layers.Dropout(0.5)(outputs) if layer.name == "decoder" else outputs

    def clone(layer):
        config = layer.get_config()
        return type(layer).from_config({**config, "name": f"other_{config['name']}"})

    model = models.CausalLM(31, **SIZES)
    options = {"call_function": call, "clone_function": clone, "input_tensors": [keras.Input((None,), dtype="int32")]}
    changed = keras.models.clone_model(model, **{change: options[change]})
    assert type(changed) is type(keras.Model(changed.inputs, changed.outputs))
    assert changed([IDS]).shape == (3, 7, 31)
