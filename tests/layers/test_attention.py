"""`MultiHeadAttention` against Keras' own, and what it does beyond it."""

import functools
import itertools
import re

import keras
import numpy as np
import pytest

from keras_tx.internals.keras_models import get_keras_mask
from keras_tx.layers import Decoder, DecoderLayer, Encoder, EncoderLayer, MultiHeadAttention
from tests.tools import assert_close, normal, randomize, to_numpy

B, T, S, N, H = 2, 5, 7, 6, 3


@functools.cache
def pair(**arguments):
    """Keras' layer and ours, with the same weights, which no test changes."""
    theirs = keras.layers.MultiHeadAttention(N, H, **arguments)
    ours = MultiHeadAttention(N, H, **arguments)
    # With scores: on JAX Keras 3.15 cannot compute its fused attention if `value_dim` is not `key_dim`.
    theirs(normal(B, T, 11), normal(B, S, 13), normal(B, S, 17), return_attention_scores=True)
    ours(normal(B, T, 11), normal(B, S, 13), normal(B, S, 17))
    randomize(theirs)
    ours.set_weights(theirs.get_weights())
    return theirs, ours


def padding(length, *counts):
    return np.arange(length)[None] < np.array(counts)[:, None]


MASKS = {
    "query_mask": padding(T, 5, 3),
    "value_mask": padding(S, 4, 7),
    "key_mask": padding(S, 7, 2),
    "attention_mask": np.random.default_rng(5).random((B, T, S)) < 0.8,
    "use_causal_mask": True,
}
COMBINATIONS = [names for count in range(6) for names in itertools.combinations(MASKS, count)]


@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_outputs_and_scores_equal_keras_in_every_combination_of_masks(names, sliding_window):
    theirs, ours = pair(sliding_window=sliding_window, value_dim=5)
    query, value, key = normal(B, T, 11), normal(B, S, 13, seed=1), normal(B, S, 17, seed=2)
    masks = {name: MASKS[name] for name in names}
    expected, expected_scores = theirs(query, value, key, **masks, return_attention_scores=True)
    output, scores = ours(query, value, key, **masks, return_attention_scores=True)
    if "query_mask" in names:  # Keras 3.15 overwrites the argument with the mask that hangs on the tensor
        joined = np.broadcast_to(masks["query_mask"][:, :, None], (B, T, S)) & masks.get("attention_mask", True)
        rest = {k: v for k, v in masks.items() if k not in ("query_mask", "attention_mask")}
        expected, expected_scores = theirs(
            query, value, key, attention_mask=joined, **rest, return_attention_scores=True
        )
    sees = to_numpy(scores).sum(-1) > 0.5  # where a query may look at nothing, Keras gives the mean of all values
    assert_close(to_numpy(scores)[sees], to_numpy(expected_scores)[sees])
    seen_by_all = sees.all(1)
    assert seen_by_all.any()
    assert_close(to_numpy(output)[seen_by_all], to_numpy(expected)[seen_by_all], atol=2e-6)


@pytest.mark.parametrize(
    "arguments", [{"use_bias": False}, {"use_gate": True}, {"output_shape": (3, 4)}, {"value_dim": 2}]
)
def test_outputs_equal_keras_with_every_other_argument(arguments):
    theirs, ours = pair(**arguments)
    inputs = normal(B, T, 11), normal(B, S, 13, seed=1), normal(B, S, 17, seed=2)
    assert_close(ours(*inputs), theirs(*inputs, return_attention_scores=True)[0])
    assert [tuple(w.shape) for w in ours.weights] == [tuple(w.shape) for w in theirs.weights]


