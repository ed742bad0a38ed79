"""Exports a trained model to saved_models/NAME/VERSION, a SavedModel that runs on an unmodified TensorFlow Serving."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx import checks
from keras_tx.internals.keras_models import layers_within
from keras_tx.internals.tensorflow_graphs import shared_shapes
from keras_tx.layers.exported_weights import LARGEST, PRECISIONS, ExportedWeights, TooLarge, exported_weights
from keras_tx.optional import Lazy
from keras_tx.serving import constant_files, parity
from keras_tx.serving.card import write_batching, write_card
from keras_tx.serving.exporters import Exporter, GeneratorExporter, exporter_for
from keras_tx.serving.onnx_format import export_onnx
from keras_tx.serving.other_backends import export_in_subprocess
from keras_tx.serving.servable_graph import check_servable, resources_of
from keras_tx.serving.versions import check_path, model_name, write_version
from keras_tx.serving.warmup import check_warmup, write_warmup

tf = Lazy("tensorflow")
int8_support = Lazy("keras_tx.serving.int8_support")

MOST_BY_ITSELF = 16 * 10**6  # bytes of constants, which a server has in memory about eight times


def export(
    model: keras.Model,
    path: str | Path,
    *,
    tokenizer: Any = None,
    source_tokenizer: Any = None,
    generation: dict[str, Any] | None = None,
    labels: Sequence[str] | None = None,
    warmup: Sequence[str | dict[str, Any]] = (),
    max_batch: int = 32,
    precision: str = "float32",
    constant_weights: bool | None = None,
    text_pairs: bool = False,
    format: str = "tf_saved_model",
) -> Path:
    """Exports the next version of a model for TensorFlow Serving.

    The version is written under a temporary name and renamed when it is complete, so that a server that watches the
    folder never sees an incomplete version. Before the renaming, the version is loaded, its answers are compared with
    those of the Keras model, and its warm-up requests are run. MODEL_CARD.json describes the version. On the JAX and
    PyTorch backends, a separate process in which Keras runs on TensorFlow does all this. It imports the modules in
    which your own classes and functions are defined, which must be registered with Keras.

    The signatures are listed below. The first axis of every input and output is the batch B; outputs in half precision
    are cast to float32.

    - `serving_default`: `text` (B,) -> the outputs. Of a `TextClassifier`, or with `labels`: `label` (B,) and
      `probabilities` (B, C); if it is multi-label, `labels` (B, C) and `probabilities` (B, C). Of a `MaskedLM`: `text`
      (B,) with its mask tokens replaced, and for each of them the best `words` and their `probabilities` (B, M, 5). Of
      any other encoder model: its outputs by name, and the strings `tokens` (B, T) where an output has more than two
      axes.
    - `tokens`: `token_ids` (B, T), `lengths` (B,) -> the same outputs; of a `MaskedLM` `top_ids` and `probabilities`
      (B, T, 5). Without a tokenizer this is also `serving_default`.
    - `classify`: `inputs` (B,), serialized tf.Examples with a feature "text" -> `classes`, `scores` (B, C), of all
      classes.
    - `explain`, of models with `attention_scores`: `text` (B,) -> the outputs of `serving_default`, `tokens` (B, T) and
      attention `scores` (B, L, N, T, T). Of a generative model the `text` is greedy; a `Seq2Seq` has `source_tokens`,
      `encoder_scores`, `decoder_scores` and `cross_scores` in place of `scores`.
    - `embed`: `text` (B,) -> `embedding` (B, D): the output `pooler_output`, or the mean of `last_hidden_state`; of a
      classifier the pooled vectors, which its last layer gets; of a `MaskedLM`, or of a checkpoint with the task
      "masked_lm", the mean of the encoder's hidden states; of a model with a single output (B, T, D) the mean of that.
      A mean is over the real tokens.
    - `generate`, of generative models: `text` and, (B,) each, `max_new_tokens`, `temperature`, `top_k`, `top_p` and
      `seed` -> `text`, `num_tokens`, `score` (B,).
    - `beam`, of generative models: `text` -> `text` and `scores` (B, n), the best first.
    - `score`, of generative models: `text` and `target` (B,) -> `log_probability` and `num_tokens` (B,), `tokens` and
      `token_log_probabilities` (B, T).

    With `text_pairs`, signatures that take `text` also take `text_pair` (B,), `tokens` also takes `segment_ids` (B, T)
    if the model does, and the tf.Examples of `classify` have a feature "text_pair".

    A classifier of several classes is multi-label if each class is decided independently of the others, so that a text
    may have several labels, or none. This is so if the activation of its head is sigmoid, if the head returns logits
    and the model was compiled with `BinaryCrossentropy` or `BinaryFocalCrossentropy` of Keras, or if the config of a
    checkpoint has the `problem_type` "multi_label_classification". The probability of a class is then the sigmoid of
    its own logit, and `labels` has the name of the class where that is at least 0.5, and "" elsewhere. Compile a model
    that was trained with another such loss, or loaded with `compile=False`, with
    `keras.losses.BinaryCrossentropy(from_logits=True)` before the export: nothing else tells what its logits mean.

    Args:
        model: a `TextClassifier`, `MaskedLM`, `CausalLM`, `Seq2Seq` or `PretrainedModel`; or any functional
            `keras.Model` over ids (B, T), with or without inputs for segment ids and for a padding mask. These are
            found by names such as "input_ids", "token_type_ids", "attention_mask", otherwise by position.
        path: the model's folder, such as "saved_models/reviews", which is local, so it cannot be a URL such as
            "gs://bucket/reviews". Versions are numbered folders in it. TensorFlow loads none from a folder whose
            absolute path contains "[" or, except on Windows, a backslash.
        tokenizer: a `BertTokenizer`, or another tokenizer with the model's vocabulary that runs in a graph
            (`Tokenizer.in_graph`). Texts that are longer than its `max_length` are truncated, but a longer prompt is an
            error. None: requests contain ids instead of texts.
        source_tokenizer: the tokenizer of the sources, for a `Seq2Seq` with two vocabularies, where `tokenizer` is that
            of the targets. None: the same as `tokenizer`.
        generation: a dict of options of `keras_tx.generation.generate` for a generative model: `strategy`,
            `max_new_tokens`, `stop_tokens`, ... None: the defaults, with at most 64 new tokens.
        labels: the names of the classes, in the order of the output's last axis. For a binary classifier with a single
            output, two names; the output is the logit or probability of the second one. None: "0", "1", ... for a
            `TextClassifier`; the labels of the config for a checkpoint that classifies; other models return their
            outputs unchanged.
        warmup: texts (with `text_pairs`, pairs `(text, text_pair)`), or requests `{"signature_name": ..., "inputs":
            {...}}`, that a server runs before it accepts requests of clients. `check` also compares the answers to the
            first texts. A request has at most `max_batch` rows.
        max_batch: the largest number of rows that a server puts into one batch, if batching is enabled, and that a
            request may have. 32 limits the memory of a batch.
        precision: "float32", "bfloat16" or "int8": the precision of matrix products with weights of this package's
            layers, of a model in float32; products of other layers, such as `keras.layers.Dense`, stay as they are.
            "bfloat16" and "int8" are faster on processors that multiply such numbers, and make the files of the kernels
            2 and 4 times smaller. With "int8" each output of a layer has a scale for its weights, and each token a
            scale for its inputs; this process and the server then must run on an x86 processor with VNNI or AMX
            instructions. The logits of tied embeddings have this precision, too; ids are looked up in a second table
            in float32.
        constant_weights: whether the graph has the weights of matrix products of this package's layers as constants,
            which oneDNN, where TensorFlow uses it, arranges in memory once instead of in every call. Short texts gain
            most. A server needs about eight times the memory of the weights for it, and its first call takes longer. A
            server whose environment has TF_ONEDNN_ASSUME_FROZEN_WEIGHTS=1 arranges variables once, too, without that
            cost. None: for encoder models with at most 16 MB of such weights.
        text_pairs: whether each request has two texts, which become one row of ids, as `tokenizer(text, text_pair)`
            makes it: for a model that was trained on such rows. It needs a tokenizer that takes pairs, and that returns
            segment ids if the model tells the texts apart by them.
        format: "tf_saved_model", or "onnx" for ONNX Runtime: model.onnx with the inputs and outputs of the model by
            name, and the tokenizer's files, which transformers and `keras_tx.text.load_tokenizer` load. For models
            that classify or encode, not in half precision, on Keras' TensorFlow backend; needs the extra `formats` and
            onnxruntime. The answers of ONNX Runtime are compared with those of the Keras model.

    Returns:
        The version's folder.

    Raises:
        TypeError: the model is not functional, or a tokenizer does not run in a graph.
        ValueError: the constants that are asked for would need 2 GiB; there are no products that could be constants or
            have a lower precision; for "int8", TensorFlow does not multiply int8 matrices exactly in this process;
            `path` is a URL, or TensorFlow could not load the model from there; arguments do not match the model or each
            other, outputs of the model for a text depend on padding or on the other texts, an operation cannot run on
            an unmodified server, or a warm-up request fails.
        OSError: the folder cannot be written, or the disk is full.
        ImportError: for the format "onnx", if tf2onnx or onnxruntime is not installed.
        RuntimeError: on JAX or PyTorch, if the process that exports on TensorFlow ends without a result.

    Reference:
        https://www.tensorflow.org/tfx/serving/serving_config

    Examples:
        >>> tokenizer = keras_tx.text.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fun", "dull"], max_length=8)
        >>> layers = [
        ...     keras.Input((None,), dtype="int32"),
        ...     keras.layers.Embedding(6, 4, mask_zero=True),
        ...     keras.layers.GlobalAveragePooling1D(),
        ...     keras.layers.Dense(2, activation="softmax"),
        ... ]
        >>> model = keras.Sequential(layers)
        >>> options = {"tokenizer": tokenizer, "labels": ["bad", "good"]}
        >>> version = keras_tx.serving.export(model, "saved_models/reviews", **options)
        >>> version.as_posix()
        'saved_models/reviews/1'
        >>> sorted(path.name for path in version.iterdir())
        ['MODEL_CARD.json', 'assets', 'assets.extra', 'batching_params.pbtxt', 'fingerprint.pb', 'saved_model.pb',
         'variables']

        A server then answers `curl -d '{"instances": ["Dull, no fun."]}' http://localhost:8501/v1/models/reviews:predict`.
    """
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    warmup = warmup.tolist() if isinstance(warmup, np.ndarray) else warmup
    arguments: dict[str, Any] = {
        "tokenizers": {"tokenizer": tokenizer, "source_tokenizer": source_tokenizer},
        "generation": generation,
        "labels": labels,
        "warmup": check_warmup(warmup, tokenizer, checks.one_of("text_pairs", text_pairs, (True, False))),
        "max_batch": checks.positive_int("max_batch", max_batch),
        "precision": checks.one_of("precision", precision, PRECISIONS),
        "constant_weights": checks.one_of("constant_weights", constant_weights, (None, True, False)),
        "text_pairs": bool(text_pairs),
    }
    checks.one_of("format", format, ("tf_saved_model", "onnx"))
    check_path(checks.local_path("path", path), format)
    # This checks the arguments on every backend.
    exporter = exporter_for(model, arguments["tokenizers"], generation, labels, arguments["text_pairs"])
    if format == "onnx":
        only_saved_model = {
            name: value
            for name, value, default in (
                ("warmup", arguments["warmup"], []),
                ("max_batch", max_batch, 32),
                ("precision", precision, "float32"),
                ("constant_weights", constant_weights, None),
            )
            if value != default
        }
        return export_onnx(exporter, Path(path), only_saved_model)
    if keras.backend.backend() != "tensorflow":
        return export_in_subprocess(model, path, **arguments, multi_label=exporter.multi_label)
    return export_on_tensorflow(model, path, **arguments, backend="tensorflow")


def export_on_tensorflow(
    model: keras.Model,
    path: str | Path,
    *,
    tokenizers: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    labels: Sequence[str] | None,
    warmup: Sequence[Any],
    max_batch: int,
    backend: str,
    precision: str = "float32",
    constant_weights: bool | None = None,
    text_pairs: bool = False,
) -> Path:
    """`export` on TensorFlow; `backend` is the backend that the model comes from."""
    tokenizers = {"tokenizer": None, "source_tokenizer": None, **tokenizers}
    exporter = exporter_for(model, tokenizers, generation, labels, text_pairs)
    signatures, weights = _traced(exporter, precision, constant_weights)
    exporter.precision = precision

    def write(folder: Path) -> None:
        # `keras.export.ExportArchive` would trace each signature a second time and save both graphs.
        graphs = {name: function.get_concrete_function() for name, function in signatures.items()}
        root = tf.Module()
        for name, graph in graphs.items():
            setattr(root, name, graph)
        used = {id(handle) for graph in graphs.values() for handle in graph.captured_inputs}
        variables = {id(weight.handle): weight for graph in graphs.values() for weight in graph.variables}
        root.weights = [weight for handle, weight in variables.items() if handle in used]  # the others are constants
        root.resources = resources_of([*tokenizers.values(), *layers_within(model)])
        with _file_errors(path), _without_information():
            tf.saved_model.save(root, str(folder), signatures=graphs)
        if weights is None or not weights.are_constants:
            loaded = tf.saved_model.load(str(folder)).signatures
            describe(folder, {name: loaded[name] for name in signatures})
            return
        with _file_errors(path):
            constant_files.fill_constants(folder, weights.values or ())
        with constant_files.loaded(folder) as found:
            describe(folder, {name: found[name] for name in signatures})

    def describe(folder: Path, loaded: Mapping[str, Any]) -> None:
        """Compares the answers of the loaded signatures, and writes all other files of the version."""
        # Texts, and pairs of texts, without bytes.
        texts = [
            x for x in warmup if isinstance(x, str) or (isinstance(x, list) and all(isinstance(t, str) for t in x))
        ]
        live = signatures
        if weights is not None and weights.are_constants and isinstance(exporter, GeneratorExporter):
            live = exporter.signatures()  # those that are traced have constants without values, which the file has
            for function in live.values():
                function.get_concrete_function()  # TensorFlow warns if many functions are traced when they are called
        content = exporter.parity(live, texts)
        figures = parity.differences(loaded, content.get("signatures", {}))
        if content:
            parity.write_parity(folder, content)
        name = model_name(path)
        with _file_errors(path):
            count = write_warmup(folder, name, loaded, warmup, exporter, max_batch)
        write_batching(folder, max_batch)
        write_card(
            folder,
            name,
            model,
            loaded,
            tokenizers=tokenizers,
            labels=exporter.labels,
            multi_label=exporter.multi_label is not None,
            generation=exporter.generation,
            parity=figures,
            warmup=count,
            backend=backend,
            weights=weights,
        )

    return write_version(Path(path), write)


def _traced(
    exporter: Exporter, precision: str, constants: bool | None
) -> tuple[dict[str, Any], ExportedWeights | None]:
    """The traced signatures, and the weights of their products; None for a model that does not compute in float32.

    Args:
        exporter: that of the model.
        precision, constants: `precision` and `constant_weights` of `export`.

    Raises:
        ValueError: constants or a lower precision are asked for, and the model does not compute in float32, or has no
            products of this package's layers, or the constants would need 2 GiB; or TensorFlow does not multiply int8
            matrices exactly.
    """

    def trace() -> dict[str, Any]:
        signatures = exporter.signatures()
        check_servable(signatures)
        return signatures

    is_float32 = {layer.compute_dtype for layer in layers_within(exporter.model) if layer.weights} <= {"float32"}
    if (constants or precision != "float32") and not is_float32:
        # The products would silently get another precision than that of the model.
        raise ValueError(
            "`constant_weights` and `precision` need a model that computes in float32. Received: "
            f"constant_weights={constants}, precision={precision!r} for a model with dtype_policy="
            f"{exporter.model.dtype_policy.name!r}"
        )
    if precision == "int8":
        int8_support.check_int8_products()
    # Of a generative model, the prefill and the decode steps of each strategy would each have all constants.
    is_generator = isinstance(exporter, GeneratorExporter)
    with shared_shapes():
        if constants or (constants is None and is_float32 and not is_generator):
            limit = LARGEST if constants else MOST_BY_ITSELF
            try:
                with exported_weights(precision, limit=limit, with_values=False) as weights:
                    signatures = trace()
                _check_products(exporter, weights, precision, constants)
                return signatures, weights
            except TooLarge:
                if constants:
                    raise ValueError(
                        "`constant_weights` puts the weights into the graph, which holds less than 2 GiB. Received: "
                        f"constant_weights={constants}, precision={precision!r} for a model of "
                        f"{exporter.model.count_params():,} parameters"
                    ) from None
        if not is_float32:
            return trace(), None
        with exported_weights(precision, constants=False) as weights:
            signatures = trace()
    _check_products(exporter, weights, precision, constants)
    return signatures, weights


def _check_products(exporter: Exporter, weights: ExportedWeights, precision: str, constants: bool | None) -> None:
    """Raises if constants or a lower precision are asked for, and no weight of the graph became so."""
    if (constants and not weights.size) or (precision != "float32" and not weights.made):
        raise ValueError(
            "`constant_weights` and `precision` need a model with matrix products of layers of keras_tx, whose weights "
            "are float32 and not quantized. Received: "
            f"constant_weights={constants}, precision={precision!r} for a model of type "
            f"{type(exporter.model).__name__} without such products"
        )


@contextmanager
def _file_errors(path: str | Path) -> Iterator[None]:
    """Raises TensorFlow's errors in writing files, such as that of a full disk, as OSError."""
    try:
        yield
    except tf.errors.OpError as error:
        message = str(error.message).partition("}} ")[2] or str(error.message)
        raise OSError(
            f"`path` must be a folder that can be written. Received: path={str(path)!r} ({message})"
        ) from error


@contextmanager
def _without_information() -> Iterator[None]:
    """Without TensorFlow's line "Assets written to", with a folder that has another name afterwards."""

    def is_shown(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Assets written to")

    logger = tf.get_logger()
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
