"""A model and a tokenizer as users make them, of Keras and TensorFlow alone."""

import keras

from tests.serving.conftest import VOCABULARY
from tests.tools import randomize

SIZE = len(VOCABULARY)


class TableTokenizer:
    """Words, looked up in a table of TensorFlow, which a SavedModel must have beside its graph."""

    in_graph = True
    mask_id = None

    def __init__(self, words, pad_id=0, max_length=6):
        import tensorflow as tf

        self.vocabulary, self.vocabulary_size = words, len(words)
        self.pad_id, self.max_length = pad_id, max_length
        keys, values = tf.constant(words), tf.range(len(words))
        self.tables = [tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 1)]

    def __call__(self, texts, max_length=None, padding="longest"):
        import tensorflow as tf

        texts = tf.strings.join(["[CLS] ", tf.convert_to_tensor(texts)])
        words = tf.strings.split(texts)[:, : max_length or self.max_length]
        return {"token_ids": self.tables[0].lookup(words).to_tensor(self.pad_id)}


def bag(size=SIZE, layer=None):
    """A small functional model (B, 2)."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(size, 3, mask_zero=True)(ids))
    x = keras.layers.Dense(2, name="head")(x)
    return randomize(keras.Model(ids, x if layer is None else layer(x)), seed=1)
