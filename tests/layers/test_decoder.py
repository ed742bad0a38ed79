"""Decoder layer and stack against the encoder's, against PyTorch's, and each argument shown to do what it says."""

import keras
import numpy as np
import pytest

from keras_tx.layers import Decoder, DecoderLayer, EncoderLayer, MultiHeadAttention
from tests.tools import OTHER_WAY, assert_close, normal, randomize, to_numpy

B, T, S, N, D, M, F = 2, 5, 7, 3, 12, 11, 17
MEMORY = normal(B, S, M, seed=1)
MASK = np.array([[True, True, True, False, False], [True] * T])
MEMORY_MASK = np.array([[True, True, True, True, False, False, False], [True] * S])
CAUSAL = np.tril(np.ones((1, T, T), bool))


def made(cls, *args, memory=None, **kwargs):
    layer = cls(*args, **kwargs)
    layer(normal(B, T, D), memory)
    return randomize(layer)


@pytest.mark.parametrize("normalize_first", [False, True])
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
def test_without_memory_a_decoder_layer_is_an_encoder_layer_that_looks_back(normalize_first, normalization):
    options = {
        "normalize_first": normalize_first,
        "normalization": normalization,
        "gated": True,
        "attention_options": {"num_key_value_heads": 1, "rotary": True, "sliding_window": 3},
    }
    decoder, encoder, x = made(DecoderLayer, F, N, **options), EncoderLayer(F, N, **options), normal(B, T, D)
    encoder(x)
    encoder.set_weights(decoder.get_weights())
    for mask in (None, MASK, MASK[:, ::-1]):
        assert_close(decoder(x, mask=mask), encoder(x, mask=mask, attention_mask=CAUSAL), atol=2e-6)


@pytest.mark.parametrize("normalize_first", [False, True])
def test_with_memory_a_decoder_layer_is_three_sublayers_with_residuals_and_norms(normalize_first):
    layer = made(DecoderLayer, F, N, memory=MEMORY, cross_attention=True, normalize_first=normalize_first)
    sublayers = [
        (layer.self_attention_norm, lambda x: layer.self_attention(x, x, use_causal_mask=True)),
        (layer.cross_attention_norm, lambda x: layer.cross_attention(x, MEMORY, value_mask=MEMORY_MASK)),
        (layer.feed_forward_norm, layer.feed_forward),
    ]
    x = expected = keras.ops.convert_to_tensor(normal(B, T, D))
    for norm, sublayer in sublayers:
        if normalize_first:
            expected = expected + sublayer(norm(expected))
        else:
            expected = norm(expected + sublayer(expected))
    assert_close(layer(x, MEMORY, memory_mask=MEMORY_MASK), expected, atol=5e-6)


def copied(layer, theirs):
    """PyTorch's decoder layer with the weights of ours."""
    torch = pytest.importorskip("torch")
    array = lambda x: torch.tensor(to_numpy(x).astype("float64"))
    state = {}
    for name, attention in (("self_attn", layer.self_attention), ("multihead_attn", layer.cross_attention)):
        into = [attention.query_dense, attention.key_dense, attention.value_dense]
        state[f"{name}.in_proj_weight"] = torch.cat([array(x.kernel).reshape(D, D).T for x in into])
        state[f"{name}.in_proj_bias"] = torch.cat([array(x.bias).reshape(D) for x in into])
        state[f"{name}.out_proj.weight"] = array(attention.output_dense.kernel).reshape(D, D).T
        state[f"{name}.out_proj.bias"] = array(attention.output_dense.bias)
    for name, dense in (("linear1", "intermediate_dense"), ("linear2", "output_dense")):
        state[f"{name}.weight"] = array(getattr(layer.feed_forward, dense).kernel).T
        state[f"{name}.bias"] = array(getattr(layer.feed_forward, dense).bias)
    for index, name in enumerate(("self_attention_norm", "cross_attention_norm", "feed_forward_norm"), start=1):
        state[f"norm{index}.weight"] = array(getattr(layer, name).gamma)
        state[f"norm{index}.bias"] = array(getattr(layer, name).beta)
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("normalize_first", [False, True])
def test_decoders_of_pytorch_give_the_same(normalize_first):
    torch = pytest.importorskip("torch")
    x, memory = normal(B, T, D), normal(B, S, D, seed=1)
    ours = made(Decoder, 2, F, N, memory=memory, cross_attention=True, normalize_first=normalize_first)
    options = {"activation": "relu", "batch_first": True, "norm_first": normalize_first, "dtype": torch.float64}
    options = {"nhead": N, "dim_feedforward": F, "dropout": 0.0, "layer_norm_eps": 1e-5, **options}
    with torch.device("cpu"):
        theirs = [copied(layer, torch.nn.TransformerDecoderLayer(D, **options)) for layer in ours.layers]
        outputs, source = torch.tensor(x).double(), torch.tensor(memory).double()
        hidden, ahead = torch.tensor(~MEMORY_MASK), torch.tensor(~CAUSAL[0])
        with torch.no_grad():
            for layer in theirs:
                outputs = layer(outputs, source, tgt_mask=ahead, memory_key_padding_mask=hidden)
    outputs = ours.final_norm(outputs.numpy().astype("float32")) if normalize_first else outputs.numpy()
    assert_close(ours(x, memory, memory_mask=MEMORY_MASK), outputs, atol=1e-5)


