"""Parts of tensors: where a slice of a variable is in a checkpoint, and that only its bytes are read."""

import itertools
import os

import keras
import numpy as np
import pytest

from keras_tx.pretrained import files
from keras_tx.pretrained.files import open_tensors, write_tensors
from keras_tx.pretrained.h5 import datasets
from keras_tx.pretrained.leading_axes import LeadingAxesRow
from keras_tx.pretrained.snapshot import OpenFile
from keras_tx.pretrained.table import AS_IS, CONV2D, KERNEL, LINEAR, VECTOR, Row
from tests.pretrained.tiny import checkpoint
from tests.tools import normal


def ranges_of(shape):
    """All ranges that cut at most one axis, each as (begin, end) for every axis."""
    whole = [(0, size) for size in shape]
    for axis, size in enumerate(shape):
        for one in {(0, size), (0, 1), (1, size), (size // 2, size - 1)}:
            yield tuple(one if other == axis else whole[other] for other in range(len(shape)))


def cut(array, ranges):
    return array[tuple(slice(*one) for one in ranges)]


@pytest.mark.parametrize(
    ("how", "inputs", "shapes", "axes"),  # the axes that can be cut
    [
        (AS_IS, 1, [(5, 7)], (0, 1)),
        (AS_IS, 1, [(4, 3), (4, 5)], (0, 1)),
        (VECTOR, 1, [(3, 5), (4, 5), (3, 5)], (0,)),
        (LINEAR, 1, [(7, 5)], (0, 1)),
        (LINEAR, 1, [(7, 3, 5), (7, 4, 5), (7, 3, 5)], (0, 1)),
        (LINEAR, 2, [(3, 5, 7)], (0, 2)),
        (KERNEL, 1, [(7, 3, 5), (7, 4, 5)], (0, 1)),
        (KERNEL, 2, [(3, 5, 7)], (0, 2)),
        (CONV2D, 1, [(3, 4, 5, 7)], ()),
    ],
)
def test_a_part_of_a_variable_is_a_block_of_the_tensor(how, inputs, shapes, axes):
    row = Row("it", [keras.Variable(np.zeros(shape)) for shape in shapes], how, inputs)
    tensor = normal(*row.shape)
    for variable, value in row.read(tensor):
        for ranges in ranges_of(value.shape):
            block = row.part(variable, ranges)
            cuts = [axis for axis, size in enumerate(value.shape) if ranges[axis] != (0, size)]
            assert (block is None) == (how == CONV2D or not set(cuts) <= set(axes))
            if block is not None:
                np.testing.assert_array_equal(row.read_part(cut(tensor, block), ranges), cut(value, ranges))


def test_a_part_of_a_tensor_with_leading_axes_is_a_block():
    row = LeadingAxesRow("it", keras.Variable(np.zeros((5, 3))), axes=2)
    tensor = normal(1, 1, 5, 3)
    block = row.part(row.ours, ((1, 4), (0, 3)))
    assert block == ((0, 1), (0, 1), (1, 4), (0, 3))
    np.testing.assert_array_equal(row.read_part(cut(tensor, block), ((1, 4), (0, 3))), tensor[0, 0, 1:4])
    number = keras.Variable(1.0)
    assert Row("number", number).part(number, ()) is None


@pytest.mark.parametrize("shape", [(), (11,), (5, 7), (3, 5, 7), (3, 0, 2)])
def test_a_block_is_read_and_no_other_byte(shape, tmp_path, monkeypatch):
    array = normal(*shape)
    write_tensors(tmp_path, [("before", np.ones(3, "float32")), ("it", array)])
    tensors, counted = open_tensors(tmp_path), []
    fill = files._Tensor._fill
    monkeypatch.setattr(
        files._Tensor, "_fill", lambda self, data, *rest: (counted.append(data.size), fill(self, data, *rest))
    )
    for ranges in itertools.product(*[{(0, size), (size // 2, size), (0, size - size // 2)} for size in shape]):
        counted.clear()
        found = tensors.read_block("it", ranges)
        np.testing.assert_array_equal(found, cut(array, ranges))
        assert found.dtype == array.dtype
        assert sum(counted) == found.nbytes
        whole = [one == (0, size) for one, size in zip(ranges, shape, strict=True)]
        assert all(whole[1:]) <= (len(counted) <= 1)  # one run


def test_pieces_are_all_bytes_and_damage_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 100)
    array = normal(11, 7)
    write_tensors(tmp_path, [("it", array)])
    path = tmp_path / files.SINGLE
    pieces = list(open_tensors(path).pieces("it"))
    assert [piece.size for piece in pieces] == [100, 100, 100, 8]
    assert np.concatenate(pieces).tobytes() == array.tobytes()
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="The tensor 'it' of .* must have the checksum .*; the file is damaged"):
        list(open_tensors(path).pieces("it"))


def test_a_file_that_becomes_shorter_is_found_in_blocks(tmp_path):
    write_tensors(tmp_path, [("it", normal(11, 7))])
    tensors = open_tensors(tmp_path)
    os.truncate(tmp_path / files.SINGLE, (tmp_path / files.SINGLE).stat().st_size - 30)
    with pytest.raises(ValueError, match="must not change while it is read. Received: 0 of 8 bytes of 'it'"):
        tensors.read_block("it", ((0, 11), (2, 4)))


def test_blocks_of_hdf5_files_are_those_of_the_whole():
    found = datasets(OpenFile(checkpoint("distilbert_cls_tf_h5") / "tf_model.h5"))
    one = next(one for one in found.values() if len(one.shape) == 2)
    ranges = ((1, one.shape[0]), (0, one.shape[1] - 1))
    np.testing.assert_array_equal(one.read_block(ranges), cut(one.read(), ranges))
    assert b"".join(piece.tobytes() for piece in one.pieces()) == one.read().tobytes()
