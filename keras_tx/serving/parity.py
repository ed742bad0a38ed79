"""What the live model answers -> a file beside the graph for `check` to compare with, and figures for the card.

The file is {"signatures": {name: [{"inputs": ..., "outputs": ..., "tolerance": ...}]}}, strings and numbers as lists,
bytes that are no UTF-8 as {"b64": ...}; the first of a name is also what `check` times. Of a classifier also "text",
"label", "probabilities" and "tolerance" of `serving_default` by Keras alone.
"""

import base64
import json
from pathlib import Path

import keras
import numpy as np

from keras_tx.optional import Lazy
from keras_tx.serving.text_encoder import one_line
from keras_tx.serving.warmup import serialized

tf = Lazy("tensorflow")

TEXTS = (
    "",
    "A short one.",
    "Not wonderful but dull, café 電影 🎬 [SEP] " * 9,
    "\x00\ufffd ��",
    "one two three " * 30,
)
MASKED = "A {mask} one, {mask}."  # for models that fill masks
FILE = "assets.extra/keras_tx_parity.json"
# How far an exported probability may be from the live one: eight roundings of 1 in the precision of the layers.
TOLERANCES = {"float16": 8 * 2**-10, "bfloat16": 8 * 2**-7, None: 1e-6}
BROKEN = 100  # tolerances away is no rounding
GIVEN = 16  # texts of the user's that are compared at most
LARGEST = 20_000  # numbers of an example; scores and vectors of long texts have millions


def encoder_examples(signatures, reader, tokenizer, texts=()):
    """{name: examples} of the signatures of `classifying`, answered by Keras layer by layer, each text alone.

    The texts are those above and the first of `texts`.

    Raises:
        ValueError: the model fails on a text that the tokenizer lets through, or answers with NaN.
    """
    texts = [*TEXTS, *texts[:GIVEN]]
    if getattr(tokenizer, "mask_id", None) is not None:
        texts.append(MASKED.format(mask=tokenizer.vocabulary[tokenizer.mask_id]))
    return {name: _examples(name, function, texts, reader, tokenizer) for name, function in signatures.items()}


def _examples(name, function, texts, reader, tokenizer):
    examples = []
    for text in texts:
        if name == "tokens":
            ids, _ = reader.tokenized(tokenizer, [text])
            inputs = {"token_ids": ids, "lengths": tf.math.count_nonzero(ids != tokenizer.pad_id, 1, dtype="int32")}
        else:
            inputs = (
                {"inputs": tf.constant([serialized(text)])} if name == "classify" else {"text": tf.constant([text])}
            )
        try:
            with keras.device("cpu:0"):  # where `check` computes: a GPU rounds otherwise
                answer = function.python_function(**inputs)
        except Exception as error:  # whatever a layer raises
            raise ValueError(
                "`model` must answer every text that `tokenizer` lets through. Received: "
                f"{text!r}, on which {name!r} fails: {one_line(error)}"
            ) from error
        examples.append(example(name, inputs, answer, reader.half))
    return [one for one in examples if one is not None]


def ids_example(function, reader, row):
    """The same for a model without a tokenizer: what `tokens` answers to a row of ids, as a list of one example."""
    inputs = {"token_ids": tf.constant([row], "int32"), "lengths": tf.constant([len(row)])}
    with keras.device("cpu:0"):
        answer = function.python_function(**inputs)
    found = example("tokens", inputs, answer, reader.half)
    return [] if found is None else [found]


def generator_example(name, function, inputs, drawn, half):
    """What a signature of a model that writes answers in the live graph, as a list of one example.

    The request alone where the answer is drawn, is too large, or may differ by a token in half precision.
    """
    alone = {"inputs": _listed(inputs), "outputs": {}, "tolerance": 0}
    if drawn or half:
        return [alone]
    with tf.device("cpu:0"):
        answer = function(**inputs)
    return [example(name, inputs, answer, half) or alone]


