"""The token at which a text is classified: the last real one of causal models, the end of the text of BART and T5."""

import keras
import numpy as np
import pytest

from keras_tx.pretrained import PretrainedModel
from tests.tools import normal, to_numpy

CAUSAL = {
    "gpt2": {"n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 11},
    "llama": {
        **{"hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 1, "num_attention_heads": 3},
        "max_position_embeddings": 11,
    },
}
SEQ2SEQ = {
    "bart": {
        **{"d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 14, "decoder_ffn_dim": 14},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 3, "max_position_embeddings": 16},
    },
    "t5": {"d_model": 10, "d_kv": 3, "d_ff": 14, "num_layers": 1, "num_heads": 2, "eos_token_id": 2},
}
WITHOUT_END = np.array([[5, 2, 7], [2, 2, 9], [5, 7, 9]])
RULE = (
    r"Each row of `input_ids` must have the `eos_token_id` 2, at which it is classified. Received: no such id in row 2"
)


def classifier(model_type, sizes):
    model = PretrainedModel({"model_type": model_type, "vocab_size": 23, **sizes}, "sequence_classification")
    for weight in model.trainable_weights:
        weight.assign(0.5 * normal(*weight.shape, seed=len(weight.path)) + (weight.path.endswith(("scale", "gamma"))))
    return model


@pytest.mark.parametrize("model_type", CAUSAL)
def test_without_a_padding_id_the_mask_tells_which_token_is_the_last(model_type):
    model = classifier(model_type, CAUSAL[model_type])
    ids, mask = np.array([[5, 9, 7, 11], [13, 4, 8, 17]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    together = to_numpy(model({"input_ids": ids, "attention_mask": mask})["logits"])
    for row, text in zip(together, ([[5, 9, 7, 11]], [[13, 4]]), strict=True):
        np.testing.assert_allclose(row, to_numpy(model(np.array(text))["logits"])[0], rtol=0, atol=1e-6)
    without = to_numpy(model(ids)["logits"])  # all tokens are real
    assert np.abs(without - together)[1].max() > 0.01 and np.allclose(without[0], together[0], atol=1e-6)


@pytest.mark.parametrize("model_type", SEQ2SEQ)
def test_a_text_without_its_end_is_refused(model_type):
    model = classifier(model_type, SEQ2SEQ[model_type])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.array([1, 0, 1])
    with pytest.raises(ValueError, match=RULE):
        model(WITHOUT_END)
    with pytest.raises(ValueError, match=RULE):
        model.predict(WITHOUT_END, verbose=0)
    with pytest.raises(ValueError, match=RULE):
        model.fit({"input_ids": WITHOUT_END}, {"logits": labels}, verbose=0)
    with pytest.raises(ValueError, match=RULE):
        model.fit((batch for batch in [({"input_ids": WITHOUT_END}, {"logits": labels})]), verbose=0)
    assert model.predict(WITHOUT_END[:2], verbose=0)["logits"].shape[0] == 2


@pytest.mark.tensorflow
def test_so_is_one_of_a_dataset():
    import tensorflow as tf

    model = classifier("t5", SEQ2SEQ["t5"])
    with pytest.raises(ValueError, match=RULE):
        model.predict(tf.data.Dataset.from_tensors({"input_ids": WITHOUT_END}), verbose=0)
    with pytest.raises(ValueError, match="`input_ids` must be an array or tensor with 2 axes"):
        model.predict(tf.data.Dataset.from_tensor_slices({"input_ids": WITHOUT_END[:2]}), verbose=0)


@pytest.mark.tensorflow
@pytest.mark.parametrize("eagerly", [False, True])
def test_rows_that_fill_a_batch_up_need_no_end(eagerly):
    import tensorflow as tf

    from keras_tx.data import fill_batches

    ids, labels = np.array([[5, 7, 2], [2, 2, 9], [9, 8, 2]]), np.array([0, 1, 1])
    rows, after = tf.data.Dataset.from_tensor_slices(({"input_ids": ids}, {"logits": labels})), []
    filled = [fill_batches(rows.batch(3), 5), fill_batches(rows.batch(3), 5, padding_values=({"input_ids": 4}, 0))]
    for batches in (rows.batch(3), *filled):
        model = classifier("t5", {**SEQ2SEQ["t5"], "dropout_rate": 0.0})
        loss = {"logits": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eagerly, jit_compile=False)
        model.fit(batches, verbose=0)
        after.append(model.get_weights())
    for plain, *others in zip(*after, strict=True):
        for other in others:
            np.testing.assert_allclose(other, plain, rtol=0, atol=1e-6)
    without = rows.map(
        lambda x, y: ({"input_ids": tf.where(x["input_ids"] == 2, tf.constant(3, "int64"), x["input_ids"])}, y)
    )
    with pytest.raises(ValueError, match=RULE.replace("row 2", "row 0")):
        model.fit(fill_batches(without.batch(3), 5), verbose=0)


def test_arrays_with_weights_of_such_rows_need_none_either():
    ids = np.array([[5, 7, 2], [0, 0, 0]])
    model = classifier("t5", SEQ2SEQ["t5"])
    model.compile("sgd", {"logits": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    given = {"input_ids": ids}, {"logits": np.array([1, 0])}
    model.fit(*given, sample_weight={"logits": np.array([1.0, -0.0], "float32")}, verbose=0)
    with pytest.raises(ValueError, match=RULE.replace("row 2", "row 1")):
        model.fit(*given, sample_weight={"logits": np.array([1.0, 0.0], "float32")}, verbose=0)
