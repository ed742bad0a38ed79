"""Arrays for `generate`, laid out as in transformers: ids and masks (B, P) -> rows, and answers -> an array.

B prompts, P slots of a prompt, N new tokens, n answers for each prompt.
"""

from numbers import Integral
from typing import Any

import numpy as np
from keras import ops

from keras_tx.generation.prompts import as_strings, is_text


def is_array(value: Any) -> bool:
    """Whether this is an array or tensor of integers."""
    return "int" in str(getattr(value, "dtype", ""))


def rows_of(ids: Any, mask: Any, padding_id: int | None) -> list[np.ndarray]:
    """The real tokens of each row.

    Args:
        ids: (B, P) integers.
        mask: (B, P), 1 at real tokens; None: all that are not `padding_id`.
        padding_id: None if no id is padding.

    Raises:
        ValueError: for other shapes.
    """
    ids = np.asarray(ops.convert_to_numpy(ids))
    if mask is None:
        real = np.ones_like(ids, "bool") if padding_id is None else ids != padding_id
    else:
        real = np.asarray(ops.convert_to_numpy(mask)).astype("bool")
    if ids.ndim != 2 or real.shape != ids.shape:
        raise ValueError(
            "The ids must be (B, P), and their mask of the same shape. Received: ids of shape "
            f"{ids.shape}, a mask of shape {real.shape}"
        )
    return [row[kept] for row, kept in zip(ids, real, strict=True)]


def longest(prompts: Any, tokenizer: Any = None) -> int:
    """The tokens of the longest prompt, as `generate` takes them; of an array its width, padding included."""
    if hasattr(prompts, "shape") and is_array(prompts):
        return int(prompts.shape[-1])
    if hasattr(prompts, "to_list"):
        prompts = prompts.to_list()
    if is_text(prompts):
        texts, _ = as_strings(prompts)
        rows = tokenizer.tokenize(texts) if tokenizer is not None else [[]]
        rows = rows.to_list() if hasattr(rows, "to_list") else rows
        return max(len(row) for row in rows) + (getattr(tokenizer, "cls_id", None) is not None)
    if all(isinstance(one, Integral) for one in prompts):
        return len(prompts)
    return max(np.size(row) for row in prompts)


def laid_out(answers: Any, prompts: Any, padding_id: int) -> np.ndarray:
    """Answers to prompts, rows of any lengths -> (B, P + N) or (B, n, P + N), filled up behind the end.

    Args:
        answers: for each prompt a row, or n rows; they begin with the prompt.
        prompts: (ids, rows): the prompts as they came, (B, P), padded on the left, and their real tokens; None where
            answers have no prompts before them.
        padding_id: fills up.
    """
    several = [rows if np.ndim(rows[0]) else [rows] for rows in answers]
    before = [0] * len(several) if prompts is None else [len(row) for row in prompts[1]]
    new = [[row[count:] for row in rows] for count, rows in zip(before, several, strict=True)]
    width = max(len(row) for rows in new for row in rows)
    array = np.full((len(new), len(new[0]), width), padding_id, "int32")
    for place, rows in zip(array, new, strict=True):
        for line, row in zip(place, rows, strict=True):
            line[: len(row)] = row
    if prompts is not None:
        ids = np.asarray(ops.convert_to_numpy(prompts[0]), "int32")[:, None]
        array = np.concatenate([np.repeat(ids, array.shape[1], axis=1), array], axis=2)
    return array if np.ndim(answers[0][0]) else array[:, 0]
