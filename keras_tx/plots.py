"""Numbers -> pictures: training curves and attention maps, as matplotlib figures and PNG files.

N heads, T queries, S keys, L layers. No window is opened and matplotlib's global state is not touched.
"""

import csv
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx.checks import one_of
from keras_tx.optional import Lazy

__all__ = ["attention_map", "training_curves"]

figures = Lazy("matplotlib.figure", extra="plots")
fonts = Lazy("matplotlib.font_manager", extra="plots")
ticker = Lazy("matplotlib.ticker", extra="plots")

_LOWER_IS_BETTER = ("loss", "error", "perplexity", "entropy", "mse", "mae")
_NOT_RATED = ("lr", "learning_rate")
_FAMILIES = """Noto Sans CJK SC,Noto Sans CJK JP,Source Han Sans,WenQuanYi Micro Hei,PingFang SC,Hiragino Sans,\
Microsoft YaHei,Malgun Gothic,Noto Sans,Arial Unicode MS""".split(",")


def training_curves(history: Any, path: str | os.PathLike | None = None) -> Any:
    """Draws one panel for each metric: train and validation over the epochs, the best epoch marked.

    Best is the lowest loss, error or perplexity and the highest of any other metric; of validation where there is one.

    Args:
        history: what `fit` returned, its `.history`, or the file of a `keras.callbacks.CSVLogger`.
        path: the PNG file to write.

    Returns:
        The `matplotlib.figure.Figure`.
    """
    epochs, curves = _history(history)
    metrics = list(dict.fromkeys(name.removeprefix("val_") for name in curves))
    columns = min(len(metrics), 3)
    rows = math.ceil(len(metrics) / columns)
    figure = figures.Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
    for index, metric in enumerate(metrics):
        axes = figure.add_subplot(rows, columns, index + 1)
        rated: tuple = ([], [])
        for name, label, color in ((metric, "train", "tab:blue"), (f"val_{metric}", "validation", "tab:orange")):
            if name in curves:
                rated = (_places(epochs, name, curves[name]), curves[name])
                axes.plot(*rated, label=label, color=color, marker=".")
        if metric not in _NOT_RATED and np.isfinite(rated[1]).any():
            lower = any(word in metric.lower() for word in _LOWER_IS_BETTER)
            values = np.where(np.isfinite(rated[1]), rated[1], np.inf if lower else -np.inf)
            best = values.argmin() if lower else values.argmax()
            where, value = rated[0][best], values[best]
            label = f"best: {value:.4g} in epoch {where}"
            axes.plot([where], [value], "o", color="black", markersize=9, fillstyle="none", label=label)
        axes.set(xlabel="epoch", ylabel=metric.replace("_", " "))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return _saved(figure, path)


def attention_map(
    scores: Any,
    tokens: Sequence[str],
    path: str | os.PathLike | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    layer: int | None = None,
    head: int | str | None = None,
    title: str | None = None,
) -> Any:
    """Draws what every token (a row) looks at (the columns), one panel for each head: darker is more.

    Args:
        scores: (N, T, S), the attention scores of one example in one layer, or (L, N, T, S), those of a stack: then
            each row of panels is a layer.
        tokens: T strings, and S as well where there are no `key_tokens`. Slice scores and tokens to leave out padding.
        path: the PNG file to write.
        key_tokens: S strings, of the other side of cross-attention.
        layer: draw this layer of a stack alone.
        head: draw this head alone, or "mean", the mean over the heads.
        title: stands above the picture.

    Returns:
        The `matplotlib.figure.Figure`.
    """
    scores, names = _chosen(_finite(scores), layer, head)
    rows, columns, queries, keys = scores.shape
    query_labels = _tick_labels("tokens", tokens, queries, scores)
    key_labels = _tick_labels(
        "key_tokens" if key_tokens is not None else "tokens", tokens if key_tokens is None else key_tokens, keys, scores
    )
    panels, names = scores.reshape(-1, queries, keys), [name for row in names for name in row]
    if rows == 1:
        columns = min(columns, 4)
        rows = math.ceil(len(panels) / columns)
    side = min(max(1.8, 0.2 * max(queries, keys)), 9, 36 / columns)  # inches
    size = min(9.0, 0.8 * 72 * side / max(queries, keys))  # points
    figure = figures.Figure(figsize=(side * columns + 2, side * rows * queries / max(queries, keys) + 1.4))
    figure.set_layout_engine("constrained")
    text = {"parse_math": False, "fontsize": size, "fontfamily": _families()}
    high = float(scores.max()) or 1.0
    drawn = []
    for index, (panel, name) in enumerate(zip(panels, names, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        drawn.append(axes)
        image = axes.imshow(panel, cmap="Blues", vmin=0, vmax=high, interpolation="nearest")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(keys) if index + columns >= len(panels) and size >= 4 else [])
        axes.set_yticks(range(queries) if index % columns == 0 and size >= 4 else [])
        if len(axes.get_xticks()):
            axes.set_xticklabels(key_labels, rotation=90, **text)
        if len(axes.get_yticks()):
            axes.set_yticklabels(query_labels, **text)
        axes.tick_params(length=2)
    figure.colorbar(image, ax=drawn, label="attention", shrink=0.8, aspect=16 + 8 * rows)
    figure.supxlabel("keys: looked at", fontsize=9)
    figure.supylabel("queries: looking", fontsize=9)
    if title is not None:
        figure.suptitle(title, parse_math=False, fontfamily=_families())
    return _saved(figure, path)


def _history(history):
    """(epochs counted from 1, {metric: values}); what a CSVLogger had no value for is NaN."""
    if isinstance(history, (str, os.PathLike)):
        if not Path(history).is_file():
            raise FileNotFoundError(f"`history` must be a file that exists. Received: history={str(history)!r}")
        with open(history, encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file, delimiter=","))
        columns: Any = {name: [row[name] for row in table] for name in (table[0] if table else {})}
        epochs: Any = columns.pop("epoch", None)
    else:
        columns = getattr(history, "history", history)
        epochs = getattr(history, "epoch", None)
    if not isinstance(columns, dict):
        raise TypeError(f"`history` must be a History, its dict or the path of a CSV file. Received: {history!r}")
    if not columns or not all(len(values) for values in columns.values()):
        raise ValueError(f"`history` must hold at least one epoch of one metric. Received: {dict(columns)}")
    try:
        curves = {name: np.array([_number(value) for value in values]) for name, values in columns.items()}
        count = max(map(len, curves.values()))
        return np.array([int(epoch) + 1 for epoch in epochs or range(count)]), curves
    except (TypeError, ValueError) as error:
        raise ValueError(f"`history` must hold numbers. Received: {error}") from error


