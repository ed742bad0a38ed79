"""A model that reads -> the functions that its SavedModel answers: strings or ids in; labels, words or vectors out.

B batch, T tokens, C classes, D hidden, L layers, N heads, M masked tokens, K best words. Every input and output has the
batch as its first axis, so that a server may put requests together.
"""

from collections.abc import Sequence

import keras

from keras_tx.functional_graph import source_of
from keras_tx.keras_internals import SIGMOID, SOFTMAX
from keras_tx.models import MaskedLM
from keras_tx.optional import Lazy
from keras_tx.serving.request_inputs import examples_in, id_specs, ids_in, text_spec
from keras_tx.serving.text_encoder import mean_of_real, with_a_column

tf = Lazy("tensorflow")

BEST = 5  # words for each masked token


def encoder_signatures(reader, tokenizer, labels, padding_id, fills=False):
    """Returns {name: tf.function with an input signature}.

    Args:
        reader: a `TextEncoder`.
        tokenizer: one that runs in a graph; None: there are only signatures over ids.
        labels: the names of the classes; None for a model that doesn't classify.
        padding_id: the id of padding.
        fills: whether the output is logits of what stands behind mask tokens, as of a `MaskedLM`.
    """
    of_ids = classes(reader, labels) if labels else reader
    of_texts, embedding = None, _embedding(reader, labels)
    vocabulary_size = reader.vocabulary_size or getattr(tokenizer, "vocabulary_size", None)
    if fills:
        of_ids, of_texts = _words_everywhere(reader), _words_in_masks(reader, tokenizer) if tokenizer else None

    of_ids = _traced_once(of_ids, padding_id, reader.width)
    of_texts = of_ids if of_texts is None else _traced_once(of_texts, padding_id, reader.width)

    @tf.function(input_signature=id_specs(), autograph=False)
    def tokens(token_ids, lengths):
        ids = ids_in(token_ids, lengths, vocabulary_size, padding_id, reader.max_length)
        if reader.width is None:
            ids = with_a_column(ids, padding_id)
        else:
            ids = tf.pad(ids[:, : reader.width], [[0, 0], [0, reader.width]], constant_values=padding_id)
            ids = tf.ensure_shape(ids[:, : reader.width], [None, reader.width])
        return of_ids(ids, tf.zeros_like(ids))

    if tokenizer is None:
        return {"serving_default": tokens, "tokens": tokens}

    @tf.function(input_signature=[text_spec()], autograph=False)
    def encode(text):  # traced once, for all
        return reader.tokenized(tokenizer, text)

    def encoded(text):
        return encode(text) if tf.inside_function() else reader.tokenized(tokenizer, text)

    def tokens_of(ids):
        return tf.gather(tf.constant(tokenizer.vocabulary), ids)

    by_token = of_texts is of_ids and any(_is_by_token(x) for x in reader.outputs.values())

    @tf.function(input_signature=[text_spec()], autograph=False)
    def text_in(text):
        ids, segments = encoded(text)
        beside = {"tokens": tokens_of(ids)} if by_token else {}
        return beside | of_texts(ids, segments)

    signatures = {"serving_default": text_in, "tokens": tokens}
    if labels and len(_head(reader)[1].shape) == 2:

        @tf.function(input_signature=[text_spec("inputs")], autograph=False)
        def classify(inputs):
            scores = of_ids(*encoded(examples_in(inputs)))["probabilities"]
            return {"classes": tf.tile(tf.constant([labels]), [tf.shape(scores)[0], 1]), "scores": scores}

        signatures["classify"] = classify

    if hasattr(reader.model, "attention_scores"):

        @tf.function(input_signature=[text_spec()], autograph=False)
        def explain(text):
            ids, segments = encoded(text)
            scores = reader.model.attention_scores(reader.inputs(ids, segments, padding_id))
            answer = of_texts(ids, segments)
            return {**answer, "tokens": tokens_of(ids), "scores": scores}

        signatures["explain"] = explain

    if embedding is not None:

        @tf.function(input_signature=[text_spec()], autograph=False)
        def embed(text):
            return {"embedding": embedding(*encoded(text), padding_id=padding_id)}

        signatures["embed"] = embed
    return signatures


