"""Turns autotuning of `tf.data` off in this process.

With it, TensorFlow 2.21 sometimes waits for seconds when it deletes an iterator, in a trial for 41: as it seems for the
thread that tunes it, which sleeps for periods that double. Single tests then stand still.
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
