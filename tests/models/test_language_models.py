"""What `CausalLM`, `Seq2Seq` and `MaskedLM` have in common: config, files, training, padding, ids, precision."""

import functools
import inspect
import json

import keras
import numpy as np
import pytest

from keras_tx.layers import RotaryEmbedding
from keras_tx.models import CausalLM, MaskedLM, Seq2Seq
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close, randomize, to_numpy

V, TARGET_V, D, F = 31, 23, 12, 17
SIZES = {"num_layers": 1, "hidden_dim": D, "num_heads": 3, "intermediate_dim": F}
LEARNED = {"position_encoding": "learned", "max_length": 11}
KINDS = {
    "causal": lambda **options: CausalLM(V, **SIZES, **options),
    "rotary": lambda **options: CausalLM(
        V,
        **SIZES,
        tie_embeddings=False,
        embedding_options={"position_encoding": None, "padding_id": 4},
        decoder_options={
            "normalization": "rms_norm",
            "activation": "silu",
            "gated": True,
            "attention_options": {"rotary": RotaryEmbedding(base=100), "num_key_value_heads": 1},
        },
        **options,
    ),
    "packed": lambda **options: CausalLM(V, **SIZES, packed=True, embedding_options=LEARNED, **options),
    "shared": lambda **options: Seq2Seq(V, **SIZES, **options),
    "separate": lambda **options: Seq2Seq(
        V,
        TARGET_V,
        **SIZES,
        num_decoder_layers=2,
        tie_embeddings=False,
        embedding_options={**LEARNED, "normalization": "layer_norm"},
        encoder_options={"position_bias": "relative"},
        decoder_options={"normalize_first": True, "position_bias": "alibi"},
        **options,
    ),
    "biased": lambda **options: CausalLM(
        V, **SIZES, use_output_bias=True, embedding_options={"zero_padding": True}, **options
    ),
    "untied bias": lambda **options: Seq2Seq(V, **SIZES, tie_embeddings=False, use_output_bias=True, **options),
    "masked": lambda **options: MaskedLM(V, **SIZES, **options),
    "segments": lambda **options: MaskedLM(
        V,
        **SIZES,
        activation="relu",
        embedding_options={"num_segments": 2, "normalization": None, "scale": False},
        encoder_options={"normalize_first": True},
        **options,
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind, **options):
    return randomize(KINDS[kind](**options), scale=0.1)


@functools.cache
def shared(kind):
    """A model that several tests call and none changes."""
    return made(kind)


def features(model, *rows):
    """Inputs for a model, the ids the same for all; small enough for any vocabulary."""
    ids = np.array(rows, "int32")
    others = {
        "segment_ids": ids % 2,
        "document_ids": (ids != 0).astype("int32"),
        "positions": np.broadcast_to(np.arange(ids.shape[1], dtype="int32"), ids.shape),
    }
    return {tensor.name: others.get(tensor.name, ids) for tensor in model.inputs}


def plain(config):
    """A config without the numbers that Keras gives to objects of a file."""
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items() if key != "shared_object_id"}
    return config


ROWS = [3, 5, 7, 0, 0], [9, 1, 22, 2, 9]


@pytest.mark.parametrize("kind", ["rotary", "biased", "packed", "separate", "segments"])
def test_a_trained_model_is_saved_and_loaded_and_trains_on(kind, tmp_path):
    model = made(kind)
    eagerly = keras.backend.backend() == "tensorflow" and kind != "packed"
    loss = PaddedCrossentropy(padding_id=model.embedding.padding_id)
    model.compile("adam", loss, run_eagerly=eagerly, jit_compile=False)
    inputs, labels = features(model, *ROWS), np.array([[5, 7, 2, 0, 0], [1, 22, 2, 9, 3]], "int32")
    before = to_numpy(model(inputs))
    first = model.evaluate(inputs, labels, verbose=0)
    model.fit(inputs, labels, epochs=2, verbose=0)
    assert np.isfinite(first) and np.abs(to_numpy(model(inputs)) - before).max() > 1e-3
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again) is type(model) and plain(again.get_config()) == plain(model.get_config())
    assert_close(again(inputs), model(inputs), atol=0)
    assert again.optimizer.iterations == 2
    again.fit(inputs, labels, verbose=0)
    assert again.optimizer.iterations == 3


@kinds
def test_the_config_is_the_signature_and_makes_the_same_model(kind):
    model = made(kind, dropout=0.3, name="one")
    config, names = model.get_config(), {*inspect.signature(type(model)).parameters} - {"kwargs"}
    assert set(config) == {"name", "trainable", *names}
    assert all(hasattr(model, name) for name in names)
    again = type(model).from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config and again.name == "one"
    for name in names:
        if isinstance(getattr(model, name), (int, float, bool, str, type(None))):
            assert getattr(again, name) == getattr(model, name)
    again.set_weights(model.get_weights())
    assert_close(again(features(model, *ROWS)), model(features(model, *ROWS)), atol=0)
    assert [w.path.split("/")[-2:] for w in again.weights] == [w.path.split("/")[-2:] for w in model.weights]


