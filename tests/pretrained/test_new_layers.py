"""The layers of a new head are named where a checkpoint is loaded, and `fit` warns if all of them are frozen."""

import warnings

import keras
import numpy as np
import pytest
import transformers

from keras_tx.pretrained import PretrainedModel, from_pretrained, save_pretrained
from keras_tx.pretrained.files import open_tensors, write_tensors
from keras_tx.pretrained.new_layers import NewLayers
from keras_tx.pretrained.table import Row
from tests.tools import to_numpy

BERT = {"model_type": "bert", "vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
BERT |= {"intermediate_size": 14, "max_position_embeddings": 11}
DISTILBERT = {"model_type": "distilbert", "vocab_size": 23, "dim": 12, "n_layers": 1, "n_heads": 3, "hidden_dim": 14}
DISTILBERT |= {"max_position_embeddings": 11}
MODERNBERT = {**BERT, "model_type": "modernbert", "pad_token_id": 0}
QWEN3 = {**BERT, "model_type": "qwen3", "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": True}
X, Y = {"input_ids": np.array([[5, 7, 11], [3, 2, 0]])}, np.array([0, 2])


def with_new_head(folder, config, absent=(), task="sequence_classification", seed=1):
    """A model with a new head, and the warning about it."""
    if not folder.exists():
        save_pretrained(PretrainedModel(config, "base", absent=absent), folder)
    keras.utils.set_random_seed(seed)
    with pytest.warns(UserWarning, match="They have random weights and must be trained: ") as caught:
        model = from_pretrained(folder, task=task, num_labels=None if task == "masked_lm" else 3)
    return model, next(str(one.message) for one in caught if "must be trained" in str(one.message))


@pytest.mark.parametrize(
    ("config", "absent", "task", "names"),
    [
        (BERT, (), "sequence_classification", ["head_output"]),
        (BERT, ("pooler",), "sequence_classification", ["pooler", "head_output"]),
        (BERT, (), "masked_lm", ["head_dense", "head_norm", "head_bias"]),
        (DISTILBERT, (), "sequence_classification", ["head_dense", "head_output"]),
    ],
)
def test_the_warning_names_the_layers_of_the_new_tensors(tmp_path, config, absent, task, names):
    model, text = with_new_head(tmp_path / "base", config, absent, task)
    assert text.endswith(f", in the layers {names}")
    other, _ = with_new_head(tmp_path / "base", config, absent, task, seed=2)
    pairs = [
        (x.name, to_numpy(v), to_numpy(w))
        for x, y in zip(model.layers, other.layers, strict=True)
        for v, w in zip(x.weights, y.weights, strict=True)
    ]
    drawn = {name for name, one, two in pairs if not np.array_equal(one, two)}  # another seed changes new weights only
    assert drawn == {name for name in names if name not in ("head_norm", "head_bias")}


def warnings_of_fit(model):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, verbose=0)
    found = [one for one in caught if "have new random weights and are frozen" in str(one.message)]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


def frozen_but(model, *names):
    for layer in model.layers:
        layer.trainable = layer.name in names


def test_fit_warns_of_new_layers_that_are_frozen(tmp_path):
    model, _ = with_new_head(tmp_path / "base", BERT, absent=("pooler",))
    frozen_but(model, "encoder")
    (text,) = warnings_of_fit(model)
    assert text.startswith("The layers ['pooler', 'head_output'] have new random weights and are frozen, so they will")
    assert '`model.get_layer("NAME").trainable = True`' in text
    frozen_but(model, "head_output")
    assert not warnings_of_fit(model)
    frozen_but(model, "encoder")
    assert not warnings_of_fit(model)  # the head has been trained before the encoder


def test_fit_does_not_warn_of_a_frozen_head_with_lora_or_loaded_weights_or_without_new_ones(tmp_path):
    model, _ = with_new_head(tmp_path / "base", BERT)
    frozen_but(model, "encoder")
    head = model.get_layer("head_output")
    head.enable_lora(2)
    head.trainable = True
    assert not warnings_of_fit(model)
    model.save_weights(tmp_path / "x.weights.h5")
    again, _ = with_new_head(tmp_path / "base", BERT, seed=2)
    again.load_weights(tmp_path / "x.weights.h5")
    save_pretrained(again, tmp_path / "whole")
    for one in (again, from_pretrained(tmp_path / "whole")):
        frozen_but(one, "encoder")
        assert not warnings_of_fit(one)


