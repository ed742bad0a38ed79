"""On JAX, training on four devices gives the weights of one device: data parallel, and model parallel on 2 x 2."""

import os

import pytest

from tests.distribution import children, equal

pytestmark = [pytest.mark.process, pytest.mark.tensorflow]

EXACT = 2e-6  # SGD in float32
BOUNDS = {"seq2seq": 1e-4, "functional": 1e-4, "classifier": 1e-2}  # Muon, AdamW, and the rounding of bfloat16
SPLIT = {"causal": 17, "functional": 11}  # how many weights of each model are split
# With KERAS_TX_TEST_ALL_CASES=1 all models are trained, which takes minutes. `test_jax_processes` trains llama, too.
ALL = os.environ.get("KERAS_TX_TEST_ALL_CASES") == "1"
SHARED = ["keras_loss_with_weights", "two_outputs", "accumulation", "ignored_classes"]  # of `equal`
if ALL:
    SHARED = list(equal.CASES)
    SPLIT |= {"llama": 16, "masked": 11, "seq2seq": 28, "classifier": 11}


@pytest.fixture(scope="module")
def report():
    cases = ",".join(SPLIT), ",".join(SHARED)
    return children.run("jax_devices", *cases, backend="jax", devices=4, tensorflow=ALL)[0]


@pytest.mark.parametrize("name", SPLIT)
def test_weights_equal_those_of_one_device(report, name):
    assert report[name]["data"] < BOUNDS.get(name, EXACT)
    assert report[name]["model"] < BOUNDS.get(name, EXACT)


@pytest.mark.parametrize("name", SHARED)
def test_batches_that_do_not_divide_give_the_weights_losses_and_outputs_of_one_device(report, name):
    found, expected = report["shared"][name]
    equal.assert_equal(found, expected, name)


def test_weights_are_split(report):
    """Two of the layers of the user's model are Keras' own, and stay whole although they have names of ours."""
    assert {name: report[name]["split"] for name in SPLIT} == SPLIT


def test_a_split_model_evaluates_predicts_and_generates_as_a_whole_one(report):
    found = report["causal"]
    assert found["loss"] < 1e-5
    assert found["predictions"] < 1e-5
    assert found["generated"][0] == found["generated"][1]


def test_checkpoints_are_loaded_bit_for_bit(report):
    """And all matrices but those of positions and heads are split."""
    split = {"gpt2": 21, "modernbert": 29, "t5": 33, "vit": 20, "llama_bf16_sharded": 16, "distilbert_cls_tf_h5": 21}
    assert report["loaded"] == {name: [True, count] for name, count in split.items()}


def test_saving_leaves_no_copies_on_the_host(report):
    held, size = report["held"]
    assert held < 0.1 * size
