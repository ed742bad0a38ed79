"""ViT against transformers: hidden states, what is pooled, classes."""

import json

import pytest

from keras_tx.pretrained import PretrainedModel, from_pretrained, save_pretrained
from tests.pretrained import torch_models
from tests.pretrained.tiny import checkpoint, reference
from tests.tools import assert_close, normal, to_numpy

SMALL = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "image_size": 10,
    "patch_size": 5,
    "num_channels": 2,
}


def test_the_base_model_is_that_of_transformers():
    arrays = reference("vit")
    outputs = from_pretrained(checkpoint("vit"), task="base")(arrays["pixel_values"])
    assert set(outputs) == {"last_hidden_state"}  # the checkpoint has no pooler
    assert_close(outputs["last_hidden_state"], arrays["last_hidden_state"], atol=2e-5)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTModel", {}),
        ("ViTModel", {"pooler_output_size": 7, "pooler_act": "relu", "qkv_bias": False}),
        ("ViTModel", {"patch_size": [5, 5]}),
        ("ViTModel", {"patch_size": 3}),  # does not divide the size of the images
        ("ViTForImageClassification", {"num_labels": 5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-2}),
    ],
)
def test_every_option_is_that_of_transformers(tmp_path, name, config):
    import torch

    theirs = torch_models.make(tmp_path, name, **{**SMALL, **config})
    images = normal(3, 2, 10, 10)
    with torch.no_grad():
        expected = theirs(torch.tensor(images, device="cpu").double(), output_hidden_states=True)
    model = from_pretrained(tmp_path, output_hidden_states=True)
    outputs = model(images)
    assert set(outputs) == set(expected)
    for key, value in expected.items():
        pairs = zip(outputs[key], value, strict=True) if key == "hidden_states" else [(outputs[key], value)]
        for ours, wanted in pairs:
            assert_close(ours, wanted.numpy(), atol=3e-5, rtol=3e-5)


def test_a_model_with_a_pooler_becomes_a_classifier(tmp_path):
    values = {"model_type": "vit", **SMALL, "image_size": [10, 15]}
    model = PretrainedModel(values, "base")
    assert to_numpy(model(normal(2, 2, 10, 15))["last_hidden_state"]).shape == (2, 7, 12)
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["ViTModel"]
    with pytest.warns(UserWarning, match=r"lacks tensors of the task 'image_classification'.*'classifier.weight'"):
        classifier = from_pretrained(tmp_path, task="image_classification", num_labels=11)
    assert to_numpy(classifier(normal(2, 2, 10, 15))["logits"]).shape == (2, 11)
    assert_close(classifier.family.encoder.final_norm.gamma, model.family.encoder.final_norm.gamma)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"patch_size": 11}, r"must be images .* multiples of `patch_size`.*shape=\(None, 0, 0, 2\), patch_size=11"),
        ({"patch_size": [5, 2]}, r"`patch_size` .* one size, or two that are equal. Received: patch_size=\[5, 2\]"),
        ({"patch_size": [5]}, r"`patch_size` .* a positive integer or two of them. .* patch_size=\[5\]"),
        (
            {"hidden_size": 13},
            "`hidden_size` in config.json must be divisible by `num_attention_heads`.* hidden_size=13",
        ),
        (
            {"image_size": "10"},
            "`image_size` .* a positive integer or two of them. .* image_size='10'",
        ),
        (
            {"image_size": [10]},
            r"`image_size` .* a positive integer or two of them. .* image_size=\[10\]",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        PretrainedModel({"model_type": "vit", **SMALL, **config}, "base")
