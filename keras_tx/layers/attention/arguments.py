"""What may be given for the arguments of attention -> what the layer keeps; a ValueError for all else."""

import keras

from keras_tx.layers.rotary import RotaryEmbedding


def feature_sizes(output_shape):
    """`output_shape`, an int or several -> a tuple; None stays."""
    sizes = (output_shape,) if isinstance(output_shape, int) else output_shape
    if sizes is None or (isinstance(sizes, (tuple, list)) and all(isinstance(n, int) and n > 0 for n in sizes)):
        return sizes and tuple(sizes)
    raise ValueError(f"Invalid `output_shape`: must be a positive int, or a tuple of them. Received: {output_shape!r}")


def axes_of(attention_axes):
    """`attention_axes`, an int or several -> a tuple; None stays."""
    axes = (attention_axes,) if isinstance(attention_axes, int) else attention_axes
    if axes is None or (isinstance(axes, (tuple, list)) and all(isinstance(axis, int) for axis in axes)):
        return axes and tuple(axes)
    raise ValueError(f"`attention_axes` must be an int, list, or tuple. Received: attention_axes={attention_axes!r}")


def rotary_layer(rotary):
    """`rotary`: a layer, the config of one, or whether there is one -> a `RotaryEmbedding` or None."""
    if isinstance(rotary, dict):
        rotary = keras.saving.deserialize_keras_object(rotary)
    if rotary is True:
        return RotaryEmbedding(name="rotary")
    if rotary is None or rotary is False or isinstance(rotary, RotaryEmbedding):
        return rotary or None
    raise ValueError(f"`rotary` must be True, None or a RotaryEmbedding. Received: rotary={rotary!r}")


def check_aligned(value_shape, key_shape):
    """Keys and values stand at the same places."""
    if tuple(value_shape[1:-1]) != tuple(key_shape[1:-1]):
        raise ValueError(
            "All dimensions of `value` and `key`, except the last one, must be equal. Received: "
            f"value_shape={value_shape} and key_shape={key_shape}"
        )
