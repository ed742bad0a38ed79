"""Attention by fused kernels against attention as a whole, gradients too; and where it is chosen."""

import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from keras import ops

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.attention import dispatch, fused
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.attention.fused import attend_fused, prefers_fused
from keras_tx.layers.masks import Visible
from tests.layers.cases import ARGUMENTS, random_attention
from tests.tools import assert_close, gradients, normal, randomize, to_numpy

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.skipif(BACKEND == "tensorflow", reason="there are no fused kernels on TensorFlow")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="about PyTorch")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="about JAX")
B, T, N, H, D = 2, 14, 3, 8, 5


@settings(max_examples=200 if BACKEND == "torch" else 4)  # not run on TensorFlow, where the many else are
@given(*ARGUMENTS)
def test_kernels_give_what_the_whole_gives_with_every_mask_bias_and_size(shape, head_counts, seed):
    visible, tensors = random_attention(shape, head_counts, seed, value_size=5)
    queries, keys = (x.shape[1] for x in tensors[:2])

    def by_a_kernel(query, key, value, bias=None):
        return attend_fused(query, key, value, visible, bias=bias)

    def as_a_whole(query, key, value, bias=None):
        return attend(query, key, value, mask=visible.whole(queries, keys), bias=bias)[0]

    output, *slopes = gradients(by_a_kernel, tensors)
    expected, *expected_slopes = gradients(as_a_whole, tensors)
    assert_close(output, expected, atol=2e-6)
    for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
        assert_close(slope, expected_slope, atol=1e-5)


def test_a_kernel_is_told_of_causality_only_where_queries_begin_at_the_first_key():
    query, key, value = (normal(B, T, N, H, seed=i) for i in range(3))
    for start in (0, 3):
        visible = Visible(causal=True, start=start)
        expected, _ = attend(query[:, start:], key, value, mask=visible.whole(T - start, T))
        assert_close(attend_fused(query[:, start:], key, value, visible), expected, atol=2e-6)


def test_a_bias_too_low_for_half_precision_hides_and_gives_no_nan():
    bias = np.zeros((1, 1, T, T), "float32")
    bias[..., 5:], bias[:, :, 2, :5] = -np.inf, -1e9
    bias[:, :, 3] = -np.inf
    tensors = [normal(B, T, N, H, seed=i).astype("float16") for i in range(3)]
    output, *slopes = gradients(lambda *x: attend_fused(*x, Visible(), bias=bias), tensors)
    expected, *expected_slopes = gradients(lambda *x: attend(*x, bias=bias)[0], tensors)
    for actual, right in zip((output, *slopes), (expected, *expected_slopes), strict=True):
        assert np.isfinite(actual).all()
        rows = [row for row in range(T) if row != 2]  # all of it as low: there half precision has the products alone
        if actual is output or actual is slopes[0]:
            assert_close(actual[:, rows], right[:, rows], atol=4e-3)
    assert not output[:, 3].any()
    alone = attend(*[x[:, :5] for x in tensors], bias=np.where(np.arange(5)[:, None] == 3, -np.inf, 0)[None, None])[0]
    assert_close(output[:, 2], to_numpy(alone)[:, 2], atol=4e-3)  # what it may not look at stays hidden


class Calls:
    """How often Keras' attention was called, and with what."""

    def __init__(self, monkeypatch):
        self.options = []
        real = ops.dot_product_attention

        def counted(*args, **kwargs):
            self.options.append(kwargs)
            return real(*args, **kwargs)

        monkeypatch.setattr(fused.ops, "dot_product_attention", counted)

    def of(self, layer, *args, length=T, **kwargs):
        """The options of the call that `layer` makes for (B, length, D), None if it makes none."""
        self.options.clear()
        x = normal(B, length, D)
        layer(x, x, *args, **kwargs)
        assert len(self.options) < 2
        return self.options[0] if self.options else None


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def random_masks():
    real = np.arange(T)[None] < np.array([[T], [9]])
    bias = normal(1, N, T, T, seed=4)
    return [Visible(), Visible(causal=True), Visible(keys=(real,), queries=real), Visible(causal=True, window=3)], bias


