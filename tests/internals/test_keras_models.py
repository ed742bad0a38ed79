"""What keras_tx uses of Keras' private parts for models and layers still is as it needs it."""

import gc
import importlib
import re
import runpy
import weakref

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_tx
from keras_tx.internals import keras_models
from tests.internals.doors import still


def wide_and_nested():
    """A model with a nested model that it calls twice, and its parts."""
    x = keras.Input((3,), name="x")
    inner_in = keras.Input((3,))
    dense = layers.Dense(3, name="dense")
    inner = keras.Model(inner_in, ops.tanh(dense(inner_in)), name="inner")
    outputs = layers.Add()([inner(x), inner(inner(x))])
    return keras.Model(x, outputs), inner, dense


def test_a_class_that_keras_no_longer_has_is_told_at_import(monkeypatch):
    monkeypatch.delattr(importlib.import_module("keras.src.ops"), "NotEqual")
    with pytest.raises(ImportError, match=re.escape(f"Keras {keras.__version__} no longer has a private part")):
        runpy.run_path(keras_models.__file__)


@still("records which call made a symbolic tensor")
def test_call_that_made():
    x = keras.Input((4, 3))
    layer = layers.LSTM(2, return_state=True)
    outputs = layer(x, training=False)
    layer(x)
    call, place = keras_models.call_that_made(outputs[2])
    assert call.operation is layer and place == 2
    assert call.inputs[0] is x and call.args[0] is x and call.kwargs == {"training": False}
    assert [id(one) for one in call.outputs] == [id(one) for one in outputs]
    source, place = keras_models.call_that_made(x)
    assert isinstance(source.operation, layers.InputLayer) and source.inputs == [] and place == 0
    assert keras_models.call_that_made(keras.KerasTensor((2,))) is None
    assert keras_models.call_that_made(np.ones(2)) is None


@still("records which calls a symbolic tensor was given to")
def test_calls_with():
    x, first, second = keras.Input((3,)), layers.Dense(2), layers.Dense(2)
    first(x), second(x), first(keras.Input((3,)))
    assert [call.operation for call in keras_models.calls_with(x)] == [first, second]


@still("remembers whether code in files may be run")
def test_is_unsafe_deserialization_enabled():
    with importlib.import_module("keras.src.saving.serialization_lib").SafeModeScope(None):
        assert keras_models.is_unsafe_deserialization_enabled() is False
        keras.config.enable_unsafe_deserialization()
        assert keras_models.is_unsafe_deserialization_enabled() is True


@still("keeps the calls of a functional model in the order in which they run")
def test_calls_in_order():
    model, inner, dense = wide_and_nested()
    calls = keras_models.calls_in_order(model)
    assert [call.operation for call in calls[1:3]] == [inner, inner]
    made = set()
    for call in calls:
        assert all(id(x) in made for x in call.inputs)
        made.update(id(x) for x in call.outputs)
    assert calls[0].operation.name == "x" and isinstance(calls[-1].operation, layers.Add)


@still("has the class of functional models, and a functional model inside a built Sequential")
def test_functional_model():
    class Subclassed(keras.Model):
        def call(self, x):
            return x

    model, _, dense = wide_and_nested()
    sequential = keras.Sequential([layers.Dense(2)])
    assert keras_models.functional_model(model) is model
    assert keras_models.functional_model(sequential) is None
    sequential.build((None, 3))
    function = keras_models.functional_model(sequential)
    assert [id(x) for x in function.inputs] == [id(x) for x in sequential.inputs]
    assert keras_models.functional_model(Subclassed()) is None
    assert keras_models.functional_model(dense) is None


@still("initializes the variables of a StatelessScope when all of them are there")
def test_variables_initialized_at_end():
    made = []

    def dense(units, initializer="ones"):
        made.append(layers.Dense(units, kernel_initializer=initializer))
        made[-1].build((None, 3))

    def full(shape, dtype=None):
        raise MemoryError("no memory")

    with keras_models.variables_initialized_at_end():
        dense(2)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(made[0].kernel), np.ones((3, 2)))
    with pytest.raises(KeyError, match="body"), keras_models.variables_initialized_at_end():
        dense(10**9)  # 12 GB that are never asked for
        raise KeyError("body")
    with pytest.raises(MemoryError, match="no memory"), keras_models.variables_initialized_at_end():
        dense(2)
        dense(2, full)
    with keras.StatelessScope():  # Keras' own scopes work as before
        dense(5)
        with keras_models.variables_initialized_at_end():
            dense(7)
    assert [layer.kernel.shape for layer in made[-2:]] == [(3, 5), (3, 7)]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(made[-1].kernel), np.ones((3, 7)))


