"""Where TensorFlow's products of integers are missing or wrong, an export in int8 is refused, and servers say why."""

import os
import re
import subprocess

import pytest

from keras_tx.serving import check, export
from keras_tx.serving.check import integer_products
from tests import forked
from tests.tools import skip_without_int8_products

pytestmark = pytest.mark.tensorflow
WITHOUT = {"TF_ENABLE_ONEDNN_OPTS": "0"}
# What oneDNN then does on every processor: it cuts off sums of two products.
OLDER_PROCESSOR = {"TF_ENABLE_ONEDNN_OPTS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
REFUSED = """
import sys
import keras_tx
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
    served.answer("POST", f"/v1/models/{served.name}:predict", b'{"inputs": {"token_ids": [[2, 6]], "lengths": [2]}}')
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


@pytest.mark.process
@pytest.mark.parametrize(("environment", "found"), [(WITHOUT, "no"), (OLDER_PROCESSOR, "inexact")])
def test_an_export_is_refused(environment, found, tmp_path):
    reasons = {"no": "has no products of integers", "inexact": "has products of integers that are not exact"}
    setting = environment["TF_ENABLE_ONEDNN_OPTS"]
    assert re.search(
        f"`precision='int8'` needs exact products of integers, .*VNNI or AMX.* Received: precision='int8', where "
        f"TensorFlow {reasons[found]}, and TF_ENABLE_ONEDNN_OPTS is {setting}",
        printed(REFUSED, tmp_path / "ids", environment),
    )
    assert not (tmp_path / "ids").exists()


@pytest.mark.process
def test_an_export_from_elsewhere_says_what_the_server_lacks(make, tmp_path, monkeypatch):
    skip_without_int8_products()
    path = export(make(), tmp_path / "ids", precision="int8")
    assert check(path).ok
    advice = "only with oneDNN on x86 processors that have VNNI .* Elsewhere, export with precision='float32'"
    assert re.search(f"^Missing 0-th output .*{advice}", printed(SERVED, path.parent, WITHOUT))
    for name, value in WITHOUT.items():
        monkeypatch.setenv(name, value)
    assert re.search(f"serving_default fails .*{advice}", "\n".join(check(path).problems))


def test_messages_of_tensorflow_are_explained():
    message = "Missing 0-th output from {{node layer_0/QuantizedMatMulWithBias}}"
    assert re.search("from .*VNNI or AMX.*or 'bfloat16'.$", integer_products.explained(message))
    for message in ("Missing 0-th output from {{node MatMul}}", "QuantizedMatMulWithBias: wrong shape", ""):
        assert integer_products.explained(message) == message
