"""What `get_layout_map` splits, and what it refuses. The layouts are decided while layers build, on every backend."""

import re

import keras
import numpy as np
import pytest

import keras_tx
from keras_tx.distribution import get_layout_map
from keras_tx.layers.splitting import SplitLayouts

SIZES = {"num_layers": 1, "hidden_dim": 12, "num_heads": 4, "intermediate_dim": 20}
OF_A_LAYER = {
    "self_attention/query/kernel": (None, "model", None),
    "self_attention/query/bias": ("model", None),
    "self_attention/key/kernel": (None, "model", None),
    "self_attention/key/bias": ("model", None),
    "self_attention/value/kernel": (None, "model", None),
    "self_attention/value/bias": ("model", None),
    "self_attention/attention_output/kernel": ("model", None, None),
    "feed_forward/intermediate/kernel": (None, "model"),
    "feed_forward/intermediate/bias": ("model",),
    "feed_forward/output/kernel": ("model", None),
}


@pytest.fixture
def make_map(monkeypatch):
    """`get_layout_map` for a mesh of devices that need not exist, as on JAX."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")

    def make(shape=(1, 2), axis_names=("batch", "model"), **names):
        return get_layout_map(mesh(shape, axis_names), **names)

    yield make
    keras.distribution.set_distribution(None)


def mesh(shape=(1, 2), axis_names=("batch", "model")):
    return keras.distribution.DeviceMesh(shape, list(axis_names), [f"cpu:{i}" for i in range(np.prod(shape))])


@pytest.fixture
def split(make_map, monkeypatch):
    """Makes a map current: {path: axes} of what layers that are built from now on split."""

    def begin(shape=(1, 2)):
        layouts = make_map(shape)
        monkeypatch.undo()  # the layers are TensorFlow's
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        keras.distribution.set_distribution(distribution)
        return layouts

    return begin


def axes(layouts):
    return {path: layout.axes for path, layout in layouts.items()}


def test_heads_feed_forward_and_vocabulary_are_split(split):
    layouts = split()
    keras_tx.models.CausalLM(26, **SIZES, tie_embeddings=False, use_output_bias=True)
    expected = {f"decoder/layer_0/{path}": axes for path, axes in OF_A_LAYER.items()}
    expected |= {
        "embedding/tokens/embeddings": ("model", None),
        "head/kernel": (None, "model"),
        "head/bias": ("model",),
    }
    assert axes(layouts) == expected
    assert len(layouts) == len(expected)


def test_layers_of_a_users_model_are_split_whatever_their_names_are(split):
    layouts = split()
    x = keras.Input((5, 12))
    y = keras_tx.layers.MultiHeadAttention(2, 3, use_bias=False, use_gate=True, name="look")(x, x)
    y = keras_tx.layers.FeedForward(8, gated=True, use_bias=False, name="think")(y)
    keras.Model(x, keras.layers.Dense(4, name="query")(y))
    columns, rows = (None, "model", None), ("model", None, None)
    attention = {f"look/{name}/kernel": columns for name in ("query", "key", "value", "gate")}
    feed_forward = {f"think/{name}/kernel": (None, "model") for name in ("gate", "intermediate")}
    assert axes(layouts) == {
        **attention,
        "look/attention_output/kernel": rows,
        **feed_forward,
        "think/output/kernel": ("model", None),
    }


def test_too_few_key_heads_stay_whole(split):
    layouts = split((1, 4))
    x = np.ones((1, 2, 12), "float32")
    keras_tx.layers.MultiHeadAttention(4, 3, num_key_value_heads=2, name="look")(x, x)
    assert set(layouts) == {"look/query/kernel", "look/query/bias", "look/attention_output/kernel"}


def test_an_odd_vocabulary_is_split_by_the_hidden_size(split):
    layouts = split()
    model = keras_tx.models.CausalLM(27, **SIZES, tie_embeddings=False, use_output_bias=True)
    assert layouts["embedding/tokens/embeddings"].axes == (None, "model")
    assert layouts["head/kernel"].axes == ("model", None)
    assert layouts["head/bias"] is None
    assert model.head.bias.path == "head/bias"


def test_lora_and_integer_kernels_follow_their_kernels(split):
    layouts = split()
    layer = keras_tx.layers.FeedForward(8, name="think")
    layer(np.ones((1, 2, 12), "float32"))
    for dense in (layer.intermediate_dense, layer.output_dense):
        dense.enable_lora(2)
    attention = keras_tx.layers.MultiHeadAttention(2, 3, name="look")
    attention(*[np.ones((1, 2, 12), "float32")] * 2)
    attention.query_dense.enable_lora(2)
    found = axes(layouts)
    assert found["think/intermediate/lora_kernel_b"] == (None, "model")
    assert found["think/output/lora_kernel_a"] == ("model", None)
    assert found["look/query/lora_kernel_b"] == (None, "model", None)
    for whole in ("think/intermediate/lora_kernel_a", "think/output/lora_kernel_b", "look/query/lora_kernel_a"):
        assert whole not in found
    kernel = attention.value_dense
    kernel.quantize("int8")
    assert keras.backend.standardize_dtype(kernel._kernel.dtype) == "int8"
    assert layouts["look/value/kernel"].axes == (None, "model", None)
    kernel = attention.key_dense
    kernel.quantize("int4")  # has other axes
    assert "look/key/kernel" not in axes(layouts)


def test_entries_of_the_user_come_first(split):
    layouts = split()
    layouts["think/intermediate/kernel"] = (None, None)
    layouts[".*/bias"] = (None,)
    keras_tx.layers.FeedForward(8, name="think")(np.ones((1, 2, 12), "float32"))
    expected = {"think/intermediate/kernel": (None, None), ".*/bias": (None,), "think/output/kernel": ("model", None)}
    assert axes(layouts) == expected
    del layouts[".*/bias"], layouts["think/output/kernel"]
    assert list(layouts) == ["think/intermediate/kernel"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"num_heads": 6, "intermediate_dim": 8},
            "`num_heads` must be divisible by the number of devices on the axis 'model' of the mesh. Received: "
            "num_heads=6, in the weight 'decoder/layer_0/self_attention/query/kernel' of shape (12, 6, 2), with the "
            "mesh {'batch': 2, 'model': 4}",
        ),
        (
            {"num_heads": 4, "intermediate_dim": 10},
            "`intermediate_dim` must be divisible by the number of devices on the axis 'model' of the mesh. Received: "
            "intermediate_dim=10, in the weight 'decoder/layer_0/feed_forward/intermediate/kernel'",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_any_weight_has_a_value(split, sizes, message):
    made = []

    class Counting(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            made.append(shape)
            return keras.ops.zeros(shape, dtype)

    split((2, 4))
    options = {"num_layers": 1, "hidden_dim": 12, "embedding_options": {"embeddings_initializer": Counting()}}
    with pytest.raises(ValueError, match=re.escape(message)):
        keras_tx.models.CausalLM(24, **options, **sizes)
    assert not made
    keras_tx.models.CausalLM(24, **options, num_heads=4, intermediate_dim=8)
    assert made == [(24, 12)]


def test_a_table_that_no_axis_of_can_be_split_is_refused(split):
    split()
    message = "`vocabulary_size` must be .* or the other axis of the embedding table must be divisible by it. "
    with pytest.raises(ValueError, match=message + "Received: vocabulary_size=27, and the other axis is 15"):
        keras_tx.layers.TokenEmbedding(27, 15)(np.ones((1, 2), "int32"))


def test_batches_must_be_split_over_the_axis_of_the_map(split):
    layouts = split()
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="model"))
    message = "`batch_dim_name` of `ModelParallel` must be .* batch_dim_name='model', data_parallel_dim_name='batch'"
    with pytest.raises(ValueError, match=message):
        keras_tx.layers.TokenEmbedding(26, 12)(np.ones((1, 2), "int32"))


def test_the_axes_may_have_other_names(make_map):
    layouts = make_map(
        (2, 1, 2), ("rows", "x", "heads"), data_parallel_dim_name="rows", model_parallel_dim_name="heads"
    )
    assert isinstance(layouts, SplitLayouts)
    assert (layouts.batch_axis, layouts.model_axis) == ("rows", "heads")


@pytest.mark.parametrize("names", [{"model_parallel_dim_name": "heads"}, {"data_parallel_dim_name": "model"}])
def test_names_that_are_not_two_axes_are_refused(make_map, names):
    with pytest.raises(ValueError, match="must be the names of two axes of `device_mesh`. .*axis_names=.'batch', 'mod"):
        make_map(**names)


def test_what_is_no_mesh_is_refused(make_map):
    with pytest.raises(TypeError, match="`device_mesh` must be a keras.distribution.DeviceMesh. .* type tuple"):
        get_layout_map((2, 2))


@pytest.mark.parametrize(
    ("backend", "instead"),
    [("tensorflow", "mirrored_strategy.* or .*multi_worker_strategy"), ("torch", "DistributedDataParallel")],
)
def test_other_backends_are_refused_with_what_to_use(monkeypatch, backend, instead):
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(
        ValueError, match=f"`get_layout_map` needs the JAX backend; on .*{instead}.* backend='{backend}'"
    ):
        get_layout_map(mesh())
