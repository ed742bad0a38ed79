"""An exported model that answers the routes of TensorFlow Serving's REST interface.

https://www.tensorflow.org/tfx/serving/api_rest
"""

import importlib.util
import json
import re
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.serving import card, rest_json
from keras_tx.serving.check.audit import need_text_ops
from keras_tx.serving.rest_json import RestError
from keras_tx.serving.versions import check_characters, versions_in

tf = Lazy("tensorflow")
integer_products = Lazy("keras_tx.serving.check.integer_products")
json_format = Lazy("google.protobuf.json_format")
saved_model_pb2 = Lazy("tensorflow.core.protobuf.saved_model_pb2")

NAME = r"(?i:/v1/models/)(?P<name>[^/:]+)"
VERSION = r"(?:/(?i:versions)/(?P<version>\d+)|/(?i:labels)/(?P<label>[^/:]+))?"
POST = re.compile(rf"{NAME}{VERSION}:(?i:(?P<method>classify|regress|predict))", re.ASCII)
GET = re.compile(rf"{NAME}{VERSION}(?P<metadata>/(?i:metadata))?", re.ASCII)
# How TensorFlow Serving gives TensorFlow's error codes, of which `tf.errors` has these names, in HTTP.
STATUS = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 412,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}


def latest_version(folder: str | Path) -> Path:
    """Returns the folder of the highest version of an exported model.

    Raises:
        FileNotFoundError: there is no version.
        ValueError: `folder` is a URL, or TensorFlow could not load the version because of its name.
    """
    folder = checks.local_path("folder", folder)
    versions = versions_in(folder, complete=True)
    if versions:
        check_characters("folder", folder)
        return versions[-1]
    hint = ""
    if (folder / "saved_model.pb").is_file():
        hint = f" That is a version; the model's folder is {str(folder.resolve().parent)!r}."
    raise FileNotFoundError(
        "`folder` must be a folder that `keras_tx.serving.export` wrote, with numbered versions that hold a "
        f"saved_model.pb.{hint} Received: folder={str(folder)!r}"
    )


