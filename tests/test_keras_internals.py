"""What keras_tx uses of Keras' and TensorFlow's private parts still is as it needs it, and only the doors use it.

A test that fails here because Keras has changed says so, with the version and the file to update.
"""

import ast
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import re
import runpy
import types
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_tx
from keras_tx import keras_internals

PACKAGE = Path(keras_tx.__file__).parent
DOOR = PACKAGE / "keras_internals.py"
DISTRIBUTE_DOOR = PACKAGE / "distribute_internals.py"  # tested in test_distribute_internals.py
TRAINING_DOOR = PACKAGE / "training_internals.py"  # tested in test_training_internals.py
GRAPH_DOOR = PACKAGE / "graph_internals.py"  # tested in test_graph_internals.py
TENSORFLOW_DOOR = PACKAGE / "serving" / "check" / "tensorflow_internals.py"
CHANGED = "{library} {version} no longer {promise}: update {door} ({error!r})"


@contextlib.contextmanager
def still(promise, library="keras", door=DOOR):
    """Around a test of a private part: says what has changed, in which version, and where that is to be mended."""
    try:
        yield
    except Exception as error:
        version = importlib.metadata.version(library)
        name = {"keras": "Keras"}.get(library, library)
        path = door.relative_to(PACKAGE.parent).as_posix()
        text = CHANGED.format(library=name, version=version, promise=promise, door=path, error=error)
        raise AssertionError(text) from error


def wide_and_nested():
    """A model with a nested model that it calls twice, and its parts."""
    x = keras.Input((3,), name="x")
    inner_in = keras.Input((3,))
    dense = layers.Dense(3, name="dense")
    inner = keras.Model(inner_in, ops.tanh(dense(inner_in)), name="inner")
    outputs = layers.Add()([inner(x), inner(inner(x))])
    return keras.Model(x, outputs), inner, dense


def test_a_change_of_keras_is_told_with_its_version():
    expected = re.escape(f"Keras {keras.__version__} no longer sings: update keras_tx/keras_internals.py")
    with pytest.raises(AssertionError, match=expected), still("sings"):
        raise AttributeError("song")


def test_a_class_that_keras_no_longer_has_is_told_at_import(monkeypatch):
    monkeypatch.delattr(importlib.import_module("keras.src.ops"), "NotEqual")
    with pytest.raises(ImportError, match=re.escape(f"Keras {keras.__version__} no longer has a private part")):
        runpy.run_path(str(DOOR))


@still("records which call made a symbolic tensor")
def test_call_that_made():
    x = keras.Input((4, 3))
    layer = layers.LSTM(2, return_state=True)
    outputs = layer(x, training=False)
    layer(x)
    call, place = keras_internals.call_that_made(outputs[2])
    assert call.operation is layer and place == 2
    assert call.inputs[0] is x and call.args[0] is x and call.kwargs == {"training": False}
    assert [id(one) for one in call.outputs] == [id(one) for one in outputs]
    source, place = keras_internals.call_that_made(x)
    assert isinstance(source.operation, layers.InputLayer) and source.inputs == [] and place == 0
    assert keras_internals.call_that_made(keras.KerasTensor((2,))) is None
    assert keras_internals.call_that_made(np.ones(2)) is None


@still("records which calls a symbolic tensor was given to")
def test_calls_with():
    x, first, second = keras.Input((3,)), layers.Dense(2), layers.Dense(2)
    first(x), second(x), first(keras.Input((3,)))
    assert [call.operation for call in keras_internals.calls_with(x)] == [first, second]


@still("keeps the calls of a functional model in the order in which they run")
def test_calls_in_order():
    model, inner, dense = wide_and_nested()
    calls = keras_internals.calls_in_order(model)
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
    assert keras_internals.functional_model(model) is model
    assert keras_internals.functional_model(sequential) is None
    sequential.build((None, 3))
    function = keras_internals.functional_model(sequential)
    assert [id(x) for x in function.inputs] == [id(x) for x in sequential.inputs]
    assert keras_internals.functional_model(Subclassed()) is None
    assert keras_internals.functional_model(dense) is None


