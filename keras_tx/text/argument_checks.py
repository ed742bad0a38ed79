"""Checks of tokenizers' arguments. Each error names the argument, the rule and the received value."""

from typing import Any

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def check_max_length(max_length: Any, special_tokens: int) -> int:
    """Returns `max_length` as an `int` if it is at least the number of `special_tokens`."""
    length: int = checks.positive_int("max_length", max_length)
    if length < special_tokens:
        raise ValueError(
            f"`max_length` must be at least {special_tokens}, for the special tokens. Received: max_length={max_length}"
        )
    return length


def check_seed(seed: Any) -> Tensor:
    """Returns `seed` as a tensor (2,) if it is two integers, or may be in a graph that does not know its shape."""
    tensor = tf.convert_to_tensor(seed)
    if not tensor.dtype.is_integer or not tensor.shape.is_compatible_with((2,)):
        raise ValueError(f"`seed` must be two integers. Received: seed={seed!r}")
    return tensor
