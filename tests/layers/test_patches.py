"""Patches against a loop over them in float64."""

import keras
import numpy as np
import pytest

from keras_tx.layers import PatchEmbedding
from tests.tools import assert_close, normal, randomize, to_numpy

P, D = 3, 7
IMAGES = normal(2, 9, 15, 5)


def embedding(**arguments):
    layer = PatchEmbedding(P, D, **arguments)
    layer(IMAGES)
    return randomize(layer)


def by_hand(layer):
    """Patch by patch, row by row."""
    kernel, bias = (to_numpy(w).astype("float64") for w in (layer.projection.kernel, layer.projection.bias))
    patches = []
    for row in range(0, 9, P):
        for column in range(0, 15, P):
            pixels = IMAGES[:, row : row + P, column : column + P]
            patches.append(sum(pixels[:, i, j] @ kernel[i, j] for i in range(P) for j in range(P)) + bias)
    return np.stack(patches, axis=1)


def test_the_output_is_the_class_token_and_the_projected_patches_and_their_places():
    layer = embedding()
    first = np.broadcast_to(to_numpy(layer.class_token), (2, 1, D))
    expected = np.concatenate([first, by_hand(layer)], axis=1) + to_numpy(layer.positions.embeddings)
    assert expected.shape == (2, 16, D)
    assert_close(layer(IMAGES), expected, atol=1e-5)
    assert layer(keras.Input((9, 15, 5))).shape == (None, 16, D)


def test_without_a_class_token_there_are_the_patches_alone():
    layer = embedding(class_token=False)
    assert_close(layer(IMAGES), by_hand(layer) + to_numpy(layer.positions.embeddings), atol=1e-5)
    assert layer.class_token is None


def test_dropout_drops_in_training_only():
    layer = embedding(dropout=0.5)
    assert (to_numpy(layer(IMAGES)) == 0).mean() < 0.01
    assert 0.3 < (to_numpy(layer(IMAGES, training=True)) == 0).mean() < 0.7


@pytest.mark.parametrize("shape", [(2, 9, 14, 5), (2, 10, 15, 5), (2, 9, None, 5), (2, 0, 9, 5)])
def test_images_that_cannot_be_cut_are_refused(shape):
    images = keras.KerasTensor(shape) if None in shape else np.zeros(shape, "float32")
    with pytest.raises(ValueError, match="`inputs` must be images .* Received: inputs.shape=.*, patch_size=3") as error:
        PatchEmbedding(P, D)(images)
    assert str(shape) in str(error.value)


def test_images_of_another_size_are_refused():
    for images in (normal(2, 12, 15, 5), normal(2, 9, 15, 4)):
        with pytest.raises(ValueError, match="is incompatible with the layer"):
            embedding()(images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "`patch_size` must be a positive integer. Received: patch_size=0"),
        ((3, 2.5), "`hidden_dim` must be a positive integer. Received: hidden_dim=2.5"),
    ],
)
def test_constructors_refuse_what_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        PatchEmbedding(*arguments)
    with pytest.raises(ValueError, match=r"`dropout` must be a number in \[0, 1\). Received: dropout=1"):
        PatchEmbedding(3, 5, dropout=1)


def test_initializers_fill_different_weights_differently():
    layer = embedding(embeddings_initializer=keras.initializers.RandomNormal(), kernel_initializer="ones")
    fresh = PatchEmbedding.from_config(layer.get_config())
    fresh(IMAGES)
    assert np.all(to_numpy(fresh.projection.kernel) == 1)
    assert np.abs(to_numpy(fresh.class_token) - to_numpy(fresh.positions.embeddings)[0]).max() > 1e-3
