"""What keras_tx uses of the private parts of TensorFlow's graphs still is as it needs it."""

import functools
import importlib
import traceback
import types

import keras
import numpy as np
import pytest
from keras import ops

import keras_tx
from keras_tx.internals import tensorflow_graphs
from tests.internals.doors import GRAPHS, LIBRARY
from tests.internals.doors import still as still_in

still = functools.partial(still_in, library="tensorflow", door=GRAPHS)


pytestmark = pytest.mark.tensorflow


@still("marks the functions of a graph that XLA must compile")
def test_is_compiled_by_xla():
    import tensorflow as tf

    for compiled in (True, False):
        inner = tf.function(lambda x: x + 1, jit_compile=compiled)
        graph = tf.function(lambda x, inner=inner: inner(x)).get_concrete_function(tf.TensorSpec([2])).graph
        functions = graph.as_graph_def().library.function
        assert any(map(tensorflow_graphs.is_compiled_by_xla, functions)) == compiled and functions


@still("marks a graph that is traced for XLA")
def test_traces_for_xla():
    import tensorflow as tf

    for compiled in (True, False):
        seen = []

        def note(x, seen=seen):
            seen.append(tensorflow_graphs.traces_for_xla())
            return x

        inner = tf.function(lambda x, note=note: tf.cond(x[0] > 0, lambda: note(x), lambda: x), jit_compile=compiled)
        tf.function(lambda x, inner=inner, note=note: note(inner(x)))(tf.ones(2))
        assert seen == [compiled, False] and not tensorflow_graphs.traces_for_xla()
        model = keras.Sequential([keras.layers.Lambda(note)])
        model.compile("sgd", jit_compile=compiled)
        model.predict(tf.ones((1, 2)), verbose=0)
        assert set(seen[2:]) == {compiled}


@still("keeps its random seed in the eager context")
def test_has_global_seed():
    import tensorflow as tf

    seed = tf.random.set_seed
    try:
        seed(None)
        assert not tensorflow_graphs.has_global_seed()
        keras.utils.set_random_seed(11)
        assert tensorflow_graphs.has_global_seed()
    finally:
        seed(7)


@still("has rules for what AutoGraph converts")
def test_leave_out_of_autograph(tmp_path, monkeypatch):
    import tensorflow as tf
    from tensorflow.python.autograph.core import config

    monkeypatch.setattr(config, "CONVERSION_RULES", config.CONVERSION_RULES)
    monkeypatch.syspath_prepend(tmp_path)
    code = "def sign(x):\n    if x > 0:\n        return 1\n    return -1\n"
    for package in ("left_out", "left_in"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "part.py").write_text(code)
    left_out, left_in = (importlib.import_module(f"{package}.part") for package in ("left_out", "left_in"))
    for _ in range(2):
        tensorflow_graphs.leave_out_of_autograph("left_out")
    assert [rule.matches("left_out.part") for rule in config.CONVERSION_RULES].count(True) == 1
    assert tf.function(lambda x: left_in.sign(x))(tf.constant(-2)) == -1
    with pytest.raises(TypeError, match="as a Python `bool` is not allowed"):
        tf.function(lambda x: left_out.sign(x))(tf.constant(-2))


def test_autograph_converts_nothing_of_this_package(monkeypatch):
    """It would take a second at the first use of a tokenizer in `Dataset.map`."""
    import tensorflow as tf
    from tensorflow.python.autograph.core import config

    def functions():
        """The functions on the way from a `tf.function` to the `call` of a layer."""
        found = []

        class Noting(keras_tx.layers.MultiHeadAttention):
            def call(self, query, value, key=None, **options):
                found.extend(frame.name for frame in traceback.extract_stack())
                return query

        layer = Noting(2, 3)
        tf.function(lambda x: layer(x, x))(tf.ones((1, 5, 7)))
        return found

    assert "__call__" in functions() and "tf____call__" not in functions()
    rules = [rule for rule in config.CONVERSION_RULES if not rule.matches("keras_tx.layers")]
    monkeypatch.setattr(config, "CONVERSION_RULES", tuple(rules))
    assert "tf____call__" in functions()


