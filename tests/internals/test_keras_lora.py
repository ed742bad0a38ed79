"""What `keras_lora` uses of Keras' LoRA."""

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_lora
from tests.internals.doors import LORA, still
from tests.tools import to_numpy


class Summed(keras_lora.LoraHooks, keras.layers.Dense):
    """Saves numbers that are easy to tell."""

    def quantize(self, mode=None, type_check=False, config=None):
        super().quantize(mode, type_check=False, config=config)

    def merged_with_lora(self):
        return np.full((4, 3), 7, "int8"), np.ones(3), None


class Table(keras_lora.LoraHooks, keras.layers.Embedding):
    def quantize(self, mode=None, type_check=False, config=None):
        super().quantize(mode, type_check=False, config=config)

    def merged_with_lora(self):
        return np.full((5, 4), 7, "int8"), np.ones(5), None


@still("asks a method of a quantized layer with LoRA what to save", door=LORA)
@pytest.mark.parametrize("make", [lambda: Summed(3, use_bias=False), lambda: Table(5, 4)], ids=["dense", "embedding"])
def test_lora_hooks(make):
    assert issubclass(Summed, keras_lora.LoraHooks)
    layer = make()
    layer.build((None, 4))
    layer.quantize("int8")
    stored = {}
    layer.save_own_variables(stored)
    assert not (to_numpy(stored["0"]) == 7).all()
    layer.enable_lora(2)
    layer.save_own_variables(stored)
    assert (to_numpy(stored["0"]) == 7).all()


@still("adds LoRA to a kernel if `lora_enabled` says so", door=LORA)
def test_without_lora():
    layer = Summed(3)
    layer.build((None, 4))
    x = np.ones((2, 4), "float32")
    before = to_numpy(layer(x))
    layer.enable_lora(2, b_initializer="ones")
    assert layer.lora_enabled and np.abs(to_numpy(layer(x)) - before).max() > 0.1
    with keras_lora.without_lora():
        assert not layer.lora_enabled
        np.testing.assert_array_equal(to_numpy(layer(x)), before)
    assert layer.lora_enabled
