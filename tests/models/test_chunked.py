"""Training with a loss in chunks: the same weights as with whole logits, in every model over a vocabulary."""

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM, MaskedLM, Seq2Seq
from keras_tx.training import PaddedAccuracy, PaddedCrossentropy
from tests.tools import assert_close, to_numpy

SIZES = {"num_layers": 1, "hidden_dim": 12, "num_heads": 3, "intermediate_dim": 17, "dropout": 0.0}
MODELS = {
    "causal": lambda: CausalLM(31, **SIZES),
    "untied": lambda: CausalLM(31, **SIZES, tie_embeddings=False),
    "packed": lambda: CausalLM(31, **SIZES, packed=True),
    "bias": lambda: CausalLM(31, **SIZES, use_output_bias=True, embedding_options={"zero_padding": True}),
    "untied bias": lambda: Seq2Seq(31, **SIZES, tie_embeddings=False, use_output_bias=True),
    "seq2seq": lambda: Seq2Seq(31, **SIZES),
    "two vocabularies": lambda: Seq2Seq(29, 31, **SIZES),
    "masked": lambda: MaskedLM(31, **SIZES),
}


def data_for(model):
    rng = np.random.default_rng(3)
    inputs = {tensor.name: rng.integers(1, 29, (5, 7)).astype("int32") for tensor in model.inputs}
    labels = rng.integers(1, 31, (5, 7)).astype("int32")
    labels[rng.random((5, 7)) < 0.4] = 0
    return inputs, labels


@pytest.mark.parametrize("name", MODELS)
def test_a_step_learns_what_it_learns_from_whole_logits(name):
    after, logs = [], []
    for chunk_size in (None, 4):
        keras.utils.set_random_seed(3)
        model = MODELS[name]()
        loss = PaddedCrossentropy(label_smoothing=0.1, chunk_size=chunk_size)
        # On TensorFlow a graph is traced for one model in chunks only, as it takes long.
        eagerly = keras.backend.backend() == "tensorflow" and (name, chunk_size) != ("causal", 4)
        options = {"jit_compile": False, "run_eagerly": eagerly}
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=[PaddedAccuracy()], **options)
        inputs, labels = data_for(model)
        weights = np.linspace(0.5, 2, 5, dtype="float32")
        history = model.fit(inputs, labels, sample_weight=weights, epochs=2, verbose=0, batch_size=5)
        logs.append(history.history)
        after.append(model.get_weights())
    for got, expected in zip(after[1], after[0], strict=True):
        assert_close(got, expected, atol=3e-6)
    assert_close(logs[1]["loss"], logs[0]["loss"], rtol=1e-5)
    assert set(logs[1]) == {"loss"} and len(logs[0]) == 2


@pytest.mark.parametrize(("reduction", "steps"), [("mean", None), ("mean", 2), ("sum", 2)])
def test_loss_weights_and_regularizers_count_as_without_chunks(reduction, steps):
    losses, after = [], []
    for chunk_size in (None, 4):
        keras.utils.set_random_seed(3)
        model = CausalLM(31, **SIZES, decoder_options={"attention_options": {"kernel_regularizer": "l2"}})
        loss = PaddedCrossentropy(chunk_size=chunk_size, reduction=reduction)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        eagerly = keras.backend.backend() == "tensorflow"
        model.compile(optimizer, loss, loss_weights=0.25, jit_compile=False, run_eagerly=eagerly)
        options = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
        inputs, labels = data_for(model)
        losses.append(model.fit(inputs, [labels] if chunk_size else labels, **options).history["loss"])
        after.append(model.get_weights())
    assert_close(losses[1], losses[0], rtol=1e-5)
    for got, expected in zip(after[1], after[0], strict=True):
        assert_close(got, expected, atol=3e-6)


def test_evaluation_and_prediction_still_have_logits():
    model = MODELS["causal"]()
    eagerly = keras.backend.backend() == "tensorflow"
    options = {"jit_compile": False, "run_eagerly": eagerly}
    model.compile("adam", PaddedCrossentropy(chunk_size=4), metrics=[PaddedAccuracy()], **options)
    inputs, labels = data_for(model)
    model.fit(inputs, labels, verbose=0)
    found = model.evaluate(inputs, labels, verbose=0, return_dict=True)
    logits = model.predict(inputs, verbose=0)
    assert logits.shape == (5, 7, 31)
    assert_close(logits, model(inputs), atol=1e-5)
    assert_close(found["loss"], PaddedCrossentropy()(labels, logits), rtol=1e-5)
    real = labels != 0
    assert_close(found["accuracy"], (to_numpy(logits).argmax(-1) == labels)[real].mean(), rtol=1e-5)


def test_wrong_labels_and_settings_are_refused():
    loss = PaddedCrossentropy(chunk_size=4)
    hidden, table = np.ones((2, 3, 5), "float32"), np.ones((7, 5), "float32")
    with pytest.raises(ValueError, match=r"must be in \[0, 7\) or the `padding_id`. Received: label 9"):
        loss.call_in_chunks(np.full((2, 3), 9), hidden, table)
    with pytest.raises(ValueError, match=r"must have the shape of `y_pred` .*=\(2, 5\), .*\(2, 3, 7\)"):
        loss.call_in_chunks(np.ones((2, 5), "int32"), hidden, table)
    with pytest.raises(ValueError, match="`chunk_size` must be a positive integer.*chunk_size=0"):
        PaddedCrossentropy(chunk_size=0)
    with pytest.raises(ValueError, match="`chunk_size` needs logits and a reduction.*chunk_size=3, reduction='none'"):
        PaddedCrossentropy(chunk_size=3, reduction="none")