@on_torch
@pytest.mark.parametrize("key_heads", [N, 1])
def test_dropout_in_a_kernel_keeps_the_mean_and_has_the_gradient_of_what_it_kept(key_heads):
    query, key = normal(B, T, N, H), normal(B, T, key_heads, H, seed=1)
    ones = np.ones((B, T, key_heads, D), "float32")
    visibles, bias = random_masks()
    for visible, given_bias in [(one, None) for one in visibles] + [(Visible(), bias)]:
        drop = lambda *x, visible=visible, bias=given_bias: attend_fused(*x, visible, bias=bias, dropout=0.4)
        whole = to_numpy(attend_fused(query, key, ones, visible, bias=given_bias))
        outputs = [gradients(drop, (query, key, ones)) for _ in range(40)]
        for output, _, _, of_value in outputs:
            # With values of ones both are sums of the kept scores, weighted by the gradient of the output.
            weights = normal(*output.shape, seed=99)
            assert_close((output * weights).sum((1, 2)), of_value.sum((1, 2)), rtol=1e-4, atol=1e-3)
            assert not output[whole == 0].any()
        assert np.abs(outputs[0][0] - outputs[1][0]).max() > 0.1
        assert abs(np.mean([one[0] for one in outputs]) - whole.mean()) < 0.05


@on_torch
def test_all_gradients_with_dropout_are_those_of_the_same_scores_dropped_in_dense_attention():
    query, key, value = normal(B, T, N, H), normal(B, T, N, H, seed=1), normal(B, T, N, T, seed=2)
    visibles, _ = random_masks()
    for visible in visibles:

        def fused_attention(*x, visible=visible):
            keras.utils.set_random_seed(3)
            return attend_fused(*x, visible, dropout=0.4)

        each_key = np.ones((B, 1, N, 1), "float32") * np.eye(T, dtype="float32")[:, None]  # the output: the scores
        output = fused_attention(*map(ops.convert_to_tensor, (query, key, each_key)))
        kept = np.swapaxes(to_numpy(output), 1, 2) != 0
        factors = ops.convert_to_tensor(kept / np.float32(0.6))

        def dense(*x, visible=visible, factors=factors):
            return attend(*x, mask=visible.whole(T, T), dropout=lambda scores: scores * factors)[0]

        tensors = query, key, value
        for one, expected in zip(gradients(fused_attention, tensors), gradients(dense, tensors), strict=True):
            assert_close(one, expected, atol=2e-5)


@on_torch
def test_the_layer_drops_in_a_kernel_where_kernels_can(monkeypatch):
    rates = []
    real = fused._with_dropout
    monkeypatch.setattr(
        fused, "_with_dropout", lambda *args, **options: rates.append(args[3]) or real(*args, **options)
    )
    layer, x = MultiHeadAttention(N, H, dropout=0.3), normal(B, T, D)
    layer(x, x, training=True)
    assert rates == [0.3] * (ops.zeros(1).device.type == "cuda")  # PyTorch has no such kernel for CPUs
    del rates[:]
    monkeypatch.setattr(dispatch, "can_drop", lambda query: True)
    keras.utils.set_random_seed(5)
    first = to_numpy(layer(x, x, training=True))
    assert rates == [0.3]
    assert np.abs(first - to_numpy(layer(x, x, training=True))).max() > 1e-3
    keras.utils.set_random_seed(5)
    np.testing.assert_array_equal(to_numpy(layer(x, x, training=True)), first)
    del rates[:]
    layer(x, x)
    layer(x, x, training=True, return_attention_scores=True)
    assert rates == []


@on_torch
def test_torch_takes_a_kernel_by_itself_where_it_computes_the_same(calls):
    layer = MultiHeadAttention(N, H, dropout=0.3)
    real = np.arange(T)[None] < np.array([[T], [7]])
    assert calls.of(layer)["mask"] is None
    causal = calls.of(layer, use_causal_mask=True)
    assert causal["is_causal"] and causal["mask"] is None
    assert calls.of(layer, query_mask=real)["mask"] is None
    assert calls.of(layer, value_mask=real)["mask"].shape == (B, 1, 1, T)
    masked = calls.of(layer, value_mask=real, use_causal_mask=True)
    assert masked["mask"].shape == (B, 1, T, T) and not masked["is_causal"]
    assert calls.of(layer, attention_bias=normal(1, 1, T, T))["bias"] is not None
    assert calls.of(layer, training=True) is None
    assert calls.of(layer, return_attention_scores=True) is None
    assert calls.of(MultiHeadAttention(N, H, dropout=0.3, hard_attention=True)) is None
    assert calls.of(MultiHeadAttention(N, H, flash_attention=False)) is None
    assert calls.of(MultiHeadAttention(N, H), training=True) is not None


