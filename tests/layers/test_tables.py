"""Tables learn from look-ups as from products with one-hot vectors, also where an id occurs several times."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.layers import TokenEmbedding
from keras_tx.layers.ids import take_rows
from keras_tx.layers.position_bias import RelativePositionBias
from tests.tools import assert_close, gradients, normal

V, D, P, G = 11, 6, 7, 2  # rows of tokens, positions and segments
IDS = np.array([[3, 3, 3, 5, 0], [5, 3, 9, 3, 3], [3, 7, 3, 3, 5]])
POSITIONS = np.array([[0, 1, 2, 0, 1], [6, 6, 0, 0, 0], [0, 1, 2, 3, 4]])
SEGMENTS = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]])


def one_hot(ids, size):
    return np.eye(size, dtype="float32")[ids]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_the_gradient_is_that_of_a_product_with_one_hot_vectors(dtype):
    ids, table = IDS.astype(dtype), normal(V, D)
    found = gradients(lambda table: take_rows(table, ops.convert_to_tensor(ids)), [table])
    expected = gradients(lambda table: ops.matmul(one_hot(IDS, V), table), [table])
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.tensorflow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_gradients_are_tensors_summed_in_single_precision(policy):
    """10,000 ones are 10,000 in bfloat16, where their sum one by one would end at 256."""
    import tensorflow as tf

    layer = TokenEmbedding(V, D, position_encoding="learned", max_length=P, num_segments=G, dtype=policy)
    layer.build((None, None))
    ids, zeros = np.full((2000, 5), 3), np.zeros((2000, 5), "int32")
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(ids, segment_ids=zeros, positions=zeros))
    slopes = tape.gradient(total, [one.value for one in layer.trainable_variables])
    assert len(slopes) == 3 and all(isinstance(one, tf.Tensor) for one in slopes)
    for slope in slopes:
        np.testing.assert_allclose(np.sort(tf.cast(slope, "float32").numpy().sum(1))[-1], D * 1e4, rtol=4e-3)


@pytest.mark.tensorflow
def test_second_gradients_are_those_of_the_product():
    import tensorflow as tf

    def second(rows):
        table = tf.constant(normal(V, D))
        with tf.GradientTape() as outer:
            outer.watch(table)
            with tf.GradientTape() as inner:
                inner.watch(table)
                total = tf.reduce_sum(rows(table) ** 3)
            slope = inner.gradient(total, table)
        return outer.gradient(slope, table)

    found, expected = second(lambda x: take_rows(x, IDS)), second(lambda x: tf.matmul(one_hot(IDS, V), x))
    assert_close(found, expected, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_embeddings_learn_as_dense_layers_of_one_hot_vectors(optimizer):
    """In a model of Keras, so that only the layer can see to it."""
    layer = TokenEmbedding(V, D, padding_id=None, position_encoding="learned", max_length=P, num_segments=G)
    inputs = [keras.Input((5,), dtype="int32") for _ in range(3)]
    rows = layer(inputs[0], positions=inputs[1], segment_ids=inputs[2])
    looked_up = keras.Model(inputs, keras.layers.Dense(1, name="head")(rows))
    dense = [keras.layers.Dense(D, use_bias=False) for _ in range(3)]
    vectors = [keras.Input((5, size)) for size in (V, P, G)]
    rows = keras.layers.add([one(x) for one, x in zip(dense, vectors, strict=True)])
    multiplied = keras.Model(vectors, keras.layers.Dense(1, name="head")(rows))
    by_size = {weight.shape[0]: weight for weight in layer.get_weights()}
    for one, size in zip(dense, (V, P, G), strict=True):
        one.set_weights([by_size[size]])
    multiplied.get_layer("head").set_weights(looked_up.get_layer("head").get_weights())
    y = normal(3, 5, 1)
    hot = [one_hot(one, size) for one, size in ((IDS, V), (POSITIONS, P), (SEGMENTS, G))]
    # On TensorFlow a graph is traced for one optimizer only, as it takes long.
    eagerly = keras.backend.backend() == "tensorflow" and optimizer is not OPTIMIZERS["clipped"]
    for model, x in ((looked_up, [IDS, POSITIONS, SEGMENTS]), (multiplied, hot)):
        model.compile(optimizer(), "mse", jit_compile=False, run_eagerly=eagerly)
        for _ in range(3):
            model.train_on_batch(x, y)
    after = {weight.shape[0]: weight for weight in layer.get_weights()}
    for one, size in zip(dense, (V, P, G), strict=True):
        assert np.abs(after[size] - by_size[size]).max() > 0.01
        assert_close(after[size], one.get_weights()[0], atol=5e-6)


def test_a_relative_bias_learns_as_a_product_with_one_hot_buckets():
    """The bias of all pairs of positions, of which many share a bucket, by Adam."""

    class Biased(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.bias = RelativePositionBias(2, num_buckets=8, max_distance=5)

        def call(self, x):
            return x + self.bias(x)[:, 0]  # of the first head

    layer, x, y = Biased(), np.zeros((1, 7, 7), "float32"), normal(1, 7, 7)
    layer(x)
    table = np.array(layer.bias.get_weights()[0], "float64")
    model = keras.Sequential([keras.Input((7, 7)), layer])
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", jit_compile=False)
    distances = np.arange(7)[None] - np.arange(7)[:, None]
    buckets = layer.bias._buckets[np.clip(distances, -5, 5) + 5]
    m, v = np.zeros_like(table), np.zeros_like(table)
    for t in (1, 2, 3):
        model.train_on_batch(x, y)
        error = (table[buckets][..., 0] - y[0]) * 2 / y.size
        slope = np.zeros_like(table)
        np.add.at(slope[:, 0], buckets, error)
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        table -= 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-3)
    assert_close(layer.bias.get_weights()[0], table, atol=1e-5)
