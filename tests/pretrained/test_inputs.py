"""The inputs of a checkpoint: masks that Keras attached to ids, and types, ranks and values that are refused."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.pretrained.tiny import inputs_of, loaded
from tests.tools import assert_close, to_numpy


class WithMask(keras.layers.Layer):
    """Ids as they are, with the Keras mask of those that are not 0."""

    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "dtype": "int32"})
        self.supports_masking = True

    def call(self, ids):
        return ids

    def compute_mask(self, ids, mask=None):
        return ops.not_equal(ids, 0)


@pytest.fixture(scope="module")
def bert():
    return loaded("bert")


@pytest.fixture(scope="module")
def x(bert):
    """Ids, which are 0 at padding, and their mask."""
    found = {name: inputs_of("bert", bert)[name] for name in ("input_ids", "attention_mask")}
    return {**found, "input_ids": found["input_ids"] * found["attention_mask"]}


def assert_equals_masked(logits, bert, x):
    real = x["attention_mask"] == 1
    assert_close(to_numpy(logits)[real], to_numpy(bert(x)["logits"])[real], atol=1e-5)


def test_the_argument_mask_is_refused_and_calls_after_it_work(bert, x):
    for inputs in (x["input_ids"], x):
        with pytest.raises(
            ValueError, match=r"`mask` must be None; .* \['attention_mask'\]. Received: mask of type nda"
        ):
            bert(inputs, mask=x["attention_mask"] == 1)
    assert_equals_masked(bert(x)["logits"], bert, x)
    assert bert(x["input_ids"])["logits"].shape[:2] == x["input_ids"].shape


def test_a_mask_that_a_layer_attached_to_the_ids_is_their_attention_mask(bert, x, tmp_path):
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, bert(WithMask()(ids))["logits"])
    assert_equals_masked(model(x["input_ids"]), bert, x)
    masked = WithMask()(x["input_ids"])
    assert_equals_masked(bert(masked)["logits"], bert, x)
    all_real = ops.ones_like(x["attention_mask"])
    assert_close(bert(masked, attention_mask=all_real)["logits"], bert(x["input_ids"])["logits"], atol=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"WithMask": WithMask})
    assert_close(again(x["input_ids"]), model(x["input_ids"]), atol=0)


def test_so_is_one_of_the_ids_of_a_target():
    bart = loaded("bart")
    x = inputs_of("bart", bart)
    masks = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
    ids = {name: x[name] * x[mask] for name, mask in masks.items()}  # 0 at padding, and nowhere else but at the start
    given = {mask: (ids[name] != 0).astype("int32") for name, mask in masks.items()}
    logits = bart({name: WithMask()(array) for name, array in ids.items()})["logits"]
    real = given["decoder_attention_mask"] == 1
    assert_close(to_numpy(logits)[real], to_numpy(bart({**ids, **given})["logits"])[real], atol=1e-5)


def test_a_mask_of_floats_is_one_of_ones_and_zeros(bert, x):
    floats = x["attention_mask"].astype("float32")
    assert_equals_masked(bert({**x, "attention_mask": floats})["logits"], bert, x)
    rule = "`attention_mask` must be boolean, or 1 and 0. Received: attention_mask with "
    wrong = {"0.5": floats / 2, "-10000.0": (floats - 1) * 1e4, "nan": np.where(floats, floats, np.nan)}
    for value, mask in wrong.items():
        with pytest.raises(ValueError, match=f"{rule}the value {value}"):
            bert({**x, "attention_mask": mask.astype("float32")})


def test_a_mask_of_floats_is_checked_in_a_graph(bert, x):
    floats = x["attention_mask"].astype("float32")
    predicted = bert.predict({**x, "attention_mask": floats}, verbose=0)["logits"]
    assert_equals_masked(predicted, bert, x)
    if keras.backend.backend() != "jax":  # which cannot raise
        with pytest.raises(Exception, match="`attention_mask` must be boolean, or 1 and 0. Received: attention_mask w"):
            bert.predict({**x, "attention_mask": floats / 2}, verbose=0)


@pytest.mark.parametrize("name", ["token_type_ids", "position_ids"])
def test_segments_and_positions_are_integers(name, bert, x):
    rule = f"`{name}` must be integers; .* Received: {name} of dtype float32"
    with pytest.raises(ValueError, match=rule):
        bert({**x, name: np.full(x["input_ids"].shape, 0.9, "float32")})
    with pytest.raises(ValueError, match=rule):
        bert(keras.Input((None,), dtype="int32"), **{name: keras.Input((None,))})


def test_each_input_is_an_array_of_the_rank_of_the_model(bert, x):
    rule = "`{0}` must be an array or tensor with 2 axes. Received: {0} of "
    ids, mask = x["input_ids"], x["attention_mask"]
    wrong = {
        r"shape \(3, 1, 1, 12\)": mask[:, None, None],
        r"shape \(12,\)": mask[0],
        "type list": mask.tolist(),
    }
    for received, given in wrong.items():
        with pytest.raises(ValueError, match=rule.format("attention_mask") + received):
            bert({"input_ids": ids, "attention_mask": given})
        with pytest.raises(ValueError, match=rule.format("input_ids") + received):
            bert(given)
    with pytest.raises(ValueError, match=rule.format("attention_mask") + r"shape \(None, 1, 1, None\)"):
        bert(keras.Input((None,), dtype="int32"), attention_mask=keras.Input((1, 1, None)))
    with pytest.raises(ValueError, match=r"`input_ids` must have at least one token in each row. .* shape \(3, 0\)"):
        bert(ids[:, :0])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="its tensors")
def test_ragged_tensors_and_tensors_of_unknown_rank_are_refused(bert):
    import tensorflow as tf

    with pytest.raises(ValueError, match="`input_ids` must be a dense tensor: .* Received: a RaggedTensor of shape"):
        bert(tf.ragged.constant([[3, 4, 5], [6]]))
    call = tf.function(lambda ids: bert(ids)["logits"], input_signature=[tf.TensorSpec(None, "int32")])
    with pytest.raises(ValueError, match="`input_ids` must be an array or tensor with 2 axes. .* unknown rank"):
        call(tf.constant([[3, 4, 5]]))
