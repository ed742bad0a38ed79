"""Saves a `PretrainedModel` as a directory that transformers loads."""

import shutil
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx import checks, json_text
from keras_tx.internals.keras_models import layers_within
from keras_tx.pretrained import headers, processes, table
from keras_tx.pretrained.family import Family
from keras_tx.pretrained.files import is_of_weights, write_into
from keras_tx.pretrained.load import CONFIG, GENERATION
from keras_tx.pretrained.model import PretrainedModel
from keras_tx.pretrained.variable_loader import check_finite
from keras_tx.replace import replacing
from keras_tx.text.compatibility import check_fits

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
    """Saves a model as a Hugging Face checkpoint: config.json, generation_config.json, safetensors and the tokenizer.

    Tensors that did not change since `from_pretrained` are saved bit for bit, unless the dtype policy of the layers has
    rounded them. Unknown keys of the config are kept. The product of LoRA matrices is added to the saved kernel.

    An earlier checkpoint in the directory is replaced atomically: a reader gets all old files or all new ones. A
    process that is killed while it saves, and any number of processes that save at once, leave one complete checkpoint;
    the next save removes what a killed process leaves. `from_pretrained` can read the directory at any time. Symbolic
    links in the directory, as in the cache of the hub, are replaced and not followed. Other files stay, and so do those
    of an earlier tokenizer if there are no new ones.

    At most one tensor is copied from the devices at a time. With several processes of JAX, all of them must call this:
    the first one writes, and the others wait.

    Args:
        model: a `PretrainedModel`, as `from_pretrained` returns it. If it is a layer of your own Keras model, pass that
            layer.
        directory: the directory, which is created if it does not exist.
        tokenizer: a tokenizer of `keras_tx.text`, or an object with `save(directory)`. None: the tokenizer files of the
            loaded checkpoint are copied.
        dtype: "float32", "float16" or "bfloat16". None: each tensor keeps the dtype in which it was stored.
        max_shard_bytes: the largest number of bytes of tensors in one file. 5 GB, as in transformers.

    Raises:
        TypeError: `model` is not a `PretrainedModel`.
        ValueError: `directory` is a URL, `dtype` is not one of these, `max_shard_bytes` is not positive, the model is
            quantized, a weight is NaN or infinite, also only after the cast to `dtype`, the tokenizer has more tokens
            than the model, or `from_pretrained` would refuse the config or the `generation_config`. An earlier
            checkpoint in the directory is kept.
        OSError: a file cannot be written, by this process or by the one that writes for all; the directory is then as
            it was.

    Examples:
        >>> config = {"model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1}
        >>> config |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 16}
        >>> model = keras_tx.pretrained.PretrainedModel(config, "base")
        >>> keras_tx.pretrained.save_pretrained(model, "my-bert", dtype="bfloat16")
        >>> import os
        >>> sorted(os.listdir("my-bert"))
        ['config.json', 'model.safetensors']
    """
    if not isinstance(model, PretrainedModel):
        raise TypeError(f"`model` must be a PretrainedModel. Received: model of type {type(model).__name__}")
    target = checks.local_path("directory", directory)
    checks.one_of("dtype", dtype, (None, *DTYPES))
    if hasattr(tokenizer, "vocabulary_size") and model.config.get("vocab_size") is not None:
        check_fits(tokenizer, model.config["vocab_size"])
    checks.positive_int("max_shard_bytes", max_shard_bytes)
    model._check_generation_config()
    texts = {CONFIG: _json(CONFIG, _values(model, dtype))}
    if model.generation_config:
        texts[GENERATION] = _json(GENERATION, model.generation_config)
    source = getattr(model, "source", None)
    if tokenizer is None and source is not None and not source.is_dir():
        warnings.warn(
            "No files of a tokenizer are saved, because the directory that the model was loaded from no longer exists: "
            f"{str(source)!r}. Pass `tokenizer`.",
            stacklevel=2,
        )

    def write(tensors: Iterator[tuple[str, np.ndarray]]) -> None:
        with replacing(target, _is_outdated, gate=CONFIG) as folder:
            write_into(folder, tensors, max_shard_bytes)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(folder)
            else:
                _copy_tokenizer(source, folder)

    processes.written_by_first(_tensors(model, dtype), write)


def _is_outdated(name: str, new: Collection[str]) -> bool:
    """Whether a file belongs to the checkpoint that is replaced, with these new files."""
    has_tokenizer = any(one in TOKENIZER_FILES for one in new)
    return name in (CONFIG, GENERATION) or is_of_weights(name) or (name in TOKENIZER_FILES and has_tokenizer)


def _tensors(model: PretrainedModel, dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    with_lora = table.with_lora(layers_within(model))
    for row in model.family.rows():
        dtypes = [keras.backend.standardize_dtype(one.dtype) for one in row.variables]
        if any("int" in dtype for dtype in dtypes):
            raise ValueError(f"`model` must have floating weights. Received: {row.theirs!r} of dtype {dtypes[0]}")
        kernels = (with_lora[id(one)].merged_with_lora()[0] if id(one) in with_lora else one for one in row.variables)
        values = [processes.on_host(one) for one in kernels]
        with np.errstate(over="ignore"):  # `check_finite` reports an overflow by the name of the tensor
            tensor = row.write(values).astype(dtype or _stored(model, row.theirs), copy=False)
        name = _name(model, row.theirs)
        check_finite(name, tensor)  # `from_pretrained` would refuse the checkpoint, and the earlier one would be gone
        yield name, tensor
    for name, array in model.family.computed().items():
        yield _name(model, name), array.astype(dtype or _stored(model, name), copy=False)


def _name(model: PretrainedModel, name: str) -> str:
    """The name of a row's tensor in a checkpoint of the model's task."""
    family: Family = model.family
    if model.task == "base":
        return name.removeprefix(family.prefix)
    if model.task in family.other_tasks and not family.is_of_head(name):
        return f"{family.other_prefix}{name.removeprefix(family.prefix)}"
    return name


def _stored(model: PretrainedModel, name: str) -> str:
    dtypes = model.stored_dtypes
    return str(dtypes.get(name, dtypes.get("*", "float32")))


def _values(model: PretrainedModel, dtype: str | None) -> dict[str, Any]:
    """The config as it was read, with the dtype as transformers 4 and 5 spell it, and the family's own changes."""
    family, values = model.family, model.config
    dtype = dtype or _stored(model, "*")
    values |= {"dtype": dtype, "torch_dtype": dtype}
    if family.head_key is not None and family.tied != values.get("tie_word_embeddings", family.tied_by_default):
        values["tie_word_embeddings"] = family.tied
    values |= family.saved_values()
    if values.get("id2label"):
        values.pop("num_labels", None)  # transformers would take this number if the two contradict each other
    return values


def _json(name: str, values: dict[str, Any]) -> str:
    """The content of a file; raises if `from_pretrained` would refuse it, as after two keys that are equal as texts."""
    text = json_text.of_file(values)
    headers.json_object(name, text.encode("utf-8"))
    return text


def _copy_tokenizer(source: Path | None, folder: Path) -> None:
    if source is not None and source.is_dir():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