@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2), -2, None])
def test_attention_over_other_axes_equals_keras(axes):
    theirs = keras.layers.MultiHeadAttention(N, H, attention_axes=axes)
    ours = MultiHeadAttention(N, H, attention_axes=axes)
    query = normal(2, 3, 5, 8)
    value = normal(2, 3, 5, 8, seed=1)
    theirs(query, value), ours(query, value)
    ours.set_weights(randomize(theirs).get_weights())
    expected, expected_scores = theirs(query, value, return_attention_scores=True)
    output, scores = ours(query, value, return_attention_scores=True)
    assert_close(output, expected)
    assert_close(scores, expected_scores)
    mask = np.random.default_rng(0).random(to_numpy(scores).shape) < 0.7
    mask.reshape(*mask.shape[: -len(ours.attention_axes or (1, 2))], -1)[..., 0] = True  # each query sees a key
    assert_close(ours(query, value, attention_mask=mask), theirs(query, value, attention_mask=mask))


def test_weights_files_of_keras_models_load_into_ours(tmp_path):
    def model(layer):
        x, y = keras.Input((None, 11)), keras.Input((None, 13))
        return keras.Model([x, y], layer(x, y))

    theirs = model(keras.layers.MultiHeadAttention(N, H, use_gate=True, name="attention"))
    ours = model(MultiHeadAttention(N, H, use_gate=True, name="attention"))
    randomize(theirs)
    theirs.save_weights(tmp_path / "keras.weights.h5")
    ours.load_weights(tmp_path / "keras.weights.h5")
    inputs = [normal(B, T, 11), normal(B, S, 13)]
    assert_close(ours(inputs), theirs(inputs))


def test_masks_that_hang_on_the_tensors_count_as_if_they_were_given():
    ids = np.array([[5, 3, 2, 0, 0], [0, 4, 1, 2, 2]])
    x = keras.layers.Embedding(7, 12, mask_zero=True)(ids)
    layer = MultiHeadAttention(3, 4)
    plain = keras.ops.convert_to_tensor(to_numpy(x))
    with_mask = layer(x, x)
    assert_close(with_mask, layer(plain, plain, query_mask=ids > 0, value_mask=ids > 0), atol=0)
    assert np.abs(to_numpy(with_mask) - to_numpy(layer(plain, plain))).max() > 1e-3
    assert_close(get_keras_mask(with_mask), ids > 0)


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    grouped, full = MultiHeadAttention(N, H, num_key_value_heads=2), MultiHeadAttention(N, H)
    inputs = normal(B, T, 11), normal(B, S, 13)
    grouped(*inputs), full(*inputs)
    weights = randomize(grouped).get_weights()
    repeated = [np.repeat(w, 3, axis=-2) if index in (2, 3, 4, 5) else w for index, w in enumerate(weights)]
    full.set_weights(repeated)
    assert_close(grouped(*inputs), full(*inputs))


def test_a_scale_of_one_over_root_h_is_the_default_and_another_is_not():
    inputs = normal(B, T, 11), normal(B, S, 13)
    default, same, other = (MultiHeadAttention(N, H, scale=scale) for scale in (None, H**-0.5, 1.0))
    for layer in (default, same, other):
        layer(*inputs)
        layer.set_weights(default.get_weights())
    assert_close(default(*inputs), same(*inputs))
    assert np.abs(to_numpy(other(*inputs)) - to_numpy(default(*inputs))).max() > 1e-3


def test_normalized_queries_and_keys_do_not_feel_the_length_of_their_projections():
    layer = MultiHeadAttention(N, H, qk_norm=True, use_bias=False)
    inputs = normal(B, T, 11), normal(B, S, 13)
    _, before = layer(*inputs, return_attention_scores=True)
    layer.query_dense.kernel.assign(layer.query_dense.kernel * 5.0)
    _, after = layer(*inputs, return_attention_scores=True)
    assert_close(after, before, atol=1e-4)
    layer.query_norm.scale.assign(layer.query_norm.scale * 5.0)
    assert np.abs(to_numpy(layer(*inputs, return_attention_scores=True)[1]) - to_numpy(before)).max() > 1e-2


def test_a_bias_moves_the_scores_as_an_added_product_would():
    layer = MultiHeadAttention(N, H)
    inputs = normal(B, T, 11), normal(B, S, 13)
    bias = np.full((1, 1, T, S), -30.0, "float32")
    bias[..., 2] = 0.0
    _, scores = layer(*inputs, attention_bias=bias, return_attention_scores=True)
    assert_close(to_numpy(scores)[..., 2], np.ones((B, N, T)), atol=1e-6)
    zero = layer(*inputs, attention_bias=np.zeros((B, T, S), "float32"))
    assert_close(zero, layer(*inputs), atol=0)