class ServedModel:
    """The newest version of an exported model. Several threads may use it at a time.

    Args:
        folder: the model's folder, such as "saved_models/reviews".
        name: the model's name in requests; None: that of the folder.

    Attributes:
        name: the model's name.
        version: the number of the version.
        generation: the options of a generative model, from MODEL_CARD.json; {} if there are none.

    Raises:
        FileNotFoundError: there is no version in the folder.
        ValueError: the folder is a URL, or TensorFlow cannot load from a folder of its name.
        ImportError: the version holds a tokenizer, and tensorflow_text is not installed.
    """

    def __init__(self, folder: str | Path, name: str | None = None):
        path = latest_version(folder)
        self.name, self.version = name or Path(folder).resolve().name, int(path.name)
        described = path / card.FILE
        self.generation = json.loads(described.read_bytes()).get("generation", {}) if described.is_file() else {}
        saved_model = saved_model_pb2.SavedModel()
        saved_model.ParseFromString((path / "saved_model.pb").read_bytes())
        self._definitions = saved_model.meta_graphs[0].signature_def
        if importlib.util.find_spec("tensorflow_text"):
            importlib.import_module("tensorflow_text")  # has the operations of tokenizers
        try:
            self._model = tf.saved_model.load(str(path))
        except (FileNotFoundError, RuntimeError) as error:  # which of them depends on where the loader meets the op
            need_text_ops(path, re.findall("Op type not registered '([^']+)'", str(error)))
            raise

    def answer(self, http_method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """Returns the JSON object with which TensorFlow Serving answers.

        Raises:
            RestError: with which error it answers.
        """
        if not path.lower().startswith("/v1/"):
            raise RestError("Not Found", 404)
        found = {"GET": GET, "POST": POST}[http_method].fullmatch(urllib.parse.urlsplit(path).path)
        if found is None:
            raise RestError(f"Malformed request: {http_method} {path}")
        parts = found.groupdict()
        name, version, label = urllib.parse.unquote(parts["name"]), parts["version"], parts["label"]
        if label is not None:
            raise RestError(f"Unrecognized servable version label: {urllib.parse.unquote(label)}")
        digits = (version or "").lstrip("0") or "0"
        if len(digits) > 19 or int(digits) >= 2**63:
            raise RestError(f"Failed to convert version: {version} to numeric.")
        is_here = name == self.name and (version is None or int(digits) == self.version)
        if http_method == "GET" and not parts["metadata"]:
            if is_here:
                return self._status()
            if version is None:
                raise RestError(f"Could not find any versions of model {name}", 404)
            raise RestError(f"Could not find version {version} of model {name}", 404)
        request = rest_json.parse(body) if http_method == "POST" else {}
        if not is_here:
            wanted = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise RestError(f"Servable not found for request: {wanted}", 404)
        if http_method == "GET":
            return self._metadata()
        signature = rest_json.signature_name(request)
        if parts["method"].lower() == "predict":
            return self._predict(request, signature)
        return self._of_examples(request, signature, parts["method"].lower())

    def _status(self) -> dict[str, Any]:
        ok = {"error_code": "OK", "error_message": ""}
        return {"model_version_status": [{"version": str(self.version), "state": "AVAILABLE", "status": ok}]}

    def _metadata(self) -> dict[str, Any]:
        options = {"always_print_fields_with_no_presence": True, "preserving_proto_field_name": True}
        signatures = {
            name: json_format.MessageToDict(one, **options) for name, one in sorted(self._definitions.items())
        }
        return {
            "model_spec": {"name": self.name, "signature_name": "", "version": str(self.version)},
            "metadata": {"signature_def": {"signature_def": signatures}},
        }

    def _predict(self, request: dict[str, Any], signature: str) -> dict[str, Any]:
        if signature not in self._model.signatures:
            raise RestError(f'Serving signature name: "{signature}" not found in signature def')
        specs = self._model.signatures[signature].structured_input_signature[1]
        inputs, by_row = rest_json.tensors_of(request, {name: spec.dtype.name for name, spec in specs.items()})
        return rest_json.predictions(self._run(signature, inputs), by_row)

    def _of_examples(self, request: dict[str, Any], signature: str, method: str) -> dict[str, Any]:
        serialized = rest_json.examples_of(request, tf.train.Example)
        if signature not in self._model.signatures:
            raise RestError(f"No signature was found with the name: {signature}")
        names = set(self._model.signatures[signature].structured_outputs)
        if set(self._model.signatures[signature].structured_input_signature[1]) != {"inputs"}:
            kind = {"classify": "classification", "regress": "regression"}[method]
            raise RestError(f"No {kind} inputs found in SignatureDef: {signature}")
        if not names & ({"classes", "scores"} if method == "classify" else {"outputs"}):
            raise RestError(f"Expected {method} signature outputs, found: {sorted(names)}")
        outputs = self._run(signature, {"inputs": np.array(serialized, object)})
        if method == "regress":
            return {"results": rest_json.to_json(outputs["outputs"].reshape(len(serialized)))}
        found = {key: rest_json.to_json(outputs[key]) for key in ("classes", "scores") if key in names}
        rows = next(iter(found.values()))  # for what is missing, TensorFlow Serving answers "" and 0.0
        classes = found.get("classes", [[""] * len(row) for row in rows])
        scores = found.get("scores", [[0.0] * len(row) for row in rows])
        pairs = [zip(*row, strict=True) for row in zip(classes, scores, strict=True)]
        return {"results": [[list(pair) for pair in row] for row in pairs]}

    def _run(self, signature: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        function = self._model.signatures[signature]
        specs = function.structured_input_signature[1]
        try:
            tensors = {name: tf.constant(array, specs[name].dtype) for name, array in inputs.items()}
            for name, tensor in tensors.items():
                if not specs[name].shape.is_compatible_with(tensor.shape):
                    sizes, got = list(specs[name].shape), list(tensor.shape)
                    raise RestError(f"The input {name} must have the shape {sizes}. Received: shape {got}")
            outputs = function(**tensors)
        except tf.errors.OpError as error:
            raise RestError(_message(str(error.message)), _status(error)) from error
        except (TypeError, ValueError) as error:  # a shape that the signature does not take
            raise RestError(str(error)) from error
        return {name: np.asarray(tensor) for name, tensor in sorted(outputs.items())}


def _status(error: Any) -> int:
    statuses = {getattr(tf.errors, name): status for name, status in STATUS.items()}
    return statuses.get(error.error_code, 500)


def _message(text: str) -> str:
    """TensorFlow's message without what Python adds to it."""
    text = text.rpartition("<stack traces unavailable>\n")[2]
    return str(integer_products.explained(re.sub(r" \[Op:\w+\]( name: *\S*)?\s*$", "", text)))
