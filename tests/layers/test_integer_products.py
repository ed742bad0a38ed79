"""Products of int8 matrices in a graph of TensorFlow equal those of 64-bit integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.tools import skip_without_int8_products

pytestmark = pytest.mark.tensorflow


def in_graph(kernel, limits):
    import tensorflow as tf

    from keras_tx.layers.integer_products import multiply

    held = tf.Variable(kernel), tf.Variable(limits)
    return tf.function(lambda rows: multiply(rows, *held)).get_concrete_function(
        tf.TensorSpec([None, len(kernel)], "int8")
    )


def expected(rows, kernel, limits):
    return rows.astype("int64") @ kernel.astype("int64") * (limits.astype("float64") / 127)


@settings(max_examples=15)
@given(some.tuples(*[some.integers(1, 70)] * 2), some.integers(0, 2**31), some.booleans())
def test_sums_are_exact_for_any_number_of_rows_after_any_other(sizes, seed, are_largest):
    skip_without_int8_products()
    random = np.random.default_rng(seed)
    kernel = random.integers(-127, 128, sizes).astype("int8")
    kernel = np.where(kernel < 0, -127, 127).astype("int8") if are_largest else kernel
    limits = random.uniform(0.1, 300, sizes[1]).astype("float32")
    function = in_graph(kernel, limits)
    for count in random.permutation([0, 1, 7, 8, 9, 37]):
        rows = random.integers(-127, 128, (count, sizes[0])).astype("int8")
        rows = np.full_like(rows, 127) if are_largest else rows
        found = function(rows).numpy()
        assert found.dtype == "float32"
        np.testing.assert_allclose(found, expected(rows, kernel, limits), rtol=1e-6, atol=1e-4)


def test_calls_of_several_threads_are_exact():
    """The first one lays out the kernel."""
    import concurrent.futures

    skip_without_int8_products()
    random = np.random.default_rng(3)
    kernel = random.integers(-127, 128, (97, 53)).astype("int8")
    limits = np.full(53, 127, "float32")
    batches = [random.integers(-127, 128, (count, 97)).astype("int8") for count in (1, 3, 8, 17, 41, 64)]
    for _ in range(3):
        function = in_graph(kernel, limits)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(function, batches))
        for rows, found in zip(batches, answers, strict=True):
            np.testing.assert_array_equal(found, expected(rows, kernel, limits))


def test_graphs_are_not_kept():
    import gc
    import weakref

    skip_without_int8_products()
    function = in_graph(np.ones((3, 2), "int8"), np.ones(2, "float32"))
    graph = weakref.ref(function.graph)
    assert graph() is not None
    del function
    gc.collect()
    assert graph() is None