@still("initializes the variables of a StatelessScope when all of them are there")
def test_variables_initialized_at_end():
    made = []

    def dense(units, initializer="ones"):
        made.append(layers.Dense(units, kernel_initializer=initializer))
        made[-1].build((None, 3))

    def full(shape, dtype=None):
        raise MemoryError("no memory")

    with keras_internals.variables_initialized_at_end():
        dense(2)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(made[0].kernel), np.ones((3, 2)))
    with pytest.raises(KeyError, match="body"), keras_internals.variables_initialized_at_end():
        dense(10**9)  # 12 GB that are never asked for
        raise KeyError("body")
    with pytest.raises(MemoryError, match="no memory"), keras_internals.variables_initialized_at_end():
        dense(2)
        dense(2, full)
    with keras.StatelessScope():  # Keras' own scopes work as before
        dense(5)
        with keras_internals.variables_initialized_at_end():
            dense(7)
    assert [layer.kernel.shape for layer in made[-2:]] == [(3, 5), (3, 7)]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(made[-1].kernel), np.ones((3, 7)))


@still("records for functions of keras.ops the operations of these classes")
def test_classes_of_operations():
    x = keras.Input((3,))
    classes = (keras_internals.NOT_EQUAL, keras_internals.SIGMOID, keras_internals.SOFTMAX)
    made = (x != 0, ops.sigmoid(x), ops.softmax(x))
    assert tuple(type(keras_internals.call_that_made(y)[0].operation) for y in made) == classes


@still("defines its functions in modules of its own")
def test_is_of_keras():
    assert keras_internals.is_of_keras(keras.activations.gelu) and keras_internals.is_of_keras(layers.Dense)
    assert not keras_internals.is_of_keras(np.tanh) and not keras_internals.is_of_keras(lambda x: x)
    assert not keras_internals.is_of_keras(keras_tx.layers.Encoder)


@still("attaches masks to tensors")
def test_get_and_set_keras_mask():
    embedding = layers.Embedding(5, 2, mask_zero=True)
    symbolic, x = embedding(keras.Input((3,), dtype="int32")), embedding(np.array([[1, 0, 2]]))
    assert keras_internals.get_keras_mask(symbolic).shape == (None, 3)
    assert ops.convert_to_numpy(keras_internals.get_keras_mask(x)).tolist() == [[True, False, True]]
    keras_internals.set_keras_mask(x, None)
    assert keras_internals.get_keras_mask(x) is None and keras_internals.get_keras_mask(np.ones(2)) is None
    keras_internals.set_keras_mask(x, ops.ones((1, 3), dtype="bool"))
    seen = []

    class Layer(layers.Layer):
        supports_masking = True

        def call(self, x, mask=None):
            seen.append(mask)
            return x

    Layer()(x)
    assert seen[-1] is keras_internals.get_keras_mask(x)


@still("lists the layers inside a layer")
def test_layers_within():
    model, inner, dense = wide_and_nested()
    for found in (keras_internals.layers_within(model), [model, *keras_internals.layers_within(model, False)]):
        assert found[0] is model and {inner, dense} <= set(found) and len(found) == len(set(found))
    assert keras_internals.layers_within(dense) == [dense]


@still("leaves call arguments as they are where a layer asks for that")
def test_keep_call_arguments():
    class Layer(layers.Layer):
        def call(self, x):
            seen.append(x)
            return x

    seen, layer, x = [], Layer(), ops.ones((2, 3), dtype="float16")
    layer(x)
    keras_internals.keep_call_arguments(layer)
    layer(x)
    assert seen[0] is not x and seen[1] is x


@still("keeps a dtype policy that replaces a map of policies")
def test_replace_dtype_policy():
    policies = keras.dtype_policies.DTypePolicyMap("float32", {"dense": "bfloat16"})
    layer = layers.Dense(2, dtype=policies, name="dense")
    keras_internals.replace_dtype_policy(layer, policies["dense"])
    assert layer.dtype_policy == keras.DTypePolicy("bfloat16") and layer.compute_dtype == "bfloat16"
    assert not isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)


