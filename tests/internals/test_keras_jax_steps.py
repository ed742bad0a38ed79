"""On JAX, `keras_tx.internals.keras_jax_steps` keeps masks for metrics, and weights if a step fails."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_tx.internals import keras_jax_steps
from tests.internals.doors import JAX_STEPS, still

X = np.array([[3, 1, 4, 0, 0], [1, 5, 0, 0, 0], [2, 6, 5, 3, 0]])  # 0 is padding
Y = np.array([[1, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 0, 0, 1]])


def model(kind=keras_jax_steps.JaxSteps, outputs=1, **options):
    keras.utils.set_random_seed(11)
    ids = keras.Input((None,), dtype="int32")
    rows = layers.Embedding(7, 3, mask_zero=True)(ids)
    logits = [layers.Dense(2, name=f"output_{index}")(rows) for index in range(outputs)]
    made = kind(ids, logits if outputs > 1 else logits[0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["sparse_categorical_accuracy"]
    made.compile(
        keras.optimizers.SGD(0.0),
        loss if outputs == 1 else [loss] * outputs,
        metrics=metrics if outputs == 1 else [metrics] * outputs,
        weighted_metrics=metrics if outputs == 1 else None,
        **options,
    )
    return made


@still("gives the masks of outputs from the loss to the metrics of a training step", door=JAX_STEPS)
@pytest.mark.parametrize("outputs", [1, 2])
def test_metrics_leave_padding_out_in_fit_as_in_evaluate(outputs):
    """With a learning rate of 0, `fit` computes what `evaluate` does."""
    made, labels = model(outputs=outputs), Y if outputs == 1 else [Y] * outputs
    trained = made.fit(X, labels, batch_size=3, verbose=0).history
    evaluated = made.evaluate(X, labels, batch_size=3, verbose=0, return_dict=True)
    assert trained.keys() == evaluated.keys()
    for name, value in evaluated.items():
        np.testing.assert_allclose(trained[name], [value], rtol=1e-6, err_msg=name)
    logits = ops.convert_to_numpy(made(X) if outputs == 1 else made(X)[0])
    right = (logits.argmax(-1) == Y)[X != 0]
    name = "sparse_categorical_accuracy" if outputs == 1 else "output_0_sparse_categorical_accuracy"
    np.testing.assert_allclose(trained[name], [right.mean()], rtol=1e-6)
    assert right.mean() != (logits.argmax(-1) == Y).mean()


def test_a_step_of_the_user_gets_the_outputs_as_from_keras():
    seen = []

    class Stepping(keras_jax_steps.JaxSteps):
        def compute_loss_and_updates(self, *args, **kwargs):
            loss, aux = super().compute_loss_and_updates(*args, **kwargs)
            seen.append(aux[1].shape)
            return loss, aux

    model(Stepping).fit(X, Y, batch_size=3, verbose=0)
    assert set(seen) == ({(3, 5, 2)} if keras.backend.backend() == "jax" else set())


class Failing(keras.utils.PyDataset):
    def __init__(self, error, at):
        super().__init__()
        self.error, self.at, self.made = error, at, 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.made += 1
        if self.made > self.at:
            raise self.error
        return X, Y


@still("can give a model its variables back when the data of a step raise an error", door=JAX_STEPS)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("at", "error", "steps"),  # every two values meet
    [
        (1, ValueError("no batch"), 1),
        (2, KeyboardInterrupt(), 1),
        (1, KeyboardInterrupt(), 2),
        (2, ValueError("no batch"), 2),
    ],
)
def test_a_model_keeps_its_weights_if_its_data_fail(method, at, error, steps):
    if steps > 1 and keras.backend.backend() == "torch":
        pytest.skip("Keras takes one step at a time on PyTorch")
    made = model(steps_per_execution=steps)
    made.fit(X, Y, verbose=0)
    before = made.get_weights()
    with pytest.raises((Exception, KeyboardInterrupt)):  # TensorFlow makes an error of its own of each
        getattr(made, method)(Failing(error, at), verbose=0)
    keras_jax_steps.restore_variables(made)
    for one, other in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    made.evaluate(X, Y, verbose=0)


@still("takes the values of a model's variables at the beginning of each step", door=JAX_STEPS)
@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_a_call_that_fails_brings_no_older_weights_back(method):
    made = model()
    for name in ("train_on_batch", "test_on_batch"):
        getattr(made, name)(X, Y)
    made.predict_on_batch(X)
    made.set_weights([np.full_like(one, 0.5) for one in made.get_weights()])
    with pytest.raises(Exception):  # noqa: B017  # each backend and method has its own
        getattr(made, method)(*([X[None, None]] if method == "predict_on_batch" else [X, Y[:, :2]]))
    keras_jax_steps.restore_variables(made)
    assert all((one == 0.5).all() for one in made.get_weights())


@still("syncs the variables of a model on request within `fit`", door=JAX_STEPS)
def test_variables_have_their_values_within_fit_on_request():
    made, seen = model(), []
    made.optimizer.learning_rate = 0.5

    class Reading(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            keras_jax_steps.sync_variables(made)  # Keras itself does it for `self.model`
            seen.append([np.array(one) for one in made.get_weights()])

    made.fit(X, Y, batch_size=1, verbose=0, callbacks=[Reading()])
    assert len(seen) == 3 and (seen[0][0] != seen[2][0]).any()
    for one, other in zip(made.get_weights(), seen[2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_failed_step_shows_its_own_error():
    """The values that a step has taken over are gone then, so nothing may ask for them."""
    if keras.backend.backend() != "jax":
        pytest.skip("JAX alone")

    def failing(state, iterator):
        for value in state[0]:
            value.delete()
        raise RuntimeError("no memory")

    made = model()
    made.fit(X, Y, verbose=0)
    made.train_function = failing
    with pytest.raises(RuntimeError, match="no memory"):
        made.fit(X, Y, verbose=0)


def test_a_callback_that_knows_the_model_predicts_with_its_weights_and_fit_goes_on():
    from keras_tx.models import CausalLM
    from keras_tx.training import PaddedCrossentropy

    made, seen = CausalLM(7, num_layers=1, hidden_dim=4, num_heads=1, intermediate_dim=3, dropout=0.0), []
    made.compile(keras.optimizers.SGD(0.1), PaddedCrossentropy(), jit_compile=keras.backend.backend() == "jax")

    def predict(batch, logs):
        seen.append(made.predict(X, verbose=0))
        seen.append(made.evaluate(X, X, verbose=0))

    made.fit(X, X, epochs=2, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=predict)])
    np.testing.assert_allclose(seen[-2], made.predict(X, verbose=0), atol=1e-5)
    assert seen[-1] < seen[1] and np.isfinite(made.get_weights()[0]).all()
