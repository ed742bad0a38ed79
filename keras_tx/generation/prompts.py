"""What users hand in -> arrays, and back: texts or ids, one or many, of any lengths.

B prompts, P slots of a prompt, N new tokens.
"""

from os.path import commonprefix

import numpy as np

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def is_text(inputs):
    """Whether `inputs` are strings: one, a list of them, or an array or tensor."""
    if isinstance(inputs, (list, tuple)):
        return any(isinstance(one, (str, bytes)) for one in inputs)
    if isinstance(inputs, (str, bytes)):
        return True
    if isinstance(inputs, np.ndarray) and inputs.dtype == object:
        return any(isinstance(one, (str, bytes)) for one in inputs.ravel())
    dtype = getattr(inputs, "dtype", None)
    return str(getattr(dtype, "name", dtype)).startswith(("str", "object", "<U", "bytes"))


def as_strings(inputs):
    """Texts -> list of str, and whether there was only one."""
    if isinstance(inputs, (str, bytes)):
        inputs, one = [inputs], True
    else:
        array = np.asarray(inputs.numpy() if hasattr(inputs, "numpy") else inputs, dtype=object)
        inputs, one = list(np.atleast_1d(array)), array.ndim == 0
    wrong = [text for text in inputs if not isinstance(text, (str, bytes))]
    if wrong:
        raise ValueError(f"`inputs` must be texts alone, or rows of ids. Received: {wrong[0]!r} among texts")
    return [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in inputs], one


def as_rows(name, inputs, padding_id, vocabulary_size):
    """Ids -> list of integer arrays without padding, and whether there was only one row.

    Args:
        name: of the argument, for errors.
        inputs: (P,) or (B, P) integers, or a list of rows of any lengths; `padding_id` is left out wherever it stands.
        padding_id: None if nothing is padding.
        vocabulary_size: V.
    """
    if hasattr(inputs, "to_list"):  # a ragged tensor
        inputs = inputs.to_list()
    if isinstance(inputs, np.ndarray) and inputs.dtype == object:  # rows of any lengths
        inputs = inputs.tolist()
    if isinstance(inputs, (list, tuple)) and len({_depth(row) for row in inputs}) > 1:
        raise ValueError(f"`{name}` must be rows of ids, (P,) or (B, P). Received: {inputs!r}")
    if isinstance(inputs, (list, tuple)):
        one = all(np.ndim(row) == 0 for row in inputs)
        rows = [np.asarray(inputs)] if one else [np.asarray(row) for row in inputs]
    else:
        array = np.asarray(inputs.detach().cpu() if hasattr(inputs, "detach") else inputs)
        one = array.ndim == 1
        rows = list(np.atleast_2d(array)) if array.ndim else [array]
    if not rows or any(row.ndim != 1 for row in rows):
        shapes = [row.shape for row in rows]
        raise ValueError(f"`{name}` must be rows of ids, (P,) or (B, P), and not empty. Received: shapes {shapes}")
    return [_tokens(name, row, padding_id, vocabulary_size) for row in rows], one


def _depth(row):
    return 1 + _depth(row[0]) if isinstance(row, (list, tuple)) and row else np.ndim(row)


def _tokens(name, row, padding_id, vocabulary_size):
    if row.size and row.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers, or texts with a `tokenizer`. Received: dtype {row.dtype}")
    tokens = row if padding_id is None else row[row != padding_id]
    if not tokens.size:
        raise ValueError(f"`{name}` must have a token in each row. Received: {row.tolist()}")
    if not 0 <= tokens.min() <= tokens.max() < vocabulary_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary_size)][0]
        raise ValueError(f"`{name}` must be in [0, {vocabulary_size}). Received: {wrong}")
    return tokens.astype("int32")


def padded(rows, length, padding_id, left):
    """Rows of any lengths -> (B, length) int32, padded on the left or on the right."""
    ids = np.full((len(rows), length), padding_id, "int32")
    for row, tokens in zip(ids, rows, strict=True):
        row[length - len(tokens) if left else 0 : length if left else len(tokens)] = tokens
    return ids


class Pieces:
    """Texts that grow, again and again -> what is new in each of them since the last time.

    Tokens that follow may change the end of a text, as where bytes are tokens and a character has several. So a piece
    waits for a few more texts.
    """

    def __init__(self, texts, wait=3):
        self._recent, self._sent = [texts] * (wait + 1), [len(text) for text in texts]

    def new_in(self, texts, last):
        """The pieces of `texts` that nothing will change; all that is left if these are the `last`."""
        self._recent = [*self._recent[1:], texts]
        settled = texts if last else [commonprefix(row) for row in zip(*self._recent, strict=True)]
        pieces = [text[sent:] for text, sent in zip(settled, self._sent, strict=True)]
        self._sent = [sent + len(piece) for sent, piece in zip(self._sent, pieces, strict=True)]
        return pieces


def until_stop(ids, stop_tokens):
    """The ids (N,) up to the first stop token, which is included."""
    stops = np.flatnonzero(np.isin(ids, stop_tokens))
    return ids[: stops[0] + 1] if len(stops) else ids
