"""Saves answers of the Keras model in a file, with which `check` compares, and figures for the model card.

The file is {"signatures": {name: [{"inputs": ..., "outputs": ..., "tolerance": ...}]}} with strings and numbers in
lists, bytes that are not UTF-8 as {"b64": ...}, and None for what is not compared. `check` also times the first
request of each signature. For a classifier the file also has "text" (and "text_pair"), "label" (or "labels"),
"probabilities" and "tolerance" of `serving_default`, computed by Keras alone.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

from keras_tx.internals.tensorflow_graphs import unoptimized
from keras_tx.optional import Lazy
from keras_tx.serving.class_labels import THRESHOLD
from keras_tx.serving.request_inputs import FEATURE, PAIR_FEATURE
from keras_tx.serving.text_encoder import TextEncoder, one_line
from keras_tx.serving.warmup import RequestSource, inputs_for
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

TEXTS = (
    "",
    "A short one.",
    "Not wonderful but dull, café 電影 🎬 [SEP] " * 9,
    "\x00\ufffd ��",
    "one two three " * 30,
)
# A model of pairs gets these: both empty, one of them empty, and the first, the second or both longer than its rows.
PAIRS: tuple[list[str], ...] = (
    *(["", ""], [TEXTS[1], ""], ["", TEXTS[1]], [TEXTS[3], TEXTS[1]]),
    *([TEXTS[1], TEXTS[4]], [TEXTS[2], TEXTS[1]], [TEXTS[4], TEXTS[2]]),
)
MASKED = "A {mask} one, {mask}."  # for models that fill masks
FILE = "assets.extra/keras_tx_parity.json"
# How far an exported probability may be from the live one: in half precision eight times the machine epsilon of the
# layers' dtype, and in int8, of which an epsilon is 2**-7, 16 times; in float32 what sums of thousands of products, in
# another order, differ by in a deep model.
TOLERANCES = {"float16": 8 * 2**-10, "bfloat16": 8 * 2**-7, "int8": 16 * 2**-7, None: 1e-5}
TOO_FAR = 100  # times the tolerance: more than rounding explains
MOST_WARMUP_TEXTS = 16  # the largest number of the user's texts that are compared
WITHOUT_CHOICES = ("score", "embed")  # signatures of generative models that depend on no choice of tokens
LARGEST_EXAMPLE = 20_000  # numbers; attention scores and vectors of long texts have millions

Example = dict[str, Any]  # {"inputs": ..., "outputs": ..., "tolerance": ...}
Text: TypeAlias = str | list[str]  # a text, or a pair of texts


def encoder_examples(
    signatures: Mapping[str, Any],
    source: RequestSource,
    tokenizer: Any,
    half_dtype: str | None,
    texts: Sequence[Text] = (),
    text_pairs: bool = False,
) -> dict[str, list[Example]]:
    """{name: examples} of an encoder model's signatures, computed by Keras layer by layer, each text alone.

    The texts, or pairs of texts, are those above and the first of `texts`.

    Raises:
        ValueError: the model fails on a text that the tokenizer accepts, or an output is NaN.
    """
    texts = [*(PAIRS if text_pairs else TEXTS), *texts[:MOST_WARMUP_TEXTS]]
    if getattr(tokenizer, "mask_id", None) is not None and not text_pairs:
        texts.append(MASKED.format(mask=tokenizer.vocabulary[tokenizer.mask_id]))
    examples: dict[str, list[Example]] = {name: [] for name in signatures}
    for text in texts:
        for name, function in signatures.items():
            found = _example(name, function, text, source, half_dtype)
            examples[name] += [] if found is None else [found]
    return examples


def _example(name: str, function: Any, text: Text, source: RequestSource, half_dtype: str | None) -> Example | None:
    """What a signature answers to a text; None if that is too large for the file."""
    inputs = inputs_for({spec.name: spec for spec in function.input_signature}, [text], source) or {}
    try:
        with keras.device("cpu:0"):  # as `check` does: a GPU rounds differently
            answer = function.python_function(**inputs)
    except Exception as error:  # a layer may raise any error
        raise ValueError(
            "`model` must answer every text that `tokenizer` accepts. Received: "
            f"{text!r}, on which {name!r} fails: {one_line(error)}"
        ) from error
    return example(name, inputs, answer, half_dtype)


def token_ids_example(function: Any, row: Sequence[int], half_dtype: str | None) -> list[Example]:
    """At most one example for a model without a tokenizer: what `tokens` answers to a row of ids."""
    inputs = {"token_ids": tf.constant([row], "int32"), "lengths": tf.constant([len(row)])}
    with keras.device("cpu:0"):
        answer = function.python_function(**inputs)
    found = example("tokens", inputs, answer, half_dtype)
    return [] if found is None else [found]


def generator_example(
    name: str, function: Any, inputs: Mapping[str, Tensor], is_random: bool, half_dtype: str | None
) -> list[Example]:
    """One example: what a signature of a generative model answers.

    The answer is left out if it is random or too large, or if rounding in half precision or int8 may change a token.
    There Keras computes the answers that are kept layer by layer, with the weights of the Keras model.
    """
    request: Example = {"inputs": _to_lists(inputs), "outputs": {}, "tolerance": 0}
    if is_random or (half_dtype and name not in WITHOUT_CHOICES):
        return [request]
    if half_dtype:
        with keras.device("cpu:0"):
            answer = function.python_function(**inputs)
        return [example(name, inputs, answer, half_dtype, times=1) or request]
    with tf.device("cpu:0"), unoptimized():
        answer = function(**inputs)
    return [example(name, inputs, answer, half_dtype) or request]


def example(
    name: str, inputs: Mapping[str, Tensor], answer: Mapping[str, Tensor], half_dtype: str | None, times: int = 10
) -> Example | None:
    """An entry of the file for a signature; None if it would be too large.

    The tolerance of probabilities is that of the dtype; of other numbers it is `times` that, relative to the largest.
    A label, word or id that rounding may change is None, see `_without_near_ties`.

    Raises:
        ValueError: a number is NaN.
    """
    outputs = {key: np.asarray(value) for key, value in answer.items()}
    floats = {key: value for key, value in outputs.items() if value.dtype.kind == "f"}
    for key, value in floats.items():
        if np.isnan(value).any():
            given = [str(np.asarray(x).ravel()[:1]) for x in inputs.values()]
            raise ValueError(f"`model` must answer with numbers. Received: NaN in the output '{key}' for {given}")
    if sum(value.size for value in outputs.values()) > LARGEST_EXAMPLE:
        return None
    tolerance = TOLERANCES[half_dtype]
    if name != "classify" and not set(floats) <= {"probabilities"}:
        finite = [value[np.isfinite(value)] for value in floats.values()]
        tolerance *= times * max([1.0, *[float(np.max(np.abs(value), initial=0)) for value in finite]])
    if "probabilities" in floats:
        outputs = _without_near_ties(outputs, 2 * TOLERANCES[half_dtype])
    return {"inputs": _to_lists(inputs), "outputs": _to_lists(outputs), "tolerance": tolerance}


def _without_near_ties(outputs: Mapping[str, np.ndarray], distance: float) -> dict[str, np.ndarray]:
    """Outputs with None in place of each label, id, word or text that rounding of the probabilities may change.

    Two probabilities are near if they differ by at most `distance`. None replaces `labels` with a probability near the
    threshold; a `label` whose probability is near the second best; `top_ids` and `words` whose probability is near that
    of the one before or after; and a `text` in which a best word is near the second best. Their probabilities are
    compared in any case.
    """
    probabilities = outputs["probabilities"]
    descending = -np.sort(-probabilities, axis=-1)
    # The outputs may have only the best words: the next one has at most the last of these, and what is left of 1.
    rest = np.minimum(descending[..., -1:], np.maximum(1 - descending.sum(axis=-1, keepdims=True), 0))
    is_near_next = descending - np.concatenate([descending[..., 1:], rest], axis=-1) <= distance
    is_near = is_near_next.copy()
    is_near[..., 1:] |= is_near_next[..., :-1]
    unknown = {
        "labels": np.abs(probabilities - THRESHOLD) <= distance,
        "label": is_near_next[..., :1].any(axis=-1),
        "top_ids": is_near,
        "words": is_near,
    }
    if "words" in outputs:
        unknown["text"] = is_near_next[..., :1].any(axis=(-2, -1))
    nothing = np.array(None, object)
    return {
        key: np.where(unknown[key], nothing, value) if key in unknown and unknown[key].shape == value.shape else value
        for key, value in outputs.items()
    }


def differences(signatures: Mapping[str, Any], examples: Mapping[str, list[Example]]) -> dict[str, dict[str, Any]]:
    """{name: figures} of how far the answers of a loaded version are from those of the Keras model.

    If no answer of the Keras model was saved, "examples" is 0, the other figures are None, and the requests only run.

    Raises:
        ValueError: an answer has another shape, or its difference is larger than rounding explains.
    """
    figures = {}
    for name, rows in examples.items():
        largest, equal = 0.0, True
        specs = signatures[name].structured_input_signature[1]
        for row in [*rows[:1], *rows]:  # the first one twice, since the answers of a model may be random
            inputs = {key: tf.constant(from_json(value), specs[key].dtype) for key, value in row["inputs"].items()}
            with tf.device("cpu:0"):
                answer = signatures[name](**inputs)
            found = [0.0]
            for key, expected in row["outputs"].items():
                if answer[key].dtype.is_floating:
                    found.append(_largest_difference(name, key, answer[key].numpy(), expected))
                else:
                    equal = equal and _equal_if_known(_to_lists({key: answer[key]})[key], expected)
            difference = float(np.max(found))  # NaN, if one of them is
            if not difference <= TOO_FAR * row["tolerance"]:
                raise ValueError(
                    "`model` must give the same answers live and as a graph, in every call. Received: answers of "
                    f"{name!r} that differ by {difference:.1e} for {row['inputs']}"
                )
            largest = max(largest, difference)
        compared = [row for row in rows if row["outputs"]]
        figures[name] = {
            "examples": len(compared),
            "largest_difference": largest if compared else None,
            "tolerance": max([row["tolerance"] for row in compared], default=None),
            "others_equal": equal if compared else None,  # strings and integers
        }
    return figures


def write_parity(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the file into the folder of a version."""
    (folder / FILE).parent.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")