def test_hard_attention_holds_at_inference_alone():
    layer = MultiHeadAttention(N, H, hard_attention=True)
    inputs = normal(B, T, 11), normal(B, S, 13)
    _, hard = layer(*inputs, return_attention_scores=True)
    _, soft = layer(*inputs, return_attention_scores=True, training=True)
    assert set(np.unique(to_numpy(hard))) == {0.0, 1.0}
    assert_close(to_numpy(hard).argmax(-1), to_numpy(soft).argmax(-1))
    assert to_numpy(soft).max() < 1


def test_dropout_drops_scores_in_training_only_and_repeats_with_its_seed():
    inputs = normal(B, T, 11), normal(B, S, 13)
    first, second = (MultiHeadAttention(N, H, dropout=0.5, seed=3) for _ in range(2))
    first(*inputs), second(*inputs)
    second.set_weights(first.get_weights())
    dropped = first(*inputs, training=True)
    assert_close(dropped, second(*inputs, training=True))
    assert np.abs(to_numpy(dropped) - to_numpy(first(*inputs))).max() > 1e-3
    assert_close(first(*inputs), second(*inputs), atol=0)


def test_initializers_regularizers_and_constraints_reach_every_projection():
    layer = MultiHeadAttention(
        N,
        H,
        kernel_initializer="ones",
        bias_initializer="ones",
        kernel_regularizer="l2",
        bias_regularizer="l1",
        kernel_constraint="non_neg",
        bias_constraint="max_norm",
        activity_regularizer="l2",
    )
    layer(normal(B, T, 11), normal(B, S, 13))
    for dense in (layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense):
        assert to_numpy(dense.kernel).min() == to_numpy(dense.bias).min() == 1
        assert isinstance(dense.kernel.constraint, keras.constraints.NonNeg)
        assert isinstance(dense.bias.constraint, keras.constraints.MaxNorm)
    assert len(layer.losses) == 4 * 3
    random = MultiHeadAttention(N, H)
    random(normal(B, T, 11), normal(B, T, 11))
    assert np.abs(to_numpy(random.query_dense.kernel) - to_numpy(random.key_dense.kernel)).max() > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "`num_heads` must be a positive integer. Received: num_heads=0"),
        ({"num_heads": 2.0}, "`num_heads` must be a positive integer. Received: num_heads=2.0"),
        ({"key_dim": -3}, "`key_dim` must be a positive integer. Received: key_dim=-3"),
        ({"value_dim": True}, "`value_dim` must be a positive integer or None. Received: value_dim=True"),
        ({"dropout": 1.0}, r"`dropout` must be a number in \[0, 1\). Received: dropout=1.0"),
        ({"dropout": float("nan")}, "`dropout` must be a number in .* Received: dropout=nan"),
        (
            {"sliding_window": 10**18},
            "`sliding_window` must be a positive integer or None, at most 2147483647. Rec.*=10{18}",
        ),
        ({"sliding_window": 0}, "`sliding_window` must be a positive integer or None. Received: sliding_window=0"),
        (
            {"num_key_value_heads": 4},
            "divisible by `num_key_value_heads`. Received: num_heads=6, num_key_value_heads=4",
        ),
        ({"scale": 0}, "`scale` must be a positive finite number. Received: scale=0"),
        ({"output_shape": (3, -1)}, r"Invalid `output_shape`: .* Received: \(3, -1\)"),
        ({"attention_axes": "1"}, "`attention_axes` must be an int, list, or tuple. Received: attention_axes='1'"),
        ({"flash_attention": True, "dropout": 0.1}, "`flash_attention=True` excludes .* dropout=0.1"),
        (
            {"flash_attention": True, "hard_attention": True},
            "excludes `dropout` and `hard_attention`. .*hard_attention=True",
        ),
    ],
)
def test_a_constructor_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"num_heads": N, "key_dim": H, **arguments})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attention_mask": np.ones((B, T, T), "bool")}, r"`attention_mask` must broadcast to \(2, 6, 5, 7\)"),
        ({"attention_mask": np.ones((B, 4, T, S), "bool")}, r"Received: attention_mask.shape=\(2, 4, 5, 7\)"),
        ({"attention_mask": np.ones((1, B, 1, T, S), "bool")}, r"Received: attention_mask.shape=\(1, 2, 1, 5, 7\)"),
        ({"attention_bias": np.ones((B, S, T))}, "`attention_bias` must broadcast to"),
        ({"query_mask": np.ones((B, S), "bool")}, r"`query_mask` must have the shape \(2, 5\)"),
        ({"value_mask": np.ones((B, T), "bool")}, r"`value_mask` must have the shape \(2, 7\). .*shape=\(2, 5\)"),
        ({"key_mask": np.ones((B, S, 1), "bool")}, r"`key_mask` must have the shape .* key_mask.shape=\(2, 7, 1\)"),
        ({"attention_mask": np.ones(S, "bool")}, r"`attention_mask` must have at least 2 axes.*shape=\(7,\)"),
        ({"attention_mask": np.array([[0.0] * 6 + [-1e9]])}, "numbers to add .* `attention_bias`.* value -1"),
        ({"attention_bias": np.ones((B, T, S), "bool")}, "`attention_bias` must be of floats, .* of dtype bool"),
        ({"attention_bias": np.ones((B, T, S), "int32")}, "booleans go into `attention_mask`.* of dtype int32"),
        ({"key": np.ones((B, S + 1, 13))}, r"`value` and `key`.* must be equal. Received: value_shape=\(2, 7, 13\)"),
    ],
)
def test_a_call_refuses_tensors_of_the_wrong_shape(call, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(N, H)(normal(B, T, 11), normal(B, S, 13), **call)


def test_a_call_without_a_value_is_refused():
    with pytest.raises(
        ValueError, match="`value` must be given, unless `cache` is what `new_memory` returned. Received"
    ):
        MultiHeadAttention(N, H)(normal(B, T, 11))


@pytest.mark.parametrize("options", [{}, {"blockwise": True}], ids=str)
def test_nan_in_a_bias_is_not_hidden(options):
    bias = normal(B, N, T, S)
    bias[0, 1, 2, 3] = np.nan
    outputs = to_numpy(MultiHeadAttention(N, H, **options)(normal(B, T, 11), normal(B, S, 13), attention_bias=bias))
    assert np.isnan(outputs[0, 2]).all() and np.isfinite(outputs[1]).all() and np.isfinite(outputs[0, :2]).all()


def test_a_causal_mask_over_two_axes_is_refused():
    with pytest.raises(
        ValueError, match=r"must be used with a single attention axis. Received: attention_axes=\(1, 2\)"
    ):
        MultiHeadAttention(N, H)(normal(2, 3, 5, 8), normal(2, 3, 5, 8), use_causal_mask=True)


@pytest.mark.parametrize("axes", [(), (0,), (3,), (1, 1), (7,)])
def test_axes_that_cannot_be_attended_over_are_refused(axes):
    with pytest.raises(ValueError, match=r"`attention_axes` must be different axes .* for an input of rank 4"):
        MultiHeadAttention(N, H, attention_axes=axes)(normal(2, 3, 5, 8), normal(2, 3, 5, 8))


def test_a_bias_too_low_for_half_precision_hides_and_gives_no_nan():
    layer = MultiHeadAttention(N, H, dtype="mixed_float16")
    bias = np.zeros((1, 1, T, S), "float32")
    bias[..., 3], bias[:, :, 2] = -1e9, -np.inf
    output, scores = layer(normal(B, T, 11), normal(B, S, 13), attention_bias=bias, return_attention_scores=True)
    assert np.isfinite(to_numpy(output)).all()
    assert not to_numpy(scores)[..., 3].any() and not to_numpy(scores)[:, :, 2].any()


def test_flash_attention_cannot_return_scores():
    with pytest.raises(ValueError, match="Returning attention scores is not supported .* flash_attention=True"):
        MultiHeadAttention(N, H, flash_attention=True)(normal(B, T, 11), normal(B, S, 13), return_attention_scores=True)


@pytest.mark.tensorflow
def test_flash_attention_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="Flash attention is not supported"):
        MultiHeadAttention(N, H, flash_attention=True)(normal(B, T, 11), normal(B, S, 13))


