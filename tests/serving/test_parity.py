"""Answers of an export that are further from the live ones than rounding are an error; all values pass through JSON."""

import json

import numpy as np
import pytest

from keras_tx.serving import parity

pytestmark = pytest.mark.tensorflow


def test_numbers_that_are_far_off_are_an_error_and_rounding_is_not():
    import tensorflow as tf

    class Loaded:
        structured_input_signature = ((), {"x": tf.TensorSpec([None], tf.float32)})

        def __call__(self, x):
            return {"y": 2 * x, "s": tf.as_string(x)}

    signatures = {"name": Loaded()}
    row = {"inputs": {"x": [1.0, np.inf]}, "outputs": {"y": [2.0, np.inf], "s": ["1", "inf"]}, "tolerance": 1e-3}
    figures = parity.differences(signatures, {"name": [row, {**row, "outputs": {"y": [2.01, np.inf]}}]})
    assert figures["name"]["largest_difference"] == pytest.approx(0.01, rel=1e-3) and figures["name"]["examples"] == 2
    assert not figures["name"]["others_equal"]  # TensorFlow writes 1.000000
    with pytest.raises(ValueError, match=r"the output 'y' of 'name', of shape \(1,\) live and \(2,\) as a graph"):
        parity.differences(signatures, {"name": [{**row, "outputs": {"y": [2.0]}}]})
    for wrong in ([2.2, np.inf], [2.0, 3.0], [2.0, np.nan]):
        with pytest.raises(ValueError, match="answers of 'name' that differ by "):
            parity.differences(signatures, {"name": [{**row, "outputs": {"y": wrong}}]})


def test_bytes_pass_through_json():
    given = {"a": [b"text", "é".encode(), b"\xff\x00"], "b": [[1, 2.5]]}
    there = json.loads(json.dumps(parity.to_json(given["a"])))
    assert there == ["text", "é", {"b64": "/wA="}]
    assert parity.from_json(there) == ["text", "é", b"\xff\x00"]
