"""What every public layer must do, for every row of the catalogue."""

import functools
import inspect
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_tx import layers
from tests import catalogue
from tests.tools import assert_close, normal, randomize, to_numpy

rows = pytest.mark.parametrize("row", catalogue.ROWS, ids=catalogue.name)
per_example = [row for row in catalogue.ROWS if row.per_example]
examples = pytest.mark.parametrize("row", per_example, ids=catalogue.name)
# Arguments whose attribute has another name: theirs is that of a sublayer, of a weight, or of something of Keras'.
RENAMED = {
    (layers.DecoderLayer, "cross_attention"): "has_cross_attention",
    (layers.PatchEmbedding, "class_token"): "has_class_token",
    (layers.MultiHeadAttention, "output_shape"): "output_features",
}
GOLDEN = Path(__file__).with_name("weights.json")


def built(row, **kwargs):
    layer = row.make(**kwargs)
    if keras.backend.backend() == "jax":  # without a value nothing is compiled
        layer(**{name: keras.Input(batch_shape=x.shape, dtype=str(x.dtype)) for name, x in row.inputs().items()})
    else:
        layer(**row.inputs())
    return randomize(layer)


def shared(row):
    """A layer that several tests call, and none changes."""
    return _shared(catalogue.name(row))


@functools.cache
def _shared(name):
    keras.utils.set_random_seed(7)  # whichever test asks first
    return built(next(row for row in catalogue.ROWS if catalogue.name(row) == name))


def outputs_of(layer, inputs):
    """What a layer gives for inputs. JAX compiles one program, which takes less time than one for each operation."""
    if keras.backend.backend() != "jax":
        return layer(**inputs)
    return _jitted(layer)(inputs)


@functools.cache
def _jitted(layer):
    import jax

    return jax.jit(lambda inputs: layer(**inputs))


def model_of(*rows):
    """A functional model of some rows side by side, by name; lengths are left open where they may be.

    What is traced, compiled or written once for all rows costs little for each.
    """
    inputs, outputs = {}, {}
    for row in rows:
        own = {name: f"{label(row)}_{name}" for name in row.inputs()}
        for name, x in row.inputs().items():
            shape = (None, *x.shape[2:]) if row.any_length else x.shape[1:]
            inputs[own[name]] = keras.Input(shape, dtype=str(x.dtype), name=own[name])
        outputs[label(row)] = row.make(name=label(row))(**{name: inputs[own[name]] for name in own})
    return randomize(keras.Model(inputs, outputs))


@functools.cache
def whole():
    """A model of all rows, which several tests call, and none changes."""
    keras.utils.set_random_seed(7)
    return model_of(*catalogue.ROWS)


def inputs_of(*rows, **sizes):
    return {f"{label(row)}_{name}": x for row in rows for name, x in row.inputs(**sizes).items()}


def label(row):
    return catalogue.name(row).replace("-", "_")


def test_every_public_layer_is_in_the_catalogue():
    assert {row.layer.__name__ for row in catalogue.ROWS} == set(layers.__all__)


@rows
def test_signature_config_and_attributes_have_the_same_names(row):
    layer, parameters = row.make(), inspect.signature(row.layer).parameters
    names = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert set(parameters) - names <= {"kwargs"}
    assert names == set(layer.get_config()) - {"name", "trainable", "dtype"}
    for name in names:
        attribute = getattr(layer, RENAMED.get((row.layer, name), name))
        given = row.arguments.get(name, parameters[name].default)
        if name in row.arguments or given is not None:  # None often stands for a default that depends on others
            assert attribute == given or not isinstance(given, (int, float)), name


def test_sizes_have_one_order():
    for cls in (layers.EncoderLayer, layers.DecoderLayer):
        assert [*inspect.signature(cls).parameters][:2] == ["intermediate_dim", "num_heads"]
    for cls in (layers.Encoder, layers.Decoder):
        assert [*inspect.signature(cls).parameters][:3] == ["num_layers", "intermediate_dim", "num_heads"]


@rows
def test_an_unknown_argument_is_refused_and_the_nearest_name_offered(row):
    name = next(iter(row.arguments))
    with pytest.raises(ValueError, match=f"no argument `{name}s`. Did you mean `{name}`\\? Received: {name}s=3"):
        row.make(**{f"{name}s": 3})


@rows
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tensors of TensorFlow")
def test_a_ragged_or_sparse_tensor_is_refused_by_name(row):
    import tensorflow as tf

    # Projections reshape: they would make rows of 2 and 2 tokens from rows of 3 and 1.
    ways = {
        "convert it with `.to_tensor\\(\\)`, and pass a mask, .* a RaggedTensor": tf.RaggedTensor.from_tensor,
        "convert it with `tf.sparse.to_dense`.* a SparseTensor": tf.sparse.from_dense,
    }
    inputs = row.inputs()
    looks_up = row.layer is layers.TokenEmbedding and not {"position_encoding", "num_segments"} & set(row.arguments)
    for name, x in inputs.items():
        others = {other: value for other, value in inputs.items() if other != name}
        for rule, made in ways.items():
            if made == tf.RaggedTensor.from_tensor and looks_up:
                continue  # see `test_ragged`
            with pytest.raises(ValueError, match=f"^`{name}` must be a dense tensor: {rule} of shape \\("):
                row.make()(**{name: made(x)}, **others)