@on_torch
def test_torch_takes_no_kernel_that_rounds_a_bias_or_whose_gradient_is_slow(calls):
    layer = MultiHeadAttention(N, H, dtype="bfloat16")
    assert calls.of(layer, attention_bias=normal(1, 1, T, T)) is None
    is_on_cpu = ops.zeros(1).device.type == "cpu"
    assert calls.of(layer) is not None and (calls.of(layer, training=True) is None) == is_on_cpu
    assert (calls.of(layer, training=True, length=191) is None) == is_on_cpu
    assert calls.of(layer, training=True, length=192) is not None
    assert calls.of(MultiHeadAttention(N, H, dtype="float16"), training=True) is not None
    assert calls.of(MultiHeadAttention(N, H, dtype="float16"), attention_bias=normal(1, 1, T, T)) is None


@on_torch
def test_torch_takes_no_kernel_that_there_is_not_or_that_copies_keys_for_few_queries(calls):
    assert calls.of(MultiHeadAttention(N, H, value_dim=H + 1)) is None
    assert calls.of(MultiHeadAttention(N, H, dtype="float64")) is None
    assert calls.of(MultiHeadAttention(4, H, num_key_value_heads=1), length=64) is None
    assert calls.of(MultiHeadAttention(4, H, num_key_value_heads=2), length=63) is None
    assert calls.of(MultiHeadAttention(4, H, num_key_value_heads=2), length=64) is not None


@on_torch
def test_keras_own_switch_turns_kernels_off(calls):
    layer = MultiHeadAttention(N, H)
    keras.config.disable_flash_attention()
    try:
        assert calls.of(layer) is None
    finally:
        keras.config.enable_flash_attention()
    assert calls.of(layer) is not None


@on_torch
def test_long_sequences_take_a_kernel_only_without_a_mask_of_all_pairs(calls, monkeypatch):
    monkeypatch.setattr(dispatch, "LONG", T * T)
    real = np.arange(T)[None] < np.array([[T], [7]])
    layer = MultiHeadAttention(N, H)
    assert calls.of(layer, use_causal_mask=True)["mask"] is None
    assert calls.of(layer, value_mask=real) is not None
    assert calls.of(layer, attention_bias=normal(1, 1, T, T)) is None
    assert calls.of(layer, value_mask=real, use_causal_mask=True) is None
    assert calls.of(layer, document_ids=np.ones((B, T), "int32")) is None
    assert calls.of(MultiHeadAttention(N, H, sliding_window=3)) is None
    assert calls.of(MultiHeadAttention(N, H, blockwise=True)) is None
    assert calls.of(MultiHeadAttention(N, H, blockwise=False), document_ids=np.ones((B, T), "int32")) is not None


@on_torch
@pytest.mark.parametrize("options", [{}, {"use_causal_mask": True}, {"value_mask": True}, {"document_ids": True}])
def test_a_layer_gives_the_same_with_and_without_kernels(options, calls):
    real = np.arange(T)[None] < np.array([[T], [7]])
    given_options = {**options}
    if "value_mask" in options:
        given_options["value_mask"] = given_options["query_mask"] = real
    if "document_ids" in options:
        given_options["document_ids"] = np.cumsum(np.arange(T) % 5 == 0)[None].repeat(B, 0).astype("int32")
    layer = MultiHeadAttention(4, H, rotary=True)
    plain = MultiHeadAttention(4, H, rotary=True, flash_attention=False)
    x = normal(B, T, D)
    for each in (layer, plain):
        each.build(x.shape, x.shape)
    randomize(layer)
    plain.set_weights(layer.get_weights())
    assert_close(layer(x, x, **given_options), plain(x, x, **given_options), atol=3e-6)
    assert len(calls.options) == 1


@on_jax
def test_jax_takes_no_kernel_on_a_cpu(calls):
    import jax

    if jax.devices()[0].platform != "cpu":
        pytest.skip("JAX computes on a GPU")
    assert calls.of(MultiHeadAttention(N, H, dtype="bfloat16")) is None