def _number(value):
    return math.nan if value in ("", "NA", None) else float(value)


def _places(epochs, name, values):
    """The epochs of `values`: all, or every second, third, ... where `validation_freq` left some out."""
    steps = [step for step in range(1, len(epochs) + 1) if len(epochs) // step == len(values)]
    if len(steps) != 1:
        raise ValueError(
            f"The values of each metric must be one for each epoch. Received: {len(values)} of {name} in {len(epochs)} "
            "epochs. A keras.callbacks.CSVLogger writes down which epoch each belongs to: give its file."
        )
    return epochs[steps[0] - 1 :: steps[0]]


def _finite(scores):
    scores = np.asarray(keras.ops.convert_to_numpy(scores), dtype="float32")
    if scores.ndim not in (3, 4) or not scores.size:
        raise ValueError(
            "`scores` must be (heads, queries, keys) or (layers, heads, queries, keys), of one example. Received: "
            f"shape {scores.shape}"
        )
    if not np.isfinite(scores).all() or scores.min() < 0:
        raise ValueError(f"`scores` must be finite and not negative. Received: {scores.min()} to {scores.max()}")
    return scores


def _chosen(scores, layer, head):
    """Scores (rows, columns, T, S) of the layers and heads asked for, and the names of the panels."""
    stacked = scores.ndim == 4
    if layer is not None and not stacked:
        raise ValueError(f"`layer` must be None for the scores of one layer. Received: layer={layer}")
    scores = scores if stacked else scores[None]
    allowed = range(len(scores))
    layers = list(allowed) if layer is None else [one_of("layer", layer, allowed)]
    heads: list[str]
    if head == "mean":
        scores, heads = scores.mean(axis=1, keepdims=True), ["mean of heads"]
    else:
        allowed = range(scores.shape[1])
        indices = list(allowed) if head is None else [one_of("head", head, allowed)]
        scores, heads = scores[:, indices], [f"head {index}" for index in indices]
    names = [[f"layer {index}, {name}" if stacked else name for name in heads] for index in layers]
    return scores[layers], names


def _tick_labels(argument, tokens, count, scores):
    if isinstance(tokens, (str, bytes)) or not all(isinstance(token, (str, bytes)) for token in tokens):
        raise TypeError(f"`{argument}` must be a list of strings. Received: {argument}={tokens!r}")
    if len(tokens) != count:
        raise ValueError(
            f"`{argument}` must have one string for each of the {count} rows or columns of `scores`. Received: "
            f"{len(tokens)} strings, scores of shape {scores.shape[2:]}"
        )
    texts = [token.decode("utf-8", "replace") if isinstance(token, bytes) else token for token in tokens]
    return ["".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text) for text in texts]


def _families():
    """DejaVu Sans, matplotlib's own, and for the signs that it lacks what is installed of the wide fonts."""
    installed = set(fonts.get_font_names())
    return ["DejaVu Sans", *(family for family in _FAMILIES if family in installed)]


def _saved(figure, path):
    """Writes beside `path` and renames, so that nobody reads half a picture."""
    if path is None:
        return figure
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn instead
            figure.savefig(beside, format="png", dpi=120)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return figure
