"""Options of attention, encoder and decoder that checkpoints of different families need, each against its equation."""

import json

import keras
import numpy as np
import pytest

from keras_tx import generation
from keras_tx.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    RotaryEmbedding,
    TokenEmbedding,
)
from tests.tools import assert_close, normal, randomize, to_numpy

B, T, S, N, D, M, F = 2, 5, 7, 3, 12, 11, 17
MEMORY = normal(B, S, M, seed=1)
LOCAL = {"sliding_window": 2, "rotary": RotaryEmbedding(base=100), "key_dim": 6}
BY_LAYER = [{"rotary": RotaryEmbedding(base=5000), "key_dim": 4}, LOCAL, {"scale": 0.7, "use_output_bias": False}]


def made(cls, *args, inputs=None, **kwargs):
    layer = cls(*args, **kwargs)
    layer(**({"inputs": normal(B, T, D)} if inputs is None else inputs))
    return randomize(layer)


def paths(layer):
    return [weight.path.split("/", 1)[1] for weight in layer.weights]


# Options of each layer


@pytest.mark.parametrize(("stack", "block"), [(Encoder, EncoderLayer), (Decoder, DecoderLayer)])
def test_each_layer_of_a_stack_may_have_attention_options_of_its_own(stack, block):
    layer, x = made(stack, 3, F, N, attention_options=BY_LAYER), normal(B, T, D)
    expected = x
    for inner, options in zip(layer.layers, BY_LAYER, strict=True):
        alone = block(F, N, attention_options=options)
        alone(x)
        alone.set_weights(inner.get_weights())
        expected = alone(expected)
    assert_close(layer(x), expected, atol=0)


@pytest.mark.parametrize("options", [BY_LAYER, tuple(BY_LAYER), BY_LAYER[0], None])
def test_options_of_a_stack_survive_its_config(options):
    layer, x = made(Encoder, 3, F, N, attention_options=options), normal(B, T, D)
    config = json.loads(json.dumps(layer.get_config()))
    again = Encoder.from_config(config)
    again(x)
    again.set_weights(layer.get_weights())
    assert_close(again(x), layer(x), atol=0)
    assert isinstance(config["attention_options"], list) == isinstance(options, (list, tuple))
    assert again.get_config() == layer.get_config()


def test_one_dict_is_for_all_layers():
    layer, x = made(Encoder, 2, F, N, attention_options=LOCAL), normal(B, T, D)
    again = made(Encoder, 2, F, N, attention_options=[LOCAL, LOCAL])
    again.set_weights(layer.get_weights())
    assert_close(again(x), layer(x), atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([{}, {}], r"a list of one dict for each layer. Received: 2 dicts, num_layers=3"),
        ([{}, {"x": 1}, {}], r"`attention_options` must be a dict with keys .* Received: attention_options=\{'x': 1\}"),
        ([3, {}, {}], r"`attention_options` must be a dict with keys .* Received: attention_options=3"),
    ],
)
def test_options_that_fit_no_layer_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Encoder(3, F, N, attention_options=options)


def test_steps_with_a_cache_equal_the_whole_where_layers_differ():
    options = [{"sliding_window": 3, "rotary": True}, {"scale": 0.3}, {"sliding_window": 2, "qk_norm": True}]
    decoder, x = made(Decoder, 3, F, N, attention_options=options), normal(B, T, D)
    whole, hidden = decoder(x, return_hidden_states=True)
    cache = decoder.new_cache(B, T)
    for t in range(T):
        step, step_hidden, cache = decoder(x[:, t : t + 1], cache=cache, start=t, return_hidden_states=True)
        assert_close(step[:, 0], whole[:, t], atol=5e-6)
        assert_close(step_hidden[:, :, 0], hidden[:, :, t], atol=5e-6)


# Norms


def test_a_layer_norm_without_bias_is_its_equation():
    layer, x = made(EncoderLayer, F, N, normalization="layer_norm_no_bias", layer_norm_epsilon=0.01), normal(B, T, D)
    assert paths(layer)[:1] == ["self_attention_norm/gamma"] and not [path for path in paths(layer) if "beta" in path]
    exact = x.astype("float64") - x.astype("float64").mean(-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 0.01) * to_numpy(layer.self_attention_norm.gamma)
    assert_close(layer.self_attention_norm(x), exact)


def test_an_embedding_takes_a_layer_norm_without_bias():
    layer = TokenEmbedding(11, D, normalization="layer_norm_no_bias")
    layer(np.array([[3, 5]]))
    assert paths(layer) == ["tokens/embeddings", "norm/gamma"]


