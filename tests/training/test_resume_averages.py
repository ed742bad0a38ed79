"""`Resume` with Keras' `SwapEMAWeights`, which exchanges weights and their moving averages at the end of an epoch."""

import keras
import numpy as np
import pytest

from keras_tx.training import Resume


class CutOff(Exception):
    pass


def train(folder, *, is_kept=True, is_before=True, swap_on_epoch=True, cut_at=None):
    """The losses of the epochs; the command ends at the beginning of the epoch `cut_at`."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9), "mse", run_eagerly=True)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
    resume = Resume(folder, callbacks=[swap] if is_kept else [])

    def cut(epoch, logs):
        if epoch == cut_at:
            raise CutOff

    pair = [swap, resume] if is_before else [resume, swap]
    callbacks = [*pair, keras.callbacks.LambdaCallback(on_epoch_begin=cut)]
    x = np.ones((4, 1))
    return model.fit(x, 2 * x, epochs=4, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_kept": False, "is_before": False}, {"is_kept": False, "swap_on_epoch": False}],
    ids=["kept", "behind", "no swap when an epoch ends"],
)
def test_averages_of_weights_that_keras_swaps_go_on(options, tmp_path):
    """`SwapEMAWeights` knows by an attribute with an underscore which weights the model has."""
    whole = train(tmp_path / "whole", **options)
    with pytest.raises(CutOff):
        train(tmp_path / "cut", cut_at=2, **options)
    assert train(tmp_path / "cut", **options) == whole and len(set(whole)) == 4


def test_a_backup_that_would_not_say_which_weights_it_has_is_refused(tmp_path):
    expected = (
        r"must contain `SwapEMAWeights\(swap_on_epoch=True\)` if it stands before .* Received: `callbacks` of \[\]"
    )
    with pytest.raises(ValueError, match=expected):
        train(tmp_path, is_kept=False)
    assert not list(tmp_path.iterdir())
