"""A graph that a stock server cannot run is refused, and the tables of a tokenizer are saved with the graph."""

import json

import keras
import numpy as np
import pytest

from keras_tx.serving import export
from keras_tx.serving.card import FILE as CARD
from tests.serving.user_models import TableTokenizer, bag
from tests.tools import assert_close

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
