"""Compares decode steps, and padded sources, with the full model, for models with operations of unknown kinds.

T tokens, V vocabulary. The steps are compared to the full model at the first tokens and at the last ones of a row, so
that an operation that looks back, or that counts tokens, is found in either case.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.generation.prompts import bucketed
from keras_tx.types import Tensor

_LONG, _SHORT = 32, 5  # T, and T for a model that does not take the long row
_NUM_TOKENS = 2  # after each prefill: in as many decode steps, or in one
_RULE = "A generative model must use other tokens, and the position of a token, only in layers of keras_tx."
_RULE_OF_DRAFTS = (
    "With `Speculative` a decode step gets several tokens, from slot `start` on. The model must return the logits of "
    "each of them, equal to those of a call with the whole sequence."
)


def check_steps(model: Any, unknown: list[Any], *, at_once: bool = False) -> None:
    """Raises if decode steps give other logits than the full model.

    Args:
        model: an `IncrementalModel`.
        unknown: the operations of which it is not known whether they mix tokens.
        at_once: whether a step gets several tokens, as in speculative decoding.

    A model whose logits are NaN in any case is not compared: `generate` raises an error for these itself.

    Raises:
        ValueError: they do, or cannot run step by step.
    """
    noise = _noise(unknown)
    for longest, values in ((_LONG, noise), (_SHORT, noise), (_SHORT, [])):
        with keras.StatelessScope(values):
            rows = _rows(model, longest)
            try:
                expected = ops.convert_to_numpy(ops.cast(model.full_logits(rows), "float32"))[0]  # (T, V)
            except Exception:  # the model does not take a row of this length, or layers of it not these values
                if longest == _SHORT and not values:
                    raise
                continue
            if not np.isnan(expected).any():
                _compare(model, rows, expected, [operation.name for operation in unknown], at_once)
                return


def padding_changes_nothing(model: Any, operations: Iterable[Any]) -> bool:
    """Whether padding at the end of sources leaves the logits of a model as they are, up to rounding.

    A model that takes no padding, or whose logits are NaN, counts as one that it changes.

    Args:
        model: an `IncrementalModel`, which has a source with a padding id.
        operations: of the model, with weights that may still be constant.
    """
    most = bucketed(_SHORT) if model.max_source_length is None else min(bucketed(_SHORT), model.max_source_length)
    with keras.StatelessScope(_noise(operations)):
        *sources, target = _rows(model, max(min(_SHORT, most // 2), 1))
        padded = []
        for name, ids in zip(model.sources, sources, strict=True):
            owner = model.beside[name].source if name in model.beside else name
            has_padding = any(model.padding_ids[one] is not None for one in model.joined.get(owner, [owner]))
            more = max(most - ids.shape[1], 0) if has_padding else 0
            padded.append(ops.pad(ids, [[0, 0], [0, more]], constant_values=model.padding_ids[name] or 0))
        try:
            outputs = [model.full_logits([*rows, target]) for rows in (sources, padded)]
        except Exception:  # each backend has its own error for shapes that do not fit
            return False
        alone, with_padding = (ops.convert_to_numpy(ops.cast(logits, "float32"))[0] for logits in outputs)
    finite = np.where(np.isfinite(alone), alone, 0.0)
    return bool(_difference(with_padding, alone) <= 1e-5 * np.ptp(finite, axis=-1).max())


def _compare(model: Any, rows: list[Tensor], expected: np.ndarray, unknown: list[str], at_once: bool) -> None:
    rule = _RULE_OF_DRAFTS if at_once else _RULE
    length = rows[-1].shape[1]
    if at_once and len(expected) < length:
        raise ValueError(f"{rule} Received: a model that returns logits for only {len(expected)} of {length} tokens")
    try:
        found = _logits_of_steps(model, rows, at_once)
    except Exception as error:  # each backend has its own error for shapes that do not fit
        raise ValueError(
            f"{rule} Received: decode steps that fail, because of one of {unknown}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]:.200}"
        ) from error
    # Counted from the end, because a model may return the logits of its last tokens alone.
    places = {place: logits for place, logits in found.items() if place >= -len(expected)}
    difference = np.max([_difference(logits, expected[place]) for place, logits in places.items()])  # NaN if one is
    is_float32 = all(getattr(one, "compute_dtype", "float32") == "float32" for one in model.target_operations)
    finite = np.where(np.isfinite(expected), expected, 0.0)
    if not difference <= (1e-3 if is_float32 else 0.1) * np.ptp(finite, axis=-1).max() + 1e-6:
        raise ValueError(
            f"{rule} Received: decode steps that differ from the full model by {difference:.1e}, because of one of "
            f"{unknown}"
        )


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of two logits; those that a model makes minus infinity, to forbid them, are equal."""
    is_equal = found == expected
    return float(np.abs(np.where(is_equal, 0.0, found) - np.where(is_equal, 0.0, expected)).max())


