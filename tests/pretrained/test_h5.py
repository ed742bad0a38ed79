"""`tf_model.h5`: TensorFlow's names and axes become PyTorch's; hostile files."""

import h5py
import numpy as np
import pytest
import safetensors.numpy

from keras_tx.pretrained import h5
from keras_tx.pretrained.files import open_tensors
from tests.pretrained.test_files import assert_holds, flipped
from tests.pretrained.tiny import checkpoint


def test_a_tensorflow_file_holds_what_the_pytorch_file_holds():
    expected = safetensors.numpy.load_file(checkpoint("distilbert_cls") / "model.safetensors")
    assert_holds(open_tensors(checkpoint("distilbert_cls_tf_h5")), expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "tf_bert_model/bert/encoder/layer_._0/output/dense/kernel:0",
            ("bert.encoder.layer.0.output.dense.weight", True),
        ),
        (
            "tf_m/bert/embeddings/position_embeddings/embeddings:0",
            ("bert.embeddings.position_embeddings.weight", False),
        ),
        ("tf_m/bert/embeddings/LayerNorm/gamma:0", ("bert.embeddings.LayerNorm.weight", False)),
        ("tf_m/bert/embeddings/LayerNorm/beta:0", ("bert.embeddings.LayerNorm.bias", False)),
        ("tf_m/mlm___cls/predictions/bias:0", ("cls.predictions.bias", False)),
        ("tf_m/transformer/h_._11/attn/c_attn/weight:0", ("transformer.h.11.attn.c_attn.weight", False)),
        ("tf_m/vit/embeddings/cls_token:0", ("vit.embeddings.cls_token", False)),
        ("final_logits_bias:0", ("final_logits_bias", False)),
    ],
)
def test_names_of_tensorflow_become_those_of_pytorch(name, expected):
    assert h5.torch_name(name) == expected


def test_arrays_of_tensorflow_get_the_axes_of_pytorch(tmp_path):
    kernel, conv, bias = np.arange(15.0).reshape(3, 5), np.arange(210.0).reshape(2, 3, 5, 7), np.arange(11.0)[None]
    with h5py.File(tmp_path / "tf_model.h5", "w") as file:
        file["vit/tf_m/vit/dense/kernel:0"] = kernel.astype("float16")
        file["vit/tf_m/vit/projection/kernel:0"] = conv
        file["vit/tf_m/vit/c_fc/bias:0"] = bias
        file["vit/tf_m/vit/ids:0"] = np.arange(7)
    expected = {
        "vit.dense.weight": np.array([[row[i] for row in kernel] for i in range(5)], "float16"),
        "vit.projection.weight": np.einsum("hwio->oihw", conv),
        "vit.c_fc.bias": bias[0],
        "vit.ids": np.arange(7),
    }
    assert_holds(open_tensors(tmp_path), expected)


def _external(file, path):
    file.create_dataset("m/w", (5,), "f4", external=[(str(path.with_name("raw")), 0, h5py.h5f.UNLIMITED)])


def _virtual(file, path):
    layout = h5py.VirtualLayout((5,), "f4")
    layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "w", (5,))
    file.create_virtual_dataset("m/w", layout)


def _loop(file, path):
    file["m/again"] = file.create_group("m/g")
    file["m/g/loop"] = file["m"]


def _two_names(file, path):
    file["m/tf_m/a_._b/kernel:0"], file["m/tf_m/a/b/weight:0"] = np.ones((2, 2)), np.ones((2, 2))


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (
            lambda f, p: f.update({"m": h5py.ExternalLink("/etc/passwd", "w")}),
            "must not contain links. Received: a link at 'm'",
        ),
        (lambda f, p: f.update({"m/x": h5py.SoftLink("/y")}), "must not contain links. Received: a link at 'm/x'"),
        (_external, "must be numbers, stored in full .* at 'm/w'"),
        (_virtual, "must be numbers, stored in full .* at 'm/w'"),
        (lambda f, p: f.create_dataset("w", (10**6, 10**7), "f4", chunks=(10, 10)), "stored in full .* at 'w'"),
        (lambda f, p: f.create_dataset("w", data=np.ones(99), compression="gzip"), "and not compressed. .* at 'w'"),
        (lambda f, p: f.update({"w": "text"}), "must be numbers, .* at 'w'"),
        (lambda f, p: f.update({"w": h5py.Empty("f4")}), "must be numbers, .* at 'w'"),
        (lambda f, p: f.update({"w": np.dtype("f4")}), "must be numbers, .* at 'w'"),
        (_loop, "must hold each array once. Received: 'm/again/loop' a second"),
        (_two_names, "must have different names. Received: 'a.b.weight' for two"),
    ],
)
def test_hostile_hdf5_is_refused(tmp_path, fill, message):
    path = tmp_path / "tf_model.h5"
    with h5py.File(path, "w") as file:
        fill(file, path)
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path)


def test_hdf5_with_damaged_bits_gives_an_error_or_arrays(tmp_path):
    path, generator, refused = tmp_path / "tf_model.h5", np.random.default_rng(5), 0
    with h5py.File(path, "w") as file:
        file["m/tf_m/dense/kernel:0"] = np.arange(12.0).reshape(3, 4)
    data = path.read_bytes()
    for _ in range(200):
        path.write_bytes(flipped(data, generator, len(data), 40))
        try:
            tensors = open_tensors(tmp_path)
            assert all(tensors.read(name).shape == tensors.shape(name) for name in tensors)
        except ValueError as error:
            refused += "Received: " in str(error)
    assert refused > 100


def test_damaged_hdf5_is_refused(tmp_path):
    path = tmp_path / "tf_model.h5"
    with h5py.File(path, "w") as file:
        file["m/tf_m/dense/kernel:0"] = np.arange(999.0).reshape(27, 37)
    data, tensors = path.read_bytes(), open_tensors(tmp_path)
    for size in (0, 7, 600, len(data) - 2000):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="tf_model.h5 must be HDF5. Received: "):
            open_tensors(tmp_path)
    with pytest.raises(ValueError, match="tf_model.h5 must hold 'm/tf_m/dense/kernel:0'. Received: "):
        tensors.read("dense.weight")
    with h5py.File(path, "w") as file:
        file["m/tf_m/dense/kernel:0"] = np.arange(5)
    with pytest.raises(ValueError, match=r"must not change while it is read. Received: \(5,\), int64"):
        tensors.read("dense.weight")
