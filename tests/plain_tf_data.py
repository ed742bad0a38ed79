"""Lets `tf.data` of this process run data sets as they are made, without autotuning and optimizing them.

With autotuning, TensorFlow 2.21 sometimes waits for seconds when it deletes an iterator, in a trial for 41: as it seems
for the thread that tunes it, which sleeps for periods that double. Single tests then stand still. To optimize the graph
of a data set takes a fifth of the time of `tests/data`, and does not change what it returns. The examples that other
tests start as programs run with both.
"""


def set_up():
    """Changes all iterators that begin from now on. No public setting does that alone."""
    from tensorflow.python.data.ops import dataset_ops

    assert hasattr(dataset_ops.DatasetV2, "_apply_debug_options"), "TensorFlow asks for options elsewhere."

    def plain(dataset):
        options = dataset_ops.options_lib.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        return dataset_ops._OptionsDataset(dataset, options)

    dataset_ops.DatasetV2._apply_debug_options = plain
