"""New models begin as those of transformers: every tensor is drawn from a distribution of the same width."""

import keras
import numpy as np
import pytest
import transformers

from keras_tx import pretrained
from keras_tx.pretrained import PretrainedModel, registry
from keras_tx.pretrained.config import LAYERS, Config
from tests.pretrained.small_configs import small
from tests.tools import to_numpy

LABELS = 211
TASKS = [
    (model_type, task)
    for model_type in sorted(registry.FILES)
    for task in registry.family_of(Config({"model_type": model_type})).tasks
    if task not in ("base", "encoder", "pretraining") and not (task == "question_answering" and model_type != "t5")
]


@pytest.mark.parametrize("model_type, task", TASKS)
def test_each_tensor_begins_as_wide_as_that_of_transformers(model_type, task, tmp_path):
    values = small(transformers.AutoConfig.for_model(model_type).to_dict())
    values |= {name: 0.13 for name in ("initializer_range", "init_std", "initializer_factor") if name in values}
    values |= {name: 2 for name in LAYERS if name in values}
    if task.endswith("classification"):  # a head of few numbers would tell little
        values |= {"id2label": {str(index): str(index) for index in range(LABELS)}}
        values |= {"label2id": {str(index): index for index in range(LABELS)}}
    values.pop("layer_types", None)  # of one layer
    model = PretrainedModel(values, task)
    kind = getattr(transformers, model.family.architecture())
    kind(kind.config_class.from_dict(model.config)).save_pretrained(tmp_path)
    theirs = pretrained.from_pretrained(tmp_path, task=task)
    assert [one.path for one in model.weights] == [one.path for one in theirs.weights]
    compared = 0
    for variable, other in zip(model.weights, theirs.weights, strict=True):
        ours, expected = to_numpy(variable), to_numpy(other)
        if expected.std() == 0:  # biases, and the scales of norms, which only T5 of transformers multiplies
            np.testing.assert_array_equal(ours, expected != 0)
            continue
        # Six standard deviations of the ratio and of the mean, and a row of zeros for padding.
        assert ours.std() / expected.std() == pytest.approx(1, abs=6 / np.sqrt(ours.size) + 0.01), variable.path
        assert abs(ours.mean()) < 6 * ours.std() / np.sqrt(ours.size), variable.path
        compared += 1
    assert compared > 10


def test_the_weights_of_a_clone_begin_as_wide():
    model = PretrainedModel(small(transformers.T5Config().to_dict()), "conditional_generation")
    clone = keras.models.clone_model(model)
    for variable, other in zip(clone.weights, model.weights, strict=True):
        ours, expected = to_numpy(variable), to_numpy(other)
        assert not np.array_equal(ours, expected) or expected.std() == 0
        assert ours.std() == pytest.approx(expected.std(), rel=6 / np.sqrt(ours.size)), variable.path


def test_a_head_that_a_checkpoint_lacks_begins_as_wide(tmp_path):
    values = {**small(transformers.BertConfig().to_dict()), "initializer_range": 0.13}
    pretrained.save_pretrained(PretrainedModel(values, "base"), tmp_path)
    with pytest.warns(UserWarning, match="lacks tensors of the task"):
        model = pretrained.from_pretrained(tmp_path, task="sequence_classification", num_labels=53)
    (kernel,) = [row.ours for row in model.family.rows() if row.theirs == "classifier.weight"]
    assert to_numpy(kernel).std() == pytest.approx(0.13, rel=0.2)


@pytest.mark.parametrize("model_type", ["bert", "llama", "gpt2"])
def test_a_range_of_zero_stands_for_the_default(model_type):
    values = {**small(transformers.AutoConfig.for_model(model_type).to_dict()), "initializer_range": 0.0}
    model = PretrainedModel(values, "sequence_classification" if model_type == "bert" else "causal_lm")
    assert all(to_numpy(one).std() > 0.001 for one in model.weights if one.path.endswith(("kernel", "embeddings")))
