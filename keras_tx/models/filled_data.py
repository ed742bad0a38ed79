"""Data of `fit`, `evaluate` and `predict` whose batches several devices share evenly.

The last batch of an epoch may have a number of examples that the devices cannot share. Rows of padding then fill it up;
see `keras_tx.data.fill_batches`.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_tx.data.padding_rows import fill_arrays, fill_batches
from keras_tx.internals import keras_training
from keras_tx.models.counted import IS_EXAMPLE
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def fill_arguments(model: Any, method: str, given: dict[str, Any]) -> Callable[[Any], Any]:
    """Changes the data among the arguments `given` to a method of `model`, so that devices share batches evenly.

    Returns a function to call with what the method returns, which drops the outputs for rows of padding.
    """
    multiple_of = num_shares(model)
    if multiple_of == 1:
        return _unchanged
    if method.endswith("_on_batch"):
        return _fill_one_batch(given, multiple_of)
    if method == "fit" and given.get("validation_split") and given.get("validation_data") is None:
        arrays = given.get("x"), given.get("y"), given.pop("sample_weight", None)
        (x, y, weights), given["validation_data"] = keras_training.split_for_validation(
            arrays, given.pop("validation_split")
        )
        given.update(x=x, y=y, sample_weight=weights)
    if method == "fit" and given.get("validation_data") is not None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(given["validation_data"])
        size = given.get("validation_batch_size") or given.get("batch_size")
        steps = given.get("validation_steps")
        filled = _filled(multiple_of, x, y, weights, batch_size=size, steps_per_epoch=steps)
        if filled is not None:
            given["validation_data"] = filled
    options = {"batch_size": given.get("batch_size")}
    options["steps_per_epoch"] = given.get("steps_per_epoch" if method == "fit" else "steps")
    if method == "fit":
        options |= {"shuffle": given.get("shuffle", True), "class_weight": given.get("class_weight")}
    convert = _for_prediction if method == "predict" else None
    x = _filled(multiple_of, given.get("x"), given.get("y"), given.get("sample_weight"), convert, **options)
    if x is None:
        return _unchanged
    given["x"] = x
    for name in ("y", "sample_weight", "class_weight"):
        given.pop(name, None)
    if method != "predict":
        return _unchanged
    given["callbacks"] = _of_examples(given.get("callbacks"))
    return _drop_padding_rows


def _unchanged(outputs: Any) -> Any:
    return outputs


def _drop_padding_rows(outputs: Any) -> Any:
    """The outputs of `predict` for the examples alone."""
    outputs, kept_rows = outputs
    is_example = keras.ops.convert_to_numpy(kept_rows).astype(bool)
    if is_example.all():
        return outputs

    def kept(values: Any) -> Any:
        if isinstance(values, np.ndarray) or keras.backend.backend() != "tensorflow":
            return values[is_example]
        if isinstance(values, tf.RaggedTensor):  # from batches of different lengths
            return tf.ragged.boolean_mask(values, is_example)
        return tf.boolean_mask(values, is_example)

    return keras.tree.map_structure(kept, outputs)


class _OfExamples(keras.callbacks.CallbackList):
    """Callbacks of `predict` that get the outputs for the examples alone."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_predict_batch_end(batch, {**logs, "outputs": _drop_padding_rows(logs["outputs"])})


def _of_examples(callbacks: Any) -> Any:
    """The callbacks given to `predict`, within one that drops rows of padding; Keras adds its progress bar to it.

    It waits for the outputs of each batch, so it is left out if no callback would get them.
    """
    if not _get_outputs(callbacks):
        return callbacks
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return _OfExamples([callbacks])
    several = keras.tree.flatten(callbacks) if callbacks else []
    bars = [one for one in several if isinstance(one, keras.callbacks.ProgbarLogger)]
    return [_OfExamples([one for one in several if one not in bars]), *bars]


