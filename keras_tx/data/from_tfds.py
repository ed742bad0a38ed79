"""Reads examples (text, label id) and class names, or sentence pairs and languages, from a TFDS dataset."""

import contextlib
import difflib
import logging
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

import numpy as np

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")
tfds = Lazy("tensorflow_datasets", extra="data")

_NAME = re.compile(r"[A-Za-z_]\w*(/[\w.-]+)?(:[\d.*]+)?")  # without `huggingface:...`, for which TFDS uses the network
_PROBE_SECONDS = 5
DataDir = str | PathLike[str] | None
_LABELLED = "a .jsonl, .csv, .tsv or Parquet file (also .gz, .zst), a folder of Parquet files"
_PARALLEL = "parallel files, a .jsonl, .csv, .tsv or Parquet file, a folder of parallel or Parquet files"


def read(
    name: str, data_dir: DataDir, text_column: str | None, label_column: str | None
) -> tuple[list[list[tuple[Any, Any]]], tuple[str, ...]]:
    """Reads labelled texts.

    Returns:
        The examples of the training split and, if there is one, of the test split; and the names of the classes.
    """
    with _quiet():
        builder = _builder(name, data_dir, _LABELLED)
        text, label = _columns(name, builder.info, text_column, label_column)
        splits = _splits(name, builder)
        parts = [_examples(builder, "train", text, label)]
        for split in ("test", "validation"):
            held_out = _examples(builder, split, text, label) if split in splits else []
            if held_out:
                parts.append(held_out)
                break
    if not parts[0]:
        raise ValueError(f"`name_or_path` must have labelled examples in 'train'. Received: {name!r}, which has none")
    return parts, tuple(builder.info.features[label].names)


def read_pairs(name: str, data_dir: DataDir) -> tuple[dict[str, list[tuple[Any, Any]]], tuple[str, str]]:
    """Reads sentence pairs.

    Returns:
        A dictionary with "train", and with "validation" and "test" if there are any; and the languages, source first.
    """
    with _quiet():
        builder = _builder(name, data_dir, _PARALLEL)
        features = builder.info.features
        if not isinstance(features, tfds.features.Translation):
            raise ValueError(f"`name_or_path` must be a dataset of translations. Received: {name!r} with {features}")
        splits = _splits(name, builder)
        languages = tuple(builder.info.supervised_keys or features)
        config = tfds.ReadConfig(try_autocache=False)
        parts: dict[str, list[tuple[Any, Any]]] = {}
        for split in ("train", "validation", "test"):
            if split in splits:
                batches = builder.as_dataset(split=split, read_config=config).batch(1024)
                columns = ([np.asarray(batch[language]) for language in languages] for batch in batches)
                parts[split] = [pair for sides in columns for pair in zip(*sides, strict=True)]
    return parts, languages


def _builder(name: str, data_dir: DataDir, files: str) -> Any:
    """The builder of a dataset; `files` says, for errors, what else the name may be."""
    try:
        if _NAME.fullmatch(name):
            return tfds.builder(name, data_dir=data_dir)
        reason = "not a name of the form dataset, dataset/config or dataset/config:1.0.0"
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
    known = set(tfds.list_builders(with_community_datasets=False))
    dataset = re.split("[/:]", name)[0]
    if dataset in known:
        raise ValueError(f"`name_or_path` must be a config and version that TFDS has. Received: {name!r}. {reason}")
    near = difflib.get_close_matches(dataset, known, n=5)
    raise ValueError(
        f"`name_or_path` must be 'sample', {files} or the name of a TFDS dataset. Received: name_or_path={name!r}. "
        + (f"Similar names: {', '.join(near)}" if near else "No dataset of TFDS has a similar name")
    )


def _columns(name: str, info: Any, text_column: str | None, label_column: str | None) -> list[str]:
    """Finds the text and the label feature.

    Each is the first of these that exists: the one that the caller names, the one that TFDS names for supervised
    training, the one with the usual name, the only one of its type.
    """
    features = dict(info.features) if isinstance(info.features, tfds.features.FeaturesDict) else {}
    texts = [key for key, feature in features.items() if feature.tf_dtype == tf.string and feature.shape == ()]
    classes = [key for key, feature in features.items() if isinstance(feature, tfds.features.ClassLabel)]
    supervised = info.supervised_keys or (None, None)
    found = []
    for argument, column, candidates, likely in (
        ("text_column", text_column, texts, (supervised[0], "text")),
        ("label_column", label_column, classes, (supervised[1], "label")),
    ):
        what = "string" if candidates is texts else "ClassLabel"
        if not candidates:
            raise ValueError(
                f"`name_or_path` must be a dataset with a {what} feature. Received: {name!r} with {list(features)}"
            )
        if column is None:
            usual = [key for key in likely if key in candidates]
            column = usual[0] if usual else candidates[0] if len(candidates) == 1 else None
        if column is None or column not in candidates:
            raise ValueError(
                f"`{argument}` must be one of the {what} features of {name}, {candidates}. Received: "
                f"{argument}={column!r}"
            )
        found.append(column)
    return found


def _splits(name: str, builder: Any) -> Any:
    """The splits of the dataset, "train" among them. Prepares the dataset if it is not prepared."""
    if not builder.is_prepared():
        _prepare(name, builder)
    splits = builder.info.splits
    if "train" not in splits:
        raise ValueError(f"`name_or_path` must have a split 'train'. Received: {name!r} with {list(splits)}")
    return splits


def _prepare(name: str, builder: Any) -> None:
    """Downloads the dataset. Without network the error comes within seconds; TFDS alone would retry for minutes."""
    try:
        _reach(builder.url_infos)
        builder.download_and_prepare()
    except Exception as error:  # the script of a dataset may raise any error
        raise FileNotFoundError(
            f"The dataset {name!r} is not prepared in {builder.data_path} and cannot be downloaded: {error}. On a "
            f"machine with network run `tfds build {name}`, then give the folder that it prepared as `data_dir`."
        ) from error


def _reach(urls: Iterable[str]) -> None:
    """Raises OSError if none of the first hosts answers."""
    hosts = {urllib.parse.urlsplit(url)[:2]: None for url in urls if url.startswith("http")}
    failure: OSError | None = None
    for scheme, host in list(hosts)[:3]:
        try:
            request = urllib.request.Request(f"{scheme}://{host}/", method="HEAD")
            urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
            return
        except urllib.error.HTTPError:  # the host answered
            return
        except OSError as error:
            failure = OSError(f"{host} does not answer ({error})")
    if failure:
        raise failure


def _examples(builder: Any, split: str, text: str, label: str) -> list[tuple[Any, Any]]:
    """The labelled examples of `split`, in the order of its files."""
    decoders = tfds.decode.PartialDecoding({text: True, label: True})
    config = tfds.ReadConfig(try_autocache=False)
    examples: list[tuple[Any, Any]] = []
    for batch in builder.as_dataset(split=split, decoders=decoders, read_config=config).batch(1024):
        labels = np.asarray(batch[label])
        examples += [(x, y) for x, y in zip(np.asarray(batch[text]), labels, strict=True) if y >= 0]
    return examples


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences TFDS' warnings about every folder that it looks into, but not its progress bars and errors."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
