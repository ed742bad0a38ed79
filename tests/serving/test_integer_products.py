"""Where TensorFlow does not multiply int8 matrices exactly, exports in int8 are refused, and servers say why."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keras_tx.serving import check, export
from keras_tx.serving.check import integer_products
from tests import forked
from tests.tools import skip_without_int8_products

pytestmark = pytest.mark.tensorflow
IS_LINUX_ON_X86 = sys.platform == "linux" and platform.machine() == "x86_64"
WITHOUT = {"TF_ENABLE_ONEDNN_OPTS": "0"}
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

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.uint8, "integers")])
    def served(integers):
        products, _, _ = tf.raw_ops.QuantizedMatMulWithBias(
            a=tf.bitcast(integers, tf.quint8),
            b=tf.bitcast(tf.ones((3, 5), tf.int8), tf.qint8),
            bias=tf.bitcast(tf.zeros(5, tf.int32), tf.qint32),
            **{"min_a": 0.0, "max_a": 255.0, "min_b": -127.0, "max_b": 127.0},
            Toutput=tf.qint32,
            input_quant_mode="SCALED",
        )
        return {"products": tf.bitcast(products, tf.int32)}

    module = tf.Module()
    module.served = served
    tf.saved_model.save(module, str(tmp_path / "products" / "1"), signatures=served)
    return tmp_path / "products" / "1"


@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (WITHOUT, "does not do so here"),
        pytest.param(
            OLDER_PROCESSOR,
            "gets wrong sums here",
            marks=pytest.mark.skipif(not IS_LINUX_ON_X86, reason="oneDNN multiplies int8 matrices on x86 alone"),
        ),
    ],
)
def test_an_export_is_refused(environment, found, tmp_path):
    setting = environment["TF_ENABLE_ONEDNN_OPTS"]
    assert re.search(
        f"`precision='int8'` needs exact int8 matrix multiplication, .*VNNI or AMX.* Received: precision='int8', where "
        f"TensorFlow {found}, and TF_ENABLE_ONEDNN_OPTS is {setting}",
        printed(REFUSED, tmp_path / "ids", environment),
    )
    assert not (tmp_path / "ids").exists()


@pytest.mark.process
def test_an_export_from_elsewhere_says_what_the_server_lacks(saved, monkeypatch):
    advice = "(?s:.*)only with oneDNN on x86 processors that have VNNI .* export with precision='float32'"
    assert re.search(f"(Missing 0-th output|No OpKernel) {advice}", printed(SERVED, saved.parent, WITHOUT))
    for name, value in WITHOUT.items():
        monkeypatch.setenv(name, value)
    assert re.search(f"serving_default fails {advice}", "\n".join(check(saved).problems))


@pytest.mark.process
def test_where_int8_matrices_are_multiplied_an_export_passes_the_check(make, tmp_path):
    skip_without_int8_products()
    assert check(export(make(), tmp_path / "ids", precision="int8")).ok


@pytest.mark.skipif(not IS_LINUX_ON_X86, reason="oneDNN multiplies int8 matrices on x86 alone")
def test_a_processor_with_vnni_is_not_refused():
    """Otherwise all tests of exports in int8 would be skipped."""
    has_vnni = "avx512_vnni" in Path("/proc/cpuinfo").read_text()
    if not has_vnni or os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        pytest.skip("the processor has no AVX512-VNNI, or TensorFlow may not use oneDNN")
    integer_products.check_int8_products()


def test_messages_of_tensorflow_are_explained():
    for words in ("Missing 0-th output from", "No OpKernel was registered to support"):
        message = f"{words} {{{{node layer_0/QuantizedMatMulWithBias}}}}"
        assert re.search(f"^{words} .*VNNI or AMX.*or 'bfloat16'.$", integer_products.explained(message))
    for message in ("Missing 0-th output from {{node MatMul}}", "QuantizedMatMulWithBias: wrong shape", ""):
        assert integer_products.explained(message) == message