@kinds
def test_padding_left_or_right_changes_no_logit(kind):
    model = shared(kind)
    padding = getattr(model, "target_embedding", model.embedding).padding_id
    row, empty = [3, 5, 7, 2], [padding] * 3
    inputs = features(model, row)
    alone = model(inputs)
    padded = lambda row: {**features(model, row), **({"segment_ids": segments(row)} if kind == "segments" else {})}
    segments = lambda row: np.array([[token % 2 if token != padding else 0 for token in row]], "int32")
    right = to_numpy(model(padded(row + empty)))
    assert_close(right[:, :4], alone, atol=3e-6)
    if kind == "packed":
        inputs = padded(empty + row)
        inputs["positions"] = np.maximum(inputs["positions"] - 3, 0)
        assert_close(model(inputs)[:, 3:], alone, atol=3e-6)
    else:
        assert_close(model(padded(empty + row))[:, 3:], alone, atol=3e-6)


@kinds
def test_half_precision_stays_near_single_precision(kind):
    exact, rough = shared(kind), made(kind, dtype="mixed_bfloat16")
    rough.set_weights(exact.get_weights())
    inputs = features(exact, *ROWS)
    expected = to_numpy(exact(inputs))
    assert getattr(rough, "decoder", getattr(rough, "encoder", None)).compute_dtype == "bfloat16"
    logits = rough(inputs)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"  # as the guide on training says
    found = to_numpy(keras.ops.cast(logits, "float32"))
    assert np.abs(found - expected).max() < 0.06 * np.abs(expected).max()


@kinds
@pytest.mark.parametrize(("wrong", "received"), [(V, f"{V}"), (-1, "-1"), (1.5, "dtype float")])
def test_wrong_ids_are_refused(kind, wrong, received):
    model = shared(kind)
    for name in model.id_inputs:
        inputs = features(model, *ROWS)
        inputs[name] = np.array([[wrong] * 5] * 2, "float32" if wrong == 1.5 else "int32")
        with pytest.raises(ValueError, match=f"`{name}` must be .*Received: .*{received}"):
            model(inputs)


@kinds
def test_the_inputs_may_be_a_list_or_a_dict_with_more_keys(kind):
    model = shared(kind)
    inputs = features(model, *ROWS)
    expected = to_numpy(model(inputs))
    assert_close(model([inputs[tensor.name] for tensor in model.inputs]), expected, atol=0)
    assert_close(model({**inputs, "more": ROWS[0]}), expected, atol=0)


@pytest.mark.parametrize("cls", [CausalLM, MaskedLM, Seq2Seq])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_dim": 0}, "`hidden_dim` must be a positive integer. Received: hidden_dim=0"),
        ({"hidden_dim": 10}, "divisible by `num_heads`.* Received: hidden_dim=10, num_heads=3"),
        ({"num_layers": 0}, "`num_layers` must be a positive integer. Received: num_layers=0"),
        ({"dropout": 1.5}, "`dropout` must be a number .*Received: dropout=1.5"),
        ({"embedding_options": {"dim": 1}}, "`embedding_options` must be a dict with keys among .*'dim': 1"),
        ({"num_layer": 12}, r"no argument `num_layer`. Did you mean `num_layers`\? Received: num_layer=12"),
        ({"hiden_dim": 16}, r"no argument `hiden_dim`. Did you mean `hidden_dim`\? Received: hiden_dim=16"),
        ({"padding_id": 3}, r"LM|Seq2Seq` has no argument `padding_id`. Received: padding_id=3"),
        ({"intermediate_dim": 2}, "may have been swapped: .*Received: intermediate_dim=2, num_heads=3"),
    ],
)
def test_a_constructor_refuses_what_cannot_work(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(V, **{**SIZES, **options})


@pytest.mark.parametrize("cls", [CausalLM, Seq2Seq])
def test_small_token_embeddings_cannot_be_tied(cls):
    small = {"embedding_options": {"embedding_dim": 5}}
    expected = "`tie_embeddings` must be False if `embedding_dim` is not `hidden_dim`.*True, embedding_dim=5"
    with pytest.raises(ValueError, match=expected):
        cls(V, **SIZES, **small)
    assert cls(V, **SIZES, **small, tie_embeddings=False).embedding.table().shape == (V, 5)
    cls(V, **SIZES, embedding_options={"embedding_dim": D})


def test_small_token_embeddings_of_a_masked_language_model_are_tied():
    model = MaskedLM(V, **SIZES, embedding_options={"embedding_dim": 5})
    ids = np.array([[3, 7, 9, 0], [4, 1, 22, 30]], "int32")
    logits = model(ids)
    assert tuple(logits.shape) == (2, 4, V)
    hidden = model.encoder(model.embedding(ids))
    for name in ("head_dense", "head_norm"):
        hidden = model.get_layer(name)(hidden)
    assert_close(logits, to_numpy(hidden) @ to_numpy(model.embedding.table()).T, atol=1e-5)
