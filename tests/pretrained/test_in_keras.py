"""The models in users' hands: in other models, frozen, trained, in half precision, with and without optional inputs."""

import json

import keras
import numpy as np
import pytest

from keras_tx import pretrained
from keras_tx.pretrained import PretrainedModel
from keras_tx.pretrained.files import open_tensors
from tests.pretrained.tiny import (
    NAMES,
    assert_equals_reference,
    checkpoint,
    inputs_of,
    loaded,
    numbers,
    reference,
)
from tests.tools import to_numpy

BASES = ["bert_cls", "roberta", "distilbert", "electra"]


@pytest.mark.parametrize("name", BASES)
def test_a_model_around_it_needs_no_more_than_ids(name, tmp_path):
    encoder = pretrained.from_pretrained(checkpoint(name), task="base")
    ids = keras.Input((None,), dtype="int32")
    hidden = encoder(ids)["last_hidden_state"]
    assert hidden.shape == (None, None, 32)
    model = keras.Model(ids, keras.layers.Dense(3)(hidden[:, 0]))
    array = inputs_of(name, encoder)["input_ids"][:1]
    expected = to_numpy(encoder(array)["last_hidden_state"])[:, 0] @ to_numpy(model.layers[-1].kernel)
    np.testing.assert_allclose(to_numpy(model(array)), expected, rtol=0, atol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(to_numpy(again(array)), to_numpy(model(array)))


@pytest.mark.parametrize("way", ["dict", "keywords", "dict of some"])
def test_symbolic_inputs_may_be_given_in_several_ways(way):
    encoder = pretrained.from_pretrained(checkpoint("bert_cls"), task="base")
    names = ("input_ids", "attention_mask", "token_type_ids")
    ids, mask, segments = inputs = [keras.Input((None,), dtype="int32", name=name) for name in names]
    if way == "dict":
        outputs = encoder(dict(zip(names, inputs, strict=True)))
    elif way == "keywords":
        outputs = encoder(ids, attention_mask=mask, token_type_ids=segments)
    else:
        outputs = encoder({"input_ids": ids, "attention_mask": mask}, token_type_ids=segments, training=False)
    model = keras.Model(inputs, outputs)
    arrays = [inputs_of("bert_cls", encoder)[name] for name in names]
    assert assert_equals_reference(model(arrays), "bert_cls") == {"last_hidden_state", "pooler_output"}


def test_layers_after_it_see_the_mask():
    encoder = pretrained.from_pretrained(checkpoint("bert_cls"), task="base")
    ids, mask = [keras.Input((None,), dtype="int32", name=name) for name in ("ids", "mask")]
    pooled = keras.layers.GlobalAveragePooling1D()(encoder(ids, attention_mask=mask)["last_hidden_state"])
    inputs = inputs_of("bert_cls", encoder)
    hidden, real = (
        to_numpy(encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])["last_hidden_state"]),
        0,
    )
    real = inputs["attention_mask"][..., None]
    expected = (hidden * real).sum(axis=1) / real.sum(axis=1)
    actual = keras.Model([ids, mask], pooled)([inputs["input_ids"], inputs["attention_mask"]])
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=0, atol=1e-5)


