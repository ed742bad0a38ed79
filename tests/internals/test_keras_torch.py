"""What keras_tx uses of Keras' private parts for PyTorch still is as it needs it."""

import keras
import pytest
from keras import layers

from keras_tx.internals import keras_torch
from tests.internals.doors import TORCH, still

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="about PyTorch")


@still("clears gradients by `zero_grad`", door=TORCH)
def test_gradients_of_variables_that_came_later_are_cleared():
    keras_torch.clear_all_gradients()
    keras_torch.clear_all_gradients()  # once is enough
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.layers[0].enable_lora(1)
    for variable in model.trainable_variables:
        variable.value.grad = keras.ops.ones_like(variable.value)
    model.zero_grad()
    assert len(model.trainable_variables) == 3
    assert all(variable.value.grad is None for variable in model.trainable_variables)


@still("keeps the parameters of a module by `_track_variables`", door=TORCH)
def test_parameters_of_variables_that_came_later_are_found():
    inputs = keras.Input((3,))
    dense = layers.Dense(2)
    model = keras_torch.Tracked(inputs, dense(inputs))
    dense.enable_lora(1)
    assert {id(one) for one in model.parameters()} == {id(one.value) for one in model.variables}
    assert len(list(model.parameters())) == 4 and len(model.state_dict()) >= 4
