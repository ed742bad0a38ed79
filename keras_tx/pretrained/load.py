"""Loads a checkpoint from a directory or the Hugging Face hub, and checks that every tensor is used."""

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_tx import checks
from keras_tx.internals.keras_models import variables_initialized_at_end
from keras_tx.optional import Lazy
from keras_tx.pretrained import audit, generation_config, headers
from keras_tx.pretrained.config import MOST_LABELS, Config, check_layers
from keras_tx.pretrained.files import PICKLES, Tensors, pickled, tensors_in
from keras_tx.pretrained.model import CLASSIFYING, PretrainedModel
from keras_tx.pretrained.new_layers import NewLayers
from keras_tx.pretrained.registry import family_of
from keras_tx.pretrained.snapshot import Snapshot, consistent
from keras_tx.pretrained.variable_loader import VariableLoader

huggingface_hub = Lazy("huggingface_hub", "hub")

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BESIDE = ["*.json", "*.txt", "*.model", "*.spm", "*.jinja"]


def from_pretrained(
    path: str | Path,
    *,
    task: str | None = None,
    dtype: Any = None,
    output_hidden_states: bool = False,
    skip_padding: bool | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
) -> PretrainedModel:
    """Loads a Hugging Face checkpoint as a functional `keras.Model` of this package's layers.

    It reads config.json, generation_config.json, and safetensors or tf_model.h5, one tensor at a time. Neither torch
    nor transformers is needed, no pickle is loaded, and no code of the checkpoint is run.

    On JAX, under `keras.distribution.ModelParallel` with the map of `keras_tx.distribution.get_layout_map`, each
    process reads from safetensors only the slices that its devices hold, one at a time. So a checkpoint may be larger
    than one device, and than the memory of one machine. The checksums of tensors that are split are not verified then.

    Args:
        path: a directory; or a model id of the Hugging Face hub, which `huggingface_hub` (the extra `hub`) downloads.
        task: "base", "sequence_classification", "token_classification", "question_answering", "masked_lm", "causal_lm",
            "conditional_generation", "encoder", "image_classification", ... None: the task that the checkpoint was
            saved for. If the checkpoint has no head for the task that you choose, the head gets random weights, and a
            warning names the new tensors and their layers. As in transformers, tensors that have the same name in the
            head of another task are used, of which another warning tells.
        dtype: the dtype policy, such as "mixed_bfloat16". None: Keras' global dtype policy. With "float32", weights
            that are stored in half precision become float32.
        output_hidden_states: whether the outputs include `hidden_states`.
        skip_padding: whether to skip padding tokens, as for `keras_tx.layers.Encoder`; the outputs there are then 0.
            None: on TensorFlow with only CPUs and without XLA, if every output is for a whole text, as for
            "sequence_classification"; for "masked_lm" and "token_classification" in training, where losses and metrics
            leave padding out. Models that classify by their first token, such as BERT, need texts that do not begin
            with padding: if a text does, its answer depends on `skip_padding`, and is not that of transformers.
        num_labels: the number of classes. If the checkpoint has a different number, the classification layer gets
            random weights.
        labels: the names of the classes, which are stored in the config (`id2label`). None: the names of the
            checkpoint, or, if it has none or `num_labels` differs, LABEL_0, LABEL_1, ...

    Returns:
        A `PretrainedModel`. Its attribute `source` is the directory of the checkpoint, for `text.load_tokenizer`.

    Raises:
        ValueError: the model type or task is unknown; the config lacks a key or has an unsupported value; a tensor is
            unknown, missing, has NaN or infinite numbers, or does not have the shape that follows from the config;
            files are damaged, or change while they are read; weights are pickled; the directory has a PEFT adapter
            (adapter_config.json); `skip_padding` is set for a model without an `Encoder`; `labels` or `num_labels` are
            given for a task without classes. The message names the cause.
        OSError: a file cannot be read, or the directory changes during each of several attempts to open its files.
        ImportError: for the id of a model on the hub, if huggingface_hub is not installed.

    Examples:
        >>> config = {"model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1}
        >>> config |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 16}
        >>> model = keras_tx.pretrained.PretrainedModel(config, "base")
        >>> keras_tx.pretrained.save_pretrained(model, "my-bert")
        >>> bert = keras_tx.pretrained.from_pretrained("my-bert", task="base")
        >>> ids = keras.Input((None,), dtype="int32")
        >>> bert(ids)["last_hidden_state"].shape
        (None, None, 8)
    """
    directory = _directory(path)
    values, generation, tensors = consistent(directory, read_files)
    asked_labels = labels
    labels = _labels(values, labels, num_labels)
    if labels is not None:
        if len(labels) != (len(values.get("id2label") or ()) or values.get("num_labels") or 2):
            values.pop("problem_type", None)  # it describes the labels of another head
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
        values["label2id"] = {label: index for index, label in enumerate(labels)}
        values.pop("num_labels", None)  # it would contradict the names
    config = Config(values)
    kind = family_of(config)
    said_tied = kind.tied_by_file or config.flag("tie_word_embeddings", default=kind.tied_by_default)
    is_shared = config.values.get("share_encoder_decoder_embeddings") is not False
    names = audit.canonical(tensors.names, kind, said_tied, is_shared)
    tied = said_tied and audit.is_tied(kind, tensors, names)
    if not tied and isinstance(kind.copies, dict):  # older files store one tensor for both
        names |= {copy: names[name] for copy, name in kind.copies.items() if copy not in names and name in names}
    absent = [part for part, key in kind.parts.items() if kind.prefix + key not in names]
    check_layers(values, len(tensors))
    loader = VariableLoader(tensors, names)
    with variables_initialized_at_end():  # and not at all if the tensors do not fit
        model = PretrainedModel(
            Config(values, absent, largest=_largest(tensors)),
            task,
            output_hidden_states=output_hidden_states,
            skip_padding=skip_padding,
            tied=tied,
            absent=absent,
            generation_config=generation,
            dtype=dtype,
        )
        if not (asked_labels is None and num_labels is None) and model.task not in CLASSIFYING:
            raise ValueError(
                f"`labels` and `num_labels` are for the tasks {list(CLASSIFYING)}. Received: "
                f"labels={asked_labels!r:.200}, num_labels={num_labels}, task={model.task!r}"
            )
        rows = list(model.family.rows())
        zeros = [name for name in kind.zeros if name not in names]
        relabeled, asked = labels is not None, task is not None
        new = audit.new_tensors(model, rows, tensors, names, zeros, asked=asked, relabeled=relabeled)
        loader.prepare(row for row in rows if row.theirs not in (*new, *zeros))
        loader.read_split()
    loader.finish()
    tensors.check_unchanged()
    model.stored_dtypes.update(
        audit.stored_dtypes(tensors, {row.theirs: names.get(row.theirs) for row in rows}, [*new, *zeros])
    )
    tensors.close()
    if new:
        new_layers = NewLayers(model, [row for row in rows if row.theirs in new])
        object.__setattr__(model, "_new_layers", new_layers)  # for `fit`; Keras would track the layers a second time
        warnings.warn(
            f"The checkpoint lacks tensors of the task {model.task!r}. They have random weights and must be trained: "
            f"{new}, in the layers {new_layers.names}",
            stacklevel=2,
        )
    reused = audit.reused(model.family, rows, names, new)
    if reused:
        warnings.warn(
            f"The checkpoint was saved for the task {audit.other_task(model.family)!r}. Of its head, a model of the "
            f"task {model.task!r} has the tensors {reused['used']}, which were trained for the other task, but not "
            f"{reused['unused'] or 'others'}",
            stacklevel=2,
        )
    object.__setattr__(model, "source", directory.absolute())  # `save_pretrained` copies the tokenizer's files from it
    return model