@still("has the variable of a kernel and of an embedding table apart from what LoRA adds")
def test_variables_under_lora():
    for layer, variable_of, shape in (
        (layers.Dense(3), keras_internals.kernel_of, (5, 3)),
        (layers.EinsumDense("ab,bc->ac", output_shape=3), keras_internals.kernel_of, (5, 3)),
        (layers.Embedding(7, 3), keras_internals.embeddings_of, (7, 3)),
    ):
        layer.build((None, 5))
        variable = variable_of(layer)
        assert any(variable is one for one in layer.weights) and variable.shape == shape
        layer.enable_lora(2)
        assert variable_of(layer) is variable


@still("casts variables within the call of a layer, but not in an AutocastScope of None")
def test_without_autocast():
    seen = []

    class Noting(layers.Dense):
        def call(self, inputs):
            seen.append((self.kernel.value, self.kernel.dtype))
            with keras_internals.without_autocast():
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
    variable = weakref.ref(keras_internals.kernel_of(layer))
    keras_internals.delete_variable(layer, "_kernel")
    assert layer.weights == [layer.bias] and not hasattr(layer, "_kernel")
    assert variable() is None


@still("calls the class of a functional model with the new outputs to clone it")
def test_cloned():
    class Model(keras_internals.Cloned):
        def __init__(self, *args, **kwargs):
            seen.append(keras_internals.model_that_made(args[1]))
            super().__init__(*args, **kwargs)

    seen, x = [], keras.Input((3,), name="x")
    model = Model(x, layers.Dense(2)(x))
    clone = keras.models.clone_model(model)
    assert type(clone) is Model and clone.name == model.name and seen == [None, model]
    assert keras_internals.model_that_made(clone.outputs) is model
    assert keras_internals.model_that_made(x) is None and keras_internals.model_that_made(3) is None


@still("asks the initializer of a variable that waits for its value")
def test_set_initializer():
    asked = []

    def initializer(shape, dtype=None):
        asked.append((tuple(shape), dtype))
        return ops.full(shape, 7.0, dtype=dtype)

    with keras.StatelessScope():
        variable = keras.Variable(initializer="zeros", shape=(2, 3), dtype="float32")
        keras_internals.set_initializer(variable, initializer)
    assert asked == [((2, 3), "float32")]
    np.testing.assert_array_equal(variable.numpy(), np.full((2, 3), 7.0))


def test_keras_hub_positions():
    class PositionEmbedding(layers.Layer):  # as KerasHub's, which needs not be installed
        sequence_length = 11

    assert keras_internals.keras_hub_positions(PositionEmbedding()) == 11
    assert keras_internals.keras_hub_positions(layers.Dense(2)) is None


@still("has the attribute `sequence_length` in PositionEmbedding", library="keras_hub")
def test_positions_of_keras_hub():
    hub = pytest.importorskip("keras_hub")
    assert keras_internals.keras_hub_positions(hub.layers.PositionEmbedding(sequence_length=7)) == 7


@still("takes a seed generator that has its seed already")
def test_fixed_seed():
    def dropped(seed):
        seeds = keras_internals.FixedSeed(ops.convert_to_tensor(seed, dtype=keras.random.SeedGenerator(1).state.dtype))
        return ops.convert_to_numpy(keras.random.dropout(ops.ones(64), 0.5, seed=seeds)).tolist()

    assert dropped([3, 0]) == dropped([3, 0]) != dropped([4, 0])


@still("lets a callback say with which epoch `fit` begins")
def test_begin_fit_at():
    class Callback(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            keras_internals.begin_fit_at(self.model, begin)

        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=keras.backend.backend() != "jax")
    epochs, begin, data = [], 2, (np.ones((2, 3)), np.ones((2, 1)))
    model.fit(*data, epochs=4, callbacks=[Callback()], verbose=0)
    assert epochs == [2, 3]
    keras_internals.begin_fit_at(model, None)
    begin = None
    model.fit(*data, epochs=2, initial_epoch=1, callbacks=[Callback()], verbose=0)
    assert epochs == [2, 3, 1]


