"""Int8 matrix multiplication, of which exports in int8 consist: whether TensorFlow computes it exactly in this process.

Only oneDNN has it. TensorFlow uses oneDNN by itself on Linux, on x86 processors with VNNI, AVX512-BF16 or AMX
instructions. Without oneDNN, the operation is there and ends without an output. With oneDNN on a processor without VNNI
or AMX, which the environment can ask for, sums of two products saturate at 16 bits. Neither keras_tx nor Keras is
imported here.
"""

import os

import tensorflow as tf

OPERATION = "QuantizedMatMulWithBias"
ADVICE = (
    "TensorFlow multiplies int8 matrices exactly only with oneDNN on x86 processors that have VNNI or AMX instructions "
    "(Intel's for servers since 2019, AMD's since Zen 4). On Linux it uses oneDNN there, unless TF_ENABLE_ONEDNN_OPTS "
    "is 0. For other processors, export with precision='float32' or 'bfloat16'"
)
_FAILURES = "Missing ", "No OpKernel was registered"  # of this operation, in TensorFlow's messages
_LARGEST, _SUMMED = (255, 127), 64


def check_int8_products() -> None:
    """Raises ValueError where TensorFlow does not multiply int8 matrices exactly in this process."""
    # TensorFlow finds the operation of oneDNN when it optimizes a graph.
    function = tf.function(_products, autograph=False).get_concrete_function()
    try:
        products = function().numpy()
    except (tf.errors.InternalError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError):
        found = "does not do so here"
    else:
        if (products == _SUMMED * _LARGEST[0] * _LARGEST[1]).all():
            return
        found = "gets wrong sums here"
    setting = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "not set")
    raise ValueError(
        "`precision='int8'` needs exact int8 matrix multiplication, where a model is exported and where it is served. "
        f"{ADVICE}. Received: precision='int8', where TensorFlow {found}, and TF_ENABLE_ONEDNN_OPTS is {setting}"
    )


def explained(message: str) -> str:
    """An error message of TensorFlow, with the reason if an int8 matrix multiplication could not run."""
    if OPERATION not in message or not any(words in message for words in _FAILURES):
        return message
    return f"{message}. {ADVICE}."


def _products() -> tf.Tensor:
    """The largest sums of products that there can be."""
    integers, weights = _LARGEST
    return tf.bitcast(
        tf.raw_ops.QuantizedMatMulWithBias(
            a=tf.bitcast(tf.fill((8, _SUMMED), tf.cast(integers, tf.uint8)), tf.quint8),
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