@still("records for functions of keras.ops the operations of these classes")
def test_classes_of_operations():
    x = keras.Input((3,))
    by_name = (keras_models.NOT_EQUAL, keras_models.CAST, keras_models.SIGMOID, keras_models.SOFTMAX)
    classes = (*by_name, *keras_models.ELEMENTWISE)
    made = (x != 0, ops.cast(x, "int32"), ops.sigmoid(x), ops.softmax(x), x + x, x - x, x * x)
    assert tuple(type(keras_models.call_that_made(y)[0].operation) for y in made) == classes


@still("records casts with their dtype")
def test_is_cast_of_numbers():
    x = keras.Input((3,))
    made = (ops.cast(x, "int32"), ops.cast(x, "float16"), ops.cast(x, "bool"), x != 0)
    found = [keras_models.is_cast_of_numbers(keras_models.call_that_made(y)[0].operation) for y in made]
    assert found == [True, True, False, False]


@still("defines its functions in modules of its own")
def test_is_of_keras():
    assert keras_models.is_of_keras(keras.activations.gelu) and keras_models.is_of_keras(layers.Dense)
    assert not keras_models.is_of_keras(np.tanh) and not keras_models.is_of_keras(lambda x: x)
    assert not keras_models.is_of_keras(keras_tx.layers.Encoder)


@still("attaches masks to tensors")
def test_get_and_set_keras_mask():
    embedding = layers.Embedding(5, 2, mask_zero=True)
    symbolic, x = embedding(keras.Input((3,), dtype="int32")), embedding(np.array([[1, 0, 2]]))
    assert keras_models.get_keras_mask(symbolic).shape == (None, 3)
    assert ops.convert_to_numpy(keras_models.get_keras_mask(x)).tolist() == [[True, False, True]]
    keras_models.set_keras_mask(x, None)
    assert keras_models.get_keras_mask(x) is None and keras_models.get_keras_mask(np.ones(2)) is None
    keras_models.set_keras_mask(x, ops.ones((1, 3), dtype="bool"))
    seen = []

    class Layer(layers.Layer):
        supports_masking = True

        def call(self, x, mask=None):
            seen.append(mask)
            return x

    Layer()(x)
    assert seen[-1] is keras_models.get_keras_mask(x)


@still("lists the layers inside a layer")
def test_layers_within():
    model, inner, dense = wide_and_nested()
    for found in (keras_models.layers_within(model), [model, *keras_models.layers_within(model, False)]):
        assert found[0] is model and {inner, dense} <= set(found) and len(found) == len(set(found))
    assert keras_models.layers_within(dense) == [dense]


@still("leaves call arguments as they are where a layer asks for that")
def test_keep_call_arguments():
    class Layer(layers.Layer):
        def call(self, x):
            seen.append(x)
            return x

    seen, layer, x = [], Layer(), ops.ones((2, 3), dtype="float16")
    layer(x)
    keras_models.keep_call_arguments(layer)
    layer(x)
    assert seen[0] is not x and seen[1] is x


@still("keeps a dtype policy that replaces a map of policies")
def test_replace_dtype_policy():
    policies = keras.dtype_policies.DTypePolicyMap("float32", {"dense": "bfloat16"})
    layer = layers.Dense(2, dtype=policies, name="dense")
    keras_models.replace_dtype_policy(layer, policies["dense"])
    assert layer.dtype_policy == keras.DTypePolicy("bfloat16") and layer.compute_dtype == "bfloat16"
    assert not isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)


@still("finds the layers directly inside a layer, and those that a model calls")
def test_direct_sublayers():
    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.one = layers.MultiHeadAttention(2, 3)
            self.others = [layers.Dense(3)]

    outer = Outer()
    assert keras_models.direct_sublayers(outer) == [outer.one, *outer.others]
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x))
    assert keras_models.direct_sublayers(model) == model.layers


@still("calls a method of a layer when it is built")
def test_has_after_build():
    class Noting(keras_models.HasAfterBuild):
        def build(self, shape):
            self.dense = layers.Dense(2)
            self.dense.build(shape)

        def after_build(self):
            super().after_build()
            self.seen = self.built, self.dense.built

    layer = Noting()
    layer.build((None, 3))
    assert layer.seen == (True, True)