@still("keeps what a model was compiled with, its loss metric, and sums the losses that layers add")
def test_parts_of_a_compiled_model():
    model = keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2")])
    model.build((None, 3))
    model.compile("sgd", ["mse"], loss_weights=[0.5], metrics=["mae"], run_eagerly=keras.backend.backend() != "jax")
    assert keras_internals.loss_weights(model) == [0.5] and not keras_internals.metrics_are_built(model)
    assert ops.convert_to_numpy(keras_internals.sum_of_added_losses(model)) == pytest.approx(0.03)
    results = model.evaluate(np.ones((2, 3)), np.ones((2, 1)), verbose=0, return_dict=True)
    assert results["loss"] == pytest.approx(0.5 * 4 + 0.03) and keras_internals.metrics_are_built(model)
    tracker = keras_internals.loss_tracker(model)
    assert tracker.name == "loss" and float(tracker.result()) == pytest.approx(results["loss"])
    model.compile("sgd", "mse")
    assert keras_internals.loss_weights(model) is None and keras_internals.metrics_are_built(model)


@still("builds the metrics that a model was compiled with for a batch")
def test_build_metrics():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    keras_internals.build_metrics(model, (np.ones((2, 3)), np.ones((2, 1))))
    assert keras_internals.metrics_are_built(model) and len(model.metrics_variables) == 4


@still("lets a subclass of Muon say what AdamW updates, and how the others are updated")
def test_muon_by_variable():
    class Muon(keras_internals.MuonByVariable):
        def takes_adamw(self, variable):
            return variable.path.endswith("adam") or super().takes_adamw(variable)

        def update_matrix(self, gradient, variable, learning_rate, momentum):
            updated.append(self.index_of(variable))
            super().update_matrix(gradient, variable, learning_rate, momentum)

    updated, names = [], ["vector", "matrix", "adam"]
    shapes = [(3,), (3, 5), (3, 5)]
    variables = [keras.Variable(np.ones(s, "float32"), name=name) for s, name in zip(shapes, names, strict=True)]
    optimizer = Muon(0.1)
    optimizer.apply([ops.ones(shape) for shape in shapes], variables)
    assert updated == [1] and all((variable.numpy() < 1).all() for variable in variables)


@pytest.mark.tensorflow
@still("gives a weight the path of the layer and the name")
def test_weight_path():
    found = []

    class Inner(layers.Layer):
        def build(self, shape):
            found.append(keras_internals.weight_path(self, "kernel"))
            self.kernel = self.add_weight(shape=(2,), name="kernel")

    class Outer(layers.Layer):
        def build(self, shape):
            self.inner = Inner(name="inner")
            self.inner.build(shape)

    outer = Outer(name="outer")
    outer.build((3,))
    assert found == ["outer/inner/kernel"] == [outer.inner.kernel.path]
    assert keras_internals.weight_path(outer.inner, "later") == "outer/inner/later"


@still("keeps the layout map of a distribution")
def test_layout_map_of():
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
    layouts = keras.distribution.LayoutMap(mesh)
    split = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    assert keras_internals.layout_map_of(split) is layouts
    assert keras_internals.layout_map_of(keras.distribution.DataParallel(devices=["cpu:0"])) is None


@still("lets a distribution decide the layout of a variable of JAX, and gives it a value at the end of a scope")
def test_layout_of_and_initialize_now():
    from keras.src.backend.jax.core import Variable

    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    distribution = keras.distribution.DataParallel(mesh)
    value = object()
    with keras_internals.variables_initialized_at_end():
        one = Variable(keras.initializers.Zeros(), shape=(2, 3), dtype="float32")
        assert keras_internals.layout_of(one) is None
        with distribution.scope():
            assert keras_internals.layout_of(one).axes == (None, None)
        other = layers.Dense(2)
        other.build((None, 3))
        keras_internals.initialize_now([(one, value)])
        assert other.kernel._value is None
    assert one._value is value  # not initialized again
    assert other.kernel.shape == (3, 2) and other.kernel._value is not None


