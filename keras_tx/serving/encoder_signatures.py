"""The signatures of a functional encoder model: texts or ids in; labels, words or vectors out.

B batch, T tokens, C classes, D hidden, L layers, N heads, M mask tokens, K best words. The first axis of every input
and output is the batch, so that a server can batch requests.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from keras_tx.functional_graph import source_of
from keras_tx.generation.in_graph import at_least_columns
from keras_tx.layers import exported_weights
from keras_tx.optional import Lazy
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving.class_labels import Outputs, classifier_outputs, head_of
from keras_tx.serving.request_inputs import (
    PAIR_FEATURE,
    checked_ids,
    checked_pairs,
    checked_segments,
    graph_function,
    id_specs,
    text_spec,
    texts_of_examples,
)
from keras_tx.serving.text_encoder import TextEncoder, mean_of_real_tokens, with_columns
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

TOP_K = 5  # words for each mask token


def encoder_signatures(
    encoder: TextEncoder,
    tokenizer: Any,
    labels: list[str] | None,
    padding_id: int,
    fills_masks: bool = False,
    *,
    multi_label: str | None = None,
    text_pairs: bool = False,
) -> dict[str, Any]:
    """Returns {name: tf.function with an input signature}.

    Args:
        encoder: the model.
        tokenizer: a tokenizer that runs in a graph; None: there are only signatures over ids.
        labels: the names of the classes; None for a model that does not classify.
        padding_id: the id of padding tokens.
        fills_masks: whether the output is logits over the vocabulary, as of a `MaskedLM`.
        multi_label: what `multi_label_kind` returned.
        text_pairs: whether the signatures take pairs of texts.
    """
    outputs_of_ids: Outputs = classifier_outputs(encoder, labels, multi_label) if labels else encoder
    outputs_of_texts = outputs_of_ids
    embedding = _embedding_function(encoder, labels, fills_masks)
    vocabulary_size = encoder.vocabulary_size or getattr(tokenizer, "vocabulary_size", None)
    if fills_masks:
        outputs_of_ids = _top_tokens(encoder)
        outputs_of_texts = _filled_masks(encoder, tokenizer) if tokenizer else outputs_of_ids
    same_outputs = outputs_of_texts is outputs_of_ids
    parts: dict[str, Outputs] = {"of_ids": outputs_of_ids, "of_texts": outputs_of_texts}
    if embedding is not None:
        parts["embedding"] = embedding
    if hasattr(encoder.model, "attention_scores"):

        def attention_scores(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> Tensor:
            inputs = encoder.model_inputs(ids, segments, padding_id)

            def scores() -> list[Tensor]:
                return [tf.cast(encoder.model.attention_scores(inputs), "float32")]

            return exported_weights.by_number_of_rows(tf.size(ids), scores)[0]

        parts["scores"] = attention_scores
    run = {
        name: _traced_once(part, padding_id, encoder.fixed_length, constants=part is outputs_of_texts)
        for name, part in parts.items()
        if name != "of_ids" or not same_outputs
    }
    run.setdefault("of_ids", run["of_texts"])

    def of_width(rows: Tensor, padding: int) -> Tensor:
        length = encoder.fixed_length
        rows = rows[:, : encoder.max_length]  # behind it there is only padding, by `lengths`
        return at_least_columns(rows, padding) if length is None else with_columns(rows, padding, length)

    def outputs_of_tokens(token_ids: Tensor, lengths: Tensor, segment_ids: Tensor = None) -> dict[str, Tensor]:
        ids = of_width(checked_ids(token_ids, lengths, vocabulary_size, padding_id, encoder.max_length), padding_id)
        if segment_ids is None:
            segments = tf.zeros_like(ids)
        else:
            segments = of_width(checked_segments(segment_ids, token_ids, lengths, encoder.num_segments), 0)
        found: dict[str, Tensor] = run["of_ids"](ids, segments)
        return found

    tokens = _tokens_function(outputs_of_tokens, with_segments=text_pairs and encoder.has_segments)
    if tokenizer is None:
        return {"serving_default": tokens, "tokens": tokens}

    def ids_and_segments(*texts: Tensor) -> tuple[Tensor, Tensor]:
        return encoder.tokenize(tokenizer, *(checked_pairs(*texts) if text_pairs else texts))

    def over_texts(function: Callable[..., Any]) -> Any:
        return _text_function(function, text_pairs)

    tokenize_in_graph = over_texts(ids_and_segments)  # one trace serves all signatures
    tokenize_once = _last_call_kept(ids_and_segments)

    def tokenize(*texts: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = (tokenize_in_graph if tf.inside_function() else tokenize_once)(*texts)
        return found

    def token_strings(ids: Tensor) -> Tensor:
        return tf.gather(tf.constant(tokenizer.vocabulary), ids)

    has_token_axis = same_outputs and any(_has_token_axis(x) for x in encoder.outputs.values())

    @over_texts
    def serving_default(*texts: Tensor) -> dict[str, Tensor]:
        ids, segments = tokenize(*texts)
        strings = {"tokens": token_strings(ids)} if has_token_axis else {}
        found: dict[str, Tensor] = run["of_texts"](ids, segments)
        return strings | found

    signatures = {"serving_default": serving_default, "tokens": tokens}
    if labels and len(head_of(encoder)[1].shape) == 2:

        @graph_function(text_spec("inputs"))
        def classify(inputs: Tensor) -> dict[str, Tensor]:
            scores = run["of_ids"](*tokenize(*texts_of_examples(inputs, text_pairs)))["probabilities"]
            return {"classes": tf.tile(tf.constant([labels]), [tf.shape(scores)[0], 1]), "scores": scores}

        signatures["classify"] = classify

    if "scores" in parts:

        @over_texts
        def explain(*texts: Tensor) -> dict[str, Tensor]:
            ids, segments = tokenize(*texts)
            outputs = run["of_texts"](ids, segments)
            return {**outputs, "tokens": token_strings(ids), "scores": run["scores"](ids, segments)}

        signatures["explain"] = explain

    if embedding is not None:

        @over_texts
        def embed(*texts: Tensor) -> dict[str, Tensor]:
            return {"embedding": run["embedding"](*tokenize(*texts))}

        signatures["embed"] = embed
    return signatures


def _text_function(function: Callable[..., Any], text_pairs: bool) -> Any:
    """A graph function of `text`, or of `text` and `text_pair`."""
    if text_pairs:

        @graph_function(text_spec(), text_spec(PAIR_FEATURE))
        def of_pairs(text: Tensor, text_pair: Tensor) -> Any:
            return function(text, text_pair)

        return of_pairs

    @graph_function(text_spec())
    def of_texts(text: Tensor) -> Any:
        return function(text)

    return of_texts


def _tokens_function(function: Callable[..., Any], with_segments: bool) -> Any:
    """A graph function of `token_ids` and `lengths`, and of `segment_ids` where they tell two texts apart."""
    if with_segments:

        @graph_function(*id_specs(), tf.TensorSpec([None, None], tf.int32, "segment_ids"))
        def tokens_of_pairs(token_ids: Tensor, lengths: Tensor, segment_ids: Tensor) -> Any:
            return function(token_ids, lengths, segment_ids)

        return tokens_of_pairs

    @graph_function(*id_specs())
    def tokens(token_ids: Tensor, lengths: Tensor) -> Any:
        return function(token_ids, lengths)

    return tokens


def _has_token_axis(output: Tensor) -> bool:
    return len(output.shape) > 2 or (len(output.shape) == 2 and output.shape[1] is None)


def _traced_once(part: Outputs, padding_id: int, length: int | None, *, constants: bool) -> Callable[..., Any]:
    """A function of ids and segment ids, which in graphs is one function of TensorFlow for all signatures that call it.

    Each part of what signatures return is a function of its own: TensorFlow takes long to leave out what a signature
    does not use of a larger one. Only one of them has weights as `constants`, so that a graph has each constant once.
    """
    spec = tf.TensorSpec([None, length], tf.int32)

    @graph_function(spec, spec)
    def traced(ids: Tensor, segments: Tensor) -> Any:
        with contextlib.nullcontext() if constants else exported_weights.only_variables():
            return part(ids, segments, padding_id=padding_id)

    run_once = _last_call_kept(lambda ids, segments: part(ids, segments, padding_id=padding_id))

    def run(ids: Tensor, segments: Tensor) -> Any:
        return (traced if tf.inside_function() else run_once)(ids, segments)

    return run


def _last_call_kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """The eager `function`, which returns again what it returned if the call before had the same tensors.

    `parity` asks all signatures about one text after another, and most of them need the same ids and outputs.
    """
    last: tuple[Any, Any] = (None, None)  # a call, and what it returned

    def run(*tensors: Tensor) -> Any:
        nonlocal last
        call = [(tuple(x.shape), x.numpy().tolist()) for x in tensors]
        if call != last[0]:
            last = call, function(*tensors)
        return last[1]

    return run


def _embedding_function(
    encoder: TextEncoder, labels: list[str] | None, fills_masks: bool
) -> Callable[..., Tensor] | None:
    """The function for `embed`: ids and segment ids -> vectors (B, D); None if the model has no such vectors.

    The vectors are the first of these that the model has: the output `pooler_output`; the output `last_hidden_state`;
    the inputs of a classifier's last layer with weights; the output of the encoder of a model that fills masks; the
    only output, if it is (B, T, D). Vectors (B, T, D) are averaged over the real tokens, so there must be one for each.
    Ids are no vectors: the last layer with weights may be the embedding that looks them up.
    """
    if "pooler_output" in encoder.outputs:
        tensor = encoder.outputs["pooler_output"]
    elif "last_hidden_state" in encoder.outputs:
        tensor = encoder.outputs["last_hidden_state"]
    elif labels:
        tensor = _before_head(head_of(encoder)[1])
    elif fills_masks:
        parts = encoder.model.family if isinstance(encoder.model, PretrainedModel) else encoder.model
        tensor = _made_by(getattr(parts, "encoder", None), head_of(encoder)[1])
    else:
        tensor = next(iter(encoder.outputs.values())) if len(encoder.outputs) == 1 else None
        tensor = tensor if tensor is not None and len(tensor.shape) == 3 else None
    if tensor is None or len(tensor.shape) not in (2, 3):
        return None
    if not keras.backend.is_float_dtype(tensor.dtype) or any(tensor is one for one in encoder.model.inputs):
        return None
    if len(tensor.shape) == 3 and not encoder.have_token_axis([tensor]):
        return None
    hidden_states = encoder.up_to(tensor)

    def embedding(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> Tensor:
        hidden = hidden_states(ids, segments, padding_id)
        pooled = hidden if len(tensor.shape) == 2 else mean_of_real_tokens(hidden, ids, padding_id)
        return tf.cast(pooled, "float32")

    return embedding


def _filled_masks(encoder: TextEncoder, tokenizer: Any) -> Outputs:
    """A function that finds the best words for each mask token.

    It returns `words` and `probabilities` (B, M, K), where M is the largest number of mask tokens in a text, padded
    with "" and 0, and `text` (B,), in which the best word replaces each mask token.
    """
    name, _ = head_of(encoder)
    vocabulary, count = tf.constant(tokenizer.vocabulary), min(TOP_K, tokenizer.vocabulary_size)

    def run(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> dict[str, Tensor]:
        logits = tf.cast(encoder(ids, segments, padding_id)[name], "float32")
        logits = logits[:, :, : tokenizer.vocabulary_size]  # the vocabulary of the model may be larger
        masked = tf.equal(ids, tokenizer.mask_id)
        places = tf.broadcast_to(tf.range(tf.shape(ids)[1]), tf.shape(ids))
        places = tf.ragged.boolean_mask(places, masked).to_tensor(-1)  # (B, M)
        probabilities = tf.nn.softmax(tf.gather(logits, tf.maximum(places, 0), batch_dims=1))
        probabilities, best = tf.math.top_k(probabilities, count)  # (B, M, K)
        is_mask = (places >= 0)[:, :, None]
        filled = tf.where(masked, tf.argmax(logits, axis=-1, output_type="int32"), ids)
        return {
            "text": tf.convert_to_tensor(tokenizer.decode(filled), "string"),
            "words": tf.where(is_mask, tf.gather(vocabulary, best), ""),
            "probabilities": tf.where(is_mask, probabilities, 0),
        }

    return run


def _top_tokens(encoder: TextEncoder) -> Outputs:
    """A function that returns the best ids at each token: `top_ids` and `probabilities` (B, T, K)."""
    name, _ = head_of(encoder)

    def run(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> dict[str, Tensor]:
        logits = tf.cast(encoder(ids, segments, padding_id)[name], "float32")
        probabilities, top_ids = tf.math.top_k(tf.nn.softmax(logits), min(TOP_K, logits.shape[-1]))
        return {"top_ids": top_ids, "probabilities": probabilities}

    return run


def _made_by(layer: Any, tensor: Tensor) -> Tensor:
    """The output of `layer` from which the symbolic `tensor` was computed; None if there is none."""
    tensors, seen = [tensor], {id(tensor)}
    for one in tensors:  # it grows
        call = source_of(one)
        if call is not None and call.operation is layer:
            return one
        new = {} if call is None else {id(x): x for x in call.inputs if id(x) not in seen}
        seen |= set(new)
        tensors += new.values()
    return None


def _before_head(tensor: Tensor) -> Tensor:
    """The input of the last layer with weights; None if that is a nested model, or has several inputs."""
    call = source_of(tensor)
    while call is not None and len(call.inputs) == 1 and not isinstance(call.operation, keras.Model):
        if getattr(call.operation, "weights", None):
            return call.inputs[0]
        call = source_of(call.inputs[0])
    return None
