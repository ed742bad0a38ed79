"""Two processes of JAX train, load and save as one."""

import numpy as np
import pytest

from keras_tx.pretrained.files import open_tensors
from tests.distribution import children
from tests.pretrained.tiny import checkpoint

pytestmark = [pytest.mark.process, pytest.mark.tensorflow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def reports(folder):
    return children.run("jax_pair", folder, backend="jax", processes=2, tensorflow=True)


def test_weights_equal_those_of_one_process(reports):
    for found in reports:
        assert found["data"] < 2e-6
        assert found["model"] < 2e-6


def test_both_processes_get_the_loss_and_the_predictions_of_all_rows(reports):
    for found in reports:
        assert abs(found["losses"][0] - found["losses"][1]) < 1e-5
        assert found["predictions"] < 1e-5


def test_every_row_of_files_is_trained_once(reports):
    """With batches that the distribution shares, with a part of the files for each process, and with a split model."""
    steps = [4, 2, 4]  # batches of 4 of 16 rows; with a part for each process there are 4 rows in each of the two
    for found in reports:
        assert found["letters"] == [[[1] * 16, number] for number in steps]


def test_both_processes_generate_what_one_does(reports):
    for found in reports:
        assert found["generated"] == found["expected"]


def test_each_process_reads_what_its_device_holds(reports):
    """Norms are whole, so it is a little more than half."""
    for found in reports:
        assert found["read"] == found["held"] < 0.55 * found["size"]
        assert found["most"] <= found["largest"] / 2


def test_a_model_in_two_processes_is_saved_bit_for_bit(reports, folder):
    found, expected = open_tensors(folder / "saved"), open_tensors(checkpoint("llama"))
    assert set(found.names) == set(expected.names)
    assert (folder / "saved" / "model.safetensors.index.json").is_file()
    for name in expected:
        np.testing.assert_array_equal(found.read(name), expected.read(name))


def test_all_processes_stop_if_the_first_cannot_save(reports):
    assert "File exists" in reports[0]["error"]
    assert (
        "Every process must save the checkpoint without an error. Received: an error in process 0"
        in reports[1]["error"]
    )


def test_two_processes_that_were_cut_off_end_as_they_would_have(reports):
    """Of a model that is split, with a backup that both read, and of one that both hold, with a directory each."""
    for found in reports:
        assert found["resumed"] == [[True, True, 4], [True, True, 0]]
    assert [found["files"] for found in reports] == [["backup.npz"], ["worker-1.txt"]]
