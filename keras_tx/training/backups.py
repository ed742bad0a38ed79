"""What training needs to go on, in one file: arrays and a JSON text in NumPy's .npz, which keeps a checksum of each."""

import contextlib
import inspect
import json
import os
import random
import re

import keras
import numpy as np

from keras_tx.optional import Lazy

torch = Lazy("torch")

FORMAT = "keras_tx.training.Resume 1"


def write(path, state, arrays):
    """Writes the dict `state` and the `arrays` so that a cut at any moment leaves the old file or the new one."""
    text = json.dumps({"format": FORMAT, "arrays": list(arrays), **state}, default=_plain).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            np.savez(file, state=np.frombuffer(text, "uint8"), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every system opens a folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def _plain(value):
    """What callbacks log and JSON has not, such as scalars of NumPy and tensors."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def read(path):
    """The (state, arrays) of a file that `write` wrote.

    Raises:
        ValueError: for a file that is damaged or something else.
    """
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        state = json.loads(arrays.pop("state").tobytes())
        if state["format"] != FORMAT or state["arrays"] != list(arrays):
            raise ValueError(f"format {state['format']!r} for {FORMAT!r}, {len(arrays)} arrays")
    except Exception as error:  # of many kinds: a damaged zip file is found wherever it is damaged
        raise ValueError(
            f"The backup must be a whole file of `Resume`; delete it to begin anew. Received: {str(path)!r} ({error})"
        ) from error
    return state, arrays


def described(variable):
    return [variable.path, list(variable.shape), str(variable.dtype)]


def check_same(saved, present, path):
    """Raises unless the described variables are the same in kind and order."""
    for old, new in zip(saved, present, strict=False):
        if [_without_numbers(old[0]), *old[1:]] != [_without_numbers(new[0]), *new[1:]]:
            raise ValueError(
                "The model and its optimizer must be those of the backup, which has the variable "
                f"{_told(old)}. Received: {_told(new)}, backup {str(path)!r}"
            )
    if len(saved) != len(present):
        extra = max(saved, present, key=len)[min(len(saved), len(present))]
        raise ValueError(
            f"The model and its optimizer must be those of the backup, which has {len(saved)} variables. Received: "
            f"{len(present)}, backup {str(path)!r}; only one of the two has {_told(extra)}"
        )


def _told(description):
    path, shape, dtype = description
    return f"{path} {tuple(shape)} {dtype}"


def _without_numbers(path):
    """The path without the numbers that Keras gives to the second and further layers of one name in a process."""
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


def array_of(value):
    """A variable or array as NumPy can write it: bfloat16 and its like, which it does not know, as float32, exactly."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array.astype("float32") if array.dtype.kind == "V" else array


def encoded_state(callback, arrays):
    """The attributes of a callback that are its state: numbers, strings, arrays that its constructor was not given.

    The arrays are added to `arrays`; what is returned can be written as JSON.
    """
    skipped = {*inspect.signature(type(callback).__init__).parameters, "params"}
    state = {}
    for name, value in vars(callback).items():
        if name not in skipped and not name.startswith("_"):
            with contextlib.suppress(TypeError):
                state[name] = _encoded(value, arrays)
    return state


def restore_state(callback, state, arrays):
    """Sets what `encoded_state` found."""
    for name, value in state.items():
        setattr(callback, name, _decoded(value, arrays))


def random_states(arrays):
    """The states of the random generators that are global; on PyTorch dropout draws from one, and so does `fit`.

    The arrays are added to `arrays`; what is returned can be written as JSON.
    """
    states = [random.getstate(), np.random.get_state(), []]
    if keras.backend.backend() == "torch":
        states[2] = [state.numpy() for state in (torch.get_rng_state(), *torch.cuda.get_rng_state_all())]
    return _encoded(states, arrays)


def restore_random_states(states, arrays):
    """Sets what `random_states` found."""
    (version, internal, gauss), numpy_state, torch_states = _decoded(states, arrays)
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(numpy_state))
    if torch_states:
        torch.set_rng_state(torch.from_numpy(torch_states[0]))
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in torch_states[1:]])


def _encoded(value, arrays):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_encoded(part, arrays) for part in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufV":
        name = f"array {len(arrays)}"
        arrays[name] = array_of(value)
        return {"array": name}
    raise TypeError


def _decoded(value, arrays):
    if isinstance(value, dict):
        return arrays[value["array"]]
    return [_decoded(part, arrays) for part in value] if isinstance(value, list) else value