def read_files(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any] | None, Tensors]:
    """The content of config.json and, if there is one, of generation_config.json, and the open files of weights."""
    path = snapshot.folder
    if ADAPTER in snapshot:
        raise ValueError(
            "`path` must be a checkpoint without a PEFT adapter. Merge it in PyTorch with `merge_and_unload()` and "
            f"save the model to another folder; if it has been merged already, delete {ADAPTER}. Received: "
            f"path={str(path)!r}, which has {ADAPTER}"
        )
    if CONFIG not in snapshot:
        raise ValueError(f"`path` must have a {CONFIG}. Received: path={str(path)!r}")
    values = headers.read_object(str(path / CONFIG), snapshot.open(CONFIG))
    generation = None
    if GENERATION in snapshot:
        generation = headers.read_object(str(path / GENERATION), snapshot.open(GENERATION))
        generation_config.check(generation, str(path / GENERATION))
    return values, generation, tensors_in(snapshot)


def _largest(tensors: Tensors) -> int:
    """The number of numbers in the largest tensor: no size in the config can be larger."""
    return max((math.prod(tensors.shape(name)) for name in tensors), default=0)


def _labels(values: dict[str, Any], labels: Any, num_labels: int | None) -> list[str] | None:
    """The names of the classes, if the caller asks for others than those of the config."""
    checks.positive_int("num_labels", num_labels, none=True)
    if num_labels is not None and num_labels > MOST_LABELS:
        raise ValueError(f"`num_labels` must be at most {MOST_LABELS}. Received: num_labels={num_labels}")
    if labels is not None:
        return _checked_labels(labels, num_labels)
    in_config = values.get("id2label")
    if num_labels in (None, len(in_config) if isinstance(in_config, dict) else 0):
        return None
    return [f"LABEL_{index}" for index in range(num_labels or 0)]


def _directory(path: str | Path) -> Path:
    checks.path("path", path)
    directory = Path(path)
    if directory.is_dir():
        return directory
    is_local = directory.is_absolute() or str(path).startswith((".", "~"))
    if directory.exists() or is_local or not _HUB_ID.fullmatch(str(path)):
        raise ValueError(f"`path` must be a directory, or a model id of the hub. Received: path={str(path)!r}")
    found = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=[*_BESIDE, "model*.safetensors"]))
    if not any(found.glob("model*.safetensors")):
        found = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=[*_BESIDE, "tf_model.h5"]))
    if not any(found.glob("model*.safetensors")) and not (found / "tf_model.h5").is_file():
        pickles = [name for name in huggingface_hub.list_repo_files(str(path)) if name.endswith(PICKLES)]
        if pickles:
            raise pickled(path, f"{path}/{pickles[0]}")
    return found


def _checked_labels(labels: Any, num_labels: int | None) -> list[str]:
    given = [labels] if isinstance(labels, str) else list(labels)
    given = [str(label) if isinstance(label, str) else label for label in given]  # NumPy has strings of its own
    are_names = not isinstance(labels, str) and all(isinstance(label, str) and label for label in given)
    if not given or not are_names or len(set(given)) < len(given):
        raise ValueError(f"`labels` must be different non-empty strings, one for each class. Received: {labels=!r}")
    if num_labels not in (None, len(given)):
        raise ValueError(f"`labels` must have the length `num_labels`. Received: {labels=!r}, {num_labels=!r}")
    return given
