"""The layout map with which `keras.distribution.ModelParallel` splits models of this package over devices, on JAX."""

from typing import Any

import keras

from keras_tx.layers.splitting import SplitLayouts

_INSTEAD = {
    "tensorflow": "on TensorFlow, where `keras.distribution` does nothing, use "
    "`keras_tx.distribution.mirrored_strategy` or `keras_tx.distribution.multi_worker_strategy`",
    "torch": "on PyTorch, where Keras has no model parallelism, use `torch.nn.parallel.DistributedDataParallel`",
}


def get_layout_map(
    device_mesh: Any, data_parallel_dim_name: str = "batch", model_parallel_dim_name: str = "model"
) -> keras.distribution.LayoutMap:
    """Returns the `LayoutMap` that splits models of this package's layers over devices, on the JAX backend.

    Pass it to `keras.distribution.ModelParallel`, and create the model in its scope: one of `keras_tx.models`, one that
    `keras_tx.pretrained.from_pretrained` loads, or a model of your own with layers of this package, whatever their
    names are. `fit`, `evaluate`, `predict` and `generate` then give the same numbers as on one device.

    - The projections of attention are split by heads. Key and value heads stay whole if there are too few of them, as
      in multi-query attention.
    - Feed-forward layers are split by `intermediate_dim`.
    - Token embeddings and output layers are split by the vocabulary, or by the hidden size if the vocabulary is not
      divisible. LoRA matrices and integer kernels follow their kernels where they can be divided.
    - All other weights are whole on each device, among them those of Keras' own layers. To split such a weight, give
      the map an entry with its path or a regular expression, as in every `LayoutMap`; your entries come first.

    The map is filled while layers build: `layout_map.items()` has the path and the layout of each split weight, and
    `layout_map.summary(model)` prints a table of what is split, with the bytes on each device.

    Args:
        device_mesh: a `keras.distribution.DeviceMesh` with both axes. The size of the second one must divide the number
            of heads and `intermediate_dim`.
        data_parallel_dim_name: the name of the mesh's axis over which each batch is split. Pass the same name to
            `ModelParallel` as `batch_dim_name`, unless it is the first axis.
        model_parallel_dim_name: the name of the mesh's axis over which weights are split.

    Returns:
        A `keras.distribution.LayoutMap`. Layers that it cannot split raise a ValueError when they are built, with the
        path, the size and the mesh; the models of this package do so before memory is allocated for any weight.

    Raises:
        TypeError: `device_mesh` is not a `DeviceMesh`.
        ValueError: the backend is not JAX; or the names are not those of two axes of the mesh.

    Examples:
        With JAX and 8 devices; for devices on a CPU set `XLA_FLAGS=--xla_force_host_platform_device_count=8`:

        ```python
        mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
        layout_map = keras_tx.distribution.get_layout_map(mesh)
        keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
        model = keras_tx.pretrained.from_pretrained("my-llama")
        layout_map.summary(model)
        ```

        Other backends have strategies of their own:

        >>> mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], devices=["cpu:0"])
        >>> keras_tx.distribution.get_layout_map(mesh)
        Traceback (most recent call last):
        ...
        ValueError: `get_layout_map` needs the JAX backend; on TensorFlow, where `keras.distribution` does nothing, ...
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(f"`get_layout_map` needs the JAX backend; {_INSTEAD.get(backend, '')}. Received: {backend=}")
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`device_mesh` must be a keras.distribution.DeviceMesh. Received: device_mesh of type "
            f"{type(device_mesh).__name__}"
        )
    names = list(device_mesh.axis_names)
    given = (data_parallel_dim_name, model_parallel_dim_name)
    if any(name not in names for name in given) or given[0] == given[1]:
        raise ValueError(
            "`data_parallel_dim_name` and `model_parallel_dim_name` must be the names of two axes of `device_mesh`. "
            f"Received: {data_parallel_dim_name=}, {model_parallel_dim_name=}, device_mesh.axis_names={names}"
        )
    return SplitLayouts(device_mesh, *given)