def test_what_keras_takes_by_name_is_not_dropped_by_position():
    x = normal(B, T, 11)
    with pytest.raises(TypeError, match="must be given by name. Received: 8 arguments by position"):
        MultiHeadAttention(N, H)(x, x, x, None, None, None, None, True)


def test_rotary_attention_over_other_axes_is_refused():
    layer = MultiHeadAttention(N, H + H % 2, rotary=True, attention_axes=2)
    with pytest.raises(ValueError, match=r"`rotary` needs `attention_axes=1`. Received: attention_axes=\(2,\)"):
        layer(normal(B, T, S, 11), normal(B, T, S, 11))


@pytest.mark.parametrize("symbolic", [False, True])
def test_positions_without_rotary_are_refused(symbolic):
    x, positions = normal(B, T, 11), np.arange(T)
    if symbolic:
        x, positions = keras.Input((T, 11)), keras.Input((T,), dtype="int32")
    text = "`positions` must be given only with `rotary`. Received: positions, rotary=None"
    with pytest.raises(ValueError, match=text):
        MultiHeadAttention(N, H)(x, x, positions=positions)


@pytest.mark.parametrize("layer", [EncoderLayer(17, 3), Encoder(1, 17, 3), DecoderLayer(17, 3), Decoder(1, 17, 3)])
def test_layers_around_it_take_positions_of_a_model_without_rotary(layer):
    x = normal(B, T, 12)
    assert_close(layer(x, positions=np.arange(T)[::-1].copy()), layer(x), atol=0)


