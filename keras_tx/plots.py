"""Plots of training curves, attention maps and confusion matrices, as matplotlib figures and PNG files.

N heads, T queries, S keys, L layers, C classes. No function opens a window or changes matplotlib's global state.
"""

import functools
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_tx import training_history
from keras_tx.checks import integer, local_path, one_of
from keras_tx.optional import Lazy

__all__ = ["attention_map", "confusion_matrix", "training_curves"]

figures = Lazy("matplotlib.figure", extra="plots")
fonts = Lazy("matplotlib.font_manager", extra="plots")
ticker = Lazy("matplotlib.ticker", extra="plots")

_LOWER_IS_BETTER = "loss error perplexity ppl entropy mse mae mape msle divergence hinge poisson cosh false_".split()
_NOT_RATED = ("lr", "learning_rate")
# Fonts with the characters that DejaVu Sans lacks; any other installed font comes after them.
_PREFERRED = """Noto Sans,Noto Sans CJK SC,Noto Sans CJK JP,Noto Sans SC,Noto Sans JP,Noto Sans KR,Source Han Sans,\
WenQuanYi Micro Hei,PingFang SC,Hiragino Sans,Microsoft YaHei,Malgun Gothic,Noto Sans Arabic,Noto Naskh Arabic,\
Noto Sans Devanagari,Nirmala UI,Mangal,Kohinoor Devanagari,Noto Emoji,Segoe UI Emoji,Symbola,Arial Unicode MS,\
Unifont""".split(",")
# Fonts of formulas, whose characters are not those that their numbers say, and the font of boxes.
_NO_TEXT = tuple("STIXNonUnicode STIXSize cmb10 cmex10 cmmi10 cmr10 cmss10 cmsy10 cmti10 cmtt10 Last".split())
# Zero-width joiner and non-joiner, and variation selectors: they shape the characters beside them.
_SHAPING = {"\u200c", "\u200d", *map(chr, range(0xFE00, 0xFE10))}
_SHOWN = 10  # characters in a warning


def training_curves(
    history: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    validation_freq: int | Sequence[int] = 1,
) -> Any:
    """Draws one panel for each metric, with its training and validation values over the epochs.

    A circle marks the best epoch: the one with the lowest loss, error, perplexity or divergence, or with the highest
    value of any other metric; that with the best validation value if there are any. A learning rate has no best epoch.

    Args:
        history: the `History` that `fit` returned, its dict `.history`, or the path of the CSV file of a
            `keras.callbacks.CSVLogger`.
        path: the PNG file to write, in a folder that is made if it does not exist. None: no file.
        validation_freq: the `validation_freq` of `fit`, which a History does not tell; the file of a CSVLogger has the
            epoch of each value.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        TypeError: `history` is none of these.
        ValueError: there is no epoch, a value is not a number, a row of the file has more values than its header has
            names, or the values of a metric are not as many as its epochs.
        FileNotFoundError: there is no such CSV file.

    Examples:
        >>> figure = keras_tx.plots.training_curves({"loss": [0.9, 0.5, 0.4], "val_loss": [1.0, 0.6, 0.7]})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['train', 'validation', 'best: 0.6 in epoch 2']
    """
    curves = training_history.curves(history, validation_freq)
    metrics = list(dict.fromkeys(name.removeprefix("val_") for name in curves))
    columns = min(len(metrics), 3)
    rows = math.ceil(len(metrics) / columns)
    figure = figures.Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
    families = _font_families(metrics)
    for index, metric in enumerate(metrics):
        axes = figure.add_subplot(rows, columns, index + 1)
        rated: tuple[Any, Any] = ([], [])
        for name, label, color in ((metric, "train", "tab:blue"), (f"val_{metric}", "validation", "tab:orange")):
            if name in curves:
                rated = curves[name]
                axes.plot(*rated, label=label, color=color, marker=".")
        if metric not in _NOT_RATED and np.isfinite(rated[1]).any():
            lower = any(word in metric.lower() for word in _LOWER_IS_BETTER)
            values = np.where(np.isfinite(rated[1]), rated[1], np.inf if lower else -np.inf)
            best = values.argmin() if lower else values.argmax()
            where, value = rated[0][best], values[best]
            label = f"best: {value:.4g} in epoch {where}"
            axes.plot([where], [value], "o", color="black", markersize=9, fillstyle="none", label=label)
        axes.set_xlabel("epoch")
        axes.set_ylabel(metric.replace("_", " "), parse_math=False, fontfamily=families)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return _saved(figure, path)