@pytest.mark.tensorflow
@still("has the ops behind SentencepieceTokenizer", library="tensorflow_text")
def test_sentencepiece_tokenize():
    import tensorflow as tf

    pytest.importorskip("tensorflow_text")
    from keras_tx.text.sentencepiece_model import build_unigram_model

    vocabulary = [["<unk>", 0.0], ["▁", -2.0], ["ab", -1.0], ["a", -3.0], ["b", -3.0]]
    model = build_unigram_model({"model": {"unk_id": 0, "vocab": vocabulary}}, b"")
    texts = tf.constant(["ab", "", "ba"])
    ids, splits = keras_internals.sentencepiece_tokenize(model, "test_keras_internals", texts, tf.int32)
    assert ids.numpy().tolist() == [1, 2, 1, 4, 3] and splits.numpy().tolist() == [0, 2, 2, 5]
    pieces, _ = keras_internals.sentencepiece_tokenize(model, "test_keras_internals", texts, tf.string)
    assert [piece.decode() for piece in pieces.numpy()] == ["▁", "ab", "▁", "b", "a"]


def tensorflow_internals():
    spec = importlib.util.spec_from_file_location("tensorflow_internals", TENSORFLOW_DOOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.tensorflow
@still("has its C API and the switch of XLA in libtensorflow_cc", library="tensorflow", door=TENSORFLOW_DOOR)
def test_the_library_of_tensorflow(monkeypatch):
    door, called = tensorflow_internals(), []
    assert door.library().TF_NewStatus and getattr(door.library(), door.XLA_OFF)  # not called: it is for good
    monkeypatch.setattr(door, "library", lambda: types.SimpleNamespace(**{door.XLA_OFF: lambda: called.append(1)}))
    door.turn_xla_off()
    assert called == [1]


@pytest.mark.tensorflow
@still("has its kernels in python/ops", library="tensorflow_text", door=TENSORFLOW_DOOR)
def test_the_op_libraries_of_tensorflow_text():
    pytest.importorskip("tensorflow_text")
    paths = tensorflow_internals().text_op_libraries()
    assert any("regex_split" in path for path in paths) and any("sentencepiece" in path for path in paths)


def test_the_door_is_documented_and_tested():
    tests = Path(__file__).read_text()
    for name, thing in vars(keras_internals).items():
        if getattr(thing, "__module__", None) == keras_internals.__name__ and not name.startswith("_"):
            assert thing.__doc__ and len(thing.__doc__.split()) > 5, name
            assert name == "Call" or f"keras_internals.{name}" in tests, name
    assert not {name.split(".")[1] for name in re.findall(r"keras_tx\.\w+", DOOR.read_text())} - {
        "keras_internals", "optional", "types"
    }  # fmt: skip


# Nothing else reaches in.

DOORS = (DOOR, GRAPH_DOOR, DISTRIBUTE_DOOR, TRAINING_DOOR, TENSORFLOW_DOOR)
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in DOORS]
NAMES = {  # private names that only a door may contain, even in a comment
    *"_flatten_layers _keras_history _inbound_nodes _outbound_nodes _nodes_by_depth _functional _inputs_struct".split(),
    *"_convert_input_args _call_signature _initial_epoch _initializer _dtype_policy _kernel _embeddings".split(),
    *"_initial_seed _compile_loss _compile_metrics _loss_tracker _user_loss_weights _keras_mask".split(),
    *"_aggregate_additional_loss _should_use_adamw _muon_update_step _get_variable_index _XlaMustCompile".split(),
    *"_create_op_internal".split(),
}
WORDS = re.compile(
    rf"(?<!\w)({'|'.join(sorted(NAMES))})(?!\w)|keras\.src|tensorflow\.python|tensorflow_text\.python|"
    r"(jax|torch|numpy)\._\w|_ZN\d|libtensorflow|tf_keras"
)
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Names that Keras has too, but not the objects of keras_tx from which they are read; and those of named tuples.
MEANT = {"_dropout_layer", "_replace", "_asdict", "_fields", "_make"}
READS = {"getattr", "hasattr", "setattr", "delattr", "__setattr__", "__getattribute__", "attrgetter", "get", "pop"}
CLASS_NAMES_OF_OTHERS = {"BPE", "PanicException"}  # of the `tokenizers` library
BY_NAME = {"serving/other_backends.py"}  # errors and strategies go to another process as JSON


