"""What keras_tx uses of the private parts of Keras' optimizers still is as it needs it.

A test that fails here because Keras has changed says so, with the version.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.internals import keras_optimizers
from tests.internals.doors import OPTIMIZERS, still


@still("keeps the gradients of the batches of an update, and averages them", door=OPTIMIZERS)
def test_weigh_micro_batches():
    """Gradients 1 and 5 with the weights 1 and 3; with the weight 1 and a divisor of 1/2 each; and as in Keras."""
    variable = keras.Variable([0.0])
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    shares = iter([(1.0, 1.0), (3.0, 3.0), (1.0, 0.5), (1.0, 0.5), None, None])
    for _ in range(2):
        keras_optimizers.weigh_micro_batches(optimizer, lambda: next(shares), lambda: 1)
    assert [one.name for one in optimizer.variables].count("accumulated_weight") == 1
    optimizer.build([variable])
    values = []
    for gradient in (1.0, 5.0) * 3:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])])
        values.append(-float(keras.ops.convert_to_numpy(variable)[0]))
    assert values == [0, 4, 4, 10, 10, 13]
    keras_optimizers.weigh_micro_batches(keras.optimizers.SGD(), None, None)


@pytest.mark.tensorflow
@pytest.mark.parametrize("options", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 0.5}, {}])
@still("clips the gradients of an optimizer in one function", door=OPTIMIZERS)
def test_use_whole_gradients(options):
    """Rows of a gradient that are added to the same row of a table are clipped as their sum."""
    import tensorflow as tf

    rows = tf.constant([[3.0, 4.0], [-3.0, -3.5], [1.0, 0.0]])
    gradient = tf.IndexedSlices(rows, tf.constant([2, 2, 0]), tf.constant([4, 2]))
    results = []
    for one in (gradient, tf.convert_to_tensor(gradient)):
        table, optimizer = keras.Variable(np.zeros((4, 2))), keras.optimizers.SGD(1.0, **options)
        for _ in range(2):
            keras_optimizers.use_whole_gradients(optimizer)
        optimizer.apply([one], [table])
        results.append(table.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.tensorflow
def test_whole_gradients():
    """A row has the sum of its look-ups; dense gradients and none are left as they are."""
    import tensorflow as tf

    sparse = tf.IndexedSlices(tf.reshape(tf.range(10.0), (5, 2)), tf.constant([3, 0, 3, 6, 0]), tf.constant([7, 2]))
    found, dense, none = keras_optimizers.whole_gradients([sparse, tf.ones(3), None])
    expected = np.zeros((7, 2))
    np.add.at(expected, [3, 0, 3, 6, 0], np.arange(10).reshape(5, 2))
    np.testing.assert_array_equal(found, expected)
    assert dense.shape == (3,) and none is None


def test_build_optimizer():
    """Builds the optimizer of a compiled model for what can be trained, once."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(None, "mse")
    keras_optimizers.build_optimizer(model)
    model.compile("adam", "mse")
    model.trainable = False
    keras_optimizers.build_optimizer(model)
    assert not model.optimizer.built
    model.trainable = True
    for _ in range(2):
        keras_optimizers.build_optimizer(model)
        assert model.optimizer.built and len(model.optimizer.variables) == 6


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "Lion", "Nadam"])
@still("gives optimizers that square gradients those of each look-up", door=OPTIMIZERS)
def test_whole_gradients_are_squared(name):
    import tensorflow as tf

    tables = []
    for is_sparse in (True, False):
        table, optimizer = keras.Variable(np.ones((4, 2), "float32")), getattr(keras.optimizers, name)(0.1)
        keras_optimizers.use_whole_gradients(optimizer)
        for _ in range(2):
            gradient = tf.IndexedSlices(tf.constant([[3.0, 4], [-1, 5], [1, 2]]), tf.constant([2, 2, 0]), [4, 2])
            optimizer.apply([gradient if is_sparse else tf.convert_to_tensor(gradient)], [table])
        tables.append(table.numpy())
    np.testing.assert_allclose(*tables, rtol=1e-6)


