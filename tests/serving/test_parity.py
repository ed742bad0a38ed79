"""Answers of an export that are further from the live ones than rounding are an error; all values pass through JSON."""

import json
import re

import numpy as np
import pytest

from keras_tx.serving import check, parity

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


def test_of_near_ties_the_probabilities_alone_are_compared():
    """In float32 probabilities that are 1e-5 apart are a near tie, in bfloat16 those that are 0.1 apart."""

    def kept(key, values, probabilities, half_dtype=None):
        answer = {key: np.array(values, object), "probabilities": np.array(probabilities, "float32")}
        found = parity.example("serving_default", {}, answer, half_dtype)["outputs"]
        assert found["probabilities"] == answer["probabilities"].tolist()
        return found[key]

    assert kept("label", [b"a"], [[0.3, 0.45, 0.25]]) == ["a"]
    assert kept("label", [b"a"], [[0.3, 0.45, 0.25]], "float16") == ["a"]
    assert kept("label", [b"a"], [[0.4, 0.45, 0.15]], "bfloat16") == [None]
    assert kept("label", [b"a"], [[0.1, 0.45, 0.449995]]) == [None]
    tokens = [[[0.1, 0.9], [0.5, 0.5], [0.2, 0.8]]]
    assert kept("label", [[b"O", b"B", b"I"]], tokens) == [["O", None, "I"]]
    # Of the best words only these come out: what is left of 1 may all be that of the next.
    assert kept("words", [[[b"x", b"y", b"z"]]], [[[0.5, 0.3, 0.15]]]) == [[["x", "y", "z"]]]
    assert kept("words", [[[b"x", b"y", b"z"]]], [[[0.5, 0.3, 0.1]]]) == [[["x", "y", None]]]
    assert kept("top_ids", [[[7, 5, 3]]], [[[0.5, 0.3, 0.2]]], "bfloat16") == [[[7, None, None]]]
    assert kept("top_ids", [[[7, 5, 3]]], [[[0.4, 0.4, 0.2]]]) == [[[None, None, 3]]]


@pytest.mark.parametrize(("best", "text"), [(0.8, ["so"]), (0.5, [None])])
def test_a_text_that_a_near_tie_may_change_is_not_compared(best, text):
    answer = {
        "words": [[[b"a", b"b"], [b"c", b"d"]]],
        "probabilities": [[[0.9, 0.1], [best, 1 - best]]],
        "text": [b"so"],
    }
    found = parity.example("serving_default", {}, {key: np.array(value) for key, value in answer.items()}, None)
    assert found["outputs"]["text"] == text
    del answer["words"]  # a text that does not follow from the probabilities
    found = parity.example("serving_default", {}, {key: np.array(value) for key, value in answer.items()}, None)
    assert found["outputs"]["text"] == ["so"]


@pytest.mark.parametrize(
    ("expected", "equal"),
    [(["1", "2"], True), ([None, "2"], True), ([None, "3"], False), (["1"], False), (None, True), ("1", False)],
)
def test_what_is_none_is_not_compared_and_the_rest_is(expected, equal):
    import tensorflow as tf

    class Loaded:
        structured_input_signature = ((), {"x": tf.TensorSpec([None], tf.int32)})

        def __call__(self, x):
            return {"s": tf.as_string(x)}

    row = {"inputs": {"x": [1, 2]}, "outputs": {"s": expected}, "tolerance": 0}
    assert parity.differences({"name": Loaded()}, {"name": [row]})["name"]["others_equal"] is equal


def test_the_documentation_of_check_has_the_tolerances_of_probabilities():
    text = " ".join(check.__doc__.split())
    words = "at most (.*), in half precision by (.*) times the machine epsilon, or in int8 by 1/(.*?)\\."
    in_float32, in_half, in_int8 = re.search(words, text).groups()
    assert float(in_float32) == parity.TOLERANCES[None] and 1 / float(in_int8) == parity.TOLERANCES["int8"]
    assert in_half == "eight" and parity.TOLERANCES["float16"] == 8 * np.finfo("float16").eps
    assert parity.TOLERANCES["bfloat16"] == 8 * 2**-7  # it has 7 bits after the first one
