"""Turns autotuning of `tf.data` off in this process.

When an iterator is deleted, the thread that tunes it may go to sleep once more, for up to a minute if the iterator has
lived long, and the deletion waits for it. Tests with many datasets would stand still for minutes.
"""


def turn_off():
    """Lets all iterators that begin from now on be without autotuning. No public setting does that alone."""
    from tensorflow.python.data.ops import dataset_ops

    assert hasattr(dataset_ops.DatasetV2, "_apply_debug_options"), "TensorFlow asks for options elsewhere."

    def without(dataset):
        options = dataset_ops.options_lib.Options()
        options.autotune.enabled = False
        return dataset_ops._OptionsDataset(dataset, options)

    dataset_ops.DatasetV2._apply_debug_options = without
