"""A graph that a stock server cannot run is refused, and the tables of a tokenizer are saved with the graph."""

import json

import keras
import numpy as np
import pytest

from keras_tx.serving import export
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.text_encoder import TextEncoder
from tests.serving.user_models import TableTokenizer, bag
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.tensorflow


class Servable(keras.layers.Layer):
    """Something that TensorFlow does here and a stock server does not."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def call(self, x):
        import tensorflow as tf

        if self.what == "update":
            return keras.ops.slice_update(x, (0, 0), x[:, :1])
        if self.what == "python":
            return tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), [None, 2])
        return tf.function(lambda x: 2 * x, jit_compile=True)(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.parametrize(
    "what, op",
    [("update", "XlaDynamicUpdateSlice"), ("python", "PyFunc"), ("compiled", "a function with jit_compile=True")],
)
def test_what_a_server_cannot_run_is_named(tokenizer, tmp_path, what, op):
    with pytest.raises(
        ValueError, match=f"without XLA and Python; .*Received: {op} in the signature 'serving_default'"
    ):
        export(bag(layer=Servable(what)), tmp_path, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


class Table(keras.layers.Layer):
    """Looks ids up in a table of TensorFlow, which keeps the order of ids but for 3 and 4."""

    def __init__(self):
        import tensorflow as tf

        super().__init__()
        keys, values = tf.range(6), tf.constant([0, 1, 2, 4, 3, 5])
        self.tables = {"ids": tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 1)}

    def call(self, ids):
        return self.tables["ids"].lookup(ids)

    def compute_output_spec(self, ids):
        return keras.KerasTensor(ids.shape, "int32")


def test_the_tables_of_layers_are_saved_with_the_graph(tmp_path):
    import tensorflow as tf

    ids = keras.Input((None,), dtype="int32")
    known = keras.layers.IntegerLookup(vocabulary=[1, 2, 4, 3, 5], mask_token=0)
    assert np.array_equal(known(np.array([[0, 1, 2, 3, 4, 5]])), [[0, 2, 3, 5, 4, 6]])
    x = keras.layers.Embedding(7, 3, mask_zero=True)(known(Table()(ids)))
    model = randomize(keras.Model(ids, {"mean": keras.layers.GlobalAveragePooling1D()(x)}))
    assert TextEncoder(model).vocabulary_size is None
    path = export(model, tmp_path)
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    answer = served(token_ids=tf.constant([[3, 4, 1], [5, 0, 0]]), lengths=tf.constant([3, 1]))["mean"]
    table = to_numpy(model.weights[0])  # whose rows are those of 0, an unknown id, 1, 2, 4, 3 and 5
    assert_close(answer, [(table[4] + table[5] + table[2]) / 3, table[6]])


def test_the_tables_of_a_tokenizer_are_saved_with_it(tmp_path):
    import tensorflow as tf

    words = ["[PAD]", "[UNK]", "[CLS]", "a", "b", "c"]
    model = bag(6)
    path = export(model, tmp_path, tokenizer=TableTokenizer(words))
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    answer = served(text=tf.constant(["a c b", "", "d a"]))["head"]
    assert_close(answer[0], model(np.array([[2, 3, 5, 4]]))[0])
    assert_close(answer[2], model(np.array([[2, 1, 3]]))[0])
    card = json.loads((path / CARD).read_text())
    assert card["tokenizer"] == {"kind": "TableTokenizer", "vocabulary_size": 6, "options": {}}
