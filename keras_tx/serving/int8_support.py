"""Whether TensorFlow multiplies int8 matrices exactly in this process, as exports in int8 need it."""

from keras_tx.layers import integer_products
from keras_tx.optional import Lazy
from keras_tx.serving.check.integer_products import ADVICE
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def check_int8_products() -> None:
    """Raises ValueError where TensorFlow does not multiply int8 matrices exactly in this process."""
    try:
        tf.function(_product, autograph=False).get_concrete_function()()
    except tf.errors.InvalidArgumentError as error:
        found = "computes wrong sums" if integer_products.INEXACT in str(error) else "cannot multiply int8 matrices"
    except (tf.errors.OpError, ValueError):  # it does not know the operation
        found = "cannot multiply int8 matrices"
    else:
        return
    raise ValueError(
        "`precision='int8'` needs exact int8 matrix multiplication, where a model is exported and where it is served. "
        f"{ADVICE}. Received: precision='int8', but TensorFlow {found} on this processor"
    )


def _product() -> Tensor:
    ones = tf.ones((8, 8), tf.int8)
    return integer_products.multiply(ones, ones, tf.ones(8))
