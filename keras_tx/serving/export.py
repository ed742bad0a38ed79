"""A trained model -> saved_models/NAME/VERSION, a SavedModel that TensorFlow Serving answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.serving import parity
from keras_tx.serving.card import write_batching, write_card
from keras_tx.serving.exporters import exporter_for
from keras_tx.serving.other_backends import export_elsewhere
from keras_tx.serving.servable_graph import check_servable, resources_of
from keras_tx.serving.versions import write_version
from keras_tx.serving.warmup import check_warmup, write_warmup

tf = Lazy("tensorflow")


def export(
    model: keras.Model,
    path: str | Path,
    *,
    tokenizer: Any = None,
    source_tokenizer: Any = None,
    generation: dict | None = None,
    labels: Sequence[str] | None = None,
    warmup: Sequence[str | dict] = (),
    max_batch: int = 32,
) -> Path:
    """Writes the next version of a model for TensorFlow Serving.

    The version is written beside and renamed into place, so a server that watches the folder never sees half of it.
    Before that it is loaded, compared with the live model, and answers its warm-up requests. MODEL_CARD.json in it says
    what it is. On JAX and PyTorch a TensorFlow process of its own does all this.

    Signatures, all with the batch B as first axis, and half precision as float32:

    - `serving_default`: `text` (B,) -> what the model says. Of a `TextClassifier`, or with `labels`: `label` (B,),
      `probabilities` (B, C). Of a `MaskedLM`: `text` (B,) with the mask tokens replaced, and for each of them `words`
      and `probabilities` (B, M, 5). Of any other model that reads: its outputs by their names, and `tokens` (B, T)
      where they have more than two axes.
    - `tokens`: `token_ids` (B, T), `lengths` (B,) -> the same, and in its place without a tokenizer; of a `MaskedLM`
      `top_ids` and `probabilities` (B, T, 5).
    - `classify`: `inputs` (B,), serialized tf.Examples with a feature "text" -> `classes`, `scores` (B, C).
    - `explain`, of models with `attention_scores`: `text` (B,) -> as `serving_default`, `tokens` (B, T) and attention
      `scores` (B, L, N, T, T).
    - `embed`: `text` (B,) -> `embedding` (B, D): the output `pooler_output`, or the mean of `last_hidden_state`; of a
      classifier what its last layer gets, the pooled vectors; of a `MaskedLM`, or a model with a single output
      (B, T, D), the mean over the real tokens.
    - Of models that write: see `keras_tx.serving.generator_signatures`.

    Args:
        model: a `TextClassifier`, `MaskedLM`, `CausalLM`, `Seq2Seq` or `PretrainedModel`; or any functional
            `keras.Model` over ids: one integer input (B, T), or two with segment ids, and possibly a padding mask,
            known by names such as "input_ids", "token_type_ids", "attention_mask", else by position.
        path: the model's folder, such as "saved_models/reviews"; versions are numbers below it.
        tokenizer: a `BertTokenizer`, or another that runs in the graph, of the model's vocabulary. Texts that are
            longer than its `max_length` are cut.
        source_tokenizer: of the sources, for a `Seq2Seq` with two vocabularies; beside a `tokenizer`.
        generation: of a model that writes, the options of `keras_tx.generation.generate`: `strategy`,
            `max_new_tokens`, `stop_tokens`, ...
        labels: the names of the classes, the last axis of the output; "0", "1", ... if None for a `TextClassifier`. Two
            for a single number, a logit or a sigmoid: of the second one's.
        warmup: texts that a server answers before it lets clients in, or requests
            `{"signature_name": ..., "inputs": {...}}`. The first texts are also among those that `check` compares.
        max_batch: the most rows that a server puts together, and the most of a request, where it batches.

    Returns:
        The version's folder.

    Raises:
        TypeError: the model or a tokenizer is of another kind.
        ValueError: arguments that don't fit the model or each other, a model whose answers depend on padding, an
            operation that a stock server cannot run, or a warm-up request that fails; the message has the value.
        OSError: the folder cannot be written.
    """
    arguments: dict[str, Any] = {
        "tokenizers": {"tokenizer": tokenizer, "source_tokenizer": source_tokenizer},
        "generation": generation,
        "labels": labels,
        "warmup": check_warmup(warmup, tokenizer),
        "max_batch": checks.positive_int("max_batch", max_batch),
    }
    _check_path(Path(path))
    exporter_for(
        model, arguments["tokenizers"], generation, labels
    )  # what cannot be is said here, whatever the backend
    if keras.backend.backend() != "tensorflow":
        return export_elsewhere(model, path, **arguments)
    return export_here(model, path, **arguments, backend="tensorflow")


def export_here(model, path, *, tokenizers, generation, labels, warmup, max_batch, backend):
    """What `export` does on TensorFlow; `backend` is the one that the model comes from."""
    tokenizers = {"tokenizer": None, "source_tokenizer": None} | tokenizers
    kind = exporter_for(model, tokenizers, generation, labels)
    signatures = kind.signatures()
    check_servable(signatures)

    def write(folder):
        archive = keras.export.ExportArchive()  # its endpoints bring the weights; `track` would write each twice
        for name, function in signatures.items():
            archive.add_endpoint(name, function)
        for tokenizer in tokenizers.values():
            for resource in resources_of(tokenizer):
                archive.track(resource)
        archive.write_out(str(folder), verbose=False)
        loaded = tf.saved_model.load(str(folder)).signatures
        loaded = {name: loaded[name] for name in signatures}
        content = kind.parity(signatures, [entry for entry in warmup if isinstance(entry, str)])
        figures = parity.differences(loaded, content.get("signatures", {}))
        if content:
            parity.write_parity(folder, content)
        name = Path(path).name
        count = write_warmup(folder, name, loaded, warmup, kind, max_batch)
        write_batching(folder, max_batch)
        write_card(
            folder,
            name,
            model,
            loaded,
            tokenizers=tokenizers,
            labels=kind.labels,
            generation=kind.generation,
            parity=figures,
            warmup=count,
            backend=backend,
        )

    return write_version(Path(path), write)


def _check_path(path):
    if (path / "saved_model.pb").exists():
        raise ValueError(
            "`path` must be the model's folder, below which versions are numbers, and not a version. Received: "
            f"path={str(path)!r}, which has a saved_model.pb"
        )
    if path.name.isdecimal():
        raise ValueError(
            "`path` must be the model's folder, below which versions are numbers, and not a number itself. Received: "
            f"path={str(path)!r}"
        )