def classifier_answers(
    encoder: TextEncoder,
    tokenizer: Any,
    labels: Sequence[str],
    half_dtype: str | None,
    multi_label: str | None = None,
    text_pairs: bool = False,
) -> dict[str, Any]:
    """The answers of a live `TextClassifier` to `TEXTS` or `PAIRS`, one at a time, computed by Keras alone."""
    model = encoder.model
    are_logits = model.activation is keras.activations.linear
    texts = list(PAIRS) if text_pairs else [[one] for one in TEXTS]
    rows = []
    for text in texts:
        with keras.device("cpu:0"):
            ids, segments = encoder.tokenize(tokenizer, *[[part] for part in text])
            outputs = model(encoder.model_inputs(ids, segments), training=False)
            if are_logits:
                outputs = keras.ops.sigmoid(outputs) if multi_label else keras.ops.softmax(outputs)
        rows.append(keras.ops.convert_to_numpy(outputs)[0].tolist())
    if multi_label:
        found: dict[str, Any] = {
            "labels": [[x if p >= THRESHOLD else "" for x, p in zip(labels, row, strict=True)] for row in rows]
        }
    else:
        found = {"label": [labels[max(range(len(row)), key=row.__getitem__)] for row in rows]}
    given = zip((FEATURE, PAIR_FEATURE), zip(*texts, strict=True), strict=False)
    inputs = {name: list(parts) for name, parts in given}
    return {**inputs, **found, "probabilities": rows, "tolerance": TOLERANCES[half_dtype]}