def test_no_token_sees_a_later_one_or_padding_of_the_memory():
    decoder, x = made(Decoder, 2, F, N, memory=MEMORY, cross_attention=True), normal(B, T, D)
    other, other_memory = x.copy(), MEMORY.copy()
    other[:, 3:] += 1.0
    other_memory[~MEMORY_MASK] += 1.0
    before = to_numpy(decoder(x, MEMORY, memory_mask=MEMORY_MASK))
    after = to_numpy(decoder(other, other_memory, memory_mask=MEMORY_MASK))
    assert_close(after[:, :3], before[:, :3], atol=0)
    assert np.abs(after[:, 3:] - before[:, 3:]).min() > 1e-4


@pytest.mark.parametrize("options", [{}, {"position_bias": "alibi"}, {"attention_options": {"rotary": True}}])
def test_padding_left_or_right_changes_no_real_token(options):
    decoder = made(Decoder, 2, F, N, memory=MEMORY, cross_attention=True, **options)
    x, gap = normal(B, T, D), normal(B, 3, D, seed=5)
    alone = decoder(x, MEMORY)
    longer = np.concatenate([MEMORY, normal(B, 2, M, seed=6)], axis=1)
    memory = {"memory": longer, "memory_mask": np.arange(S + 2)[None] < np.array([[S], [S]])}
    real = np.ones((B, T), bool)
    left, right = np.pad(real, ((0, 0), (3, 0))), np.pad(real, ((0, 0), (0, 3)))
    assert_close(decoder(np.concatenate([gap, x], 1), mask=left, **memory)[:, 3:], alone, atol=5e-6)
    assert_close(decoder(np.concatenate([x, gap], 1), mask=right, **memory)[:, :T], alone, atol=5e-6)


def test_scores_are_those_of_the_layers_and_sum_to_one():
    decoder, x = made(Decoder, 2, F, N, memory=MEMORY, cross_attention=True), normal(B, T, D)
    outputs, own, cross = decoder(x, MEMORY, mask=MASK, memory_mask=MEMORY_MASK, return_attention_scores=True)
    assert own.shape == (B, 2, N, T, T) and cross.shape == (B, 2, N, T, S)
    assert_close(outputs, decoder(x, MEMORY, mask=MASK, memory_mask=MEMORY_MASK), atol=OTHER_WAY)
    own, cross = to_numpy(own), to_numpy(cross)
    assert not own[..., ~CAUSAL[0]].any() and not own[0, ..., 3:].any() and not cross[0, ..., 4:].any()
    assert_close(own[1].sum(-1), np.ones((2, N, T)))
    assert_close(own[0, :, :, :3].sum(-1), np.ones((2, N, 3)))
    assert_close(cross.sum(-1)[1], np.ones((2, N, T)))
    between, *first = decoder.layers[0](x, MEMORY, mask=MASK, memory_mask=MEMORY_MASK, return_attention_scores=True)
    _, *second = decoder.layers[1](between, MEMORY, mask=MASK, memory_mask=MEMORY_MASK, return_attention_scores=True)
    assert_close(np.stack([to_numpy(first[1]), to_numpy(second[1])], 1), cross, atol=0)
    alone = made(Decoder, 2, F, N)
    assert len(alone(x, return_attention_scores=True)) == 2


def test_attention_mask_and_bias_are_for_self_attention_in_every_layer():
    decoder, x = made(Decoder, 2, F, N, memory=MEMORY, cross_attention=True), normal(B, T, D)
    diagonal = np.eye(T, dtype="bool")[None]
    outputs, own, cross = decoder(x, MEMORY, attention_mask=diagonal, return_attention_scores=True)
    assert_close(own, np.broadcast_to(np.eye(T), (B, 2, N, T, T)))
    assert to_numpy(cross).min() > 0
    bias = np.where(diagonal, 0.0, -1e4).astype("float32")
    assert_close(decoder(x, MEMORY, attention_bias=bias), outputs, atol=1e-6 + OTHER_WAY)