def with_new_kernel(dtype="float32"):
    """A frozen layer whose kernel of 70 * 13 numbers is new, and its bias is not."""
    x = keras.Input((70,))
    layer = keras.layers.Dense(13, dtype=dtype, trainable=False, name="head")
    model = keras.Model(x, layer(x))
    layer.kernel.assign(np.full((70, 13), 100.0))
    return layer, NewLayers(model, [Row("head.weight", layer.kernel)])


def test_only_new_weights_count_as_new():
    layer, new_layers = with_new_kernel()
    layer.bias.assign(np.arange(13.0))
    with pytest.warns(UserWarning, match=r"The layers \['head'\] have new random weights and are frozen"):
        new_layers.warn_if_frozen()


@pytest.mark.filterwarnings("error::UserWarning")
def test_sums_do_not_overflow_in_half_precision():
    """The sum of the numbers is larger than the largest one of float16."""
    layer, new_layers = with_new_kernel("float16")
    layer.kernel.assign(np.full((70, 13), 101.0))
    new_layers.warn_if_frozen()


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_head_that_was_trained_with_lora_counts_as_trained():
    layer, new_layers = with_new_kernel()
    layer.trainable = True
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones((2, 13)))
    layer.trainable = False
    new_layers.warn_if_frozen()


def test_sums_are_fetched_at_once(monkeypatch):
    fetched, fetch = [], keras.ops.convert_to_numpy
    monkeypatch.setattr(keras.ops, "convert_to_numpy", lambda x: fetched.append(x.shape) or fetch(x))
    layer, new_layers = with_new_kernel()
    fetched.clear()
    NewLayers(keras.Model(layer.input, layer.output), [Row("w", layer.kernel), Row("b", layer.bias)])
    assert [tuple(shape) for shape in fetched] == [(2,)]


@pytest.mark.parametrize(
    ("config", "saved", "task", "architecture", "used"),
    [
        (MODERNBERT, "masked_lm", "sequence_classification", "ModernBertForSequenceClassification", "head."),
        (MODERNBERT, "masked_lm", "token_classification", "ModernBertForTokenClassification", "head."),
        (MODERNBERT, "masked_lm", "question_answering", "ModernBertForQuestionAnswering", "head."),
        (MODERNBERT, "sequence_classification", "masked_lm", "ModernBertForMaskedLM", "head."),
        (BERT, "masked_lm", "pretraining", "BertForPreTraining", "cls.predictions."),
        (QWEN3, "sequence_classification", "token_classification", "Qwen3ForTokenClassification", "score.weight"),
        (QWEN3, "token_classification", "sequence_classification", "Qwen3ForSequenceClassification", "score.weight"),
        (DISTILBERT, "sequence_classification", "token_classification", "DistilBertForTokenClassification", "class"),
    ],
)
def test_of_the_head_of_another_task_tensors_of_the_same_name_are_used(
    config, saved, task, architecture, used, tmp_path
):
    """As transformers uses them; those that it reports as missing are new here."""
    save_pretrained(PretrainedModel(config, saved), tmp_path)
    _, report = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = from_pretrained(tmp_path, task=task)
    texts = [str(one.message) for one in caught if "The checkpoint " in str(one.message)]
    new = [text.split("trained: ")[1].split(", in the")[0] for text in texts if "They have random weights" in text]
    assert {*(eval(new[0]) if new else [])} == set(report["missing_keys"])
    tensors = open_tensors(tmp_path)
    rows = {row.theirs: row for row in model.family.rows() if row.theirs.startswith(used)}
    kept = sorted(name for name in rows if name not in report["missing_keys"])
    assert kept
    for name in kept:
        np.testing.assert_array_equal(rows[name].write([to_numpy(x) for x in rows[name].variables]), tensors.read(name))
    about = [text for text in texts if "was saved for the task" in text]
    if task == "pretraining":  # which has the same head
        assert not about
        return
    (text,) = about
    beside = sorted({name for name in tensors if model.family.is_of_head(name)} - {*kept})
    assert f"saved for the task '{saved}'. Of its head, a model of the task '{task}' has the tensors {kept}, " in text
    assert text.endswith(f"were trained for the other task, but not {beside or 'others'}")


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_head_of_its_own_task_is_whole(tmp_path):
    save_pretrained(PretrainedModel(MODERNBERT, "sequence_classification"), tmp_path)
    from_pretrained(tmp_path, task="sequence_classification")
    tensors = open_tensors(tmp_path)
    arrays = {name: tensors.read(name) for name in tensors if name != "classifier.weight"}
    write_tensors(tmp_path, arrays.items())
    with pytest.raises(ValueError, match="The checkpoint must have 'classifier.weight' of shape .* no such tensor"):
        from_pretrained(tmp_path, task="sequence_classification")
