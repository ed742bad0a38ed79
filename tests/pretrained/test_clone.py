"""`keras.models.clone_model` of a loaded checkpoint: the same outputs, methods and files, with variables of its own."""

import keras
import numpy as np
import pytest

from keras_tx import pretrained
from tests.pretrained.tiny import (
    GENERATIVE,
    assert_equals_reference,
    checkpoint,
    inputs_of,
    loaded,
    prompts_of,
)
from tests.tools import assert_close, to_numpy

# One of each way to hold layers: heads of tokens and of classes, layers by side, none.
NAMES = ["bart", "bert", "distilbert_cls", "llama", "modernbert", "roberta", "t5_v11", "vit"]


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX compiles each operation for seconds")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("eager")
def test_a_clone_of_a_checkpoint(name, tmp_path):
    model = loaded(name)
    clone = keras.models.clone_model(model)
    assert type(clone) is pretrained.PretrainedModel and clone.get_config() == model.get_config()
    clone.set_weights(model.get_weights())
    own = {id(v) for v in clone.variables}
    assert not own & {id(v) for v in model.variables}
    assert {id(v) for row in clone.family.rows() for v in row.variables} <= own
    inputs = inputs_of(name, model)
    assert_equals_reference(clone(inputs), name)
    needed = {key: inputs[key] for key in model.family.needed}
    for ours, theirs in zip(*[keras.tree.flatten(one(needed)) for one in (clone, model)], strict=True):
        assert_close(ours, theirs, atol=0)
    for one, folder in ((clone, "clone"), (model, "model")):
        pretrained.save_pretrained(one, tmp_path / folder)
    files = [{path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("clone", "model")]
    assert files[0] == files[1] and "model.safetensors" in files[0]
    if name in GENERATIVE:
        ids = [one.generate(prompts_of(name), max_new_tokens=3) for one in (clone, model)]
        np.testing.assert_array_equal(*ids)


@pytest.mark.parametrize("name", ["bert", "gpt2_inner"])
def test_a_clone_function_may_reuse_layers_and_their_weights_stay(name):
    model = pretrained.from_pretrained(checkpoint(name))
    before = [to_numpy(weight) for weight in model.weights]
    shared = {layer.name for layer in model.layers if layer.name in ("embedding", "encoder")}
    for reused in ({layer.name for layer in model.layers}, shared):
        kept = lambda layer, names=reused: (
            layer if layer.name in names else layer.__class__.from_config(layer.get_config())
        )
        clone = keras.models.clone_model(model, clone_function=kept)
        assert type(clone) is pretrained.PretrainedModel
        for weight, value in zip(model.weights, before, strict=True):
            np.testing.assert_array_equal(to_numpy(weight), value)


def test_a_clone_function_may_copy_weights():
    model = pretrained.from_pretrained(checkpoint("bert"))

    def copied(layer):
        new = layer.__class__.from_config(layer.get_config())
        if layer.weights:
            new.build_from_config(layer.get_build_config())
            new.set_weights(layer.get_weights())
        return new

    clone = keras.models.clone_model(model, clone_function=copied)
    for ours, theirs in zip(clone.weights, model.weights, strict=True):
        assert ours is not theirs
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
