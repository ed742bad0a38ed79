"""JSON of TensorFlow Serving's REST interface <-> arrays and tf.Examples, with its error messages.

A value in JSON is a number, a string, a bool, `{"b64": "..."}` for bytes, or nested lists of these. Errors are
`RestError`, whose message is what the server answers.
https://www.tensorflow.org/tfx/serving/api_rest
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_tx import json_text

SHOWN = 1000  # characters of a value in an error message
MOST_AXES = 31  # of a value; older versions of NumPy have arrays of at most 32 axes, one of which is that of the rows
DTYPES = {"float32": "float", "float64": "double"}  # TensorFlow Serving's names that are not ours
KINDS = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}  # of the features of a tf.Example


class RestError(Exception):
    """A request that fails, with its HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request."""
    if not body:
        raise RestError("JSON Parse error: The document is empty")
    try:
        value = json_text.parse(body.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise RestError(f"JSON Parse error: {error.msg} at offset: {error.pos}") from error
    except ValueError as error:  # not UTF-8, or nested too deeply
        raise RestError(f"JSON Parse error: {error}") from error
    if not isinstance(value, dict):
        raise RestError(f"JSON Value: {_shown(value)} Is not object")
    return value


def signature_name(request: Mapping[str, Any]) -> str:
    name = request.get("signature_name", "")
    if not isinstance(name, str):
        raise RestError(
            f"JSON Value: {_shown(request)} not formatted correctly. 'signature_name' key must be a string value."
        )
    return name or "serving_default"


def tensors_of(request: Mapping[str, Any], dtypes: Mapping[str, str]) -> tuple[dict[str, np.ndarray], bool]:
    """The inputs of a `predict` request, and whether it is in row format.

    Args:
        request: with "instances" (row format) or "inputs" (column format).
        dtypes: {name of an input: its dtype's name} of the signature.
    """
    if "instances" in request and "inputs" in request:
        raise RestError(
            f"JSON Value: {_shown(request)} Not formatted correctly expecting only one of 'inputs' or 'instances' keys "
            "to exist "
        )
    if "instances" in request:
        rows = request["instances"]
        if not isinstance(rows, list):
            raise RestError(f"JSON Value: {_shown(request)} Excepting 'instances' to be an list/array")
        if not rows:
            raise RestError(f"JSON Value: {_shown(request)} No values in 'instances' array")
        return _from_rows(rows, dtypes), True
    if "inputs" in request:
        return _from_columns(request["inputs"], dtypes), False
    raise RestError("Missing 'inputs' or 'instances' key")


def _from_rows(rows: list[Any], dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    if not _is_object(rows[0]) and len(dtypes) > 1:
        raise RestError(
            "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
            "tensorinfo_map"
        )
    are_objects = _is_object(rows[0])
    columns: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}
    for number, row in enumerate(rows):
        place = f"Failed to process element: {number}"
        if are_objects and not _is_object(row):
            raise RestError(f"Expecting object but got list at item {number} of input list")
        if not are_objects and _is_object(row):
            raise RestError(f"Expecting value/list but got object at item {number} of input list")
        for name, value in row.items() if are_objects else [(next(iter(dtypes)), row)]:
            key = f" key: {name}" if are_objects else ""
            try:
                if name not in dtypes:
                    raise RestError(f"JSON object: does not have named input: {name}")
                columns[name].append(_like_the_first(_array(value, dtypes[name]), columns[name]))
            except RestError as error:
                raise RestError(f"{place}{key} of 'instances' list. Error: INVALID_ARGUMENT: {error}") from error
        if are_objects and set(row) != set(dtypes):
            raise RestError(
                f"{place} of 'instances' list. JSON object: {_shown(row)} keys must be equal to: "
                f"{','.join(sorted(dtypes))}"
            )
    return {name: np.stack(column) for name, column in columns.items()}


def _like_the_first(array: np.ndarray, column: list[np.ndarray]) -> np.ndarray:
    if column and column[0].size != array.size:
        raise RestError(f"Expecting tensor size: {column[0].size} but got: {array.size}")
    if column and column[0].shape != array.shape:
        first, shape = (f"[{','.join(map(str, one.shape))}]" for one in (column[0], array))
        raise RestError(f"Expecting shape {first} but got: {shape}")
    return array


def _from_columns(columns: Any, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    if not _is_object(columns):
        if len(dtypes) > 1:
            raise RestError(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
                "tensorinfo_map"
            )
        return {name: _array(columns, dtype) for name, dtype in dtypes.items()}
    for name in sorted(dtypes):
        if name not in columns:
            raise RestError(f"Missing named input: {name} in 'inputs' object.")
    return {name: _array(columns[name], dtype) for name, dtype in dtypes.items()}


def _array(value: Any, dtype: str) -> np.ndarray:
    """A value in JSON as an array; strings become bytes in an array of objects."""
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    if len(shape) > MOST_AXES:
        raise RestError(f"JSON Value: must have at most {MOST_AXES} levels of lists. Received: {len(shape)}")
    flat: list[Any] = []
    _fill(flat, value, 0, shape, dtype)
    if dtype != "string":
        return np.array(flat, dtype).reshape(shape)
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)


def _fill(flat: list[Any], value: Any, level: int, shape: list[int], dtype: str) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise RestError(
                f"JSON Value: {_shown(value)} found at incorrect level: {level + 1} in the JSON DOM. Expected at "
                f"level: {len(shape)}"
            )
        flat.append(_scalar(value, dtype))
        return
    if level >= len(shape):
        raise RestError(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise RestError(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for one in value:
        _fill(flat, one, level + 1, shape, dtype)


def _scalar(value: Any, dtype: str) -> Any:
    if dtype == "string" and isinstance(value, dict):
        return _from_base64(value)
    name = DTYPES.get(dtype, dtype)
    if dtype == "string":
        fits = isinstance(value, str)
    elif dtype == "bool":
        fits = isinstance(value, bool)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        fits = False
    elif dtype.startswith("float"):
        if _largest(value, dtype) < abs(value) < float("inf"):
            raise RestError(f"Cannot convert JSON value: {_shown(value)} to {name} without loss of precision.")
        fits = True
    else:
        fits = isinstance(value, int) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    if not fits:
        raise RestError(f"JSON Value: {_shown(value)} Type: {_type(value)} is not of expected type: {name}")
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _largest(value: float, dtype: str) -> float:
    """The largest number that the dtype can hold; of whole numbers, the largest below which it has all."""
    info = np.finfo(dtype)
    return 2 ** (info.nmant + 1) - 1 if isinstance(value, int) else float(info.max)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of names and values, and not bytes."""
    return isinstance(value, dict) and not (list(value) == ["b64"] and isinstance(value["b64"], str))


def _from_base64(value: Any) -> bytes:
    if _is_object(value):
        raise RestError(f"JSON Value: {_shown(value)} not formatted correctly for base64 data")
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RestError("Unable to base64 decode") from error


def _shown(value: Any) -> str:
    text = json.dumps(value, indent=4, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _type(value: Any) -> str:
    if isinstance(value, (bool, type(None))):
        return {True: "True", False: "False", None: "Null"}[value]
    return next(
        name
        for kind, name in ((str, "String"), (list, "Array"), (dict, "Object"), (object, "Number"))
        if isinstance(value, kind)
    )


def examples_of(request: Mapping[str, Any], new_example: Any) -> list[bytes]:
    """The serialized tf.Examples of a `classify` or `regress` request.

    Args:
        request: with "examples", and with "context", the features that they share, if there are any.
        new_example: `tf.train.Example`.
    """
    context = _example(request["context"], new_example()) if "context" in request else new_example()
    if "examples" not in request:
        raise RestError(
            f"JSON Value: {_shown(request)} When method is classify, key 'examples' is expected and was not found"
        )
    rows = request["examples"]
    if not isinstance(rows, list):
        raise RestError(f"JSON Value: {_shown(request)} Expecting 'examples' value to be an list/array")
    if not rows:
        raise RestError(f"JSON Value: {_shown(request)} 'examples' value is an empty array")
    examples = []
    for row in rows:
        example = new_example()
        example.CopyFrom(context)
        examples.append(_example(row, example).SerializeToString())
    return examples


def _example(features: Any, example: Any) -> Any:
    if not isinstance(features, dict):
        raise RestError(f"Example must be JSON object but got JSON {_type(features)}")
    for name, content in features.items():
        try:
            feature = example.features.feature[name]
        except UnicodeEncodeError:
            raise RestError(f"Feature names must be Unicode texts. Received: {name!r}") from None
        feature.Clear()
        for value in content if isinstance(content, list) else [content]:
            _add(feature, name, value)
    return example


def _add(feature: Any, name: str, value: Any) -> None:
    if value is None or isinstance(value, list) or _is_object(value):
        raise RestError(f"Feature: {name} has element with unexpected JSON type: {_type(value)}")
    if isinstance(value, dict):
        value = _from_base64(value)
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    kind = {bytes: "bytes_list", float: "float_list"}.get(type(value), "int64_list")
    of_feature = feature.WhichOneof("kind") or kind
    if kind != of_feature:
        raise RestError(f"Unexpected element type in feature: {name} expecting type: {KINDS[of_feature]}")
    try:
        getattr(feature, kind).value.append(value)
    except ValueError as error:  # a whole number of more than 64 bits
        raise RestError(f"Feature: {name} has uint64 element. Only int64 is supported.") from error


def predictions(outputs: Mapping[str, np.ndarray], by_row: bool) -> dict[str, Any]:
    """The answer to a `predict` request; a single output is given without its name."""
    values = {name: to_json(array, name.endswith("_bytes")) for name, array in outputs.items()}
    if not by_row:
        return {"outputs": values if len(values) > 1 else next(iter(values.values()))}
    sizes = {name: array.shape[0] if array.ndim else None for name, array in outputs.items()}
    batch = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size is None:
            raise RestError(f"Tensor name: {name} has no shape information ")
        if size != batch:
            raise RestError(f"Tensor name: {name} has inconsistent batch size: {size} expecting: {batch}")
    if len(values) == 1:
        return {"predictions": next(iter(values.values()))}
    return {"predictions": [{name: values[name][row] for name in values} for row in range(batch or 0)]}


def to_json(array: np.ndarray, as_base64: bool = False) -> Any:
    """Nested lists; float32 in as few digits as tell them apart."""
    if array.dtype == object:
        one = _to_base64 if as_base64 else _to_text
        flat: list[Any] = [one(value) for value in array.ravel()]
    elif array.dtype == np.float32:
        flat = [float(str(value)) for value in array.ravel()]
    else:
        return array.tolist()
    if not array.ndim:
        return flat[0]
    for size in reversed(array.shape[1:]):
        flat = [flat[i * size : (i + 1) * size] for i in range(len(flat) // size)] if size else [[]] * len(array)
    return flat


def _to_base64(value: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(value).decode()}


def _to_text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
