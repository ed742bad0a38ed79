"""What messages of TensorFlow mean where it lacks the matrix multiplication of exports in int8.

TensorFlow has it on x86 processors. An export finds by itself whether a processor multiplies exactly, see
`keras_tx/layers/integer_products.py`. Neither keras_tx nor Keras is imported here.
"""

# The operation of exports, and that of versions that were exported before.
OPERATIONS = "_QuantizedMatMul", "QuantizedMatMulWithBias"
ADVICE = (
    "TensorFlow multiplies int8 matrices exactly only on x86 processors that have VNNI or AMX instructions (Intel's "
    "for servers since 2019, AMD's since Zen 4). For other processors, export with precision='float32' or 'bfloat16'"
)
_FAILURES = "Missing ", "No OpKernel was registered", "Op type not registered"  # in TensorFlow's messages


def explained(message: str) -> str:
    """An error message of TensorFlow, with the reason if an int8 matrix multiplication could not run."""
    is_of_int8 = any(name in message for name in OPERATIONS)
    return f"{message}. {ADVICE}." if is_of_int8 and any(words in message for words in _FAILURES) else message