def _get_outputs(callbacks: Any) -> bool:
    """Whether any of the callbacks gets the outputs of a batch; progress bars do not look at them."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return any(
        _get_outputs(one) if isinstance(one, keras.callbacks.CallbackList) else _overrides(one)
        for one in (keras.tree.flatten(callbacks) if callbacks else [])
        if not isinstance(one, keras.callbacks.ProgbarLogger)
    )


def _overrides(callback: Any) -> bool:
    method = callback.on_predict_batch_end  # `LambdaCallback` has a plain function
    return getattr(method, "__func__", method) is not keras.callbacks.Callback.on_predict_batch_end


def num_shares(model: Any) -> int:
    """The number of devices that share each batch, under a strategy of `tf.distribute` or `keras.distribution`."""
    if keras.backend.backend() == "tensorflow":
        return int(model.distribute_strategy.num_replicas_in_sync)
    distribution = keras.distribution.distribution() if keras.backend.backend() == "jax" else None
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])


def _filled(multiple_of: int, x: Any, y: Any, sample_weight: Any, convert: Any = None, **options: Any) -> Any | None:
    """`x` with batches that are filled up; None if all batches have a size that is a multiple of `multiple_of`."""
    if sys.modules.get("tensorflow") is not None and isinstance(x, tf.data.Dataset):
        size = tf.nest.flatten(x.element_spec)[0].shape[0]
        if size is not None and size % multiple_of == 0:
            return None
        if options.get("class_weight") is not None:
            x = keras_training.with_class_weight(x, options["class_weight"])
        return _fill_dataset(multiple_of, convert, x)
    is_shared = sys.modules.get("tensorflow") is not None and isinstance(x, tf.distribute.DistributedDataset)
    if is_shared or keras_training.is_filled(x) or _divides(multiple_of, x, options):
        return None
    of_dataset = functools.partial(_fill_dataset, multiple_of, convert)
    of_batch = functools.partial(_fill_batch, multiple_of, convert)
    return keras_training.map_batches(of_dataset, of_batch, x, fills=True, y=y, sample_weight=sample_weight, **options)


def _divides(multiple_of: int, x: Any, options: dict[str, Any]) -> bool:
    """Whether `x` is arrays, all of whose batches have a size that is a multiple of `multiple_of`."""
    sizes = {one.shape[0] for one in keras.tree.flatten(x) if getattr(one, "shape", ())}
    if len(sizes) != 1 or options["steps_per_epoch"]:
        return False
    return (options["batch_size"] or 32) % multiple_of == 0 and sizes.pop() % multiple_of == 0


def _fill_dataset(multiple_of: int, convert: Any, dataset: Any) -> Any:
    is_tuple = isinstance(dataset.element_spec, tuple)  # then `map` passes its elements one by one

    def parts(*batch: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch if is_tuple else batch[0])
        if convert is not None:
            return x, tf.zeros([tf.shape(tf.nest.flatten(x)[0])[0]])
        return (x, y) if sample_weight is None else (x, y, sample_weight)

    dataset = dataset.map(parts)
    filled = fill_batches(dataset, multiple_of)
    return filled if convert is None else filled.map(convert)


def _fill_batch(multiple_of: int, convert: Any, batch: Any) -> Any:
    filled = fill_arrays(multiple_of, *keras.utils.unpack_x_y_sample_weight(batch))
    return filled if convert is None else convert(*filled)


def _for_prediction(x: Any, y: Any, sample_weight: Any) -> Any:
    """A batch for `predict`, with which rows are examples."""
    first = keras.tree.flatten(sample_weight)[0]
    if isinstance(first, np.ndarray):
        is_padding_row = np.signbit(first)
    elif sys.modules.get("tensorflow") is not None and tf.is_tensor(first):  # in a dataset, on any backend
        is_padding_row = tf.bitcast(first, "int32") < 0
    else:
        is_padding_row = keras.ops.signbit(first)
    return x, is_padding_row, {IS_EXAMPLE: ~is_padding_row}


def _fill_one_batch(given: dict[str, Any], multiple_of: int) -> Callable[[Any], Any]:
    """On JAX; on TensorFlow, Keras gives the whole batch to every replica."""
    if keras.backend.backend() == "tensorflow":
        return _unchanged
    x, size = given["x"], len(keras.tree.flatten(given["x"])[0])
    if size % multiple_of == 0:
        return _unchanged
    weights, class_weight = given.get("sample_weight"), given.pop("class_weight", None)
    if class_weight is not None and weights is None:
        weights = keras_training.as_sample_weight(given["y"], class_weight)
    elif class_weight is not None:
        given["class_weight"] = class_weight  # Keras refuses both
    given["x"], y, weights = fill_arrays(multiple_of, x, given.get("y"), weights)
    if y is not None:
        given.update(y=y, sample_weight=weights)
    return lambda outputs: keras.tree.map_structure(lambda one: one[:size] if np.ndim(one) else one, outputs)
