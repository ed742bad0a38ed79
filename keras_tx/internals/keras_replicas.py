"""The private parts of Keras and TensorFlow for training under a strategy of `tf.distribute`, and what is mended there.

A mend replaces a function of Keras in this process, and only if a check finds its fault in the Keras that is installed.
Nothing here is called on the other backends.
"""

import functools
import inspect
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import keras

from keras_tx.internals import keras_loss_scales, keras_optimizers, keras_training
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")
_context = Lazy("tensorflow.python.eager.context")
_data = Lazy("tensorflow.python.data.experimental.ops.distribute")
_trainer = Lazy("keras.src.backend.tensorflow.trainer")
_optimizer = Lazy("keras.src.backend.tensorflow.optimizer")


# What Keras and TensorFlow know.


def strategy_of(model: Any) -> Any | None:
    """The strategy in whose scope a model was made, or None."""
    return getattr(model, "_distribute_strategy", None)


def strategy_of_optimizer(optimizer: Any) -> Any | None:
    """The strategy in whose scope an optimizer was made, which is TensorFlow's default one outside of all scopes."""
    return getattr(optimizer, "_distribution_strategy", None)


def metrics_compiled_with(model: Any) -> list[Any]:
    """The metrics that a model was compiled with, as they were given: objects, names or functions."""
    compiled = getattr(model, "_compile_metrics", None)
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    return list(keras.tree.flatten(given))


def is_multi_worker(strategy: Any) -> bool:
    """Whether a strategy trains in several processes."""
    return bool(strategy.extended._in_multi_worker_mode())


def replicas_here(strategy: Any) -> int:
    """The number of replicas of a strategy in this process."""
    return len(strategy.extended.worker_devices)


def batch_size_of(dataset: Any) -> int | None:
    """The size of the batches of a `tf.data.Dataset`, also if the last may be smaller; None if it cannot be known."""
    try:
        size = int(_data.compute_batch_size(dataset))
    except (tf.errors.OpError, IndexError):  # which it raises for scalars
        return None
    return None if size < 0 else size


def tensorflow_has_started() -> bool:
    """Whether this process has set its devices up. Only before can it become a member of a cluster."""
    return _context.context()._context_handle is not None


@contextmanager
def coordination_options(**options: Any) -> Iterator[None]:
    """In here, a multi-worker strategy is made with these options of TensorFlow's coordination service.

    They are those of `configure_coordination_service`, such as `heartbeat_timeout_in_ms`.
    """
    context = _context.context()
    context.configure_coordination_service = functools.partial(context.configure_coordination_service, **options)
    try:
        yield
    finally:
        del context.configure_coordination_service


_made: Counter[type] = Counter()


@contextmanager
def fresh_collective_keys(strategy_class: type) -> Iterator[None]:
    """In here, a strategy is made whose sums over devices have keys that no other strategy of this process has.

    Two `MirroredStrategy`s on CPUs have the same keys otherwise, and TensorFlow ends all training with "Shape mismatch
    in the collective instance". The keys depend only on how many strategies of a class were made before, and so agree
    between workers.
    """
    base = 1_000_000 * (_made[strategy_class] + 500 * issubclass(strategy_class, tf.distribute.MirroredStrategy))
    _made[strategy_class] += 1
    default = strategy_class._collective_key_base  # type: ignore[attr-defined]
    strategy_class._collective_key_base = base  # type: ignore[attr-defined]
    try:
        yield
    finally:
        strategy_class._collective_key_base = default  # type: ignore[attr-defined]


# What is mended.


def mend() -> None:
    """Mends the functions of Keras whose faults keep models from training under a strategy, once in a process."""
    for is_faulty, mend_it in (
        (draws_a_batch_to_build, _build_from_specs),
        (averages_over_an_axis, _average_over_replicas),
        (loops_over_batches_in_a_graph, _loop_over_batches_in_python),
        (updates_across_replicas_from_one, _overwrite_in_each_replica),
        (clips_before_the_sum, _clip_the_sum),
        (accumulates_in_one_replica, _accumulate_the_sum),
        (normalizes_no_examples_to_nan, _keep_averages_without_examples),
        (keras_loss_scales.asks_the_first_replica, keras_loss_scales.ask_all_replicas),
        (keras_loss_scales.updates_without_context, keras_loss_scales.update_with_context),
    ):
        if is_faulty():
            mend_it()


def draws_a_batch_to_build() -> bool:
    """Whether `fit` draws a batch under a strategy to build loss, metrics and optimizer.

    Keras then takes the mean of the batch over the replicas: ids become floats, and batches that the replicas do not
    share evenly, or of several workers, raise errors. And of a generator, the batches drawn are lost.
    """
    drawn = []

    def batches() -> Iterator[Any]:
        drawn.append(True)
        yield 0, 0, iter([()])

    strategy = SimpleNamespace(scope=nullcontext, reduce=lambda *_, **__: ())
    model = SimpleNamespace(
        _distribute_strategy=strategy, distribute_strategy=strategy, _symbolic_build=lambda **_: None
    )
    _trainer.TensorFlowTrainer._maybe_symbolic_build(model, iterator=_Batches(batches))
    return bool(drawn)


