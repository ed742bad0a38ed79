"""A `PretrainedModel` -> a directory that transformers loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx import checks
from keras_tx.pretrained import table
from keras_tx.pretrained.files import write_tensors
from keras_tx.pretrained.load import CONFIG, GENERATION
from keras_tx.pretrained.model import PretrainedModel
from keras_tx.text.compatibility import check_fits
from keras_tx.types import DType

DTYPES = ("float32", "float16", "bfloat16")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "preprocessor_config.json",
    "sentencepiece.bpe.model",
    "source.spm",
    "special_tokens_map.json",
    "spiece.model",
    "target.spm",
    "target_vocab.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def save_pretrained(
    model: PretrainedModel,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json, generation_config.json, safetensors and the tokenizer's files, as transformers reads them.

    A tensor that has not changed since `from_pretrained` comes out bit for bit. Keys of the config that nobody here
    knows are kept. Kernels with LoRA are written with what it adds.

    Args:
        model: what `from_pretrained` returned; of a Keras model around one, that layer.
        directory: made if it is not there.
        tokenizer: with `save(directory)`; if None, the files beside the checkpoint that was loaded are copied.
        dtype: "float32", "float16" or "bfloat16"; None: the one in which the checkpoint was stored.
        max_shard_bytes: the most bytes of tensors in one file.

    Raises:
        TypeError: `model` is no `PretrainedModel`.
        ValueError: another `dtype`, a `max_shard_bytes` that is not positive, kernels that were quantized, or a
            tokenizer with more tokens than the model.
    """
    if not isinstance(model, PretrainedModel):
        raise TypeError(f"`model` must be a PretrainedModel. Received: model of type {type(model).__name__}")
    checks.one_of("dtype", dtype, (None, *DTYPES))
    if hasattr(tokenizer, "vocabulary_size") and model.config.get("vocab_size") is not None:
        check_fits(tokenizer, model.config["vocab_size"])
    directory = Path(directory)
    write_tensors(directory, _tensors(model, dtype), max_shard_bytes=max_shard_bytes)
    _write_json(directory / CONFIG, _values(model, dtype))
    if model.generation_config:
        _write_json(directory / GENERATION, model.generation_config)
    if tokenizer is not None:
        tokenizer.save(directory)
    else:
        _copy_tokenizer(getattr(model, "source", None), directory)


def _tensors(model: PretrainedModel, dtype: DType) -> Any:
    merged = table.merged(model._flatten_layers())
    for row in model.family.rows():
        values = [keras.ops.convert_to_numpy(merged.get(id(one), one)) for one in row.variables]
        if any(np.dtype(value.dtype).kind in "iu" for value in values):
            raise ValueError(f"`model` must have floating weights. Received: {row.theirs!r} of dtype {values[0].dtype}")
        tensor = row.write(values)
        yield _name(model, row.theirs), tensor.astype(dtype or _stored(model, row.theirs), copy=False)
    for name, array in model.family.computed().items():
        yield _name(model, name), array.astype(dtype or _stored(model, name), copy=False)


def _name(model: PretrainedModel, name: str) -> str:
    """The name of a row in a file of this task."""
    family = model.family
    if model.task == "base":
        return name.removeprefix(family.prefix)
    if model.task in family.other_tasks and not family.is_of_head(name):
        return family.other_prefix + name.removeprefix(family.prefix)
    return name


def _stored(model: PretrainedModel, name: str) -> Any:
    dtypes = model.stored_dtypes
    return dtypes.get(name, dtypes.get("*", "float32"))


def _values(model: PretrainedModel, dtype: DType) -> Any:
    """The config as it was read, with the dtype in the spellings of 4 and 5, and what the family says anew."""
    family, values = model.family, model.config
    dtype = dtype or _stored(model, "*")
    values |= {"dtype": dtype, "torch_dtype": dtype}
    if family.head_key is not None and family.tied != values.get("tie_word_embeddings", family.tied_by_default):
        values["tie_word_embeddings"] = family.tied
    return {**values, **family.saved_values()}


def _write_json(path: str | Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path | None, directory: str | Path) -> None:
    for name in TOKENIZER_FILES if source is not None else ():
        if (source / name).is_file() and (source / name).resolve() != (directory / name).resolve():
            shutil.copyfile(source / name, directory / name)