@pytest.mark.parametrize("name", ["query_mask", "value_mask"])
@pytest.mark.parametrize("rotary", [None, True])
def test_a_mask_of_a_wrong_shape_is_named_also_with_rotary(name, rotary):
    x = normal(B, T, 11)
    with pytest.raises(
        ValueError, match=rf"`{name}` must have the shape \({B}, {T}\). Received: {name}.shape=\({B}, 3"
    ):
        MultiHeadAttention(N, 4, rotary=rotary)(x, x, **{name: np.ones((B, 3), "bool")})


def test_a_text_does_not_make_a_mask_causal():
    x = normal(B, T, 11)
    with pytest.raises(
        TypeError, match="`use_causal_mask` must be True, False or None. Received: use_causal_mask='no'"
    ):
        MultiHeadAttention(N, H)(x, x, use_causal_mask="no")


@pytest.mark.parametrize("value", [True, False])
def test_numbers_and_tensors_make_a_mask_causal_as_booleans_do(value):
    layer, x = MultiHeadAttention(N, H), normal(B, T, 11)
    expected = to_numpy(layer(x, x, use_causal_mask=value))
    assert np.abs(expected - to_numpy(layer(x, x, use_causal_mask=not value))).max() > 0.01
    for one in (int(value), np.bool_(value), keras.ops.convert_to_tensor(value)):
        assert_close(layer(x, x, use_causal_mask=one), expected, atol=0)


@pytest.mark.parametrize(
    "shapes", [((), ()), ((3,), (3,)), ((3, 11), (3, 11)), ((B, T, 11), (3, 11)), ((B, T, 11), (B, 2, T, 11))]
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_inputs_must_have_axes_for_batch_and_tokens(shapes, symbolic):
    query, value = (keras.KerasTensor(shape) if symbolic else normal(*shape) for shape in shapes)
    received = re.escape(f"query_shape={shapes[0]}, value_shape={shapes[1]}")
    with pytest.raises(
        ValueError, match=rf"must have the same number of axes, at least three: .* Received: {received}"
    ):
        MultiHeadAttention(N, H)(query, value)