class _Batches:
    """Stands for the iterator of `fit`."""

    def __init__(self, batches: Callable[[], Iterator[Any]]):
        self.batches = batches
        self._distributed_dataset = SimpleNamespace(element_spec=())

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


def _build_from_specs() -> None:
    original = _trainer.TensorFlowTrainer._maybe_symbolic_build

    @functools.wraps(original)
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if self._distribute_strategy is not None and iterator is not None:
            spec = iterator._distributed_dataset.element_spec
            data_batch = keras.tree.map_structure(keras_training.shape_in_replica, spec)
        original(self, data_batch=data_batch)

    _trainer.TensorFlowTrainer._maybe_symbolic_build = build


def averages_over_an_axis() -> bool:
    """Whether Keras averages the numbers that the workers return over their first axis, which they do not have."""
    axes = []

    class Strategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[name-defined]
        extended = SimpleNamespace(_in_multi_worker_mode=lambda: True)

        def __init__(self) -> None:
            pass

        def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
            axes.append(axis)
            return value

    _trainer.reduce_per_replica(0.0, Strategy(), "auto")
    return axes == [0]


def _average_over_replicas() -> None:
    original = _trainer.reduce_per_replica

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not is_multi_worker(strategy):
            return original(values, strategy, reduction)
        return keras.tree.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), values)

    vars(sys.modules[original.__module__])["reduce_per_replica"] = reduce_per_replica  # `_trainer` only stands for it


def loops_over_batches_in_a_graph() -> bool:
    """Whether `steps_per_execution` makes a loop in the graph, which TensorFlow cannot run for several replicas."""
    code = _trainer.TensorFlowTrainer._make_function.__code__
    return "next_optional_inputs" in inspect.getsource(code)


def _loop_over_batches_in_python() -> None:
    """Also lets each step wait for its batch."""
    original = _trainer.TensorFlowTrainer._make_function

    @functools.wraps(original)
    def make_function(self: Any, step_function: Any) -> Any:
        run, num_steps = original(self, keras_training.waiting_for_batch(step_function)), self.steps_per_execution

        def execute(iterator: Any) -> Any:
            if num_steps > 1 and isinstance(iterator, tf.distribute.DistributedIterator):
                iterator = itertools.chain([next(iterator)], iterator)  # of which Keras takes the batches one by one
            return run(iterator)

        return execute

    _trainer.TensorFlowTrainer._make_function = make_function


def updates_across_replicas_from_one() -> bool:
    """Whether an optimizer with `ema_overwrite_frequency` leaves its replica to overwrite the variables of all."""
    asked = []
    strategy = SimpleNamespace(extended=SimpleNamespace(update=lambda *_, **__: asked.append(True)))
    variable = SimpleNamespace(value=SimpleNamespace(assign=lambda _: None))
    optimizer = SimpleNamespace(_distribution_strategy=strategy, _model_variables_moving_average=[variable])
    _optimizer.TFOptimizer._overwrite_model_variables_with_average_value(optimizer, [variable])
    return bool(asked)


def _overwrite_in_each_replica() -> None:
    name = "_overwrite_model_variables_with_average_value"
    original = getattr(_optimizer.TFOptimizer, name)

    @functools.wraps(original)
    def overwrite(self: Any, trainable_variables: Any) -> None:
        if tf.distribute.in_cross_replica_context():  # at the end of `fit`
            original(self, trainable_variables)
            return
        for variable, average in zip(trainable_variables, self._model_variables_moving_average, strict=True):
            if average is not None:
                _of_this_replica(variable).assign(_of_this_replica(average))

    setattr(_optimizer.TFOptimizer, name, overwrite)


def clips_before_the_sum() -> bool:
    """Whether an optimizer clips the gradients of each replica by themselves, before it adds them up."""
    if _optimizer.TFOptimizer._clip_gradients is not _of_all_backends()._clip_gradients:
        return False
    calls: list[str] = []

    def noting(name: str) -> Callable[[Any], Any]:
        def note(given: Any) -> Any:
            calls.append(name)
            return given

        return note

    optimizer = SimpleNamespace(
        gradient_accumulation_steps=None,
        use_ema=False,
        learning_rate=0.0,
        _distribution_strategy=None,
        _clip_gradients=noting("clip"),
        _apply_weight_decay=lambda _: None,
        _distributed_tf_update_step=lambda *_: None,
        _all_reduce_sum_gradients=noting("sum"),
    )
    optimizer._backend_update_step = functools.partial(_optimizer.TFOptimizer._backend_update_step, optimizer)
    _optimizer.TFOptimizer._backend_apply_gradients(optimizer, [], [])
    return calls == ["clip", "sum"]


def _of_all_backends() -> Any:
    return _optimizer.base_optimizer.BaseOptimizer


_summed = threading.local()  # the gradients that this replica has got from the sum over all


