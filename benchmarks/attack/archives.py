"""Changed `.keras` files, and changed backups of `Resume`."""

import functools
import io
import json
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from benchmarks.attack.configs import change_json
from benchmarks.attack.outcome import Case, Outcome
from keras_tx import layers, training

IDS = np.array([[3, 5, 7], [2, 4, 0]])
RUN = "attack-has-run-code"  # the file that code of an archive would make
# Keras' own loader raises these for damaged archives, too.
OF_KERAS = (KeyError, TypeError, AttributeError, IndexError, zipfile.BadZipFile, EOFError, NotImplementedError)


@functools.cache
def saved() -> tuple[bytes, np.ndarray]:
    """A `.keras` file, and the outputs of its model."""
    keras.utils.set_random_seed(7)
    ids = keras.Input((None,), dtype="int32")
    x = layers.Encoder(1, 8, 2)(layers.TokenEmbedding(11, 8)(ids))
    model = keras.Model(ids, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        return (Path(folder) / "model.keras").read_bytes(), keras.ops.convert_to_numpy(model(IDS))


def keras_file(case: Case) -> Outcome:
    """A changed `.keras` file: what Keras' loader makes of it with the layers of this package."""
    data, expected = saved()
    path = case.folder / "model.keras"
    parts = {
        name: zipfile.ZipFile(io.BytesIO(data)).read(name) for name in zipfile.ZipFile(io.BytesIO(data)).namelist()
    }
    what = case.choice(CHANGES)
    case.changed = f".keras: {what}"
    changed = CHANGES[what](case, dict(parts))
    if isinstance(changed, bytes):
        path.write_bytes(changed)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in changed.items():
                archive.writestr(name, content)
    del changed

    def load():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Keras warns of parts that it skips
            model = keras.saving.load_model(path)
        return keras.ops.convert_to_numpy(model(IDS))

    found, outcome = case.attempt(load, OF_KERAS)
    if Path(RUN).exists():
        Path(RUN).unlink()
        return Outcome("wrong", "code of the archive has run")
    if outcome is not None:
        if outcome.result == "wrong" and "message of" in outcome.told:
            return Outcome("refused", outcome.told)  # Keras' own message, which has the whole config
        return outcome
    if not np.isfinite(found).all():
        return Outcome("wrong", "the outputs are not finite")
    same = found.shape == expected.shape and np.allclose(found, expected, atol=1e-5)
    allowed = same or what in ("another value in the config", "a number in the weights")
    return Outcome("right" if allowed else "wrong", "as before" if same else "other outputs")


def _config(change):
    def changed(case: Case, parts: dict[str, bytes]) -> dict[str, bytes]:
        config = json.loads(parts["config.json"])
        change(case, config)
        return {**parts, "config.json": json.dumps(config).encode()}

    return changed


def _lambda(case: Case, config: dict[str, Any]) -> None:
    layer = keras.saving.serialize_keras_object(keras.layers.Lambda(lambda x: open(RUN, "w") and x))
    last = config["config"]["layers"][-1]
    layer["config"]["name"], layer["name"], layer["inbound_nodes"] = last["name"], last["name"], last["inbound_nodes"]
    config["config"]["layers"][-1] = layer


def _module(case: Case, config: dict[str, Any]) -> None:
    one = case.choice(config["config"]["layers"])
    one["module"], one["class_name"], one["registered_name"] = case.choice(
        [
            ("os", "system", None),
            ("builtins", "eval", None),
            ("subprocess", "Popen", None),
            ("keras_tx.nothing", "X", None),
        ]
    )
    one["config"] = {"command": f"touch {RUN}"}


def _function(case: Case, config: dict[str, Any]) -> None:
    call = {"module": "builtins", "class_name": "function", "config": case.choice(["exec", "eval", "os.system"])}
    config["config"]["layers"][-1]["config"]["activation"] = call | {"registered_name": "function"}


def _value(case: Case, parts: dict[str, bytes]) -> dict[str, bytes]:
    path = case.folder / "config.json"
    path.write_bytes(parts["config.json"])
    change_json(case, path, ["registered_name", "build_config"], added=0.02)
    return {**parts, "config.json": path.read_bytes()}


def _weights(change):
    def changed(case: Case, parts: dict[str, bytes]) -> dict[str, bytes]:
        path = case.folder / "weights.h5"
        path.write_bytes(parts["model.weights.h5"])
        with h5py.File(path, "r+") as file:
            keys: list[str] = []
            file.visititems(lambda key, value: keys.append(key) if isinstance(value, h5py.Dataset) else None)
            key = case.choice(keys)
            change(file, key)
        return {**parts, "model.weights.h5": path.read_bytes()}

    return changed


def _huge(file: Any, key: str) -> None:
    del file[key]
    file.create_dataset(key, shape=(10**6, 10**5), dtype="float32", chunks=(1000, 1000), compression="gzip")


def _external(file: Any, key: str) -> None:
    del file[key]
    file[key] = h5py.ExternalLink("/etc/passwd", "/")


def _number(file: Any, key: str) -> None:
    file[key][...] = file[key][...] + 1


def _without(file: Any, key: str) -> None:
    del file[key]


def _bomb(name: str):
    return lambda case, parts: bomb(name)


@functools.cache
def bomb(name: str) -> bytes:
    """An archive of 5 MB in which one part has 5 GiB. Keras reads parts of up to 4 GiB, whatever their size on disk."""
    made, data = io.BytesIO(), saved()[0]
    old = zipfile.ZipFile(io.BytesIO(data))
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in old.namelist():
            if part != name:
                archive.writestr(part, old.read(part))
        with archive.open(name, "w", force_zip64=True) as file:
            for _ in range(320):
                file.write(bytes(1 << 24))
    return made.getvalue()


def _short(case: Case, parts: dict[str, bytes]) -> bytes:
    return saved()[0][: int(case.random.integers(len(saved()[0])))]


def _byte(case: Case, parts: dict[str, bytes]) -> bytes:
    data = bytearray(saved()[0])
    data[int(case.random.integers(len(data)))] ^= 1 + int(case.random.integers(255))
    return bytes(data)


def _missing(case: Case, parts: dict[str, bytes]) -> dict[str, bytes]:
    del parts[case.choice(["config.json", "model.weights.h5"])]
    return parts


CHANGES: dict[str, Any] = {
    "a Lambda layer": _config(_lambda),
    "a class of another module": _config(_module),
    "a function of another module": _config(_function),
    "another value in the config": _value,
    "a huge compressed array": _weights(_huge),
    "an external link": _weights(_external),
    "an array less": _weights(_without),
    "a number in the weights": _weights(_number),
    "a zip bomb as config": _bomb("config.json"),
    "a zip bomb as weights": _bomb("model.weights.h5"),
    "a path outside": lambda case, parts: {**parts, "../outside.txt": b"x", "/tmp/outside-attack.txt": b"x"},
    "short": _short,
    "a byte": _byte,
    "a part less": _missing,
    "empty": lambda case, parts: b"",
}


# Backups


@functools.cache
def backed_up() -> tuple[bytes, np.ndarray]:
    """The backup after one of two epochs, and the weights after both."""
    with tempfile.TemporaryDirectory() as folder:
        _train(Path(folder), 1)
        data = (Path(folder) / "backup.npz").read_bytes()
        return data, _train(Path(folder), 2)


def _train(folder: Path, epochs: int) -> np.ndarray:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    x = np.arange(8, dtype="float32").reshape(4, 2)
    resume = training.Resume(folder)
    model.fit(x, x[:, :1], epochs=epochs, batch_size=2, shuffle=False, verbose=0, callbacks=[resume])
    return np.concatenate([value.ravel() for value in model.get_weights()])


def backup(case: Case) -> Outcome:
    """A changed backup.npz of `Resume`: refused, or the training goes on as it did."""
    data, expected = backed_up()
    data = bytearray(data)
    middle = int(case.random.integers(len(data)))
    what = case.choice(["short", "empty", "byte", "state", "array", "bomb", "pickle"])
    case.changed = f"backup.npz: {what} at {middle}"
    path = case.folder / "backup.npz"
    if what in ("short", "empty", "byte"):
        data[middle] ^= 1 + int(case.random.integers(255))
        path.write_bytes(data[: {"short": middle, "empty": 0, "byte": len(data)}[what]])
    else:
        with np.load(io.BytesIO(bytes(data))) as file:
            arrays = dict(file)
        if what == "state":
            state = case.folder / "state.json"
            state.write_bytes(arrays["state"].tobytes())
            change_json(case, state, ["epoch"])
            arrays["state"] = np.frombuffer(state.read_bytes(), "uint8")
        else:
            name = case.choice(sorted(arrays.keys() - {"state"}))
            bad = {"array": np.zeros((2, 7)), "bomb": np.zeros(10**7), "pickle": np.array([{}], object)}
            arrays[name] = bad[what]
        np.savez_compressed(path, **arrays)
    found, outcome = case.attempt(lambda: _train(case.folder, 2))
    if outcome is not None:
        return outcome
    same = np.allclose(found, expected, atol=1e-6)
    right = same or (what == "state" and np.isfinite(found).all())  # another state is another training
    return Outcome("right" if right else "wrong", "goes on as it did" if same else "goes on otherwise")
