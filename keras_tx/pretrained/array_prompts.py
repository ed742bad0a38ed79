"""Converts the padded arrays of transformers' `generate` to rows of ids, and back.

B prompts, P tokens of a padded prompt, N new tokens, n generated results for each prompt.
"""

import math
from numbers import Integral
from typing import Any

import numpy as np
from keras import ops

from keras_tx.generation.prompts import RealRows, as_strings, is_text


def is_array(value: Any) -> bool:
    """Whether `value` is an array or tensor of integers."""
    return "int" in str(getattr(value, "dtype", ""))


def rows_of(ids: Any, mask: Any, padding_id: int | None) -> RealRows:
    """The real tokens of each row.

    Args:
        ids: (B, P) integers.
        mask: (B, P), 1 at real tokens. None: all ids but `padding_id` are real.
        padding_id: the id of padding tokens; None if there is none.

    Raises:
        ValueError: `ids` is not (B, P), or `mask` has another shape.
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
    return RealRows(row[kept] for row, kept in zip(ids, real, strict=True))


def check_source(rows: RealRows, padding_id: int | None) -> None:
    """Raises a `ValueError` if a token of a source has the padding id."""
    for number, row in enumerate(rows):
        if padding_id is not None and (row == padding_id).any():
            raise ValueError(
                f"`attention_mask` must be 0 at the padding id {padding_id} of a source, which the encoder takes for "
                f"padding. Received: 1 at such a token of row {number}, with the real tokens {row.tolist()}"
            )


def longest(prompts: Any, tokenizer: Any = None, start_token: Any = None) -> int:
    """The number of tokens of the longest prompt; for an array its width, padding tokens included.

    For what are no prompts it is 0: `generate` raises for these.

    Args:
        prompts: texts or ids.
        tokenizer: of texts.
        start_token: the token that begins each text; None or False if there is none.
    """
    if hasattr(prompts, "shape") and is_array(prompts):
        return int(prompts.shape[-1])
    if hasattr(prompts, "to_list"):
        prompts = prompts.to_list()
    if isinstance(prompts, np.ndarray) and not is_text(prompts):
        prompts = prompts.tolist()
    if is_text(prompts):
        texts, _ = as_strings(prompts)
        rows = tokenizer.tokenize(texts) if tokenizer is not None else [[]]
        rows = rows.to_list() if hasattr(rows, "to_list") else rows
        return max(len(row) for row in rows) + (start_token is not None and start_token is not False)
    if not isinstance(prompts, (list, tuple)):
        return 0
    if all(isinstance(one, Integral) for one in prompts):
        return len(prompts)
    return max((math.prod(np.shape(row)) for row in prompts), default=0)


def as_array(answers: Any, prompts: Any, padding_id: int) -> np.ndarray:
    """Generated rows of any lengths -> one array (B, P + N) or (B, n, P + N), padded on the right.

    Args:
        answers: one row for each prompt, or n rows. Each begins with its prompt.
        prompts: the prompts as the caller gave them, (B, P), padded on the left, and the rows of their real tokens;
            None if the answers do not begin with prompts.
        padding_id: the id that pads the rows.
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