@still("has options for optimizing graphs, which each thread keeps from its first call on")
def test_unoptimized():
    import tensorflow as tf
    from tensorflow.python.eager import context

    def settings():
        tf.function(lambda x: x + 1)(1.0)
        return context.context().function_call_options.config_proto_serialized

    before, options = settings(), tf.config.optimizer.get_experimental_options()
    with pytest.raises(KeyError), tensorflow_graphs.unoptimized():
        assert settings() != before
        assert tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]
        raise KeyError
    assert settings() == before  # a compiled program belongs to these settings
    assert tf.config.optimizer.get_experimental_options() == options


@still("lets a graph return an operation that it has in place of a new one")
@pytest.mark.parametrize("jit_compile", [None, True])
def test_shared_shapes(jit_compile):
    import tensorflow as tf

    def reshaped(x):
        for _ in range(3):
            x = ops.reshape(x + 2.0, (ops.shape(x)[0], 1, ops.size(x) // ops.shape(x)[0])) * 2.0
        with tf.control_dependencies([tf.debugging.Assert(x[0, 0, 0] > 0, [x])]):
            x = x + 2.0  # a constant that waits for the assertion
        return ops.while_loop(lambda y, i: i < 2, lambda y, i: (y + 2.0 * 2.0, i + 1), (x, 0))[0]

    x, spec = np.arange(1.0, 7.0, dtype="float32").reshape(2, 3), tf.TensorSpec([None, None])
    with tensorflow_graphs.shared_shapes():
        shared = tf.function(reshaped, jit_compile=jit_compile).get_concrete_function(spec)
    alone = tf.function(reshaped, jit_compile=jit_compile).get_concrete_function(spec)
    np.testing.assert_array_equal(shared(tf.constant(x)), alone(tf.constant(x)))

    def numbers(function):
        nodes = [node for node in function.graph.as_graph_def().node if node.op == "Const"]
        made = [node for node in nodes if tf.make_ndarray(node.attr["value"].tensor).tolist() == 2.0]
        return len(made), len([node for node in made if node.input])

    (of_shared, after), (of_alone, also_after) = numbers(shared), numbers(alone)
    assert (of_shared, of_alone) == (2, 7) and after == also_after == 1
    sizes = [[node.op for node in one.graph.as_graph_def().node].count("Shape") for one in (shared, alone)]
    assert sizes == [3, 6]


@pytest.mark.parametrize("jit_compile", [None, True])
def test_equal_small_tensors_from_outside_are_inputs_of_their_own(jit_compile):
    import tensorflow as tf

    one, two = tf.constant(3.0), tf.constant(3.0)
    with tensorflow_graphs.shared_shapes():
        concrete = tf.function(lambda x: x * one + two + 3.0, jit_compile=jit_compile).get_concrete_function(
            tf.TensorSpec([None])
        )
    assert len({id(x) for x in concrete.graph.inputs}) == len(concrete.graph.inputs)
    assert concrete(tf.constant([1.0, 2.0])).numpy().tolist() == [9.0, 12.0]


def test_numbered_constant_and_constant_number():
    import tensorflow as tf

    values = [np.ones((2, 3), "float32"), np.ones((5, 7), "int8"), np.ones(11, tf.bfloat16.as_numpy_dtype)]

    @tf.function(input_signature=[], autograph=False)
    def constants():
        return [tensorflow_graphs.numbered_constant(value, 3 + index) for index, value in enumerate(values)]

    with still("lets constants have shapes, attributes and no values"):
        graph = constants.get_concrete_function().graph
        made = [(x.shape.as_list(), x.dtype) for x in graph.outputs]
        assert made == [([2, 3], tf.float32), ([5, 7], tf.int8), ([11], tf.bfloat16)]
        numbers = [tensorflow_graphs.constant_number(node) for node in graph.as_graph_def().node]
        assert [one for one in numbers if one is not None] == [3, 4, 5]
        assert None in numbers  # the other nodes


@still("makes variables that a trace does not see")
def test_untraced_variable(tmp_path):
    import tensorflow as tf

    class Product(tf.Module):
        def __init__(self, make):
            self.make, self.factor, self.traces = make, None, 0

        @tf.function(input_signature=[tf.TensorSpec([2])])
        def __call__(self, x):
            self.traces += 1
            if self.factor is None:
                with tf.init_scope():
                    self.factor = self.make(np.array([3.0, 5.0], "float32"))
            return x * self.factor

    for make, traces in ((tensorflow_graphs.untraced_variable, 1), (tf.Variable, 2)):
        product = Product(make)
        np.testing.assert_array_equal(product(tf.constant([7.0, 11.0])), [21.0, 55.0])
        assert product.traces == traces and product.variables == (product.factor,)
        assert isinstance(product.factor, tf.Variable) and product.factor.trainable == (make is tf.Variable)
        tf.saved_model.save(product, str(tmp_path / str(traces)))
        loaded = tf.saved_model.load(str(tmp_path / str(traces)))
        np.testing.assert_array_equal(loaded(tf.constant([1.0, 2.0])), [3.0, 10.0])


def test_write_fingerprint(tmp_path):
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), str(tmp_path))
    with still("writes the fingerprint of a SavedModel"):
        before = tf.saved_model.experimental.read_fingerprint(str(tmp_path))
        (tmp_path / "fingerprint.pb").unlink()
        tensorflow_graphs.write_fingerprint(tmp_path)
        after = tf.saved_model.experimental.read_fingerprint(str(tmp_path))
        assert after.saved_model_checksum == before.saved_model_checksum