def test_rotary_and_window_are_for_self_attention_alone():
    options = {"rotary": True, "sliding_window": 2, "qk_norm": True, "key_dim": 4}
    layer = made(DecoderLayer, F, N, memory=MEMORY, cross_attention=True, attention_options=options)
    assert layer.self_attention.rotary is not None and layer.self_attention.sliding_window == 2
    assert layer.cross_attention.rotary is None and layer.cross_attention.sliding_window is None
    assert layer.cross_attention.qk_norm and layer.cross_attention.key_dim == 4


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_an_attention_bias_is_added_in_float32_under_any_policy(policy):
    bias = np.where(CAUSAL, np.array([300.5, 300.0, 301.0, 299.5, 300.25]), 0.0).astype("float32")
    logits = np.where(CAUSAL, bias.astype("float64"), -np.inf)
    expected = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.broadcast_to((expected / expected.sum(-1, keepdims=True))[:, None], (B, N, T, T))
    x, zeros = normal(B, T, D), {"kernel_initializer": "zeros"}  # all products are 0
    attention = MultiHeadAttention(N, 4, dtype=policy, **zeros)
    decoder = Decoder(1, F, N, dtype=policy, **zeros)
    encoder = EncoderLayer(F, N, dtype=policy, **zeros)
    scores = [
        attention(x, x, attention_bias=bias, use_causal_mask=True, return_attention_scores=True)[1],
        decoder(x, attention_bias=bias, return_attention_scores=True)[1][:, 0],
        encoder(x, attention_bias=bias, attention_mask=CAUSAL, return_attention_scores=True)[1],
    ]
    inputs, biases = keras.Input((T, D)), keras.Input((T, T))
    symbolic = decoder(inputs, attention_bias=biases, return_attention_scores=True)[1]
    model = keras.Model([inputs, biases], symbolic)
    scores.append(model([x, np.repeat(bias, B, axis=0)])[:, 0])
    for found in scores:
        assert_close(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_by_itself(name):
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, name: 0.5}
    layer, x = made(DecoderLayer, F, N, memory=MEMORY, cross_attention=True, **rates), normal(B, T, D)
    assert layer.self_attention.dropout == layer.cross_attention.dropout == rates["attention_dropout"]
    assert np.abs(to_numpy(layer(x, MEMORY, training=True)) - to_numpy(layer(x, MEMORY))).max() > 1e-3


def test_masks_come_from_the_tensors():
    ids, source = np.array([[3, 4, 5, 0, 0], [1] * T]), np.array([[1, 2, 3, 4, 0, 0, 0], [1] * S])
    embed = keras.layers.Embedding(7, D, mask_zero=True)
    decoder = made(Decoder, 2, F, N, memory=normal(B, S, D), cross_attention=True)
    found = to_numpy(decoder(embed(ids), embed(source)))
    x, memory = to_numpy(embed(ids)), to_numpy(embed(source))
    expected = to_numpy(decoder(x, memory, mask=ids != 0, memory_mask=source != 0))
    assert_close(found, expected, atol=0)
    inputs = [keras.Input((None,), dtype="int32") for _ in range(2)]
    model = keras.Model(inputs, decoder(*[embed(x) * 1.0 for x in inputs]))  # the operator drops the Keras mask
    assert_close(model([ids, source]), expected, atol=2e-6)


@pytest.mark.parametrize("cls", [DecoderLayer, Decoder])
def test_memory_is_refused_where_there_is_no_cross_attention_and_demanded_where_there_is(cls):
    sizes = (F, N) if cls is DecoderLayer else (2, F, N)
    with pytest.raises(ValueError, match=r"`memory` needs `cross_attention=True`. Received: memory.shape=\(2, 7, 11\)"):
        cls(*sizes)(normal(B, T, D), MEMORY)
    with pytest.raises(ValueError, match="`memory` must be given with `cross_attention=True`. Received: memory=None"):
        cls(*sizes, cross_attention=True)(normal(B, T, D))
    layer = made(cls, *sizes, memory=MEMORY, cross_attention=True)
    with pytest.raises(ValueError, match="`memory` must be given with `cross_attention=True`. Received: memory=None"):
        layer(normal(B, T, D))
    with pytest.raises(ValueError, match="`memory` must be given"):
        layer(keras.Input((T, D)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decoder(0, F, N), "`num_layers` must be a positive integer. Received: num_layers=0"),
        (lambda: DecoderLayer(0, N), "`intermediate_dim` must be a positive integer. Received: intermediate_dim=0"),
        (lambda: Decoder(1, F, 5)(normal(B, T, D)), "divisible by `num_heads`.* Received: hidden_dim=12, num_heads=5"),
        (lambda: Decoder(1, F, N, position_bias="x"), "`position_bias` must be one of .*position_bias='x'"),
        (
            lambda: made(DecoderLayer, F, N, memory=MEMORY, cross_attention=True)(
                normal(B, T, D), MEMORY, memory_mask=np.ones((B, 3), bool)
            ),
            r"`memory_mask` must have the shape \(2, 7\). Received: memory_mask.shape=\(2, 3\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
