"""The backup file of `Resume`: arrays and a JSON text in NumPy's .npz format, which has checksums.

Also what is saved in it: descriptions of variables, states of callbacks and of random generators.
"""

import contextlib
import inspect
import io
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np

from keras_tx import disk
from keras_tx.optional import Lazy

torch = Lazy("torch")

FORMAT = "keras_tx.training.Resume 2"


def write(path: Path, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes `state` and the arrays. An interruption at any moment leaves a complete file, the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.new_file(path) as file:
        save(file, state, arrays)


def write_text(path: Path, text: str) -> None:
    """Writes a short text file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.new_file(path) as file:
        file.write(text.encode())


def save(file: IO[bytes], state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes `state`, which JSON can hold, and the arrays to an open file."""
    text = json.dumps({"format": FORMAT, "arrays": list(arrays), **state}, default=_as_json).encode()
    entries: dict[str, Any] = {"state": np.frombuffer(text, "uint8"), **arrays}
    np.savez(file, **entries)


def _as_json(value: Any) -> float | str:
    """Converts a logged value that JSON does not know, such as a NumPy scalar or a tensor, to a number or a string."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def read(path: Path, file: IO[bytes] | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The (state, arrays) of a file that `write` wrote.

    Args:
        path: the file.
        file: what it contains, if it is not read from the disk.

    Raises:
        ValueError: for a damaged file, or one that `write` did not write.
    """
    try:
        with open(path, "rb") if file is None else file as opened, np.load(opened, allow_pickle=False) as entries:
            arrays = {name: entries[name] for name in entries.files}
        state = json.loads(arrays.pop("state").tobytes())
        if state["format"] != FORMAT or state["arrays"] != list(arrays):
            raise ValueError(f"format {state['format']!r} for {FORMAT!r}, {len(arrays)} arrays")
    except Exception as error:  # damage in a zip file raises errors of many types
        raise _damaged(path, error) from error
    return state, arrays


@contextlib.contextmanager
def reading(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raises ValueError, which names the file, where the body finds values of other types than `Resume` writes.

    Args:
        path: the file.
        errors: further errors that can only come from such values.
    """
    wrong: tuple[type[Exception], ...] = (AttributeError, LookupError, OverflowError, TypeError, *errors)
    try:
        yield
    except wrong as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        "The backup must be a whole file of `Resume`; delete it to begin anew. Received: "
        f"{str(path)!r} ({error!s:.200})"
    )


def describe(variable: Any) -> list[Any]:
    """Path, shape and dtype of a variable, as JSON."""
    return [variable.path, list(variable.shape), str(variable.dtype)]


def path_of(variable: Any) -> str:
    """The path of a variable, or of its description, without the numbers that Keras adds to equal names."""
    return _without_numbers(variable[0] if isinstance(variable, list) else variable.path)


def check_same(saved: Sequence[Any], present: Sequence[Any], path: Path | str) -> None:
    """Raises a ValueError unless the descriptions of two lists of variables are equal and in the same order."""
    for old, new in zip(saved, present, strict=False):
        if [_without_numbers(old[0]), *old[1:]] != [_without_numbers(new[0]), *new[1:]]:
            raise ValueError(
                "The model and its optimizer must be those of the backup, which has the variable "
                f"{_as_text(old)}. Received: {_as_text(new)}, backup {str(path)!r}"
            )
    if len(saved) != len(present):
        extra = max(saved, present, key=len)[min(len(saved), len(present))]
        raise ValueError(
            f"The model and its optimizer must be those of the backup, which has {len(saved)} variables. Received: "
            f"{len(present)}, backup {str(path)!r}; only one of the two has {_as_text(extra)}"
        )


def _as_text(description: Sequence[Any]) -> str:
    path, shape, dtype = description
    return f"{path} {tuple(shape)} {dtype}"


def _without_numbers(path: str) -> str:
    """The path without suffixes as in `dense_1`, which Keras adds to equal names of layers in one process."""
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


def as_array(array: np.ndarray) -> np.ndarray:
    """Converts an array to one that NumPy can write; bfloat16 becomes float32, which is exact."""
    return array.astype("float32") if array.dtype.kind == "V" else array


def callback_state(callback: keras.callbacks.Callback, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The state of a callback: its numbers, strings and arrays that are not arguments of its constructor.

    Arrays are added to `arrays`; the return value can be written as JSON.
    """
    of_fit = {"params", "_params", "_model"}  # which `fit` sets
    skipped: set[str] = {*inspect.signature(type(callback).__init__).parameters, *of_fit}
    state: dict[str, Any] = {}
    for name, value in vars(callback).items():
        if name not in skipped:
            with contextlib.suppress(TypeError):
                state[name] = _encoded(value, arrays)
    return state


def restore_callback(callback: keras.callbacks.Callback, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Restores what `callback_state` returned."""
    for name, value in state.items():
        setattr(callback, name, _decoded(value, arrays))


def random_states(arrays: dict[str, np.ndarray]) -> Any:
    """The states of the global random generators; on PyTorch dropout and the shuffling of `fit` draw from one.

    Arrays are added to `arrays`; the return value can be written as JSON.
    """
    states: list[Any] = [random.getstate(), np.random.get_state(), []]
    if keras.backend.backend() == "torch":
        states[2] = [state.numpy() for state in (torch.get_rng_state(), *torch.cuda.get_rng_state_all())]
    return _encoded(states, arrays)


def restore_random_states(states: Any, arrays: dict[str, np.ndarray]) -> None:
    """Restores what `random_states` returned."""
    (version, internal, gauss), numpy_state, torch_states = _decoded(states, arrays)
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(numpy_state))
    if torch_states:
        torch.set_rng_state(torch.from_numpy(torch_states[0]))
        here = torch_states[1 : 1 + torch.cuda.device_count()]  # there may have been more GPUs
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in here])


def packed_random_states() -> bytes:
    """The states of the global random generators as a file, which one process can send to another."""
    arrays: dict[str, np.ndarray] = {}
    states, file = random_states(arrays), io.BytesIO()
    save(file, {"random": states}, arrays)
    return file.getvalue()


def restore_packed_random_states(packed: bytes, path: Path) -> None:
    """Restores what `packed_random_states` returned; errors name `path`, which it comes from."""
    state, arrays = read(path, io.BytesIO(packed))
    restore_random_states(state["random"], arrays)


def _encoded(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Converts `value` to JSON and adds its arrays to `arrays`. Raises a TypeError for other types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_encoded(part, arrays) for part in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufV":
        name = f"array {len(arrays)}"
        arrays[name] = as_array(value)
        return {"array": name}
    raise TypeError


def _decoded(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        return arrays[value["array"]]
    return [_decoded(part, arrays) for part in value] if isinstance(value, list) else value