def _is_by_token(output):
    return len(output.shape) > 2 or (len(output.shape) == 2 and output.shape[1] is None)


def _traced_once(function, padding_id, width):
    """`function` of ids and segments as one part of all graphs that use it; outside graphs as it is."""

    def call(ids, segments):
        return function(ids, segments, padding_id=padding_id)

    spec = tf.TensorSpec([None, width], tf.int32)
    traced = tf.function(call, input_signature=[spec, spec], autograph=False)
    return lambda *ids: traced(*ids) if tf.inside_function() else call(*ids)


def check_labels(reader, labels):
    """The labels as a list, one for each class of the model.

    Raises:
        ValueError: they don't fit the model's output, or that isn't a distribution.
    """
    name, output = _head(reader)
    activation = _activation(output)
    count = output.shape[-1]
    taken = sorted({"label", "probabilities"} & (set(reader.outputs) - {name}))
    if taken:
        raise ValueError(f"`model` must not have outputs named as what `labels` add. Received: outputs {taken}")
    if count == 1 and activation in (keras.activations.linear, keras.activations.sigmoid):
        count = 2  # no or yes
    elif count == 1 and activation is None:
        raise ValueError(
            "`model` must end in a layer that tells whether its single number is a logit or a probability, such as "
            f"`keras.layers.Activation('sigmoid')`. Received: output '{name}'"
        )
    elif activation not in (None, keras.activations.linear, keras.activations.softmax):
        raise ValueError(
            "`model` must return logits or probabilities: its `activation` must be None or 'softmax'. Received: "
            f"activation={getattr(activation, '__name__', activation)} of output '{name}'"
        )
    if labels is None:
        return [str(index) for index in range(count)]
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str)
    strings = is_list and all(isinstance(label, str) for label in labels)
    if not strings or len(set(labels)) != count or len(labels) != count:
        raise ValueError(
            f"`labels` must be a list of {count} different strings, one for each class of the model. "
            f"Received: labels={labels!r}"
        )
    return list(labels)


def classes(reader, labels):
    """The head's output as labels and probabilities, and all other outputs by their names."""
    name, output = _head(reader)
    names, activation, is_single = tf.constant(labels), _activation(output), output.shape[-1] == 1
    are_logits = activation is keras.activations.linear
    if activation is None:
        are_logits = not _are_probabilities(reader, name)

    def answer(ids, segments=None, padding_id=0):
        outputs = reader(ids, segments, padding_id)
        given = tf.cast(outputs.pop(name), "float32")
        if is_single:
            given = tf.sigmoid(given) if are_logits else given
            given = tf.concat([1 - given, given], axis=-1)
        probabilities = tf.nn.softmax(given) if are_logits and not is_single else given
        return {**outputs, "label": tf.gather(names, tf.argmax(given, axis=-1)), "probabilities": probabilities}

    return answer


def _embedding(reader, labels):
    """The function that `embed` answers with, (B, D); None where the model has no such vectors.

    The first of: the output `pooler_output`; the mean of `last_hidden_state` over the real tokens; of a classifier what
    its last layer with weights gets, and of a MaskedLM what its encoder returns, or of others the only output
    (B, T, D), (B, T, D) as the mean over the real tokens.
    """
    if "pooler_output" in reader.outputs:
        tensor = reader.outputs["pooler_output"]
    elif "last_hidden_state" in reader.outputs:
        tensor = reader.outputs["last_hidden_state"]
    elif labels:
        tensor = _before_head(_head(reader)[1])
    elif isinstance(reader.model, MaskedLM):
        tensor = reader.model.encoder.output
    else:
        tensor = next(iter(reader.outputs.values())) if len(reader.outputs) == 1 else None
        tensor = tensor if tensor is not None and len(tensor.shape) == 3 else None
    if tensor is None or len(tensor.shape) not in (2, 3):
        return None
    part = reader.part(tensor)

    def embedding(ids, segments=None, padding_id=0):
        hidden = part(ids, segments, padding_id)
        return hidden if len(tensor.shape) == 2 else mean_of_real(hidden, ids, padding_id)

    return embedding