def is_private(name):
    return bool(PRIVATE.fullmatch(name)) and not name.startswith("__")


@functools.cache
def private_names_in(cls):
    """The private attributes in the code of one class."""
    try:
        return set(re.findall(r"(?:self\.|cls\.|def |^    )(_[A-Za-z]\w*)", inspect.getsource(cls), re.M))
    except (OSError, TypeError):  # a class that is not written in Python
        return set()


@pytest.fixture(scope="module")
def names_of_keras():
    """Every private attribute that occurs in Keras' own code."""
    folder, names = Path(keras.__file__).parent / "src", set()
    for path in folder.rglob("*.py"):
        if not path.name.endswith("_test.py"):
            names.update(re.findall(r"(?:\.|def |^    )(_[A-Za-z]\w*)", path.read_text(), re.M))
    assert len(NAMES - names) <= 5, "NAMES"
    return names


@pytest.fixture(scope="module")
def names_of_keras_tx():
    """Every private attribute that classes of keras_tx give to their objects."""
    names = set()
    for path in FILES:
        for cls in ast.walk(ast.parse(path.read_text())):
            if isinstance(cls, ast.Call) and ast.unparse(cls.func) == "object.__setattr__":
                names.update(one.value for one in cls.args if isinstance(one, ast.Constant))
            for node in ast.walk(cls) if isinstance(cls, ast.ClassDef) else ():
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names


def private_names_read(tree):
    """(object, name, line) of every private attribute that is read, written or named in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield ast.unparse(node.value), node.attr, node.lineno
        strings, holder = [], ""
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in READS:
            strings, holder = node.args, ast.unparse(node.args[0]) if node.args else ""
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            strings = [node.left]
        elif isinstance(node, ast.Subscript):
            strings = [node.slice]
        for one in strings:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                for part in one.value.split("."):
                    if is_private(part):
                        yield holder, part, node.lineno


def class_names_compared(tree):
    """Lines where the name or module of a class decides something, beside those of keras_tx's own modules."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (*READS, "startswith", "endswith"):
            parts = [node.func, *node.args]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Match):
            parts = [node.subject]
        found = [one for part in parts for one in ast.walk(part)]
        asked = {one.attr for one in found if isinstance(one, ast.Attribute)}
        asked |= {one.value for one in found if isinstance(one, ast.Constant)}
        if not asked & {"__name__", "__qualname__", "__module__"}:
            continue
        words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        if not words & CLASS_NAMES_OF_OTHERS and "keras_tx." not in words and "__main__" not in words:
            yield node.lineno, ast.unparse(node)


def test_no_other_file_names_a_private_part():
    found = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := WORDS.search(line):
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {match[0]}")
    assert not found, f"only keras_internals.py may use these: {found}"


def test_no_other_file_reads_private_attributes_of_others(names_of_keras, names_of_keras_tx):
    found = []
    for path in FILES:
        for holder, name, line in private_names_read(ast.parse(path.read_text())):
            own = name in names_of_keras_tx and name not in names_of_keras
            if holder not in ("self", "cls", "super()") and name not in MEANT and not own:
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {holder}.{name}")
    assert not found, f"only keras_internals.py may read private attributes of other libraries: {found}"


def private_names_of(cls):
    """The private attributes in the code of the Keras classes that a class is made from."""
    return set().union(*[private_names_in(base) for base in cls.__mro__ if keras_internals.is_of_keras(base)])


def test_no_other_class_uses_or_overrides_private_attributes_of_its_keras_base(names_of_keras):
    found = []
    for path in FILES:
        if path.parent.name == "check":  # scripts without Keras
            continue
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            of_bases = private_names_of(getattr(module, cls.name)) if cls in tree.body else names_of_keras
            for node in ast.walk(cls):
                used = ""
                if isinstance(node, ast.FunctionDef):
                    used = node.name
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
                    used = node.attr
                if is_private(used) and used in of_bases:
                    found.append(f"{path.name}: {cls.name}.{used}")
    assert not found, f"only keras_internals.py may use the private parts of Keras' classes: {found}"


