"""Functions with gradients of their own."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.layers import exported_weights, xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")
torch = Lazy("torch")


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.custom_gradient`; in exports and generation, of which nobody takes a gradient, the function alone."""
    if xla.is_generating() or exported_weights.current() is not None:
        return lambda *tensors: function(*tensors)[0]
    made: Callable[..., Any] = tf.custom_gradient(function)
    return made


def twice_differentiable(function: Callable[..., Any], constants: Any = None) -> Callable[..., Any]:
    """`keras.ops.custom_gradient`, whose gradient has the right gradients in turn on PyTorch as well.

    Keras calls `function` there without recording gradients, so second derivatives would treat what `gradient` closes
    over as constants. For these, `function` is computed again.

    Args:
        function: `constants` and tensors -> (output, gradient), where `gradient` is a function of the gradient of the
            output alone and returns the gradients of the tensors. For second derivatives, the graph of its second
            computation stays in memory until they are computed.
        constants: tensors in dicts or lists, without a gradient. On JAX `function` must not close over tensors instead:
            within `jax.checkpoint` it is called once more when they are no longer known.
    """
    backend = keras.backend.backend()
    if backend == "jax":

        def without_gradients(constants: Any, *tensors: Any) -> tuple[Any, Callable[..., Any]]:
            output, gradient = function(constants, *tensors)
            return output, lambda upstream: (None, *gradient(upstream))

        return functools.partial(ops.custom_gradient(without_gradients), constants)

    def given(*tensors: Any) -> Any:
        return function(constants, *tensors)

    if backend != "torch":
        made: Callable[..., Any] = ops.custom_gradient(given)
        return made

    def with_gradient(*tensors: Any) -> tuple[Any, Callable[..., Any]]:
        output, gradient = given(*tensors)

        def own_gradient(*tensors: Any, upstream: Any) -> Any:
            is_differentiated = torch.is_grad_enabled()  # in a backward pass: whether it was given `create_graph=True`
            return (given(*tensors)[1] if is_differentiated else gradient)(upstream)

        return output, own_gradient

    made = ops.custom_gradient(with_gradient)
    return made
