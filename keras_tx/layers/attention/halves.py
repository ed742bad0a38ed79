"""Attention of half-precision numbers on GPUs, on JAX: what is as large as the scores is kept in half precision.

X batch * key heads, Q queries of all heads of a key head, S keys, H head. Products add up in float32, and softmax is
float32; what the gradient needs of them is rounded to the dtype of the inputs, as in the kernels of Dao et al. 2022,
arXiv:2205.14135.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

jax = Lazy("jax")

Gradient = Callable[..., Any]


def multiplies_halves(*tensors: Tensor) -> bool:
    """Whether the tensors have the same half precision, on JAX on a GPU."""
    if keras.backend.backend() != "jax" or not computes_on_gpu():
        return False
    return {keras.backend.standardize_dtype(x.dtype) for x in tensors} in ({"bfloat16"}, {"float16"})


def computes_on_gpu() -> bool:
    return jax.devices()[0].platform in ("gpu", "cuda", "rocm")


def half_product(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(X, Q, H), (X, S, H) -> (X, Q, S) in float32, multiplied by `scale`.

    The scale follows the products, as the gradient of the logits is so small in float16 that less of it may be zero.
    """

    def with_gradient(query: Tensor, key: Tensor) -> tuple[Tensor, Gradient]:
        def gradient(upstream: Tensor) -> tuple[Tensor, Tensor]:
            upstream = ops.cast(upstream, query.dtype)
            of_query, of_key = _einsum("XQS,XSH->XQH", upstream, key), _einsum("XQS,XQH->XSH", upstream, query)
            return ops.cast(of_query * scale, query.dtype), ops.cast(of_key * scale, key.dtype)

        return _einsum("XQH,XSH->XQS", query, key) * scale, gradient

    return ops.custom_gradient(with_gradient)(query, key)


def half_weights(logits: Tensor, dropout: Callable[[Tensor], Tensor] | None, dtype: str) -> Tensor:
    """The softmax over the last axis of float32 logits, after dropout, in `dtype`."""
    # Dropout changes the state of a random generator, which must not happen within a function with its own gradient.
    factors = None if dropout is None else dropout(ops.ones_like(logits))

    def with_gradient(logits: Tensor, *factors: Tensor) -> tuple[Tensor, Gradient]:
        scores = jax.nn.softmax(logits, axis=-1)  # Keras warns of a single key
        kept = ops.cast(scores * factors[0] if factors else scores, dtype)
        scores = ops.cast(scores, dtype) if factors else kept

        def gradient(upstream: Tensor) -> Any:
            of_scores = ops.cast(kept, "float32") * ops.cast(upstream, "float32")
            of_logits = of_scores - ops.cast(scores, "float32") * ops.sum(of_scores, axis=-1, keepdims=True)
            return (of_logits, *[ops.zeros_like(x) for x in factors])

        return kept, gradient

    return ops.custom_gradient(with_gradient)(logits, *([] if factors is None else [factors]))


def _einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    return jax.numpy.einsum(equation, a, b, preferred_element_type="float32")
