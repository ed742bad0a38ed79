"""Where TensorFlow does not multiply int8 matrices exactly, exports in int8 are refused, and servers say why."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keras_tx.serving import check, export, int8_support
from keras_tx.serving.check import integer_products
from tests import forked
from tests.tools import skip_without_int8_products

pytestmark = pytest.mark.tensorflow
IS_LINUX_ON_X86 = sys.platform == "linux" and platform.machine() == "x86_64"
# What oneDNN then does on every x86 processor: sums of two products saturate.
OLDER_PROCESSOR = {"TF_ENABLE_ONEDNN_OPTS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
REFUSED = """
import sys
import keras_tx, tensorflow
tensorflow.config.run_functions_eagerly(True)  # with it, too, products of the graph count
model = keras_tx.models.TextClassifier(9, 2, num_layers=1, hidden_dim=4, num_heads=2, intermediate_dim=5)
try:
    keras_tx.serving.export(model, sys.argv[1], precision="int8")
except ValueError as error:
    print(error)
"""
SERVED = """
import sys
from keras_tx.serving import rest
try:
    served = rest.ServedModel(sys.argv[1])
    served.answer("POST", f"/v1/models/{served.name}:predict", b'{"inputs": [[1, 2, 3]]}')
except rest.RestError as error:
    print(error)
"""


def printed(code, folder, environment):
    """What a new process prints, in which TensorFlow decides anew whether it uses oneDNN."""
    process = forked.start("-c", code, folder, new=True, stdout=subprocess.PIPE, env={**os.environ, **environment})
    with process.stdout:
        text = process.stdout.read()
    assert process.wait() == 0
    return text


@pytest.fixture
def saved(tmp_path):
    """A version with an int8 product, which is saved and never run, so that every processor can make it."""
    import tensorflow as tf

    from keras_tx.layers.integer_products import multiply

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.int8, "integers")])
    def served(integers):
        return {"products": multiply(integers, tf.ones((3, 5), tf.int8), tf.ones(5))}

    module = tf.Module()
    module.served = served
    tf.saved_model.save(module, str(tmp_path / "products" / "1"), signatures=served)
    return tmp_path / "products" / "1"


@pytest.mark.process
@pytest.mark.skipif(not IS_LINUX_ON_X86, reason="oneDNN multiplies int8 matrices on x86 alone")
def test_an_export_is_refused_where_sums_are_wrong(tmp_path):
    assert re.search(
        "`precision='int8'` needs exact int8 matrix multiplication, .*VNNI or AMX.* Received: precision='int8', but "
        "TensorFlow computes wrong sums on this processor",
        printed(REFUSED, tmp_path / "ids", OLDER_PROCESSOR),
    )
    assert not (tmp_path / "ids").exists()


def test_an_export_is_refused_where_tensorflow_has_no_such_operation(monkeypatch):
    import tensorflow as tf

    def fails(*_):
        raise tf.errors.NotFoundError(None, None, "Op type not registered")

    monkeypatch.setattr(int8_support.integer_products, "multiply", fails)
    received = "Received: precision='int8', but TensorFlow cannot multiply int8 matrices on this processor"
    with pytest.raises(ValueError, match=received):
        int8_support.check_int8_products()


@pytest.mark.process
@pytest.mark.skipif(not IS_LINUX_ON_X86, reason="oneDNN multiplies int8 matrices on x86 alone")
def test_an_export_from_elsewhere_gives_an_error_in_place_of_wrong_sums(saved, monkeypatch):
    advice = "(?s:.*)This processor does not multiply int8 matrices exactly, .* Export in float32 or bfloat16 for it"
    assert re.search(advice, printed(SERVED, saved.parent, OLDER_PROCESSOR))
    for name, value in OLDER_PROCESSOR.items():
        monkeypatch.setenv(name, value)
    assert re.search(f"serving_default fails {advice}", "\n".join(check(saved).problems))


@pytest.mark.process
def test_where_int8_matrices_are_multiplied_an_export_passes_the_check(make, tmp_path):
    skip_without_int8_products()
    assert check(export(make(), tmp_path / "ids", precision="int8")).ok


@pytest.mark.skipif(not IS_LINUX_ON_X86, reason="oneDNN multiplies int8 matrices on x86 alone")
def test_a_processor_with_vnni_is_not_refused():
    """Otherwise all tests of exports in int8 would be skipped."""
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the processor has no AVX512-VNNI")
    int8_support.check_int8_products()


@pytest.mark.parametrize("operation", ["_QuantizedMatMul", "QuantizedMatMulWithBias"])
def test_messages_of_tensorflow_are_explained(operation):
    for words in ("Missing 0-th output from", "No OpKernel was registered to support", "Op type not registered"):
        message = f"{words} {{{{node layer_0/{operation}}}}}"
        assert re.search(f"^{words} .*VNNI or AMX.*or 'bfloat16'.$", integer_products.explained(message))
    for message in ("Missing 0-th output from {{node MatMul}}", f"{operation}: wrong shape", ""):
        assert integer_products.explained(message) == message