@still_in("has the ops behind SentencepieceTokenizer", library="tensorflow_text", door=GRAPHS)
def test_sentencepiece_tokenize():
    import tensorflow as tf

    pytest.importorskip("tensorflow_text")
    from keras_tx.text.sentencepiece_model import build_unigram_model

    vocabulary = [["<unk>", 0.0], ["▁", -2.0], ["ab", -1.0], ["a", -3.0], ["b", -3.0]]
    model = build_unigram_model({"model": {"unk_id": 0, "vocab": vocabulary}}, b"")
    texts = tf.constant(["ab", "", "ba"])
    ids, splits = tensorflow_graphs.sentencepiece_tokenize(model, "test_tensorflow_graphs", texts, tf.int32)
    assert ids.numpy().tolist() == [1, 2, 1, 4, 3] and splits.numpy().tolist() == [0, 2, 2, 5]
    pieces, _ = tensorflow_graphs.sentencepiece_tokenize(model, "test_tensorflow_graphs", texts, tf.string)
    assert [piece.decode() for piece in pieces.numpy()] == ["▁", "ab", "▁", "b", "a"]


def tensorflow_internals():
    spec = importlib.util.spec_from_file_location("tensorflow_internals", LIBRARY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@still_in("has its C API and the switch of XLA in libtensorflow_cc", library="tensorflow", door=LIBRARY)
def test_the_library_of_tensorflow(monkeypatch):
    door, called = tensorflow_internals(), []
    assert door.library().TF_NewStatus and getattr(door.library(), door.XLA_OFF)  # not called: it is for good
    monkeypatch.setattr(door, "library", lambda: types.SimpleNamespace(**{door.XLA_OFF: lambda: called.append(1)}))
    door.turn_xla_off()
    assert called == [1]


@still_in("has its kernels in python/ops", library="tensorflow_text", door=LIBRARY)
def test_the_op_libraries_of_tensorflow_text():
    pytest.importorskip("tensorflow_text")
    paths = tensorflow_internals().text_op_libraries()
    assert any("regex_split" in path for path in paths) and any("sentencepiece" in path for path in paths)