ADAMS = {
    "defaults": {},
    "betas": {"beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-3},
    "variable": {"beta_1": keras.Variable(0.8)},
    "weight_decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.3},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
}


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "mode", "case"),
    [(name, "eager", case) for name in ("Adam", "AdamW") for case in ADAMS]
    + [
        (("Adam", "AdamW")[(i + j) % 2], mode, case)
        for i, mode in enumerate(("graph", "xla"))
        for j, case in enumerate(ADAMS)
    ],
)
@still("updates variables in one function, and keeps momentums and velocities", door=OPTIMIZERS)
def test_update_with_kernels(name, mode, case):
    """Three steps are those of Keras' eager operations, for dense gradients and for rows of a table."""
    import tensorflow as tf

    def trained(has_kernels):
        variables = [keras.Variable(x, dtype="float32") for x in (np.linspace(-1, 1, 6).reshape(3, 2), np.ones((5, 2)))]
        optimizer = getattr(keras.optimizers, name)(**ADAMS[case])
        if has_kernels:
            keras_optimizers.update_with_kernels(optimizer)
        optimizer.build(variables)

        def step(dense, rows):
            rows = tf.IndexedSlices(rows, tf.constant([4, 0, 2]), tf.constant([5, 2]))
            # Keras accumulates dense gradients only.
            rows = tf.convert_to_tensor(rows) if optimizer.gradient_accumulation_steps else rows
            optimizer.apply([dense, rows], variables)

        if has_kernels and mode != "eager":
            step = tf.function(step, jit_compile=mode == "xla")
        random = np.random.default_rng(3)
        for _ in range(3):
            step(*[tf.constant(random.normal(size=(3, 2)), "float32") for _ in range(2)])
        return [x.numpy() for x in (*variables, *optimizer.variables)]

    for one, two in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(one, two, rtol=5e-6, atol=1e-6)  # the largest rate is 0.1


@pytest.mark.tensorflow
def test_adam_is_that_of_the_paper():
    """Kingma and Ba 2015, algorithm 1 with epsilon as in section 2, in NumPy and float64."""
    import tensorflow as tf

    optimizer, variable = keras.optimizers.Adam(0.1, epsilon=1e-3), keras.Variable(np.ones(3), dtype="float64")
    keras_optimizers.update_with_kernels(optimizer)
    x, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, gradient in enumerate(np.random.default_rng(5).normal(size=(7, 3)), 1):
        optimizer.apply([tf.constant(gradient)], [variable])
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        x -= 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(variable.numpy(), x, rtol=1e-6)  # Keras keeps the learning rate in float32


@pytest.mark.tensorflow
def test_other_optimizers_are_left_to_keras():
    import tensorflow as tf

    class Own(keras.optimizers.Adam):
        pass

    for optimizer in (Own(), keras.optimizers.Adam(amsgrad=True), keras.optimizers.SGD(), keras.optimizers.Nadam()):
        keras_optimizers.update_with_kernels(optimizer)
        assert "_backend_update_step" not in vars(optimizer)
    called, optimizer = [], keras.optimizers.Adam()
    keras_optimizers.update_with_kernels(optimizer)
    optimizer.update_step = lambda *arguments: called.append(arguments)
    optimizer.apply([tf.ones(3)], [keras.Variable(np.ones(3, "float32"))])
    assert len(called) == 1
    for shapes in ([("bfloat16", 1.0)], [("float32", 1.0), ("float64", 1.0)]):
        ends = []
        for has_kernels in (True, False):
            variables = [keras.Variable(np.full(3, start), dtype=dtype) for dtype, start in shapes]
            optimizer = keras.optimizers.Adam(0.1)
            if has_kernels:
                keras_optimizers.update_with_kernels(optimizer)
            optimizer.apply([tf.fill([3], tf.cast(0.5, one.dtype)) for one in variables], variables)
            ends.append([ops.convert_to_numpy(ops.cast(one, "float64")) for one in variables])
        np.testing.assert_array_equal(*ends)


@still("lets a subclass of Muon say what AdamW updates, and how the others are updated", door=OPTIMIZERS)
def test_muon_by_variable():
    class Muon(keras_optimizers.MuonByVariable):
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