@rows
def test_a_layer_made_from_its_config_has_the_same_attributes(row):
    layer = row.make(dtype="mixed_float16", name="one")
    again = row.layer.from_config(json.loads(json.dumps(layer.get_config())))
    for name, value in vars(layer).items():
        if isinstance(value, (int, float, str, bool, tuple, dict, type(None))) and not name.startswith("_"):
            assert getattr(again, name) == value, name
    assert again.dtype_policy == layer.dtype_policy
    assert again.get_config() == layer.get_config()


@rows
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_symbolic_shape_and_dtype_are_the_eager_ones(row, policy):
    layer, inputs = row.make(dtype=policy), row.inputs()
    symbolic = {name: keras.Input(batch_shape=x.shape, dtype=str(x.dtype)) for name, x in inputs.items()}
    for flags in [{}] + [{"return_attention_scores": True}] * row.scores:
        specs = keras.tree.flatten(layer(**symbolic, **flags))
        outputs = keras.tree.flatten(layer(**inputs, **flags))
        assert [tuple(s.shape) for s in specs] == [tuple(o.shape) for o in outputs]
        assert [s.dtype for s in specs] == [keras.backend.standardize_dtype(o.dtype) for o in outputs]
        shape = layer.compute_output_shape(**{f"{name}_shape": x.shape for name, x in inputs.items()})
        assert tuple(shape) == tuple(outputs[0].shape)


of_one_input = {row.layer: row for row in reversed(per_example) if len(row.inputs()) == 1}.values()