def _words_in_masks(reader, tokenizer):
    """The best words for each mask token, M being the most of a text: `words` and `probabilities` (B, M, K), and
    the text (B,) with the best words in their places. A text with fewer masks has "" and 0 behind them."""
    name, _ = _head(reader)
    vocabulary, best = tf.constant(tokenizer.vocabulary), min(BEST, tokenizer.vocabulary_size)

    def words(ids, segments=None, padding_id=0):
        logits = tf.cast(reader(ids, segments, padding_id)[name], "float32")
        logits = logits[:, :, : tokenizer.vocabulary_size]  # a model may have more rows than there are tokens
        masked = tf.equal(ids, tokenizer.mask_id)
        places = tf.broadcast_to(tf.range(tf.shape(ids)[1]), tf.shape(ids))
        places = tf.ragged.boolean_mask(places, masked).to_tensor(-1)  # (B, M)
        probabilities = tf.nn.softmax(tf.gather(logits, tf.maximum(places, 0), batch_dims=1))
        probabilities, likeliest = tf.math.top_k(probabilities, best)  # (B, M, K)
        there = (places >= 0)[:, :, None]
        filled = tf.where(masked, tf.argmax(logits, axis=-1, output_type="int32"), ids)
        return {
            "text": tf.convert_to_tensor(tokenizer.decode(filled), "string"),
            "words": tf.where(there, tf.gather(vocabulary, likeliest), ""),
            "probabilities": tf.where(there, probabilities, 0),
        }

    return words


def _words_everywhere(reader):
    """The best ids at each token: `top_ids` and `probabilities` (B, T, K)."""
    name, _ = _head(reader)

    def words(ids, segments=None, padding_id=0):
        logits = tf.cast(reader(ids, segments, padding_id)[name], "float32")
        probabilities, top_ids = tf.math.top_k(tf.nn.softmax(logits), min(BEST, logits.shape[-1]))
        return {"top_ids": top_ids, "probabilities": probabilities}

    return words


def _head(reader):
    """The name of the output over the classes, and its symbolic tensor."""
    names = list(reader.outputs)
    name = names[0] if len(names) == 1 else "logits"
    if name not in names or len(reader.outputs[name].shape) < 2:
        raise ValueError(
            "`labels` are for a model with one output (B, ..., C), or one that is named 'logits'. Received: outputs "
            f"{ {key: x.shape for key, x in reader.outputs.items()} }"
        )
    return name, reader.outputs[name]


def _activation(tensor):
    """The activation that made a tensor; None of an operation without one."""
    call = source_of(tensor, inside_models=True)
    if call is None:
        return None
    operation = call.operation
    activation = getattr(operation, "activation", None)
    changes_nothing = isinstance(operation, keras.layers.Activation) and activation is keras.activations.linear
    if changes_nothing or isinstance(operation, keras.layers.Dropout):
        return _activation(call.inputs[0])
    if isinstance(operation, (keras.layers.Softmax, SOFTMAX)):
        return keras.activations.softmax
    return keras.activations.sigmoid if isinstance(operation, SIGMOID) else activation


def _are_probabilities(reader, name):
    """Whether an output is one: by its numbers for a few rows of ids, where no layer tells."""
    size, width = min(reader.vocabulary_size or 2, 11), reader.width or min(5, reader.max_length or 5)
    ids = tf.constant([[(row + 3 * column) % size for column in range(width)] for row in range(7)], "int32")
    numbers = tf.cast(reader(ids, padding_id=-1)[name], "float64").numpy()
    return bool(((numbers >= 0) & (numbers <= 1)).all() and (abs(numbers.sum(-1) - 1) < 0.02).all())


def _before_head(tensor):
    """What the last layer with weights gets; None where it is a nested model, or has several inputs."""
    call = source_of(tensor)
    while call is not None and len(call.inputs) == 1 and not isinstance(call.operation, keras.Model):
        if getattr(call.operation, "weights", None):
            return call.inputs[0]
        call = source_of(call.inputs[0])
    return None
