"""A classifier -> the functions that its SavedModel answers: strings or ids in, labels and probabilities out.

B batch, T tokens, C classes, L layers, N heads. Every input and output has the batch as its first axis, so that a
server may put requests together. No padding mask comes from outside: a server pads with the first value of a tensor.
"""

import keras

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def classifier_signatures(model, tokenizer, labels):
    """Returns {name: tf.function with an input signature}.

    `serving_default` and `explain` take `text` (B,) and are there if there is a tokenizer; `tokens` takes `token_ids`
    (B, T) and `lengths` (B,), and is the default otherwise.
    """
    names = tf.constant(labels)
    is_probability = model.activation is keras.activations.softmax
    padding_id = model.embedding.padding_id

    def classify(features):
        outputs = model(features, training=False)
        probabilities = tf.cast(outputs if is_probability else tf.nn.softmax(outputs), "float32")
        return {"label": tf.gather(names, tf.argmax(probabilities, axis=-1)), "probabilities": probabilities}

    def with_segments(features):
        return features if model.embedding.num_segments else {"token_ids": features["token_ids"]}

    strings = tf.TensorSpec([None], tf.string, "text")

    @tf.function(input_signature=[strings])
    def encode(text):  # traced once, for both
        return with_segments(tokenizer(text))

    @tf.function(input_signature=[strings])
    def text_in(text):
        return classify(encode(text))

    @tf.function(input_signature=[strings])
    def explain(text):
        features = encode(text)
        tokens = tf.gather(tf.constant(tokenizer.vocabulary), features["token_ids"])
        return {**classify(features), "tokens": tokens, "scores": model.attention_scores(features)}

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, None], tf.int32, "token_ids"),
            tf.TensorSpec([None], tf.int32, "lengths"),
        ]
    )
    def tokens(token_ids, lengths):
        rows, width = tf.unstack(tf.shape(token_ids))
        size = model.vocabulary_size
        one_each = tf.equal(tf.shape(lengths)[0], rows)
        in_range = tf.reduce_all((token_ids >= 0) & (token_ids < size))
        fitting = tf.reduce_all((lengths >= 0) & (lengths <= width))
        positions = model.embedding.max_length or tf.int32.max
        short = tf.reduce_all(lengths <= positions)
        checks = [
            tf.debugging.Assert(one_each, ["lengths must be one for each row of token_ids. Received:", lengths]),
            tf.debugging.Assert(in_range, [f"token_ids must be in [0, {size}). Received:", token_ids]),
            tf.debugging.Assert(fitting, ["lengths must be between 0 and the width of token_ids. Received:", lengths]),
            tf.debugging.Assert(
                short, [f"lengths must be at most {positions}, the positions of the model. Received:", lengths]
            ),
        ]
        with tf.control_dependencies(checks):
            token_ids = tf.where(tf.sequence_mask(lengths, width), token_ids, padding_id)
        return classify(with_segments({"token_ids": token_ids, "segment_ids": tf.zeros_like(token_ids)}))

    if tokenizer is None:
        return {"serving_default": tokens, "tokens": tokens}
    return {"serving_default": text_in, "tokens": tokens, "explain": explain}