def test_a_frozen_encoder_stays_as_it_is_and_a_trainable_one_learns():
    encoder = pretrained.from_pretrained(checkpoint("bert_cls"), task="base")
    encoder.trainable = False
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(2)(encoder(ids)["pooler_output"]))
    assert len(model.trainable_weights) == 2
    before = [to_numpy(x).copy() for x in encoder.weights]
    x, y = np.arange(2, 37, dtype="int32").reshape(5, 7), np.array([0, 1, 0, 1, 1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, run_eagerly=True)
    model.fit(x, y, epochs=1, verbose=0)
    for old, new in zip(before, encoder.weights, strict=True):
        np.testing.assert_array_equal(old, to_numpy(new))
    encoder.trainable = True
    assert len(model.trainable_weights) == 2 + len(before)
    model.compile(keras.optimizers.Adam(0.003), loss, run_eagerly=True)
    loss_before = model.evaluate(x, y, verbose=0)  # without dropout
    model.fit(x, y, epochs=4, verbose=0)
    assert model.evaluate(x, y, verbose=0) < loss_before
    changed = [not np.array_equal(old, to_numpy(new)) for old, new in zip(before, encoder.weights, strict=True)]
    assert all(changed)


@pytest.mark.parametrize("keys", [("input_ids",), ("input_ids", "attention_mask"), None])
def test_fit_evaluate_and_predict_take_dicts_with_and_without_the_optional_keys(keys):
    model = pretrained.from_pretrained(checkpoint("bert_cls"))
    x = inputs_of("bert_cls", model)
    x = x if keys is None else {key: x[key] for key in keys}
    y = np.array([2, 0, 1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, run_eagerly=keys is not None, jit_compile=False)
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    if keys is not None:  # as a graph evaluation is traced below
        assert model.evaluate(x, y, verbose=0) < losses[0]
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted["logits"], to_numpy(model(x)["logits"]), rtol=0, atol=1e-5)


def test_a_token_classifier_is_not_trained_on_padding():
    """The loss with wrong labels at padding is that of the real tokens alone."""
    with pytest.warns(UserWarning, match=r"lacks tensors of the task 'token_classification'. .*'classifier.weight'"):
        model = pretrained.from_pretrained(checkpoint("bert"), task="token_classification", num_labels=5)
    x = inputs_of("bert", model)
    real = x["attention_mask"].astype("bool")
    labels = np.random.default_rng(0).integers(0, 5, real.shape)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(loss=loss)
    logits = to_numpy(model(x)["logits"]).astype("float64")
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    each = log_sums - np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    assert model.evaluate(x, np.where(real, labels, 4), verbose=0) == pytest.approx(each[real].sum(), rel=1e-4)


@pytest.mark.parametrize("name", ["bert_cls", "distilbert_cls", "roberta_cls", "electra"])
def test_dropout_of_the_config_is_on_in_training_alone(name):
    model = loaded(name)
    inputs = inputs_of(name, model)
    still, again, dropped, other = [to_numpy(model(inputs, training=on)["logits"]) for on in (False, None, True, True)]
    np.testing.assert_array_equal(still, again)
    assert np.abs(dropped - still).max() > 1e-3 and np.abs(dropped - other).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("bert_cls", {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.4, "classifier_dropout": 0.5}),
        ("distilbert_cls", {"dropout": 0.3, "attention_dropout": 0.4, "seq_classif_dropout": 0.5}),
    ],
)
def test_the_rates_of_the_config_are_those_of_the_layers(name, rates):
    config = {**loaded(name).config, **rates}
    model = PretrainedModel(config)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout)]
    assert {layer.rate for layer in layers} - {0.0} == {0.3, 0.4, 0.5}
    off = PretrainedModel({**config, **dict.fromkeys(rates, 0.0)})
    assert {x.rate for x in off._flatten_layers() if isinstance(x, keras.layers.Dropout)} == {0.0}


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_half_precision_errs_no_more_than_in_transformers(policy):
    import torch
    from transformers import BertForMaskedLM

    model = pretrained.from_pretrained(checkpoint("bert"), dtype=policy)
    variables = "bfloat16" if policy == "bfloat16" else "float32"
    assert {keras.backend.standardize_dtype(x.dtype) for x in model.trainable_weights} == {variables}
    outputs = model(inputs_of("bert", model))
    assert keras.backend.standardize_dtype(outputs["logits"].dtype) == "bfloat16"
    logits = to_numpy(keras.ops.cast(outputs["logits"], "float32"))
    theirs = BertForMaskedLM.from_pretrained(checkpoint("bert"), dtype=torch.bfloat16).to("cpu").eval()
    inputs = {name: torch.tensor(x, device="cpu") for name, x in inputs_of("bert", model).items()}
    with torch.no_grad():
        rough = theirs(**inputs).logits.float().numpy()
    real = reference("bert")["attention_mask"] == 1
    ours, usual = [np.abs(x - reference("bert")["logits"])[real] for x in (logits, rough)]
    assert ours.mean() < 1.5 * usual.mean() and ours.max() < 2 * usual.max()
    assert PretrainedModel.from_config(model.get_config()).get_config() == model.get_config()


