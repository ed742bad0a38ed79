"""Converts the inputs of `generate` to padded arrays of ids, and new ids to pieces of text.

B prompts, P slots of a prompt, N ids of a row, V vocabulary.
"""

from os.path import commonprefix
from typing import Any

import keras
import numpy as np

from keras_tx.optional import Lazy

jax, tf = Lazy("jax"), Lazy("tensorflow")


def check_concrete(inputs: Any) -> None:
    """Raises for symbolic inputs, and within a TensorFlow function, where results have no values."""
    given = [*inputs.values()] if isinstance(inputs, dict) else [inputs]
    rows = [row for one in given if isinstance(one, (list, tuple)) for row in one]
    symbolic = [x for x in (*given, *rows) if _is_symbolic(x)]
    if symbolic or (keras.backend.backend() == "tensorflow" and tf.inside_function()):
        received = f"a {type(symbolic[0]).__name__}" if symbolic else "a call within a TensorFlow function"
        raise TypeError(
            "`inputs` must have values: `generate` and `stream` cannot run in `tf.function`, `Dataset.map`, `jax.jit` "
            "or a functional model. For a TensorFlow graph, export the model with `keras_tx.serving.export`. Received: "
            f"{received}"
        )


def _is_symbolic(x: Any) -> bool:
    if keras.backend.backend() == "jax" and isinstance(x, jax.core.Tracer):
        return True
    is_of_graph = hasattr(x, "dtype") and hasattr(x, "graph")  # of TensorFlow, which need not be the backend
    return isinstance(x, keras.KerasTensor) or is_of_graph


def of_sides(tokenizer: Any, source_tokenizer: Any, sources: Any) -> tuple[Any, Any]:
    """The tokenizers of targets (or prompts) and of sources.

    A `MarianTokenizer` alone is the one of its sources: its attribute `target` segments texts of the other language.
    """
    if sources and source_tokenizer is None and getattr(tokenizer, "target", None) is not None:
        return tokenizer.target, tokenizer
    return tokenizer, source_tokenizer or tokenizer


def is_text(inputs: Any) -> bool:
    """Whether `inputs` are text: a string, or a list, an array or a tensor of strings."""
    if isinstance(inputs, (list, tuple)):
        return any(isinstance(item, (str, bytes)) for item in inputs)
    if isinstance(inputs, (str, bytes)):
        return True
    if isinstance(inputs, np.ndarray) and inputs.dtype == object:
        return any(isinstance(item, (str, bytes)) for item in inputs.ravel())
    dtype = getattr(inputs, "dtype", None)
    return str(getattr(dtype, "name", dtype)).startswith(("str", "object", "<U", "bytes"))


def as_strings(inputs: Any) -> tuple[list[str], bool]:
    """Texts -> a list of `str`, and whether there was a single text instead of a list."""
    if isinstance(inputs, (str, bytes)):
        inputs, is_single = [inputs], True
    else:
        array = np.asarray(inputs.numpy() if hasattr(inputs, "numpy") else inputs, dtype=object)
        inputs, is_single = list(np.atleast_1d(array)), array.ndim == 0
    wrong = [text for text in inputs if not isinstance(text, (str, bytes))]
    if wrong:
        raise ValueError(f"`inputs` must be only texts, or only rows of ids. Received: {wrong[0]!r} among texts")
    return [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in inputs], is_single


class RealRows(list[np.ndarray]):
    """Rows of ids (P,) without padding, whose tokens may also have the padding id."""