def _sum_once(gradients: list[Any]) -> list[Any]:
    """The sums of gradients over all replicas, which `_all_reduce_sum_gradients` will not add up again."""
    replica = tf.distribute.get_replica_context()
    given = [gradient for gradient in gradients if gradient is not None]
    sums = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, given))
    return [None if gradient is None else next(sums) for gradient in gradients]


def _has_several_replicas() -> bool:
    return not tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def _clip_the_sum() -> None:
    clip, add_up = _optimizer.TFOptimizer._clip_gradients, _optimizer.TFOptimizer._all_reduce_sum_gradients

    @functools.wraps(clip)
    def clip_the_sum(self: Any, grads: Any) -> Any:
        if not (self.clipnorm or self.global_clipnorm or self.clipvalue) or not _has_several_replicas():
            return clip(self, grads)
        _summed.gradients = list(clip(self, keras_optimizers.whole_gradients(_sum_once(grads))))
        return _summed.gradients

    @functools.wraps(add_up)
    def add_up_once(self: Any, grads_and_vars: Any) -> Any:
        pairs, known = list(grads_and_vars), getattr(_summed, "gradients", [])
        _summed.gradients = []
        is_done = len(known) == len(pairs) and all(one is pair[0] for one, pair in zip(known, pairs, strict=True))
        return pairs if pairs and is_done else add_up(self, pairs)

    _optimizer.TFOptimizer._clip_gradients = clip_the_sum
    _optimizer.TFOptimizer._all_reduce_sum_gradients = add_up_once


def accumulates_in_one_replica() -> bool:
    """Whether an optimizer with `gradient_accumulation_steps` decides in each replica if it updates the variables.

    TensorFlow cannot do that: what replicas do together must not be in a condition of one of them.
    """
    return _optimizer.TFOptimizer._backend_apply_gradients is _of_all_backends()._backend_apply_gradients


def _accumulate_the_sum() -> None:
    original = _optimizer.TFOptimizer._backend_apply_gradients

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any) -> None:
        # Keras makes a `merge_call` for one replica, too, which TensorFlow refuses here; but not with XLA on GPUs.
        is_alone = tf.__internal__.distribute.strategy_supports_no_merge_call() and not _has_several_replicas()
        if not self.gradient_accumulation_steps or is_alone or tf.distribute.in_cross_replica_context():
            original(self, grads, trainable_variables)
            return
        steps = self.gradient_accumulation_steps
        kept = [self._accumulated_gradients[self._get_variable_index(one)] for one in trainable_variables]
        grads = _sum_once([tf.convert_to_tensor(one) for one in grads])

        def update(grads: Any) -> None:
            grads = [(one + _of_this_replica(k)) / steps for one, k in zip(grads, kept, strict=True)]
            _summed.gradients = list(clip(self, grads))
            self._apply_weight_decay(trainable_variables)
            self._backend_update_step(_summed.gradients, trainable_variables, self.learning_rate)
            self._backend_increment_gradient_accumulators([-_of_this_replica(k) for k in kept], kept)

        def keep(grads: Any) -> None:
            self._backend_increment_gradient_accumulators(grads, kept)

        def in_all_replicas(strategy: Any, grads: Any) -> None:
            def run(step: Callable[[Any], None]) -> Callable[[], None]:
                return lambda: strategy.extended.call_for_each_replica(step, args=(grads,))

            tf.cond((tf.convert_to_tensor(self._iterations) + 1) % steps == 0, run(update), run(keep))

        tf.distribute.get_replica_context().merge_call(in_all_replicas, args=(grads,))
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            if self.ema_overwrite_frequency:
                keras.ops.cond(
                    (self.iterations + 1) % self.ema_overwrite_frequency == 0,
                    lambda: self._overwrite_model_variables_with_average_value(self._trainable_variables),
                    lambda: None,
                )

    clip = getattr(_optimizer.TFOptimizer._clip_gradients, "__wrapped__", _optimizer.TFOptimizer._clip_gradients)
    _optimizer.TFOptimizer._backend_apply_gradients = apply


def normalizes_no_examples_to_nan() -> bool:
    """Whether `BatchNormalization` takes the mean of no examples, which is NaN, where a replica has none in a batch.

    That is so if its code does not ask how many there are. Trying it would start TensorFlow, and then this process
    could not become a member of a cluster.
    """
    return "size" not in keras.layers.BatchNormalization._moments.__code__.co_names


def _keep_averages_without_examples() -> None:
    original = keras.layers.BatchNormalization._moments

    @functools.wraps(original)
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        found = original(self, inputs, mask)
        if self.synchronized:  # over the examples of all replicas
            return found
        has_examples = tf.size(inputs) > 0
        averages = (keras.ops.cast(one, inputs.dtype) for one in (self.moving_mean, self.moving_variance))
        return tuple(tf.where(has_examples, one, two) for one, two in zip(found, averages, strict=True))

    keras.layers.BatchNormalization._moments = moments


def _of_this_replica(variable: Any) -> Any:
    """The copy that the current replica has of a variable."""
    replica = tf.distribute.get_replica_context()
    return replica.strategy.experimental_local_results(variable.value)[replica._replica_id]