def test_inputs_that_cannot_be_are_refused():
    model = loaded("bert")
    ids = inputs_of("bert", model)["input_ids"]
    rule = r"`inputs` must have \['input_ids'\], and may have \['input_ids', 'attention_mask', "
    with pytest.raises(ValueError, match=rule + r".* Received: \['input_ids', 'attention_masks'\]"):
        model({"input_ids": ids, "attention_masks": ids})
    with pytest.raises(ValueError, match=rule + r".* Received: \['attention_mask'\]"):
        model({"attention_mask": ids})
    with pytest.raises(ValueError, match=rule + r".* Received: \['input_ids', 'input_ids'\]"):
        model(ids, input_ids=ids)
    size = model.config["vocab_size"]
    with pytest.raises(ValueError, match=rf"`input_ids` must be in \[0, {size}\). Received: {size}"):
        model(np.full((2, 3), size))
    with pytest.raises(ValueError, match="`input_ids` must be integers; .* of dtype float32"):
        model(np.ones((2, 3), "float32"))
    with pytest.raises(ValueError, match="`input_ids` must be integers; .* of dtype float32"):
        model(keras.Input((None,)))
    with pytest.raises(ValueError, match="`segment_ids` must be in .0, 2.. Received: 2"):
        model(ids, token_type_ids=np.full_like(ids, 2))


def test_positions_past_the_table_are_refused():
    for name, most in (("bert", 40), ("roberta", 40)):
        model = loaded(name)
        assert model.get_layer("embedding").positions.max_length == most
        model(np.full((1, most), 5))
        with pytest.raises(ValueError, match=r"`positions` must be in \[0, 4[02]\). Received: 4[02]"):
            model(np.full((1, most + 1), 5))


def test_a_model_that_only_reads_does_not_generate():
    with pytest.raises(ValueError, match="`generate` needs a generative model, .* Received: task='masked_lm'"):
        loaded("bert").generate([[5, 7]])


def test_generate_takes_masks_of_the_ids_and_nothing_unknown():
    model = loaded("gpt2")
    ids = reference("gpt2")["lp_input_ids"]
    options = {"max_new_tokens": 2, "stop_tokens": (), "jit_compile": False}
    with pytest.raises(
        ValueError, match=r"and their mask of the same shape. Received: ids of shape \(3, 9\), .* \(3, 8\)"
    ):
        model.generate({"input_ids": ids, "attention_mask": ids[:, 1:]}, **options)
    with pytest.raises(ValueError, match=r"must be among \['input_ids'\], .* Received: \['input_ids', 'positions'\]"):
        model.generate({"input_ids": ids, "positions": ids}, **options)
    mask = reference("gpt2")["lp_attention_mask"]
    rows = [row[real == 1].tolist() for row, real in zip(ids, mask, strict=True)]
    answers = model.generate(rows, **options)
    array = model.generate({"input_ids": ids, "attention_mask": mask}, **options)
    for row, answer, whole in zip(rows, answers, array, strict=True):
        assert answer[: len(row)] == row and whole[-2:].tolist() == answer[len(row) :]
    np.testing.assert_array_equal(array[:, :-2], ids)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_written_as_they_were_read(name, tmp_path):
    pretrained.save_pretrained(loaded(name), tmp_path)
    assert numbers(tmp_path) == numbers(checkpoint(name))


def test_another_dtype_is_written_where_it_is_asked_for(tmp_path):
    pretrained.save_pretrained(loaded("bert"), tmp_path, dtype="bfloat16")
    tensors = open_tensors(tmp_path)
    assert {str(tensors.dtype(name)) for name in tensors} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = pretrained.from_pretrained(tmp_path)
    assert_equals_reference(again(inputs_of("bert", again)), "bert", atol=0.3)  # torch in bfloat16: 0.13