@still("has the variable of a kernel and of an embedding table apart from what LoRA adds")
def test_variables_under_lora():
    for layer, variable_of, shape in (
        (layers.Dense(3), keras_models.kernel_of, (5, 3)),
        (layers.EinsumDense("ab,bc->ac", output_shape=3), keras_models.kernel_of, (5, 3)),
        (layers.Embedding(7, 3), keras_models.embeddings_of, (7, 3)),
    ):
        layer.build((None, 5))
        variable = variable_of(layer)
        assert any(variable is one for one in layer.weights) and variable.shape == shape
        assert keras_models.kernel_or_table_of(layer) is variable
        layer.enable_lora(2)
        assert variable_of(layer) is variable


@still("casts variables within the call of a layer, but not in an AutocastScope of None")
def test_without_autocast():
    seen = []

    class Noting(layers.Dense):
        def call(self, inputs):
            seen.append((self.kernel.value, self.kernel.dtype))
            with keras_models.without_autocast():
                seen.append((self.kernel.value, self.kernel.dtype))
            return inputs

    layer = Noting(3, dtype=keras.DTypePolicy("mixed_bfloat16"))
    layer(np.ones((2, 5)))
    assert [dtype for _, dtype in seen] == ["bfloat16", "float32"]
    assert [keras.backend.standardize_dtype(value.dtype) for value, _ in seen] == ["bfloat16", "float32"]
    assert np.array_equal(ops.convert_to_numpy(seen[1][0]), ops.convert_to_numpy(layer.kernel))


@still("lets go of a variable that is no longer an attribute of its layer")
def test_delete_variable(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("the garbage is collected"))
    layer = layers.Dense(3)
    layer.build((None, 5))
    variable = weakref.ref(keras_models.kernel_of(layer))
    keras_models.delete_variable(layer, "_kernel")
    assert layer.weights == [layer.bias] and not hasattr(layer, "_kernel")
    assert variable() is None


@still("calls the class of a functional model with the new outputs to clone it")
def test_cloned():
    class Model(keras_models.Cloned):
        def __init__(self, *args, **kwargs):
            seen.append(keras_models.model_that_made(args[1]))
            super().__init__(*args, **kwargs)

    seen, x = [], keras.Input((3,), name="x")
    model = Model(x, layers.Dense(2)(x))
    clone = keras.models.clone_model(model)
    assert type(clone) is Model and clone.name == model.name and seen == [None, model]
    assert keras_models.model_that_made(clone.outputs) is model
    assert keras_models.model_that_made(x) is None and keras_models.model_that_made(3) is None


@still("asks the initializer of a variable that waits for its value")
def test_set_initializer():
    asked = []

    def initializer(shape, dtype=None):
        asked.append((tuple(shape), dtype))
        return ops.full(shape, 7.0, dtype=dtype)

    with keras.StatelessScope():
        variable = keras.Variable(initializer="zeros", shape=(2, 3), dtype="float32")
        keras_models.set_initializer(variable, initializer)
    assert asked == [((2, 3), "float32")]
    np.testing.assert_array_equal(variable.numpy(), np.full((2, 3), 7.0))


def test_keras_hub_positions():
    class PositionEmbedding(layers.Layer):  # as KerasHub's, which needs not be installed
        sequence_length = 11

    assert keras_models.keras_hub_positions(PositionEmbedding()) == 11
    assert keras_models.keras_hub_positions(layers.Dense(2)) is None


@still("has the attribute `sequence_length` in PositionEmbedding", library="keras_hub")
def test_positions_of_keras_hub():
    hub = pytest.importorskip("keras_hub")
    assert keras_models.keras_hub_positions(hub.layers.PositionEmbedding(sequence_length=7)) == 7


@still("finds the inputs of a nested model by their names in a dict")
@pytest.mark.filterwarnings("ignore:(?s).*structure of `inputs` doesn't match")
@pytest.mark.parametrize("of_dict", [False, True])
def test_inputs_of_nested(of_dict):
    inputs = [keras.Input((3,), name=name) for name in ("b", "a")]
    nested = keras.Model({"b": inputs[0], "a": inputs[1]} if of_dict else inputs, inputs[0] - 2 * inputs[1])
    one, two = keras.Input((3,)), keras.Input((3,))
    for given in ({"a": two, "b": one}, {"a": two, "b": one, "0": two} if not of_dict else {"a": two, "b": one}):
        (call,) = [keras_models.call_that_made(nested(given))[0]]
        found = keras_models.inputs_of_nested(nested, call)
        assert [one if x is one else two for x in found] == ([two, one] if of_dict else [one, two])
        value = keras.Model([one, two], nested(given))([np.ones((1, 3)), np.full((1, 3), 5.0)])
        assert float(value[0, 0]) == 1 - 10


