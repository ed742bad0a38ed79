"""What is frozen stays so in files and clones: layers, models, and layers inside them at any depth."""

import keras
import numpy as np
import pytest

from keras_tx import layers
from keras_tx.models import CausalLM, TextClassifier
from keras_tx.pretrained import PretrainedModel
from tests.tools import normal, to_numpy

SIZES = {"num_layers": 2, "hidden_dim": 8, "num_heads": 2, "intermediate_dim": 8}
BERT = {"model_type": "bert", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 8, "max_position_embeddings": 9, "num_labels": 3}


def encoder():
    x = keras.Input((5, 12))
    encoder = layers.Encoder(2, 16, 2, name="encoder")
    return keras.Model(x, keras.layers.Dense(3)(encoder(x))), encoder


def whole_encoder():
    model, stack = encoder()
    stack.trainable = False
    return model


def one_layer():
    model, stack = encoder()
    stack.layers[1].trainable = False
    return model


def one_projection():
    model, stack = encoder()
    stack.layers[0].self_attention.key_dense.trainable = False
    return model


def classifier():
    model = TextClassifier(11, 3, **SIZES)
    model.trainable = False
    return model


def nested():
    ids = keras.Input((None,), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(3)(classifier()(ids)))


def parts():
    model = TextClassifier(11, 3, **SIZES)
    model.embedding.trainable = model.encoder.layers[0].trainable = False
    return model


def decoder():
    model = CausalLM(11, **SIZES)
    model.decoder.trainable = False
    return model


def checkpoint():
    model = PretrainedModel(BERT, "sequence_classification")
    model.get_layer("embedding").trainable = model.get_layer("encoder").layers[1].trainable = False
    return model


def with_lora():
    """What is saved has no LoRA, so a layer with LoRA is frozen in the file: its kernel, and with it its bias."""
    model = CausalLM(11, **SIZES)
    for layer in model.decoder.layers:
        layer.trainable = False
        layer.self_attention.query_dense.trainable = True
        layer.self_attention.query_dense.enable_lora(2)
    return model


def thawed_within():
    model = TextClassifier(11, 3, **SIZES)
    model.encoder.trainable = False
    model.encoder.layers[1].feed_forward.trainable = model.encoder.layers[0].self_attention_norm.trainable = True
    return model


CASES = [whole_encoder, one_layer, one_projection, classifier, nested, parts, decoder, checkpoint, with_lora]
CASES += [thawed_within]


def trained(model):
    return sorted(weight.path for weight in model.trainable_weights if "lora" not in weight.path)


@pytest.mark.parametrize("make", CASES)
def test_files_and_clones_train_the_same_weights(make, tmp_path):
    model = make()
    every = {weight.path for weight in model.weights}
    expected = trained(model)
    if make is with_lora:
        expected = [path for path in expected if "query" not in path]
    assert len(expected) < len(every)
    model.save(tmp_path / "model.keras")
    for other in (keras.saving.load_model(tmp_path / "model.keras"), keras.models.clone_model(model)):
        assert trained(other) == expected
        assert [weight.shape for weight in other.weights] == [w.shape for w in model.weights if "lora" not in w.path]


def test_frozen_weights_of_a_loaded_model_stay_in_training(tmp_path):
    one_layer().save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    before = {weight.path: to_numpy(weight) for weight in model.weights}
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.train_on_batch(normal(2, 5, 12), np.ones((2, 5, 3)))
    still = {weight.path for weight in model.weights if (to_numpy(weight) == before[weight.path]).all()}
    still -= {path for path in still if path.endswith("key/bias")}  # whose gradient is zero but for rounding
    frozen = {path for path in before if "layer_1" in path and not path.endswith("key/bias")}
    assert still >= frozen and not any("layer_0" in path for path in still)


def test_what_is_thawed_is_saved_without_a_word():
    model = parts()
    assert model.get_config()["trainable_layers"] == {"embedding": False, "encoder/layers.0": False}
    model.embedding.trainable = model.encoder.layers[0].trainable = True
    assert "trainable_layers" not in model.get_config()


@keras.saving.register_keras_serializable(package="tests")
class OwnLayer(layers.FeedForward):
    """A user's layer, whose sublayers have names from Keras, which count through the process."""

    def __init__(self, *args, extra=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra, self.down, self.up = extra, keras.layers.Dense(3), keras.layers.Dense(12)

    def build(self, shape):
        super().build(shape)
        self.down.build(shape)
        self.up.build((*shape[:-1], 3))

    def call(self, inputs, training=None):
        return super().call(self.up(self.down(inputs)), training=training)

    def get_config(self):
        return {**super().get_config(), "extra": self.extra}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable(package="tests")
class OwnModel(TextClassifier):
    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)


def test_subclasses_of_users_are_loaded_too(tmp_path):
    x = keras.Input((5, 12))
    layer = OwnLayer(16)
    model = keras.Model(x, layer(x))
    layer.down.trainable = False
    model.save(tmp_path / "layer.keras")
    classifier = OwnModel(11, 3, **SIZES)
    classifier.encoder.trainable = False
    classifier.save(tmp_path / "model.keras")
    keras.layers.Dense(2)  # takes the next name
    again = keras.saving.load_model(tmp_path / "layer.keras").layers[-1]
    assert not again.down.trainable and again.up.trainable and not again.down.kernel.trainable
    assert len(again.trainable_weights) == len(layer.trainable_weights)
    assert trained(keras.saving.load_model(tmp_path / "model.keras")) == trained(classifier)


def test_a_config_is_kept_until_the_layer_is_built():
    stack = layers.Encoder(2, 16, 2)
    stack.build((None, None, 12))
    stack.layers[0].trainable = False
    first = layers.Encoder.from_config(stack.get_config())
    second = layers.Encoder.from_config(first.get_config())
    second.build((None, None, 12))
    assert len(second.trainable_weights) == len(stack.trainable_weights) == 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Encoder(2, 16, 2, normalize_first=True, position_bias="relative", trainable=False),
        lambda: layers.TokenEmbedding(11, 12, position_encoding="learned", max_length=5, trainable=False),
        lambda: OwnLayer(16, trainable=False),
    ],
)
def test_a_layer_made_frozen_is_frozen_in_copies_from_before_and_after_it_is_built(make):
    layer, shape = make(), (None, 5) if make().name.startswith("token") else (None, 5, 12)
    first = type(layer).from_config(layer.get_config())
    second = type(layer).from_config(first.get_config())
    layer.build(shape)
    for one in (layer, first, second, type(layer).from_config(layer.get_config())):
        if not one.built:
            one.build(shape)
        assert one.weights and not any(weight.trainable for weight in one.weights)


def test_a_layer_that_is_gone_is_told():
    layer = layers.Encoder(1, 16, 2, trainable_layers={"layers.5": False})
    with pytest.warns(UserWarning, match="`trainable_layers` names the layer 'layers.5', which 'encoder"):
        layer.build((None, None, 12))


def test_a_kernel_with_lora_stays_frozen_whatever_is_thawed():
    model = CausalLM(11, **SIZES)
    projection = model.decoder.layers[0].self_attention.query_dense
    projection.enable_lora(2)
    for thawed in (projection, model.decoder, model):
        thawed.trainable = False
        thawed.trainable = True
        names = {weight.name for weight in projection.trainable_weights}
        assert names == {"bias", "lora_kernel_a", "lora_kernel_b"}