def example(name, inputs, answer, half):
    """An entry of the file for the signature `name`; None if it would be too large.

    Probabilities must be equal to the tolerance of `half`, other numbers to ten times that, relative to the largest.

    Raises:
        ValueError: a number is NaN.
    """
    outputs = {key: np.asarray(value) for key, value in answer.items()}
    floats = {key: value for key, value in outputs.items() if value.dtype.kind == "f"}
    for key, value in floats.items():
        if np.isnan(value).any():
            given = [str(np.asarray(x).ravel()[:1]) for x in inputs.values()]
            raise ValueError(f"`model` must answer with numbers. Received: NaN in the output '{key}' for {given}")
    if sum(value.size for value in outputs.values()) > LARGEST:
        return None
    tolerance = TOLERANCES[half]
    if name != "classify" and not set(floats) <= {"probabilities"}:
        finite = [value[np.isfinite(value)] for value in floats.values()]
        tolerance *= 10 * max([1.0, *[float(np.max(np.abs(value), initial=0)) for value in finite]])
    return {"inputs": _listed(inputs), "outputs": _listed(outputs), "tolerance": tolerance}


def differences(signatures, examples):
    """{name: figures} of what a loaded version answers to the examples.

    Raises:
        ValueError: it answers otherwise than the live model, by far more than rounding.
    """
    figures = {}
    for name, rows in examples.items():
        largest, equal = 0.0, True
        specs = signatures[name].structured_input_signature[1]
        for row in [*rows[:1], *rows]:  # the first one twice: a model may draw lots
            inputs = {key: tf.constant(raw(value), specs[key].dtype) for key, value in row["inputs"].items()}
            with tf.device("cpu:0"):
                answer = signatures[name](**inputs)
            found = [0.0]
            for key, expected in row["outputs"].items():
                if answer[key].dtype.is_floating:
                    found.append(_largest(answer[key].numpy(), expected))
                else:
                    equal = equal and _listed({key: answer[key]})[key] == expected
            difference = float(np.max(found))  # NaN, if one is
            if not difference <= BROKEN * row["tolerance"]:
                raise ValueError(
                    "`model` must answer the same as a graph as it does live, every time. Received: answers of "
                    f"{name!r} that differ by {difference:.1e} for {row['inputs']}"
                )
            largest = max(largest, difference)
        figures[name] = {
            "examples": len(rows),
            "largest_difference": largest,
            "tolerance": max([row["tolerance"] for row in rows], default=None),
            "others_equal": equal,  # strings and integers
        }
    return figures


def write_parity(folder: Path, content):
    """Writes the file of the version in `folder`."""
    (folder / FILE).parent.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")


def classifier_answers(reader, tokenizer, labels):
    """What a live `TextClassifier` answers to `TEXTS`, one text at a time, by Keras alone."""
    model = reader.model
    is_probability = model.activation is keras.activations.softmax
    rows = []
    for text in TEXTS:
        with keras.device("cpu:0"):
            ids, segments = reader.tokenized(tokenizer, [text])
            outputs = model(reader.inputs(ids, segments), training=False)
            probabilities = outputs if is_probability else keras.ops.softmax(outputs)
        rows.append(keras.ops.convert_to_numpy(probabilities)[0].tolist())
    best = [labels[max(range(len(row)), key=row.__getitem__)] for row in rows]
    return {"text": list(TEXTS), "label": best, "probabilities": rows, "tolerance": TOLERANCES[reader.half]}


def _listed(tensors):
    return {key: written(np.asarray(value).tolist()) for key, value in tensors.items()}


def written(value):
    """Bytes as str, and those that are not UTF-8 as {"b64": ...}, as a server's REST interface has them."""
    if isinstance(value, list):
        return [written(one) for one in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def raw(value):
    """What `written` wrote."""
    if isinstance(value, list):
        return [raw(one) for one in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


def _largest(got, expected):
    expected = np.asarray(expected, "float64")
    if not got.size and not expected.size:
        return 0.0
    if got.shape != expected.shape:
        return np.inf
    with np.errstate(invalid="ignore"):  # of infinities that are equal
        return float(np.max(np.abs(np.where(got == expected, 0, got - expected)), initial=0))