@still("tells whether a function runs only for the shapes of its outputs")
def test_made_up_values():
    seen = []

    class Asks(layers.Layer):
        def call(self, x):
            seen.append(keras_models.values_are_made_up())
            return x

    Asks()(keras.Input((3,)))
    Asks()(ops.ones((2, 3)))
    assert seen[0] is True and seen[-1] is False


@still("lists the seed generators of a layer")
def test_seed_generators_within():
    class Mine(layers.Layer):
        def __init__(self):
            super().__init__()
            self.random, self.within = keras.random.SeedGenerator(3), layers.Dropout(0.5)

    layer = Mine()
    assert keras_models.seed_generators_within(layer) == [layer.random, layer.within.seed_generator]


@pytest.mark.tensorflow
@still("gives a weight the path of the layer and the name")
def test_weight_path():
    found = []

    class Inner(layers.Layer):
        def build(self, shape):
            found.append(keras_models.weight_path(self, "kernel"))
            self.kernel = self.add_weight(shape=(2,), name="kernel")

    class Outer(layers.Layer):
        def build(self, shape):
            self.inner = Inner(name="inner")
            self.inner.build(shape)

    outer = Outer(name="outer")
    outer.build((3,))
    assert found == ["outer/inner/kernel"] == [outer.inner.kernel.path]
    assert keras_models.weight_path(outer.inner, "later") == "outer/inner/later"


@still("keeps the layout map of a distribution")
def test_layout_map_of():
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
    layouts = keras.distribution.LayoutMap(mesh)
    split = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    assert keras_models.layout_map_of(split) is layouts
    assert keras_models.layout_map_of(keras.distribution.DataParallel(devices=["cpu:0"])) is None


@still("lets a distribution decide the layout of a variable of JAX, and gives it a value at the end of a scope")
def test_layout_of_and_initialize_now():
    from keras.src.backend.jax.core import Variable

    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    distribution = keras.distribution.DataParallel(mesh)
    value = object()
    with keras_models.variables_initialized_at_end():
        one = Variable(keras.initializers.Zeros(), shape=(2, 3), dtype="float32")
        assert keras_models.layout_of(one) is None
        with distribution.scope():
            assert keras_models.layout_of(one).axes == (None, None)
        other = layers.Dense(2)
        other.build((None, 3))
        keras_models.initialize_now([(one, value)])
        assert other.kernel._value is None
    assert one._value is value  # not initialized again
    assert other.kernel.shape == (3, 2) and other.kernel._value is not None


def vectors_in(function):
    inputs = keras.Input((None, 3))
    return keras.Model(inputs, function(inputs), name="nested")


@still("says with `supports_masking` and `_set_mask_metadata` what becomes of masks")
def test_let_models_pass_masks_on():
    """A nested model gives the mask on without a warning; a layer in it that loses the mask is still named."""
    keras_models.let_models_pass_masks_on()
    ids = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(7, 3, mask_zero=True)(ids)
    keeps = vectors_in(lambda x: layers.Dropout(0.1)(x))
    summed = vectors_in(lambda x: layers.GlobalAveragePooling1D()(x))
    given = np.array([[1, 2, 0], [3, 0, 0]])
    for inner in (keeps, summed):  # every warning is an error here
        keras.Model(ids, inner(embedded))(given)
    mean = keras.Model(ids, layers.GlobalAveragePooling1D()(keeps(embedded)))
    padded, alone = (ops.convert_to_numpy(mean(one)) for one in (given, given[1:, :1]))
    np.testing.assert_allclose(padded[1], alone[0], rtol=1e-6)

    class Unaware(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2.0

    with pytest.warns(UserWarning, match="type Unaware.* was passed an input with a mask"):
        keras.Model(ids, vectors_in(lambda x: Unaware()(x))(embedded))(given)


def test_a_model_with_masks_of_its_own_is_left_alone():
    keras_models.let_models_pass_masks_on()

    class Mine(keras.Model):
        def compute_mask(self, inputs, mask=None):
            return None if mask is None else ops.flip(mask, axis=1)

    inputs = keras.Input((None, 3))
    x = keras.layers.Masking()(np.array([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]]))
    outputs = Mine(inputs, ops.tanh(inputs))(x)
    assert np.asarray(keras.ops.convert_to_numpy(keras_models.get_keras_mask(outputs))).tolist() == [[False, True]]