def test_no_other_file_decides_by_the_name_of_a_class():
    found = []
    for path in [one for one in FILES if one.relative_to(PACKAGE).as_posix() not in BY_NAME]:
        found += [f"{path.name}:{line}: {code}" for line, code in class_names_compared(ast.parse(path.read_text()))]
    assert not found, f"a class is known by `isinstance`, in keras_internals.py if it must be by its name: {found}"


REACHING = {
    "words": ["from keras.src import ops", "import tensorflow.python.eager", "x = layer._kernel  # a comment"],
    "reads": [
        "layer._flatten_layers()", "getattr(x, '_keras_history')", "y = vars(x)['_layers']", "'_layers' in vars(x)",
        "operator.attrgetter('a._kernel')(x)", "vars(x).get('_layers')", "model._tracker.x", "x._layers = 3",
    ],
    "names": [
        "type(x).__name__ == 'Dense'", "{'Dense': 1}.get(type(x).__name__)", "TABLE[type(x).__name__]",
        "type(x).__name__ in NAMES", "x.__class__.__name__ != 'A'", "type(x).__module__.startswith('keras.')",
        "getattr(f, '__module__', '').startswith('keras.')", "type(x).__qualname__.endswith('Add')",
    ],
}  # fmt: skip


def test_these_tests_see_what_reaches_in(names_of_keras, names_of_keras_tx):
    for line in REACHING["words"]:
        assert WORDS.search(line), line
    for line in REACHING["reads"]:
        read = [name for _, name, _ in private_names_read(ast.parse(line))]
        assert any(name not in names_of_keras_tx or name in names_of_keras for name in read), line
    for line in REACHING["names"]:
        assert list(class_names_compared(ast.parse(line))), line
    assert {"_tracker", "_flatten_layers", "_call_signature"} <= private_names_of(keras_tx.layers.Encoder)
    assert "_compile_loss" in private_names_of(keras_tx.models.CausalLM)
    assert len(names_of_keras) > 500 and len(names_of_keras_tx) > 100
    assert {"_layers", "_tracker", "_kernel", "_keras_history"} <= names_of_keras


def vectors_in(function):
    inputs = keras.Input((None, 3))
    return keras.Model(inputs, function(inputs), name="nested")


@still("says with `supports_masking` and `_set_mask_metadata` what becomes of masks")
def test_let_models_pass_masks_on():
    """A nested model gives the mask on without a warning; a layer in it that loses the mask is still named."""
    keras_internals.let_models_pass_masks_on()
    ids = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(7, 3, mask_zero=True)(ids)
    keeps = vectors_in(lambda x: layers.Dropout(0.1)(x))
    summed = vectors_in(lambda x: layers.GlobalAveragePooling1D()(x))
    given = np.array([[1, 2, 0], [3, 0, 0]])
    for inner in (keeps, summed):  # every warning is an error here
        keras.Model(ids, inner(embedded))(given)
    mean = keras.Model(ids, layers.GlobalAveragePooling1D()(keeps(embedded)))
    np.testing.assert_allclose(mean(given)[1], mean(given[1:, :1])[0], rtol=1e-6)

    class Unaware(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2.0

    with pytest.warns(UserWarning, match="type Unaware.* was passed an input with a mask"):
        keras.Model(ids, vectors_in(lambda x: Unaware()(x))(embedded))(given)


def test_a_model_with_masks_of_its_own_is_left_alone():
    keras_internals.let_models_pass_masks_on()

    class Mine(keras.Model):
        def compute_mask(self, inputs, mask=None):
            return None if mask is None else mask[:, ::-1]

    inputs = keras.Input((None, 3))
    x = keras.layers.Masking()(np.array([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]]))
    outputs = Mine(inputs, ops.tanh(inputs))(x)
    assert np.asarray(keras.ops.convert_to_numpy(keras_internals.get_keras_mask(outputs))).tolist() == [[False, True]]