@pytest.fixture
def gpu(monkeypatch):
    """JAX as it is where the default device is a GPU, as far as programs are made and not run."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(fused, "_has_cuda", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: wanted == "8.0")
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)


def kernels_for_cuda(layer, length, training, remat=False, **options):
    """The names of cuDNN's attention in the program for CUDA that computes `layer`, or its gradient."""
    import jax

    if not layer.built:
        layer.build((B, length, D), (B, length, D))
    frozen = [v.value for v in layer.non_trainable_variables]

    def total(trained, x):
        call = lambda x: layer.stateless_call(trained, frozen, x, x, training=training, **options)[0]
        return (jax.checkpoint(call) if remat else call)(x).astype("float32").sum()

    arguments = [v.value for v in layer.trainable_variables], jax.numpy.zeros((B, length, D), "bfloat16")
    traced = jax.jit(jax.grad(total) if training else total).trace(*arguments)
    return set(re.findall(r"__cudnn\$fmha(\w+)", traced.lower(lowering_platforms=("cuda",)).as_text()))


@on_jax
@pytest.mark.parametrize("remat", [False, True])
def test_programs_for_cuda_have_the_kernels_forward_and_backward(gpu, remat):
    layer = MultiHeadAttention(N, H, dtype="bfloat16")
    assert kernels_for_cuda(layer, T, False) == {"Softmax"}
    forward_and_backward = {"Softmax", "SoftmaxBackward"}
    assert kernels_for_cuda(layer, T, True, remat) == forward_and_backward
    assert kernels_for_cuda(layer, T, True, remat, use_causal_mask=True) == forward_and_backward
    real = np.arange(T)[None] < np.array([[T], [7]])
    with_bias = {"ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"}
    assert kernels_for_cuda(layer, T, True, remat, value_mask=real, query_mask=real) == with_bias
    assert kernels_for_cuda(layer, T, True, remat, value_mask=real, use_causal_mask=True) == with_bias


@on_jax
@pytest.mark.parametrize("long", [T * T, T * T + 1])
def test_where_there_is_a_gpu_programs_for_cpus_do_as_without(gpu, monkeypatch, long):
    import jax

    monkeypatch.setattr(dispatch, "LONG", long)
    layer, plain = MultiHeadAttention(N, H, dtype="bfloat16"), MultiHeadAttention(N, H, dtype="bfloat16")
    plain.flash_attention = False
    x = normal(B, T, D)
    plain.build(x.shape, x.shape)
    layer.build(x.shape, x.shape)
    plain.set_weights(layer.get_weights())
    outputs = (ops.cast(one(x, x, use_causal_mask=True), "float32") for one in (layer, plain))
    assert_close(*outputs, atol=0 if jax.devices()[0].platform == "cpu" else 0.01)
    assert kernels_for_cuda(layer, T, True) and not kernels_for_cuda(plain, T, True)


@on_jax
def test_programs_for_cuda_have_no_kernel_in_odd_lengths_even_rematerialized(gpu):
    layer = MultiHeadAttention(N, H, dtype="bfloat16")
    for remat in (False, True):
        assert not kernels_for_cuda(layer, T + 1, True, remat)
    assert not kernels_for_cuda(MultiHeadAttention(N, H, dropout=0.3, dtype="bfloat16"), T, True)


@on_jax
def test_cudnn_is_taken_for_what_it_has_kernels_for(gpu, monkeypatch):
    def takes(queries=T, keys=T, size=H, value_size=None, dtype="bfloat16", visible=None, bias=None, long=False):
        shapes = (queries, size), (keys, size), (keys, value_size or size)
        tensors = [ops.cast(normal(B, length, N, each), dtype) for length, each in shapes]
        return prefers_fused(*tensors, visible or Visible(), bias=bias, training=True, long=long)

    real = Visible(keys=(np.ones((B, T), "bool"),))
    assert takes() and takes(dtype="float16") and takes(size=128) and takes(visible=real) and takes(long=True)
    assert takes(visible=Visible(causal=True), long=True)
    assert not takes(queries=T + 1) and not takes(keys=T + 1)
    assert not takes(size=12) and not takes(size=136) and not takes(value_size=16)
    assert not takes(dtype="float32") and not takes(bias=normal(1, 1, T, T))
    assert not takes(visible=real, long=True) and not takes(visible=Visible(window=3), long=True)
    monkeypatch.setattr(keras.distribution, "distribution", lambda: object.__new__(keras.distribution.ModelParallel))
    assert not takes()


@on_jax
@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [("gpu", "9.0", True), ("gpu", "10.3", True), ("gpu", "7.5", False), ("gpu", "gfx942", False), ("tpu", "9", False)],
)
def test_cudnn_needs_an_nvidia_gpu_from_ampere_on(monkeypatch, platform, capability, expected):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(fused, "jax", SimpleNamespace(devices=lambda: [device]))
    assert fused._has_cuda() is expected
