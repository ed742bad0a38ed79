"""A version, loaded through TensorFlow's C API by the C++ loader that TensorFlow Serving calls.

Only the graph, the weights and the SignatureDefs of a SavedModel are read, nothing that is only for Python. Neither
keras_tx nor Keras is imported here.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

STRING = 7  # TF_STRING
STRING_SIZE = 24  # bytes of a TF_TString
POINTER, TEXT, SIZE, INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int


class _Buffer(ctypes.Structure):
    _fields_ = [("data", POINTER), ("length", SIZE), ("deallocator", POINTER)]


class _Output(ctypes.Structure):
    _fields_ = [("operation", POINTER), ("index", INT)]


INTEGERS, OUTPUTS = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(_Output)
POINTERS, BUFFER = ctypes.POINTER(POINTER), ctypes.POINTER(_Buffer)
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {  # return and argument types: tensorflow/c/c_api.h, tf_tensor.h
    "TF_NewStatus": (POINTER, []),
    "TF_GetCode": (INT, [POINTER]),
    "TF_Message": (TEXT, [POINTER]),
    "TF_NewGraph": (POINTER, []),
    "TF_NewSessionOptions": (POINTER, []),
    "TF_NewBuffer": (BUFFER, []),
    "TF_LoadSessionFromSavedModel": (
        POINTER,
        [POINTER, POINTER, TEXT, ctypes.POINTER(TEXT), INT, POINTER, BUFFER, POINTER],
    ),
    "TF_DeleteSession": (None, [POINTER, POINTER]),
    "TF_DeleteGraph": (None, [POINTER]),
    "TF_DeleteBuffer": (None, [BUFFER]),
    "TF_GraphOperationByName": (POINTER, [POINTER, TEXT]),
    "TF_AllocateTensor": (POINTER, [INT, INTEGERS, INT, SIZE]),
    "TF_DeleteTensor": (None, [POINTER]),
    "TF_TensorData": (POINTER, [POINTER]),
    "TF_TensorType": (INT, [POINTER]),
    "TF_NumDims": (INT, [POINTER]),
    "TF_Dim": (ctypes.c_int64, [POINTER, INT]),
    "TF_TensorByteSize": (SIZE, [POINTER]),
    "TF_StringInit": (None, [POINTER]),
    "TF_StringCopy": (None, [POINTER, TEXT, SIZE]),
    "TF_StringGetDataPointer": (POINTER, [POINTER]),
    "TF_StringGetSize": (SIZE, [POINTER]),
    "TF_SessionRun": (
        None,
        [POINTER, POINTER, OUTPUTS, POINTERS, INT, OUTPUTS, POINTERS, INT, POINTER, INT, POINTER, POINTER],
    ),
}


class Session:
    """A loaded version.

    Args:
        version: the version's folder.
        library: TensorFlow's C++ library, as `ctypes` loads it.

    Attributes:
        signatures: {name: `Signature`}.

    Raises:
        RuntimeError: the version does not load; the message is the loader's.
    """

    def __init__(self, version: str, library: Any):
        self._c = library
        for name, (returns, takes) in FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = returns, takes
        c, self._status = self._c, self._c.TF_NewStatus()
        self._graph, buffer = c.TF_NewGraph(), c.TF_NewBuffer()
        tags = (TEXT * 1)(b"serve")
        self._session = c.TF_LoadSessionFromSavedModel(
            c.TF_NewSessionOptions(), None, str(version).encode(), tags, 1, self._graph, buffer, self._status
        )
        self._check()
        meta = meta_graph_pb2.MetaGraphDef()
        meta.ParseFromString(ctypes.string_at(buffer.contents.data, buffer.contents.length))
        c.TF_DeleteBuffer(buffer)
        self.signatures = {
            name: Signature(self, signature)
            for name, signature in sorted(meta.signature_def.items())
            if not name.startswith("__")
        }

    def run(self, inputs: Sequence[tuple[str, np.ndarray]], outputs: Sequence[str]) -> list[np.ndarray]:
        """Feeds arrays to tensors by name, and returns the arrays of the tensors named in `outputs`."""
        count, c = len(inputs), self._c
        places = (_Output * count)(*[self._place(name) for name, _ in inputs])
        given = (POINTER * count)(*[self._tensor(value) for _, value in inputs])
        wanted = (_Output * len(outputs))(*[self._place(name) for name in outputs])
        found = (POINTER * len(outputs))()
        try:
            c.TF_SessionRun(
                self._session, None, places, given, count, wanted, found, len(outputs), None, 0, None, self._status
            )
            self._check()
            return [self._array(tensor) for tensor in found]
        finally:
            for tensor in [*given, *found]:
                if tensor:
                    c.TF_DeleteTensor(tensor)

    def close(self) -> None:
        """Frees the memory of the version. Its signatures cannot be called any more."""
        self._c.TF_DeleteSession(self._session, self._status)
        self._c.TF_DeleteGraph(self._graph)

    def _check(self) -> None:
        if self._c.TF_GetCode(self._status):
            raise RuntimeError(self._c.TF_Message(self._status).decode(errors="replace"))

    def _place(self, name: str) -> _Output:
        operation, _, index = name.partition(":")
        return _Output(self._c.TF_GraphOperationByName(self._graph, operation.encode()), int(index or 0))

    def _tensor(self, value: np.ndarray) -> Any:
        c, is_text = self._c, value.dtype == object
        sizes = (ctypes.c_int64 * max(value.ndim, 1))(*value.shape)
        dtype = STRING if is_text else tf.as_dtype(value.dtype).as_datatype_enum
        tensor = c.TF_AllocateTensor(dtype, sizes, value.ndim, STRING_SIZE * value.size if is_text else value.nbytes)
        start = c.TF_TensorData(tensor)
        if not is_text:
            ctypes.memmove(start, np.ascontiguousarray(value).ctypes.data, value.nbytes)
            return tensor
        for index, text in enumerate(value.ravel()):
            text = text.encode() if isinstance(text, str) else text
            c.TF_StringInit(start + STRING_SIZE * index)
            c.TF_StringCopy(start + STRING_SIZE * index, text, len(text))
        return tensor

    def _array(self, tensor: Any) -> np.ndarray:
        c, dtype = self._c, self._c.TF_TensorType(tensor)
        shape, start = [c.TF_Dim(tensor, axis) for axis in range(c.TF_NumDims(tensor))], c.TF_TensorData(tensor)
        if dtype == STRING:
            places = range(start or 0, (start or 0) + STRING_SIZE * int(np.prod(shape)), STRING_SIZE)
            texts = [ctypes.string_at(c.TF_StringGetDataPointer(at), c.TF_StringGetSize(at)) for at in places]
            array = np.empty(len(texts), object)
            array[:] = texts
            return array.reshape(shape)
        numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
        if 0 in shape:
            return np.zeros(shape, numpy_dtype)
        return np.frombuffer(ctypes.string_at(start, c.TF_TensorByteSize(tensor)), numpy_dtype).reshape(shape)


class Signature:
    """A SignatureDef that is called with arrays by name and returns arrays by name; strings are in arrays of objects.

    Attributes:
        inputs, outputs: {name: (tf.DType, shape as a list with None, or None where the rank is unknown)}.
    """

    def __init__(self, session: Session, signature: Any):
        self._session = session
        self._names = [{key: one.name for key, one in side.items()} for side in (signature.inputs, signature.outputs)]
        self.inputs, self.outputs = (
            {key: _spec(one) for key, one in sorted(side.items())} for side in (signature.inputs, signature.outputs)
        )

    def __call__(self, **inputs: Any) -> dict[str, np.ndarray]:
        given = []
        for key, value in inputs.items():
            dtype = self.inputs[key][0]
            given.append(
                (self._names[0][key], np.asarray(value, object if dtype == tf.string else dtype.as_numpy_dtype))
            )
        keys = list(self.outputs)
        return dict(zip(keys, self._session.run(given, [self._names[1][key] for key in keys]), strict=True))


def _spec(info: Any) -> tuple[Any, list[int | None] | None]:
    shape = info.tensor_shape
    sizes = None if shape.unknown_rank else [None if one.size < 0 else one.size for one in shape.dim]
    return tf.as_dtype(info.dtype), sizes
