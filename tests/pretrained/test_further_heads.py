"""Heads that no tiny checkpoint has compute what they do in transformers."""

import keras
import numpy as np
import pytest
import torch
import transformers

from keras_tx import pretrained
from tests.pretrained.tiny import inputs_of, loaded, tolerance
from tests.tools import to_numpy


def test_the_heads_that_no_tiny_checkpoint_has_equal_transformers(tmp_path):
    cases = [("bert", "BertFor", "PreTraining NextSentencePrediction TokenClassification QuestionAnswering")]
    cases += [("roberta", "RobertaFor", "TokenClassification QuestionAnswering")]
    cases += [("distilbert", "DistilBertFor", "TokenClassification")]
    heads = "MaskedLM SequenceClassification TokenClassification QuestionAnswering"
    cases += [("electra", "ElectraFor", heads), ("bert", "Bert", "Model"), ("roberta", "Roberta", "Model")]
    cases += [("roberta", "XLMRobertaFor", "MaskedLM QuestionAnswering")]
    cases += [("roberta", "CamembertFor", "SequenceClassification TokenClassification")]
    with torch.device("cpu"):
        for name, start, tasks in cases:
            for task in tasks.split():
                architecture = getattr(transformers, start + task)
                config = architecture.config_class(
                    **{**loaded(name).config, "model_type": architecture.config_class.model_type}
                )
                torch.manual_seed(3)
                theirs = architecture(config).eval()
                with torch.no_grad():
                    for parameter in theirs.parameters():  # biases of zero would hide mistakes
                        parameter.add_(0.1 * torch.randn_like(parameter))
                theirs.save_pretrained(tmp_path / start / task)
                ours = pretrained.from_pretrained(tmp_path / start / task)
                x = inputs_of(name, ours)
                with torch.no_grad():
                    expected = theirs(**{key: torch.tensor(value) for key, value in x.items()})
                actual = ours(x)
                assert set(actual) == {key for key, value in expected.items() if torch.is_tensor(value)}, start + task
                for key, value in actual.items():
                    value, other = to_numpy(value), expected[key].numpy()
                    real = x["attention_mask"] == 1 if other.shape[:2] == x["attention_mask"].shape else ...
                    np.testing.assert_allclose(
                        value[real], other[real], rtol=0, atol=tolerance(name), err_msg=start + task
                    )
                again = tmp_path / "again" / start / task
                pretrained.save_pretrained(ours, again)
                _, report = architecture.from_pretrained(again, output_loading_info=True)
                assert not any(report.values()), (start + task, report)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_classifier_of_the_last_token_computes_in_its_own_dtype(name, tmp_path):
    config = {**loaded(name).config, "pad_token_id": 0}
    pretrained.save_pretrained(pretrained.PretrainedModel(config, "sequence_classification"), tmp_path)
    ids = np.array([[5, 7, 11, 3], [2, 3, 0, 0]])
    alone = to_numpy(pretrained.from_pretrained(tmp_path, dtype="float32")(ids)["logits"])
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        beside = to_numpy(pretrained.from_pretrained(tmp_path, dtype="float32")(ids)["logits"])
    finally:
        keras.config.set_dtype_policy(before)
    np.testing.assert_array_equal(beside, alone)
