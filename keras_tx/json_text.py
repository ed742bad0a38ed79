"""Parses JSON of unknown origin, where what cannot be used raises ValueError and nothing else, and writes it."""

import json
import math
from collections.abc import Callable
from typing import Any

DEEPEST = 100  # levels; Python's own limit depends on how deep the calls around are, and its copies reach it earlier


def of_file(content: Any) -> str:
    """The text of a file, as transformers writes it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def parse(
    text: str, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None, finite: bool = False
) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: the text.
        object_pairs_hook: as for `json.loads`.
        finite: whether numbers must be finite; if not, NaN, Infinity and 1e999 are accepted, as by `json.loads`.

    Raises:
        ValueError: the text is not JSON, is nested more than `DEEPEST` levels deep, or has a number that is not finite.
    """
    number = _finite if finite else None
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook, parse_constant=number, parse_float=number)
    except RecursionError as error:
        raise ValueError(f"values nested more than {DEEPEST} levels deep") from error
    _check_depth(value)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text}")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [part for part in level if isinstance(part, (dict, list))]
        if not level:
            return
        level = [part for parts in level for part in (parts.values() if isinstance(parts, dict) else parts)]
    raise ValueError(f"values nested more than {DEEPEST} levels deep")
