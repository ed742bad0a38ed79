"""On PyTorch all variables of a model have their gradients cleared, and are in `parameters()` and `state_dict()`."""

import keras
import numpy as np
import pytest

from keras_tx.models import TextClassifier
from keras_tx.pretrained import PretrainedModel
from keras_tx.training import backups
from tests.tools import to_numpy

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="about PyTorch")
SIZES = {"num_layers": 1, "hidden_dim": 4, "num_heads": 1, "intermediate_dim": 5, "dropout": 0.0}
BERT = {"model_type": "bert", "vocab_size": 11, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
BERT |= {"intermediate_size": 4, "max_position_embeddings": 8}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # seed generators have numbers in their names
IDS, LABELS = np.arange(1, 11).reshape(2, 5), np.array([0, 1])


def classifier(name="classifier"):
    return TextClassifier(11, 2, **SIZES, name=name)


def gradients(model, variables):
    return [None if one.value.grad is None else to_numpy(one.value.grad) for one in variables]


def compiled(model):
    model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def wrapped():
    model, ids = classifier(), keras.Input((None,), dtype="int32")
    return keras.Model(ids, model(ids)), model


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_gradients_of_lora_do_not_add_up_over_steps(is_wrapped, quantized):
    model, inner = wrapped() if is_wrapped else (None, classifier())
    model = inner if model is None else model
    layer = inner.encoder.layers[0].self_attention.query_dense
    if quantized:
        inner.quantize("int4")
    layer.enable_lora(2, b_initializer="ones")
    compiled(model)
    found = []
    for _ in range(3):
        model.train_on_batch(IDS, LABELS)
        found.append(gradients(model, layer.lora_matrices()))
    for one in found:
        for got, expected in zip(one, found[0], strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-7)
    assert np.abs(found[0][0]).max() > 0


def test_those_of_two_models_with_the_same_names_do_neither():
    one, two, ids = classifier("one"), classifier("two"), keras.Input((None,), dtype="int32")
    model = compiled(keras.Model(ids, one(ids) + two(ids)))
    found = []
    for _ in range(3):
        model.train_on_batch(IDS, LABELS)
        found.append(gradients(model, [*one.trainable_variables, *two.trainable_variables]))
    for step in found:
        for got, expected in zip(step, found[0], strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-7)


def test_gradients_may_be_set_to_zero_instead():
    model = compiled(classifier())
    model.train_on_batch(IDS, LABELS)
    model.zero_grad(set_to_none=False)
    found = gradients(model, model.trainable_variables)
    assert all(one is not None and not one.any() for one in found)


@pytest.mark.parametrize("make", [classifier, lambda: PretrainedModel(BERT, "sequence_classification")])
def test_parameters_and_the_state_are_whole(make):
    model = make()
    held = {one.data_ptr() for one in model.state_dict().values()}
    assert held == {one.value.data_ptr() for one in model.variables}
    assert {id(one) for one in model.parameters()} == {id(one.value) for one in model.variables}
    other = make()
    other.load_state_dict(model.state_dict())
    for got, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        make().load_state_dict({})
    layer = next(one for one in model._flatten_layers() if hasattr(one, "lora_matrices") and one.built)
    layer.enable_lora(2)
    ids = {id(one) for one in model.parameters()}
    assert all(id(one.value) in ids for one in layer.lora_matrices())


def test_random_states_of_gpus_that_are_gone_are_left_out(monkeypatch):
    torch, arrays, seen = pytest.importorskip("torch"), {}, []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.get_rng_state()] * 3)
    states = backups.random_states(arrays)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", seen.extend)
    backups.restore_random_states(states, arrays)
    assert len(seen) == 1