@pytest.mark.parametrize("row", of_one_input, ids=catalogue.name)
def test_a_layer_may_be_applied_to_each_part_of_its_inputs(row):
    """As in models of documents, which embed each sentence."""
    (x,) = row.inputs(batch=6).values()
    parts = x.reshape(2, 3, *x.shape[1:])
    layer = row.make()
    inputs = keras.Input(parts.shape[1:], dtype=str(x.dtype))
    model = randomize(keras.Model(inputs, keras.layers.TimeDistributed(layer)(inputs)))
    expected = to_numpy(layer(x))
    assert model.output_shape == (None, 3, *expected.shape[1:])
    assert_close(model(parts), expected.reshape(2, 3, *expected.shape[1:]), atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("normalize_first", [False, True])
@pytest.mark.parametrize("kind", [layers.EncoderLayer, layers.DecoderLayer])
def test_a_layer_of_another_dtype_than_its_inputs_may_be_applied_to_each_part(kind, normalize_first, dtype):
    """On TensorFlow, `TimeDistributed` runs a layer without the cast to its own dtype."""
    layer = kind(7, 2, normalize_first=normalize_first, dtype=dtype)
    parts = normal(2, 3, 5, 6)
    wrapped = keras.layers.TimeDistributed(layer)
    wrapped.build(parts.shape)
    randomize(layer)
    found = to_numpy(keras.ops.cast(wrapped(parts), "float32"))
    expected = to_numpy(keras.ops.cast(layer(parts.reshape(6, 5, 6)), "float32")).reshape(parts.shape)
    assert_close(found, expected, atol=5e-2 if dtype == "mixed_bfloat16" else 1e-2)


def test_padding_of_each_part_changes_nothing_if_embedding_and_encoder_are_wrapped_together():
    parts = np.array([[[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]], [[5, 6, 7, 8, 9], [9, 3, 0, 0, 0]]])
    both = keras.Sequential([layers.TokenEmbedding(10, 8), layers.Encoder(1, 11, 2)])
    ids = keras.Input((2, 5), dtype="int32")
    model = randomize(keras.Model(ids, keras.layers.TimeDistributed(both)(ids)))
    for row, texts in zip(to_numpy(model(parts)), parts, strict=True):
        for vectors, text in zip(row, texts, strict=True):
            real = text[text > 0]
            assert_close(vectors[: len(real)], both(real[None])[0], atol=1e-5)


of_vectors = [row for row in per_example if row.layer is not layers.TokenEmbedding]
DTYPES = ["int32", "uint8", "bool"]
# JAX compiles each anew: there one dtype for each layer.
of_other_dtypes = [
    pytest.param(row, dtype, id=f"{catalogue.name(row)}-{dtype}")
    for i, row in enumerate(of_vectors)
    for dtype in ([DTYPES[i % 3]] if keras.backend.backend() == "jax" else DTYPES)
]


@pytest.mark.parametrize(("row", "dtype"), of_other_dtypes)
def test_vectors_of_integers_and_booleans_are_numbers(row, dtype):
    layer, inputs = shared(row), row.inputs()
    vectors = {name: (2 * abs(x)).astype(dtype) for name, x in inputs.items()}
    floats = outputs_of(layer, {name: x.astype("float32") for name, x in vectors.items()})
    outputs = outputs_of(layer, vectors)
    assert outputs.dtype == floats.dtype
    assert_close(outputs, to_numpy(floats), atol=1e-5, rtol=1e-5)  # compiled for GPUs, sums may round otherwise


@pytest.mark.slow
def test_a_saved_model_and_saved_weights_come_back_with_the_same_outputs(tmp_path):
    model, inputs = whole(), inputs_of(*catalogue.ROWS)
    outputs = {name: to_numpy(x) for name, x in model(inputs).items()}
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    saved = keras.saving.load_model(tmp_path / "model.keras")
    for name, x in saved(inputs).items():
        assert_close(x, outputs[name], atol=0, rtol=0)
    randomize(saved, seed=1)
    saved.load_weights(tmp_path / "model.weights.h5")
    for name, x in saved(inputs).items():
        assert_close(x, outputs[name], atol=0, rtol=0)


@pytest.mark.parametrize("row", [row for row in per_example if row.any_length], ids=catalogue.name)
def test_lengths_and_batches_may_change_from_call_to_call(row):
    layer = shared(row)
    assert outputs_of(layer, row.inputs(1, 1)).shape[:2] == (1, 1)
    inputs = row.inputs(3, 8)
    together = to_numpy(outputs_of(layer, inputs))
    assert together.shape[:2] == (3, 8)
    atol = max(2e-6, 1e-6 * np.abs(together).max())
    for i in (0, 2):
        alone = outputs_of(layer, {name: x[i : i + 1] for name, x in inputs.items()})
        assert_close(alone[0], together[i], atol=atol)


@examples
def test_an_empty_batch_gives_an_empty_output(row):
    layer = shared(row)
    outputs = outputs_of(layer, row.inputs())
    empty = outputs_of(layer, {name: x[:0] for name, x in row.inputs().items()})
    assert to_numpy(empty).shape == (0, *outputs.shape[1:])


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_graph_compiled_by_xla_equals_the_eager_call():
    import tensorflow as tf

    made = {label(row): shared(row) for row in catalogue.ROWS}
    inputs = {label(row): row.inputs() for row in catalogue.ROWS}
    compiled = tf.function(lambda inputs: {name: made[name](**inputs[name]) for name in made}, jit_compile=True)
    found = compiled(keras.tree.map_structure(tf.constant, inputs))
    for name, layer in made.items():
        expected = to_numpy(layer(**inputs[name]))
        assert_close(found[name], expected, atol=max(3e-6, 1e-6 * np.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_an_exported_model_equals_the_model_without_xla_ops(tmp_path):
    import tensorflow as tf

    model, inputs = whole(), inputs_of(*catalogue.ROWS)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    found = exported.serve(inputs)
    for name, expected in model(inputs).items():
        assert_close(found[name], expected, atol=1e-6 * max(1.0, np.abs(to_numpy(expected)).max()))
    graph = exported.signatures["serving_default"].graph.as_graph_def()
    ops = {node.op for node in graph.node} | {n.op for function in graph.library.function for n in function.node_def}
    assert len(ops) > 3 and not [op for op in ops if op.startswith("Xla")]


@rows
def test_half_precision_stays_near_single_precision(row):
    exact = shared(row)
    expected = to_numpy(outputs_of(exact, row.inputs()))
    # JAX compiles each operation for each dtype; the layers are the same code on every backend.
    for policy in ("mixed_bfloat16", "float16")[: 1 if keras.backend.backend() == "jax" else 2]:
        rough = built(row, dtype=policy)
        rough.set_weights(exact.get_weights())
        outputs = to_numpy(keras.ops.cast(outputs_of(rough, row.inputs()), "float32"))
        error = np.abs(outputs - expected).max() / np.abs(expected).max()
        assert error < (0.05 if "bfloat16" in policy else 0.01), policy


def test_every_weight_gets_a_gradient():
    model, inputs = model_of(*per_example), inputs_of(*per_example)
    losses = dict.fromkeys(map(label, per_example), "mse")
    eagerly = keras.backend.backend() == "tensorflow"  # a graph of the gradients takes longer to trace than to run
    model.compile(keras.optimizers.SGD(1.0), loss=losses, run_eagerly=eagerly)
    before = model.get_weights()
    random = np.random.default_rng(3)
    targets = {name: random.normal(size=to_numpy(x).shape).astype("float32") for name, x in model(inputs).items()}
    model.fit(inputs, targets, verbose=0)
    for weight, old in zip(model.weights, before, strict=True):
        if weight.path.endswith("key/bias"):
            continue  # the same number on every key: the softmax does not see it
        assert np.abs(to_numpy(weight) - old).max() > 0, weight.path


def test_weight_names_and_shapes_are_a_promise():
    golden = json.loads(GOLDEN.read_text())
    found = {catalogue.name(row): {} for row in catalogue.ROWS}
    names = {label(row): catalogue.name(row) for row in catalogue.ROWS}
    for weight in whole().weights:
        layer, path = weight.path.split("/", 1)
        found[names[layer]][path] = list(weight.shape)
    assert found == golden
