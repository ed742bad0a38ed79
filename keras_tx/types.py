"""Type aliases that several folders use.

Keras has no static types, and a layer accepts the tensors of every backend, so `Tensor` cannot be narrower than `Any`.
The name still documents what is expected.
"""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any  # a tensor of the current backend, a NumPy array, or a symbolic `keras.KerasTensor`
Shape: TypeAlias = tuple[int | None, ...]  # None is a size that is not known statically
DType: TypeAlias = Any  # the name of a dtype, of a dtype policy, or a `keras.DTypePolicy`