@pytest.mark.parametrize("cls", [EncoderLayer, DecoderLayer])
def test_a_layer_may_leave_the_norm_of_its_inputs_out(cls):
    x = keras.ops.convert_to_tensor(normal(B, T, D))
    layer = made(cls, F, N, normalize_first=True, normalize_inputs=False)
    assert layer.self_attention_norm is None and not [path for path in paths(layer) if "self_attention_norm" in path]
    middle = x + layer.self_attention(x, x, use_causal_mask=cls is DecoderLayer)
    assert_close(layer(x), middle + layer.feed_forward(layer.feed_forward_norm(middle)), atol=2e-6)


@pytest.mark.parametrize("cls", [Encoder, Decoder])
def test_only_the_first_layer_of_a_stack_leaves_it_out(cls):
    stack = made(cls, 3, F, N, normalize_first=True, normalize_inputs=False)
    assert [layer.normalize_inputs for layer in stack.layers] == [False, True, True]
    assert [layer.self_attention_norm is None for layer in stack.layers] == [True, False, False]
    x = normal(B, T, D)
    expected = stack.final_norm(stack.layers[2](stack.layers[1](stack.layers[0](x))))
    assert_close(stack(x), expected, atol=0)
    assert cls.from_config(stack.get_config()).get_config() == stack.get_config()
    assert all(layer.normalize_inputs for layer in cls(3, F, N, normalize_first=True).layers)


def test_a_decoder_without_the_first_norm_keeps_that_of_cross_attention():
    options = {"cross_attention": True, "normalize_first": True, "normalize_inputs": False}
    layer = made(DecoderLayer, F, N, inputs={"inputs": normal(B, T, D), "memory": MEMORY}, **options)
    assert layer.self_attention_norm is None and layer.cross_attention_norm is not None


@pytest.mark.parametrize("make", [lambda **kw: EncoderLayer(F, N, **kw), lambda **kw: Decoder(2, F, N, **kw)])
def test_post_norm_has_no_norm_of_the_inputs_to_leave_out(make):
    with pytest.raises(ValueError, match="Received: normalize_inputs=False, normalize_first=False"):
        make(normalize_inputs=False)


# Attention


@pytest.mark.parametrize(("use_bias", "use_output_bias"), [(True, False), (False, True), (True, None), (False, None)])
def test_the_output_projection_may_have_a_bias_or_not(use_bias, use_output_bias):
    x = normal(B, T, D)
    layer = MultiHeadAttention(N, 4, use_bias=use_bias, use_output_bias=use_output_bias)
    layer(x, x)
    randomize(layer)
    has_output_bias = use_bias if use_output_bias is None else use_output_bias
    assert ("attention_output/bias" in paths(layer)) == layer.use_output_bias == has_output_bias
    assert ("query/bias" in paths(layer)) == ("value/bias" in paths(layer)) == use_bias
    full = MultiHeadAttention(N, 4)
    full(x, x)
    known = dict(zip(paths(layer), layer.get_weights(), strict=True))
    zeros = dict(zip(paths(full), map(np.zeros_like, full.get_weights()), strict=True))
    full.set_weights([known.get(path, zero) for path, zero in zeros.items()])
    assert_close(layer(x, x), full(x, x))


def test_the_epsilon_of_normalized_queries_and_keys_is_as_given():
    x, epsilon = normal(B, T, D), 0.5
    layer = MultiHeadAttention(N, 4, use_bias=False, qk_norm=True, qk_norm_epsilon=epsilon)
    layer(x, x)
    randomize(layer)
    heads = lambda dense: np.einsum("btd,dnh->btnh", x.astype("float64"), to_numpy(dense.kernel).astype("float64"))
    norm = lambda y, norm: y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon) * to_numpy(norm.scale)
    query, key = norm(heads(layer.query_dense), layer.query_norm), norm(heads(layer.key_dense), layer.key_norm)
    logits = np.einsum("btnh,bsnh->bnts", query, key) / 2
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert_close(layer(x, x, return_attention_scores=True)[1], expected, atol=2e-6)
    assert MultiHeadAttention(N, 4).qk_norm_epsilon == 1e-6


def test_an_epsilon_of_zero_is_refused():
    with pytest.raises(ValueError, match="`qk_norm_epsilon` must be a positive finite number. .*qk_norm_epsilon=0"):
        MultiHeadAttention(N, 4, qk_norm_epsilon=0)


# Hidden states


@pytest.mark.parametrize("normalize_first", [False, True])
@pytest.mark.parametrize("cls", [Encoder, Decoder])
def test_hidden_states_are_the_inputs_and_what_each_layer_makes_of_them(cls, normalize_first):
    stack, x = made(cls, 2, F, N, normalize_first=normalize_first), normal(B, T, D)
    output, hidden = stack(x, return_hidden_states=True)
    first = stack.layers[0](x)
    last = stack.layers[1](first)
    expected = [x, first, stack.final_norm(last) if normalize_first else last]
    assert_close(hidden, np.stack([to_numpy(one) for one in expected], axis=1), atol=0)
    assert_close(output, hidden[:, -1], atol=0)
    assert_close(output, stack(x), atol=0)


