"""The modules that may use private parts of Keras and TensorFlow, and what a test of them says of a change."""

import contextlib
import importlib.metadata
from pathlib import Path

import keras_tx

PACKAGE = Path(keras_tx.__file__).parent
MODELS, LORA, TRAINING, JAX_STEPS, OPTIMIZERS, REPLICAS, SCALES, BATCHES, GRAPHS, TORCH = (
    PACKAGE / "internals" / f"{name}.py"
    for name in (
        *("keras_models", "keras_lora", "keras_training", "keras_jax_steps", "keras_optimizers", "keras_replicas"),
        *("keras_loss_scales", "keras_batches", "tensorflow_graphs", "keras_torch"),
    )
)
LIBRARY = PACKAGE / "serving" / "check" / "tensorflow_internals.py"
CHANGED = "{library} {version} no longer {promise}: update {door} ({error!r})"


@contextlib.contextmanager
def still(promise, library="keras", door=MODELS):
    """Around a test of a private part: says what has changed, in which version, and where that is to be mended."""
    try:
        yield
    except Exception as error:
        version = importlib.metadata.version(library)
        name = {"keras": "Keras"}.get(library, library)
        path = door.relative_to(PACKAGE.parent).as_posix()
        text = CHANGED.format(library=name, version=version, promise=promise, door=path, error=error)
        raise AssertionError(text) from error
