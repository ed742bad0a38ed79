"""What `fit` and the like need under a strategy of `tf.distribute`, for any Keras model.

Keras is mended, what cannot work is refused in one sentence before training starts, and the loss of a worker is told
with its address.
"""

import functools
import inspect
import os
import re
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras

from keras_tx.internals import keras_batches, keras_replicas, keras_training
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_UPDATES = ("fit", "train_on_batch")
_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
_guarded: set[str] = set()
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies


def remember(strategy: Any) -> None:
    """From now on, `fit` tells if a model was not made in the scope of `strategy`, while that exists."""
    _made.add(strategy)


def guard_training() -> None:
    """Mends Keras in this process, and lets `fit` and the like of every model check what a strategy needs."""
    _outside_of_scopes(keras_replicas.mend)
    for name in _METHODS:
        if name not in _guarded:
            _guarded.add(name)
            setattr(keras.Model, name, _with_guard(name, getattr(keras.Model, name)))


def _outside_of_scopes(function: Callable[[], None]) -> None:
    """Calls `function` where no scope of a strategy is entered: in another thread, if the caller is in one."""
    if not tf.distribute.has_strategy():
        function()
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(function).result()


def check_training(model: Any, method: str, arguments: Mapping[str, Any]) -> None:
    """Raises for what cannot work under the strategy in whose scope `model` was made; mends Keras for what can.

    Args:
        method: the name of the method that is called, such as "fit".
        arguments: those of the call, by their names.

    Raises:
        ValueError: `keras.distribution` on TensorFlow, a model or an optimizer from outside of the scope of the
            strategy, `jit_compile=True`, a batch size below the number of replicas, or `ParameterServerStrategy`.
    """
    if keras.backend.backend() != "tensorflow":
        return
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ValueError(
            "`keras.distribution` does nothing on the TensorFlow backend. Use "
            "`keras_tx.distribution.mirrored_strategy()` or `multi_worker_strategy()`, or the JAX backend. Received: "
            f"keras.distribution.distribution()={distribution!r}"
        )
    strategy = keras_replicas.strategy_of(model)
    if strategy is None:
        _check_that_no_scope_is_meant(model, method)
    else:
        guard_training()
        _check(model, strategy, method, arguments)
        _weigh_batches(model, strategy)