def _to_lists(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {key: to_json(np.asarray(value).tolist()) for key, value in tensors.items()}


def to_json(value: Any) -> Any:
    """Turns bytes into str, and bytes that are not UTF-8 into {"b64": ...}, as a server's REST interface does."""
    if isinstance(value, list):
        return [to_json(one) for one in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def from_json(value: Any) -> Any:
    """Turns what `to_json` returned into values for `tf.constant`."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


def _equal_if_known(got: Any, expected: Any) -> bool:
    """Whether two values, or lists of lists of them, are equal, where those in `expected` are not None."""
    if not isinstance(expected, list):
        return expected is None or bool(got == expected)
    is_like = isinstance(got, list) and len(got) == len(expected)
    return is_like and all(_equal_if_known(one, other) for one, other in zip(got, expected, strict=True))


def _largest_difference(signature: str, output: str, got: np.ndarray, expected: Any) -> float:
    expected = np.asarray(expected, "float64")
    if not got.size and not expected.size:
        return 0.0
    if got.shape != expected.shape:
        raise ValueError(
            "`model` must have outputs of the same shape live and as a graph. Received: the output "
            f"'{output}' of {signature!r}, of shape {expected.shape} live and {got.shape} as a graph"
        )
    with np.errstate(invalid="ignore"):  # inf - inf, where both are equal
        return float(np.max(np.abs(np.where(got == expected, 0, got - expected)), initial=0))