def test_hidden_states_come_after_the_scores_and_before_the_cache():
    inputs = {"inputs": normal(B, T, D), "memory": MEMORY}
    decoder = made(Decoder, 2, F, N, inputs=inputs, cross_attention=True)
    flags = {"return_attention_scores": True, "return_hidden_states": True}
    output, own, cross, hidden = decoder(**inputs, **flags)
    expected = [(B, T, D), (B, 2, N, T, T), (B, 2, N, T, S), (B, 3, T, D)]
    assert [tuple(x.shape) for x in (output, own, cross, hidden)] == expected
    cache = decoder.new_cache(B, T, MEMORY)
    *outputs, after = decoder(inputs["inputs"], cache=cache, start=0, **flags)
    for one, other in zip(outputs, (output, own, cross, hidden), strict=True):
        assert_close(one, other, atol=2e-6)
    assert len(after) == 2 and len(after[0]) == 2


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("cls", [Encoder, Decoder])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_symbolic_hidden_states_have_the_shape_and_dtype_of_real_ones(cls, scores, policy):
    flags = {"return_attention_scores": scores, "return_hidden_states": True}
    layer = cls(2, F, N, normalize_first=True, dtype=policy)
    symbolic = layer(keras.Input((None, D), batch_size=B), **flags)
    real = layer(normal(B, T, D), **flags)
    assert len(symbolic) == len(real) == 2 + scores
    for one, other in zip(symbolic, real, strict=True):
        assert [n or T for n in one.shape] == list(other.shape)
        assert one.dtype == keras.backend.standardize_dtype(other.dtype)


@pytest.mark.usefixtures("eager")
def test_a_model_with_all_of_this_generates_the_tokens_of_its_own_logits():
    vocabulary_size, ids = 23, keras.Input((None,), dtype="int32", name="ids")
    embedding = TokenEmbedding(vocabulary_size, D, normalization="layer_norm_no_bias")
    decoder = Decoder(3, F, N, normalize_first=True, normalize_inputs=False, attention_options=BY_LAYER)
    _, hidden = decoder(embedding(ids), return_hidden_states=True)
    model = randomize(keras.Model(ids, embedding(hidden[:, -1], reverse=True)))
    model_of_output = keras.Model(ids, embedding(decoder(embedding(ids)), reverse=True))
    prompt = np.array([[3, 5, 7, 11]], "int32")
    generated = generation.generate(model_of_output, prompt, max_new_tokens=5, jit_compile=False)
    for length in range(4, 9):
        assert to_numpy(model(generated[:, :length]))[0, -1].argmax() == generated[0, length]


# A policy for single layers


@pytest.mark.parametrize("normalize_first", [False, True])
@pytest.mark.parametrize("with_sublayers", [False, True])
def test_a_map_gives_a_layer_of_a_stack_another_dtype(with_sublayers, normalize_first):
    key = "enc/layer_1(/.*)?" if with_sublayers else "enc/layer_1"
    policies = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16", {key: keras.DTypePolicy("float32")})
    options = {"normalize_first": normalize_first, "gated": True, "dropout": 0.0}
    encoder = made(Encoder, 3, F, N, dtype=policies, name="enc", **options)
    assert keras.backend.standardize_dtype(encoder(normal(B, T, D)).dtype) == "bfloat16"
    layer, x = encoder.layers[1], normal(B, T, D)
    output = layer(x)
    assert keras.backend.standardize_dtype(output.dtype) == "float32"
    if with_sublayers:  # equals a layer that is float32 as a whole
        alone = made(EncoderLayer, F, N, **options)
        alone.set_weights(layer.get_weights())
        assert_close(output, alone(x))
        return
    first, second = layer.self_attention_norm, layer.feed_forward_norm
    wide = lambda outputs: to_numpy(keras.ops.cast(outputs, "float32"))
    if normalize_first:
        between = x + wide(layer.self_attention(first(x), first(x)))
        expected = between + wide(layer.feed_forward(second(between)))
    else:
        between = wide(first(x + wide(layer.self_attention(x, x))))
        expected = wide(second(between + wide(layer.feed_forward(between))))
    assert_close(output, expected)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_the_activation_of_a_gate_may_be_a_layer_of_float32(policy):
    if policy == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX computes in float64 only if its 64-bit types are on")
    layer = made(FeedForward, F, activation=keras.layers.LeakyReLU(0.25, dtype="float32"), gated=True, dtype=policy)
    exact = made(FeedForward, F, activation=lambda x: keras.ops.where(x > 0, x, 0.25 * x), gated=True, dtype="float32")
    exact.set_weights(layer.get_weights())
    output = layer(normal(B, T, D))
    assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype
    expected = to_numpy(exact(normal(B, T, D)))
    atol = 1e-6 if policy == "float64" else 0.03
    assert_close(keras.ops.cast(output, "float32"), expected, atol=atol * max(1.0, np.abs(expected).max()))