def _with_guard(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_training(self, name, signature.bind(self, *args, **kwargs).arguments)
        strategy = keras_replicas.strategy_of(self)
        if strategy is None:
            _warn_if_alone(self, name)
            return method(self, *args, **kwargs)
        in_parts = name in ("train_on_batch", "test_on_batch") and _adds_up_replicas(self, strategy)
        is_fit = name == "fit" and keras_replicas.is_multi_worker(strategy)
        try:
            with (
                keras_batches.batches_in_parts(self, name) if in_parts else nullcontext(),
                whole_files(self) if is_fit else nullcontext(),
            ):
                outputs = method(self, *args, **kwargs)
        except tf.errors.OpError as error:
            lost = _lost_worker(strategy, error)
            if lost is None:
                raise
            raise lost from error
        if name == "predict_on_batch":  # every replica was given the whole batch
            copies = strategy.num_replicas_in_sync
            outputs = keras.tree.map_structure(lambda rows: rows[: len(rows) // copies], outputs)
        return outputs

    return guarded


@contextmanager
def whole_files(model: Any) -> Iterator[None]:
    """Within this context, `save` and `save_weights` of a model replace a file at one moment.

    All workers have the same weights and the same callbacks, such as `ModelCheckpoint`, so that several processes may
    write one file. Each then writes a file of its own beside it first.
    """
    before = {name: vars(model)[name] for name in ("save", "save_weights") if name in vars(model)}
    for name in ("save", "save_weights"):
        object.__setattr__(model, name, _at_one_moment(getattr(model, name)))
    try:
        yield
    finally:
        for name in ("save", "save_weights"):
            object.__delattr__(model, name)
            if name in before:
                object.__setattr__(model, name, before[name])


def _at_one_moment(save: Callable[..., Any]) -> Callable[..., Any]:
    """`save` of a model, whose file appears, or replaces the old one, when it is whole."""

    @functools.wraps(save)
    def saved(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        overwrite = args[0] if args else kwargs.get("overwrite", True)
        is_one_file = str(filepath).endswith((".keras", ".h5")) and not (len(args) > 1 or {*kwargs} - {"overwrite"})
        path = Path(filepath) if is_one_file and "://" not in str(filepath) else None
        if path is None or not overwrite or path.is_dir():
            return save(filepath, *args, **kwargs)
        beside = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
        try:
            result = save(str(beside), *args, **kwargs)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        return result

    return saved


def _adds_up_replicas(model: Any, strategy: Any) -> bool:
    """Whether a loss of a model is no mean, and so too large if each replica of this process gets the whole batch."""
    losses = [one for one in keras.tree.flatten(getattr(model, "loss", None)) if isinstance(one, keras.losses.Loss)]
    return keras_replicas.replicas_here(strategy) > 1 and any(one.reduction in ("sum", "none", None) for one in losses)


def _check_that_no_scope_is_meant(model: Any, method: str) -> None:
    """Raises if a model outside of all scopes was meant to be under a strategy."""
    optimizer = keras_replicas.strategy_of_optimizer(getattr(model, "optimizer", None))
    if method.startswith("predict"):  # works, on one device
        return
    if tf.distribute.has_strategy() or (optimizer is not None and type(optimizer) is not _default()):
        raise ValueError(
            f"The model was made outside of the scope of the strategy: make or load it, and compile it, inside "
            f"`with strategy.scope():`. Received: model {model.name!r}"
        )
    if any(map(keras_replicas.is_multi_worker, _several(method))):
        raise ValueError(_trains_alone(model, method))


def _warn_if_alone(model: Any, method: str) -> None:
    """Warns if a model outside of all scopes was meant to be under a strategy.

    It is no part of `check_training`, which the models of this package call once more, before Keras' method.
    """
    if keras.backend.backend() == "tensorflow" and _several(method):
        warnings.warn(_trains_alone(model, method), stacklevel=3)


def _several(method: str) -> list[Any]:
    """The strategies with several replicas that exist, if `method` trains."""
    return [one for one in _made if one.num_replicas_in_sync > 1] if method in _UPDATES else []


def _trains_alone(model: Any, method: str) -> str:
    return (
        f"`{method}` trains the model {model.name!r} in this process alone, because it was made outside of the scope "
        "of the strategy: make or load it, and compile it, inside `with strategy.scope():`."
    )


def _default() -> type:
    return type(tf.distribute.get_strategy())  # outside of all scopes


def _check(model: Any, strategy: Any, method: str, arguments: Mapping[str, Any]) -> None:
    """Raises for what cannot work under `strategy`."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            "`ParameterServerStrategy` is not supported: use `keras_tx.distribution.multi_worker_strategy()`. "
            f"Received: model {model.name!r}"
        )
    optimizer = getattr(model, "optimizer", None)
    metrics = [one for one in keras_replicas.metrics_compiled_with(model) if isinstance(one, keras.metrics.Metric)]
    parts = {"model": [model], "optimizer": [optimizer, getattr(optimizer, "inner_optimizer", None)], "metric": metrics}
    for kind, owners in parts.items():
        for variable in [one for owner in owners for one in getattr(owner, "variables", ())]:
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise ValueError(
                    f"The {kind} was made outside of the scope of the strategy: make it, and compile the model, inside "
                    f"`with strategy.scope():`. Received: the variable {variable.path!r} of the {kind}"
                )
    replicas = strategy.num_replicas_in_sync
    if replicas > 1 and model.jit_compile and not method.startswith("predict"):
        raise ValueError(
            "`jit_compile` must be False or 'auto' under a strategy, because XLA cannot compile what several devices "
            f"do together. Received: jit_compile=True, {replicas} replicas"
        )
    size = _batch_size(arguments) if method == "fit" else None
    if size is not None and size < replicas:
        raise ValueError(
            f"The batch size must be at least the number of replicas, {replicas}, each of which gets a part of every "
            f"batch. Received: batches of {size}"
        )


def _weigh_batches(model: Any, strategy: Any) -> None:
    """Lets the loss that `fit` and `evaluate` show weigh each batch by its rows on all replicas.

    Keras takes the rows of each replica, which is right for losses that are means over the rows of a replica, but not
    for those that divide by what all replicas have. The models of this package do it themselves.
    """
    losses = [one for one in keras.tree.flatten(getattr(model, "loss", None)) if one is not None]
    divides = bool(losses) and all(getattr(one, "counts_over_replicas", False) for one in losses)
    if divides and strategy.num_replicas_in_sync > 1 and not getattr(model, "counts_over_replicas", False):
        keras_training.wrap_loss_trackers(model, _by_rows)


def _by_rows(update: Callable[..., None]) -> Callable[..., None]:
    """`update_state` of the mean of the loss over batches, which it weighs by their rows on all replicas."""

    def update_by_rows(values: Any, sample_weight: Any = None) -> None:
        context = tf.distribute.get_replica_context()
        if context is not None and sample_weight is not None:
            rows = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(sample_weight, "float32"))
            sample_weight = rows / context.num_replicas_in_sync
        update(values, sample_weight=sample_weight)

    return update_by_rows


def _batch_size(arguments: Mapping[str, Any]) -> int | None:
    """The size of the batches that `fit` is given or makes; None if it is not known."""
    x = arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        return keras_replicas.batch_size_of(x)
    is_array = any(hasattr(one, "shape") for one in keras.tree.flatten(x))
    return (arguments.get("batch_size") or 32) if is_array else None  # 32 is the default of Keras


def _lost_worker(strategy: Any, error: Exception) -> Exception | None:
    """The error to raise if `error` says that another worker is gone."""
    kinds = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError)
    if not isinstance(error, kinds) or not keras_replicas.is_multi_worker(strategy):
        return None
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict()
    own = (resolver.task_type, resolver.task_id)
    named = [(job, int(index)) for job, index in _TASK.findall(str(error))]
    leader = ("chief" if "chief" in jobs else "worker", 0)  # which all others report to
    lost = next((task for task in named if task != own and task[1] < len(jobs.get(task[0], ()))), leader)
    job, index = lost
    name = "another worker" if lost == own else f"{job} {index} ({jobs[job][index]})"
    return ConnectionError(
        f"The connection to {name} was lost, so the training has ended: that process has ended, or the network has "
        "failed. Look at its messages, and start all workers again."
    )