def _rows(model: Any, longest: int) -> list[Tensor]:
    """Ids (1, T) for `sources`, in their order, and for `target`, without padding."""
    lengths = {tensor.name: tensor.shape[1] for tensor in model.model.inputs}
    limits = [limit for limit in (longest, model.max_length, model.max_source_length) if limit]
    rows: list[Tensor] = []
    for name in [*model.sources, model.target]:
        size, padding_id = model.vocabulary_sizes[name] or model.vocabulary_size, model.padding_ids[name]
        tokens = [token for token in range(min(size, 50)) if token != padding_id]
        if name in model.beside:  # segment 0, or a mask of real tokens
            tokens = [0 if model.beside[name].has_segments else 1]
        ids = np.random.default_rng(len(rows)).choice(tokens, (1, lengths[name] or min(limits)))
        rows.append(ops.convert_to_tensor(ids, dtype="int32"))
    return rows


def _logits_of_steps(model: Any, rows: list[Tensor], at_once: bool) -> dict[int, np.ndarray]:
    """{place of a token, -1 for the last: logits (V,)}, from steps after a short prefill and after a long one."""
    *sources, ids = rows
    length, found = ids.shape[1], {}
    real = ops.ones_like(ids, dtype="bool")
    for end in sorted({min(_SHORT, length), length}):
        values, cache = model.prepare(sources, 1, length)
        first = max(end - _NUM_TOKENS, 1)
        stops = [end][: end - first] if at_once else range(first + 1, end + 1)
        for start, stop in itertools.pairwise((0, first, *stops)):
            positions = ops.arange(start, stop, dtype="int32")[None]
            places = {"mask": real, "real": real[:, start:stop], "positions": positions, "start": start}
            logits, cache = model.step(ids[:, start:stop], values, cache, **places, every_token=at_once)
            logits = ops.convert_to_numpy(logits)[0]  # (T, V) or (V,)
            for place, of_token in enumerate(np.atleast_2d(logits)[::-1], start=1):
                found[stop - place - length] = of_token
    return found


def _noise(operations: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    """Random values for those variables of the operations that are constant.

    A layer whose gate begins at zero, as in ReZero (Bachlechner et al. 2020, arXiv:2003.04887), is only seen with
    another value.
    """
    layers = [one for one in operations if isinstance(one, keras.layers.Layer)]
    variables = {id(variable): variable for layer in layers for variable in layer.variables}
    rng, found = np.random.default_rng(0), []
    for variable in variables.values():
        is_float = variable.dtype in ("float16", "bfloat16", "float32", "float64")
        if is_float and np.prod(variable.shape) and bool(ops.max(variable) == ops.min(variable)):
            # Positive, because it may be a variance; small in a matrix, so that its products are not large.
            fan_in = np.prod(variable.shape[:-1])
            value = rng.uniform(0.5, 1.5, variable.shape) / np.sqrt(fan_in)
            found.append((variable, ops.convert_to_tensor(value, dtype=variable.dtype)))
    return found
