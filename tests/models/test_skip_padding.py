"""`skip_padding=None`, the default of models: padding is skipped where nothing reads it, and changes no number."""

import functools

import keras
import numpy as np
import pytest

from keras_tx import models
from keras_tx.layers import Encoder, FeedForward, unpadding
from keras_tx.pretrained import PretrainedModel
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close, normal, randomize, to_numpy

V, T, D = 19, 9, 12
LENGTHS = [9, 4, 1, 7]
REAL = np.arange(T) < np.array(LENGTHS)[:, None]
IDS = np.random.default_rng(3).integers(1, V, REAL.shape) * REAL
TOKENS, CLASSES = np.where(REAL, (IDS * 7) % V, 0), np.array([0, 2, 1, 1])
SIZES = {"num_layers": 2, "hidden_dim": D, "num_heads": 3, "intermediate_dim": 17, "dropout": 0.0}
BERT = {
    "model_type": "bert",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 11,
    "num_labels": V,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MASKED = {"input_ids": IDS, "attention_mask": REAL.astype("int32")}


def of_class(kind, *arguments, **options):
    def make(**skip):
        return kind(V, *arguments, **SIZES, **options, **({"encoder_options": skip} if skip else {}))

    return make


def bert(task):
    return lambda **skip: PretrainedModel(BERT, task, **skip)


# A maker, inputs, labels, and whether the encoder skips padding at inference and in training.
MODELS = {
    "classifier": (of_class(models.TextClassifier, 3), IDS, CLASSES, True, True),
    "first": (of_class(models.TextClassifier, 3, pooling="first"), IDS, CLASSES, True, True),
    "masked_lm": (of_class(models.MaskedLM), IDS, TOKENS, False, True),
    "seq2seq": (of_class(models.Seq2Seq), [IDS, IDS[:, :5]], TOKENS[:, :5], True, True),
    "bert_sequences": (bert("sequence_classification"), MASKED, {"logits": CLASSES}, True, True),
    "bert_tokens": (bert("token_classification"), MASKED, {"logits": TOKENS}, False, True),
    "bert_base": (bert("base"), MASKED, {"pooler_output": normal(4, D)}, False, False),
    "bert_answers": (
        bert("question_answering"),
        MASKED,
        {"start_logits": CLASSES, "end_logits": CLASSES},
        False,
        False,
    ),
}
on_tensorflow = pytest.mark.tensorflow


def made(name):
    """The model with its default, and with `skip_padding=False` and the same weights."""
    make = MODELS[name][0]
    default, plain = randomize(make(), scale=0.1), make(skip_padding=False)
    plain.set_weights(default.get_weights())
    return default, plain


@functools.cache
def shared(name):
    """A pair that several tests call and none changes."""
    return made(name)


def around(model):
    ids = keras.Input((None,), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(2)(model(ids)))


@pytest.fixture
def seen(monkeypatch):
    """The shapes of what each feed-forward network of an encoder gets."""
    shapes, call = [], FeedForward.call

    def record(self, x, **options):
        shapes.append(tuple(x.shape))
        return call(self, x, **options)

    monkeypatch.setattr(FeedForward, "call", record)
    return shapes


WHOLE, SKIPPED = (*REAL.shape, D), (1, sum(LENGTHS), D)


@pytest.mark.parametrize("name", MODELS)
def test_every_output_is_that_with_all_padding_computed(name):
    default, plain = shared(name)
    inputs = MODELS[name][1]
    for got, expected in zip(*[keras.tree.flatten(one(inputs)) for one in (default, plain)], strict=True):
        assert_close(got, expected, atol=5e-6)


@on_tensorflow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_skipped_where_nothing_reads_it(name, training, seen):
    default, plain = shared(name)
    *_, at_inference, in_training = MODELS[name]
    default(MODELS[name][1], training=training)
    skips = in_training if training else at_inference
    assert seen[:2] == [SKIPPED if skips else WHOLE] * 2
    del seen[:]
    plain(MODELS[name][1], training=training)
    assert seen[:2] == [WHOLE] * 2


def loss_of(name):
    """Of words one that leaves no label out: it is Keras' mask that leaves padding out."""
    if name == "bert_base":
        return {"pooler_output": "mean_squared_error"}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = MODELS[name][2]
    return dict.fromkeys(labels, loss) if isinstance(labels, dict) else loss


@on_tensorflow
@pytest.mark.parametrize("name", MODELS)
def test_it_learns_the_same(name):
    weights = []
    for model in made(name):
        before = model.get_weights()
        model.compile(keras.optimizers.SGD(0.1), loss_of(name), run_eagerly=True)
        inputs, labels = MODELS[name][1:3]
        losses = [model.train_on_batch(inputs, labels) for _ in range(2)]
        weights.append([np.array(losses), *model.get_weights()])
    assert max(np.abs(new - old).max() for new, old in zip(weights[0][1:], before, strict=True)) > 1e-3
    for got, expected in zip(*weights, strict=True):
        assert_close(got, expected, atol=5e-6)


@on_tensorflow
def test_training_in_chunks_of_logits_skips_padding_and_learns_the_same(seen):
    weights = []
    for model in made("masked_lm"):
        model.compile(keras.optimizers.SGD(0.1), PaddedCrossentropy(chunk_size=4), run_eagerly=True)
        model.train_on_batch(IDS, TOKENS)
        weights.append(model.get_weights())
    assert seen == [SKIPPED] * 2 + [WHOLE] * 2
    for got, expected in zip(*weights, strict=True):
        assert_close(got, expected, atol=5e-6)


@on_tensorflow
def test_compiled_by_xla_all_is_computed(seen):
    import tensorflow as tf

    default, plain = shared("classifier")
    for model in (default, around(default)):
        del seen[:]
        graph = tf.function(lambda ids, model=model: model(ids), jit_compile=True)
        graph.get_concrete_function(tf.TensorSpec(REAL.shape, "int32"))
        assert set(seen) == {WHOLE}
    default.compile("sgd", loss_of("classifier"), jit_compile=True)
    assert default.jit_compile
    assert_close(default.predict_on_batch(IDS), plain(IDS), atol=5e-6)
    assert set(seen) == {WHOLE}
    tf.function(lambda ids: default(ids)).get_concrete_function(tf.TensorSpec(REAL.shape, "int32"))
    assert seen[-1] == (1, None, D)


@on_tensorflow
def test_with_a_gpu_all_is_computed(seen, monkeypatch):
    import tensorflow as tf

    devices = [tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda: devices)
    model = shared("classifier")[0]
    model(IDS)
    assert seen[-1] == SKIPPED
    devices.append(tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU"))
    model(IDS)
    assert seen[-1] == WHOLE


@on_tensorflow
def test_a_model_that_reads_the_vectors_at_padding_computes_them(seen):
    default, plain = shared("classifier")
    got, expected = (keras.Model(model.inputs[0], model.encoder.output)(IDS) for model in (default, plain))
    assert set(seen) == {WHOLE}
    assert_close(got, expected, atol=0)
    assert np.abs(to_numpy(got)[~REAL]).min(-1).max() > 1e-3


@on_tensorflow
def test_a_model_inside_another_skips_padding(seen):
    around(shared("classifier")[0])(IDS)
    assert seen[-1] == SKIPPED


@on_tensorflow
def test_an_activity_regularizer_still_counts_padding(seen):
    options = {"activity_regularizer": "l2"}
    one, other = (of_class(models.TextClassifier, 3)(attention_options=options, skip_padding=x) for x in (None, False))
    other.set_weights(one.get_weights())
    for model in (one, other):
        model(IDS)
    assert set(seen) == {WHOLE}
    assert_close(sum(one.losses), sum(other.losses))


@on_tensorflow
def test_a_hidden_state_among_the_outputs_is_computed(seen):
    options = {"output_hidden_states": True}
    PretrainedModel(BERT, "sequence_classification", **options)(MASKED)
    PretrainedModel(BERT, "token_classification", **options)(MASKED, training=True)
    assert set(seen) == {WHOLE}


@pytest.mark.parametrize("skip_padding", [None, False, True])
@pytest.mark.parametrize("name", ["classifier", "bert_sequences"])
def test_files_and_clones_keep_the_option(name, skip_padding, tmp_path):
    model = MODELS[name][0](skip_padding=skip_padding)
    model.save(tmp_path / "model.keras")
    for again in (keras.saving.load_model(tmp_path / "model.keras"), keras.models.clone_model(model)):
        (encoder,) = [layer for layer in again.layers if isinstance(layer, Encoder)]
        assert encoder.skip_padding is skip_padding
        config = again.get_config()
        assert config.get("encoder_options", config)["skip_padding"] is skip_padding


@on_tensorflow
def test_a_clone_skips_padding_by_itself(seen):
    keras.models.clone_model(shared("classifier")[0])(IDS)
    assert seen[-1] == SKIPPED


def test_the_layer_alone_computes_padding_unless_nothing_reads_it():
    x = normal(*REAL.shape, D)
    plain, by_itself, skipping = (Encoder(1, 17, 3, skip_padding=skip) for skip in (False, None, True))
    for layer in (plain, by_itself, skipping):
        layer.build(x.shape)
        layer.set_weights(plain.get_weights())
    assert Encoder(1, 17, 3).skip_padding is False and by_itself.get_config()["skip_padding"] is None
    assert_close(by_itself(x, mask=REAL), plain(x, mask=REAL), atol=0)
    with unpadding.padding_unread(True):
        with unpadding.padding_unread(False):
            assert_close(by_itself(x, mask=REAL), plain(x, mask=REAL), atol=0)
        skips = keras.backend.backend() == "tensorflow"
        assert_close(by_itself(x, mask=REAL), (skipping if skips else plain)(x, mask=REAL), atol=0)
