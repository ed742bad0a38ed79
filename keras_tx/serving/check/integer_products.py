"""Products of integers, of which exports in int8 consist: whether TensorFlow computes them exactly in this process.

Only oneDNN has them. TensorFlow uses oneDNN by itself on Linux, on x86 processors with VNNI, AVX512-BF16 or AMX
instructions. Without oneDNN, the operation is there and ends without an output. With oneDNN on a processor without VNNI
or AMX, which the environment can ask for, sums of two products are cut off at 16 bits. Neither keras_tx nor Keras is
imported here.
"""

import os

import tensorflow as tf

OPERATION = "QuantizedMatMulWithBias"
ADVICE = (
    "TensorFlow computes products of integers exactly only with oneDNN on x86 processors that have VNNI or AMX "
    "instructions (Intel's for servers since 2019, AMD's since Zen 4). On Linux it uses oneDNN there, unless "
    "TF_ENABLE_ONEDNN_OPTS is 0"
)
_LARGEST, _ROWS, _SUMMED = (255, 127), 8, 64


def check_int8_products() -> None:
    """Raises ValueError where TensorFlow does not compute products of integers exactly in this process."""
    try:
        products = tf.function(_products, autograph=False)().numpy()
    except tf.errors.OpError:
        found = "no products of integers"
    else:
        if (products == _SUMMED * _LARGEST[0] * _LARGEST[1]).all():
            return
        found = "products of integers that are not exact"
    setting = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "not set")
    raise ValueError(
        f"`precision='int8'` needs exact products of integers, in this process and in the server. {ADVICE}. Received: "
        f"precision='int8', where TensorFlow has {found}, and TF_ENABLE_ONEDNN_OPTS is {setting}"
    )


def explained(message: str) -> str:
    """An error message of TensorFlow, with the reason if a product of integers has ended without an output."""
    if OPERATION not in message or "Missing " not in message:
        return message
    return f"{message}. {ADVICE}. Elsewhere, export with precision='float32' or 'bfloat16'."


def _products() -> tf.Tensor:
    """The largest sums of products that there can be."""
    integers, weights = _LARGEST
    return tf.bitcast(
        tf.raw_ops.QuantizedMatMulWithBias(
            a=tf.bitcast(tf.fill((_ROWS, _SUMMED), tf.cast(integers, tf.uint8)), tf.quint8),
            b=tf.bitcast(tf.fill((_SUMMED, 16), tf.cast(weights, tf.int8)), tf.qint8),
            bias=tf.bitcast(tf.zeros(16, tf.int32), tf.qint32),
            min_a=0.0,
            max_a=255.0,
            min_b=-127.0,
            max_b=127.0,
            Toutput=tf.qint32,
            input_quant_mode="SCALED",
        )[0],
        tf.int32,
    )