def attention_map(
    scores: Any,
    tokens: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    layer: int | None = None,
    head: int | str | None = None,
    title: str | None = None,
) -> Any:
    """Draws how much each query token (a row) attends to each key token (a column), one panel for each head.

    Darker squares have higher scores. All panels share one scale, from zero to the highest score. Tokens may be of any
    script: characters that matplotlib's own font lacks are drawn with the fonts that are installed. One warning names
    those that no font has.

    Args:
        scores: (N, T, S), the attention scores of one example in one layer, or (L, N, T, S), those of a stack of
            layers; each layer is then a row of panels. To leave out padding, slice the scores and the tokens.
        tokens: T strings, the query tokens; also the key tokens if `key_tokens` is None.
        path: the PNG file to write, in a folder that is made if it does not exist. None: no file.
        key_tokens: S strings, the key tokens of cross-attention.
        layer: the index of one layer of a stack to draw. None: all layers.
        head: the index of one head to draw, or "mean" for the mean over the heads. None: all heads.
        title: a title above the panels.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        TypeError: tokens are not a list of strings, or the title is not a string.
        ValueError: scores have another rank, are negative or not finite, their shape does not match the tokens, or
            there is no such layer or head.

    Examples:
        >>> scores = np.array([[[1.0, 0.0], [0.25, 0.75]]])
        >>> figure = keras_tx.plots.attention_map(scores, ["the", "cat"], "map.png", title="One head")
        >>> panel = figure.axes[0]
        >>> panel.get_title(), [label.get_text() for label in panel.get_xticklabels()]
        ('head 0', ['the', 'cat'])
        >>> panel.images[0].get_array().tolist()
        [[1.0, 0.0], [0.25, 0.75]]
    """
    scores, names = _selected(_checked_scores(scores), layer, head)
    rows, columns, queries, keys = scores.shape
    query_labels = _tick_labels("tokens", tokens, queries, scores)
    key_labels = _tick_labels(
        "key_tokens" if key_tokens is not None else "tokens", tokens if key_tokens is None else key_tokens, keys, scores
    )
    panels, titles = scores.reshape(-1, queries, keys), [name for row in names for name in row]
    if rows == 1:
        columns = min(columns, 4)
        rows = math.ceil(len(panels) / columns)
    side = min(max(1.8, 0.2 * max(queries, keys)), 9, 36 / columns)  # inches
    size = min(9.0, 0.8 * 72 * side / max(queries, keys))  # points
    figure = figures.Figure(figsize=(side * columns + 2, side * rows * queries / max(queries, keys) + 1.4))
    figure.set_layout_engine("constrained")
    title = _title(title)
    families = _font_families([*query_labels, *key_labels, title or ""])
    text = {"parse_math": False, "fontsize": size, "fontfamily": families}
    high = float(scores.max()) or 1.0
    drawn = []
    for index, (panel, panel_title) in enumerate(zip(panels, titles, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        drawn.append(axes)
        image = axes.imshow(panel, cmap="Blues", vmin=0, vmax=high, interpolation="nearest")
        axes.set_title(panel_title, fontsize=9)
        axes.set_xticks(range(keys) if index + columns >= len(panels) and size >= 4 else [])
        axes.set_yticks(range(queries) if index % columns == 0 and size >= 4 else [])
        if len(axes.get_xticks()):
            axes.set_xticklabels(key_labels, rotation=90, **text)
        if len(axes.get_yticks()):
            axes.set_yticklabels(query_labels, **text)
        axes.tick_params(length=2)
    figure.colorbar(image, ax=drawn, label="attention score", shrink=0.8, aspect=16 + 8 * rows)
    figure.supxlabel("key tokens", fontsize=9)
    figure.supylabel("query tokens", fontsize=9)
    if title is not None:
        figure.suptitle(title, parse_math=False, fontfamily=families)
    return _saved(figure, path)


def confusion_matrix(
    labels: Any,
    predictions: Any,
    names: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Any:
    """Draws how many examples of each class (a row) a classifier put into each class (a column).

    The colour of a square is its part of the row, so that rare classes are seen as well as frequent ones; the number in
    it is the count of examples. Right answers lie on the diagonal.

    Args:
        labels: (B,), the ids of the classes of examples.
        predictions: (B,), the ids of the classes that a model gave them.
        names: the C names of the classes.
        path: the PNG file to write, in a folder that is made if it does not exist. None: no file.
        title: a title above the matrix.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        TypeError: names are not a list of strings, or the title is not a string.
        ValueError: labels or predictions are not integers in [0, C), there is none, or their numbers differ.

    Examples:
        >>> figure = keras_tx.plots.confusion_matrix([0, 0, 1], [0, 1, 1], ["dull", "moving"], "confusion.png")
        >>> figure.axes[0].images[0].get_array().tolist()
        [[0.5, 0.5], [0.0, 1.0]]
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['1', '1', '0', '1']
    """
    shown = _printable("names", names)
    size = len(shown)
    rows, columns = _class_ids("labels", labels, size), _class_ids("predictions", predictions, size)
    if len(rows) != len(columns):
        raise ValueError(
            f"`predictions` must be as many as `labels`. Received: {len(columns)} predictions, {len(rows)} labels"
        )
    counts = np.zeros((size, size), int)
    np.add.at(counts, (rows, columns), 1)
    parts = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(max(3.0, 0.5 * size), 14.0)  # inches
    font = min(9.0, 0.35 * 72 * side / size)  # points
    title = _title(title)
    families = _font_families([*shown, title or ""])
    text = {"parse_math": False, "fontsize": font, "fontfamily": families}
    figure = figures.Figure(figsize=(side + 2, side + 1), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="prediction", ylabel="label")
    axes.set_xticks(range(size), shown, rotation=90, **text)
    axes.set_yticks(range(size), shown, **text)
    if font >= 4:
        for row, column in np.ndindex(size, size):
            color = "white" if parts[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color, fontsize=font)
    figure.colorbar(image, ax=axes, label="part of the label", shrink=0.8)
    if title is not None:
        figure.suptitle(title, parse_math=False, fontfamily=families)
    return _saved(figure, path)


def _checked_scores(given: Any) -> np.ndarray:
    scores: np.ndarray = np.asarray(keras.ops.convert_to_numpy(given), dtype="float32")
    if scores.ndim not in (3, 4) or not scores.size:
        raise ValueError(
            "`scores` must be (heads, queries, keys) or (layers, heads, queries, keys), of one example. Received: "
            f"shape {scores.shape}"
        )
    if not np.isfinite(scores).all() or scores.min() < 0:
        raise ValueError(f"`scores` must be finite and not negative. Received: {scores.min()} to {scores.max()}")
    return scores


def _selected(scores: np.ndarray, layer: int | None, head: int | str | None) -> tuple[np.ndarray, list[list[str]]]:
    """The scores (rows, columns, T, S) of the layers and heads to draw, and the titles of the panels."""
    stacked = scores.ndim == 4
    if layer is not None and not stacked:
        raise ValueError(f"`layer` must be None for the scores of one layer. Received: layer={layer}")
    scores = scores if stacked else scores[None]
    layers = list(range(len(scores))) if layer is None else [_index("layer", layer, len(scores))]
    heads: list[str]
    if isinstance(head, str):
        one_of("head", head, [*range(scores.shape[1]), "mean"])
        scores, heads = scores.mean(axis=1, keepdims=True), ["mean of heads"]
    else:
        indices = list(range(scores.shape[1])) if head is None else [_index("head", head, scores.shape[1])]
        scores, heads = scores[:, indices], [f"head {index}" for index in indices]
    names = [[f"layer {index}, {name}" if stacked else name for name in heads] for index in layers]
    return scores[layers], names


def _index(name: str, value: Any, count: int) -> int:
    return int(one_of(name, integer(name, value), range(count)))


def _tick_labels(argument: str, tokens: Any, count: int, scores: np.ndarray) -> list[str]:
    texts = _printable(argument, tokens)
    if len(texts) != count:
        raise ValueError(
            f"`{argument}` must have one string for each of the {count} rows or columns of `scores`. Received: "
            f"{len(texts)} strings, scores of shape {scores.shape[2:]}"
        )
    return texts


def _printable(argument: str, given: Any) -> list[str]:
    """The strings with escapes for signs that cannot be seen."""
    is_one = isinstance(given, (str, bytes)) or not hasattr(given, "__iter__")
    if is_one or not all(isinstance(one, (str, bytes)) for one in given):
        raise TypeError(f"`{argument}` must be a list of strings. Received: {argument}={given!r}")
    return [_visible(one.decode("utf-8", "replace") if isinstance(one, bytes) else one) for one in given]


def _title(title: Any) -> str | None:
    """A title whose characters can all be drawn."""
    if title is not None and not isinstance(title, str):
        raise TypeError(f"`title` must be a string or None. Received: title={title!r}")
    return None if title is None else "\n".join(map(_visible, title.split("\n")))


def _class_ids(argument: str, given: Any, classes: int) -> np.ndarray:
    ids: np.ndarray = np.asarray(keras.ops.convert_to_numpy(given))
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= classes:
        raise ValueError(
            f"`{argument}` must be (examples,) integers in [0, {classes}), one for each example. Received: "
            f"{argument}={given!r}"
        )
    return ids


def _visible(text: str) -> str:
    """`text` with escapes for what cannot be seen. Joiners and selectors stay, unless there is nothing else."""
    kept = _SHAPING if set(text) - _SHAPING else set()
    shown = [sign in kept or (sign.isprintable() and sign not in _SHAPING) for sign in text]
    escapes = [sign.encode("unicode_escape").decode() for sign in text]
    return "".join(sign if is_shown else escape for sign, is_shown, escape in zip(text, shown, escapes, strict=True))


def _font_families(texts: Sequence[str]) -> list[str]:
    """DejaVu Sans, which matplotlib brings, and installed fonts with the characters of `texts` that it lacks.

    Warns of characters that no installed font has.
    """
    found = ["DejaVu Sans"]
    missing = {sign for text in texts for sign in text if sign.isprintable()} - _SHAPING
    missing -= _characters_of(fonts.findfont("DejaVu Sans"))
    installed = _installed() if missing else {}
    for family in [*(name for name in _PREFERRED if name in installed), *sorted(set(installed) - set(_PREFERRED))]:
        if missing and missing & _characters_of(installed[family]):
            found.append(family)
            missing -= _characters_of(installed[family])
    if missing:
        names = [f"{sign} (U+{ord(sign):04X})" for sign in sorted(missing)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            f"No installed font has these characters, which are drawn as boxes: {', '.join(names[:_SHOWN])}{more}. "
            "Install a font that has them, such as Noto Sans CJK, Noto Sans Devanagari or Noto Emoji.",
            stacklevel=3,
        )
    return found


def _installed() -> dict[str, str]:
    """{family: path of its file} of the installed fonts of texts; upright and of normal weight if there is one."""
    entries = sorted(fonts.fontManager.ttflist, key=lambda one: (one.style != "normal", one.weight != 400))
    return {one.name: one.fname for one in reversed(entries) if not one.name.startswith(_NO_TEXT)}


@functools.cache
def _characters_of(path: str) -> frozenset[str]:
    try:
        return frozenset(map(chr, fonts.get_font(path).get_charmap()))
    except (OSError, RuntimeError):  # a file that was removed, or that is damaged
        return frozenset()


def _saved(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Writes under a temporary name and renames, so that the file is always complete. Returns the figure."""
    if path is None:
        return figure
    target = local_path("path", path)
    if not target.name or target.is_dir():
        raise ValueError(
            f"`path` must be the name of a file, which is not a folder. Received: path={os.fspath(path)!r}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    incomplete = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # `_font_families` has warned once
            figure.savefig(incomplete, format="png", dpi=120)
        incomplete.replace(target)
    finally:
        incomplete.unlink(missing_ok=True)
    return figure
