"""The private parts of Keras for PyTorch: the parameters of a model, and whose gradients `fit` clears."""

import functools
from typing import Any

import keras

from keras_tx.internals import keras_models


def clear_all_gradients() -> None:
    """Lets `fit` of every model on PyTorch clear the gradients of all its variables, from now on.

    Keras clears those of the variables that it knew when the model was built: not those of LoRA, and of several
    variables with one path, as in two models within a third, only those of the last.
    """
    if keras.backend.backend() != "torch" or hasattr(keras.Model.zero_grad, "__wrapped__"):
        return
    original = keras.Model.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for variable in self.trainable_variables:
            if set_to_none:
                variable.value.grad = None
            elif variable.value.grad is not None:
                variable.value.grad.detach_().zero_()

    keras.Model.zero_grad = zero_grad


class Tracked(keras_models.Cloned):
    """A functional model whose parameters and `state_dict` on PyTorch are always those of all its variables.

    Keras keeps them as they were when the model was built, or has none if it was built without values.
    """

    if keras.backend.backend() == "torch":

        def _track_again(self) -> None:
            known = vars(self).get("_modules", {}).get("_torch_params")
            if known is None or {id(one) for one in known.values()} != {id(one.value) for one in self.variables}:
                self._track_variables()

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            self._track_again()
            return super().named_parameters(*args, **kwargs)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self._track_again()
            return super().state_dict(*args, **kwargs)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self._track_again()
            return super().load_state_dict(*args, **kwargs)

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            self._track_again()
            return super()._apply(*args, **kwargs)