def as_rows(
    name: str, inputs: Any, padding_id: int | None, vocabulary_size: int, *, is_target: bool = False
) -> tuple[list[np.ndarray], bool]:
    """Ids -> a list of integer arrays without padding, and whether there was a single row instead of a list.

    Args:
        name: of the argument, for errors.
        inputs: (P,) or (B, P) integers, or a list of rows of any lengths.
        padding_id: the id that is removed wherever it occurs, except from `RealRows`; None if the model has none.
        vocabulary_size: V.
        is_target: whether rows may begin with the padding id, as targets of T5 do. Then it is only removed from arrays
            (B, P), because rows in a list, and a single row, need no padding.

    Raises:
        TypeError: for other objects, such as datasets and generators.
        ValueError: for ids outside the vocabulary, rows without tokens, and targets (B, P) that all begin with the
            padding id.
    """
    padding_id = None if isinstance(inputs, RealRows) else padding_id
    if hasattr(inputs, "to_list"):  # a ragged tensor
        inputs = inputs.to_list()
    if isinstance(inputs, np.ndarray) and inputs.dtype == object:  # rows of any lengths
        inputs = inputs.tolist()
    if isinstance(inputs, (list, tuple)) and len({_depth(row) for row in inputs}) > 1:
        raise ValueError(f"`{name}` must be rows of ids, (P,) or (B, P). Received: {inputs!r}")
    if isinstance(inputs, (list, tuple)):
        is_single = all(np.ndim(row) == 0 for row in inputs)
        padding_id = None if is_target else padding_id
        rows = [np.asarray(inputs)] if is_single else [np.asarray(row) for row in inputs]
    else:
        array = np.asarray(inputs.detach().cpu() if hasattr(inputs, "detach") else inputs)
        if array.dtype == object:  # NumPy made no array of numbers of it
            raise TypeError(
                f"`{name}` must be texts, or rows of ids, (P,) or (B, P). Received: an object of type "
                f"{type(inputs).__name__}"
            )
        is_single = array.ndim == 1
        rows = list(np.atleast_2d(array)) if array.ndim else [array]
        if is_target and padding_id is not None:
            padding_id = None if is_single else _padding_id_of_targets(name, array, padding_id)
    if not rows or any(row.ndim != 1 for row in rows):
        shapes = [row.shape for row in rows]
        raise ValueError(f"`{name}` must be rows of ids, (P,) or (B, P), and not empty. Received: shapes {shapes}")
    return [_checked_row(name, row, padding_id, vocabulary_size) for row in rows], is_single


def _padding_id_of_targets(name: str, array: np.ndarray, padding_id: int) -> int:
    """The padding id of targets (B, P); raises a `ValueError` if all begin with it, which may be their start token."""
    if array.ndim == 2 and array.size and (array[:, 0] == padding_id).all():
        raise ValueError(
            f"`{name}` must be a list of rows if targets begin with the padding id: in an array it may be padding. "
            f"Received: an array of shape {array.shape} whose rows all begin with the padding id {padding_id}"
        )
    return padding_id


def _depth(row: Any) -> int:
    return 1 + _depth(row[0]) if isinstance(row, (list, tuple)) and row else int(np.ndim(row))


def _checked_row(name: str, row: np.ndarray, padding_id: int | None, vocabulary_size: int) -> np.ndarray:
    """The real tokens of a row (N,), int32."""
    if row.size and row.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers, or texts with a `tokenizer`. Received: dtype {row.dtype}")
    tokens = row if padding_id is None else row[row != padding_id]
    if not tokens.size:
        raise ValueError(f"`{name}` must have a token in each row. Received: {row.tolist()}")
    if not 0 <= tokens.min() <= tokens.max() < vocabulary_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary_size)][0]
        raise ValueError(f"`{name}` must be in [0, {vocabulary_size}). Received: {wrong}")
    return tokens.astype("int32")


def bucketed(length: int, smallest: int = 16) -> int:
    """`length`, rounded up to a power of two: programs are compiled for these few lengths only."""
    return max(smallest, 1 << (max(length, 1) - 1).bit_length())


def padded(rows: list[np.ndarray], length: int, padding_id: int, left: bool) -> np.ndarray:
    """Rows of any lengths -> (B, length) int32, padded on the left or on the right."""
    ids = np.full((len(rows), length), padding_id, "int32")
    for row, tokens in zip(ids, rows, strict=True):
        row[length - len(tokens) if left else 0 : length if left else len(tokens)] = tokens
    return ids


def until_stop(ids: np.ndarray, stop_tokens: tuple[int, ...]) -> np.ndarray:
    """The ids (N,) up to and with the first stop token."""
    stops = np.flatnonzero(np.isin(ids, stop_tokens))
    return ids[: stops[0] + 1] if len(stops) else ids


class TextPieces:
    """Cuts growing texts into the pieces that a stream yields.

    A later token may change the end of a text, for example if tokens are bytes and a character has several of them. So
    a piece is held back until it has stayed the same for `wait` further steps.

    Args:
        texts: the prompts, which the stream does not yield.
        wait: the number of steps for which a piece is held back.
    """

    def __init__(self, texts: list[str], wait: int = 3):
        self._recent, self._yielded = [texts] * (wait + 1), [len(text) for text in texts]

    def next(self, texts: list[str], is_last: bool) -> list[str]:
        """The new pieces of `texts`, decoded from all tokens so far; all that is left if these are the last."""
        self._recent = [*self._recent[1:], texts]
        settled = texts if is_last else [commonprefix(row) for row in zip(*self._recent, strict=True)]
        pieces = [text[start:] for text, start in zip(settled, self._yielded, strict=True)]
        self._yielded = [start + len(piece) for start, piece in zip(self._yielded, pieces, strict=True)]
        return pieces
