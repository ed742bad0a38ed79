"""Decoding with a cache gives what the whole sequence gives: step by step and in pieces, eagerly and compiled."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.layers import Decoder, DecoderLayer, MultiHeadAttention, RotaryEmbedding, cache, xla
from keras_tx.layers.attention import memory as memory_module
from tests.tools import assert_close, normal, randomize, to_numpy

B, T, S, N, D, F, SLOTS = 2, 7, 5, 6, 24, 19, 11
MASK = np.array([[False, False, True, True, True, True, True], [True] * T])
MEMORY = normal(B, S, 13, seed=1)
MEMORY_MASK = np.array([[True, True, True, False, False], [True] * S])
ONE_BY_ONE, PIECES = [1] * T, [3, 1, 1, 2]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def rotary(**arguments):
    return {"attention_options": {"rotary": RotaryEmbedding(**arguments)}}


KINDS = {
    "post-norm": {},
    "pre-norm": {"normalize_first": True},
    "rms-norm": {"normalize_first": True, "normalization": "rms_norm", "gated": True, "use_bias": False},
    "rotary": rotary(),
    "interleaved": rotary(layout="interleaved", base=100),
    "partial": rotary(fraction=0.5),
    "linear": rotary(scaling={"rope_type": "linear", "factor": 2.0}),
    "llama3": rotary(scaling=LLAMA3),
    "yarn": rotary(scaling=YARN),
    "alibi": {"position_bias": "alibi"},
    "relative": {"position_bias": "relative"},
    "grouped": {"attention_options": {"num_key_value_heads": 2}},
    "window": {"attention_options": {"sliding_window": 3}},
    "sizes": {"attention_options": {"key_dim": 5, "value_dim": 3, "scale": 0.7, "qk_norm": True, "use_gate": True}},
    "hard": {"attention_options": {"hard_attention": True}},
    "cross": {"cross_attention": True},
    "everything": {
        "cross_attention": True,
        "normalize_first": True,
        "position_bias": "relative",
        "attention_options": {"rotary": True, "num_key_value_heads": 3, "sliding_window": 4, "qk_norm": True},
    },
}


@functools.cache
def made(kind, num_layers=2):
    """A decoder with random weights, which no test changes."""
    decoder = Decoder(num_layers, F, N, **KINDS[kind])
    decoder(normal(B, T, D), **memory_of(decoder))
    return randomize(decoder)


def memory_of(layer):
    return {"memory": MEMORY, "memory_mask": MEMORY_MASK} if layer.get_config()["cross_attention"] else {}


def over_slots(mask):
    """(B, T) -> (B, SLOTS): what is still to come is real."""
    return np.concatenate([mask, np.ones((B, SLOTS - T), bool)], axis=1)


def in_pieces(layer, x, lengths, mask=None, as_start=int, **arguments):
    """What `layer` returns for each piece of `x`, one after the other with a cache, joined; and the cache."""
    memory = memory_of(layer)
    state = layer.new_cache(B, SLOTS, memory.pop("memory", None))
    start, pieces = 0, []
    for length in lengths:
        piece = x[:, start : start + length]
        *outputs, state = layer(piece, mask=mask, cache=state, start=as_start(start), **memory, **arguments)
        pieces.append([to_numpy(output) for output in outputs])
        start += length
    return [np.concatenate(parts, axis=-2) for parts in zip(*pieces, strict=True)], state


def scalar(start):
    return ops.convert_to_tensor(start, dtype="int32")


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_cache_a_decoder_gives_what_it_gives_for_the_whole(kind):
    decoder, x = made(kind, num_layers=1), normal(B, T, D)
    (pieces,), _ = in_pieces(decoder, x, PIECES, over_slots(MASK))
    assert_close(pieces[MASK], to_numpy(decoder(x, mask=MASK, **memory_of(decoder)))[MASK], atol=1e-5)


@pytest.mark.parametrize("kind", ["rotary", "everything"])
def test_it_does_so_step_by_step_with_a_tensor_for_the_slot(kind):
    decoder, x = made(kind), normal(B, T, D)
    (steps,), _ = in_pieces(decoder, x, ONE_BY_ONE, as_start=scalar)
    assert_close(steps, decoder(x, **memory_of(decoder)), atol=1e-5)


@pytest.mark.parametrize("kind", ["everything", "alibi", "rotary"])
def test_padding_on_the_left_changes_nothing_with_a_cache(kind):
    decoder, x = made(kind), normal(B, T, D)
    (padded,), _ = in_pieces(decoder, x, PIECES, over_slots(MASK))
    memory = {name: value[:1] for name, value in memory_of(decoder).items()}
    assert_close(padded[:1, 2:], decoder(x[:1, 2:], **memory), atol=1e-5)


@pytest.mark.tensorflow
@pytest.mark.parametrize("by_xla", [True, False])
def test_compiled_steps_give_what_the_whole_gives(by_xla):
    import tensorflow as tf

    decoder, x = made("everything", num_layers=1), normal(B, T, D)
    state, mask = decoder.new_cache(B, SLOTS, MEMORY), over_slots(MASK)

    @tf.function(jit_compile=by_xla)
    def step(x, state, start):
        return decoder(x, mask=mask, memory_mask=MEMORY_MASK, cache=state, start=start)

    start, outputs = 0, []
    with xla.tracing(by_xla):
        for length in [1] * T if by_xla else (3, 1, 1, 1, 1):  # each length is compiled anew
            output, state = step(x[:, start : start + length], state, tf.constant(start))
            outputs.append(output)
            start += length
        graph = step.get_concrete_function(x[:, :1], state, tf.constant(0)).graph
    assert any(op.type.startswith("Xla") for op in graph.get_operations()) == by_xla
    whole = to_numpy(decoder(x, mask=MASK, **memory_of(decoder)))
    assert_close(np.concatenate(outputs, axis=1)[MASK], whole[MASK], atol=1e-5)


@pytest.mark.parametrize("kind", ["cross", "everything"])
def test_scores_with_a_cache_are_those_of_the_whole_and_zero_at_empty_slots(kind):
    decoder, x = made(kind), normal(B, T, D)
    _, own, cross = decoder(x, mask=MASK, return_attention_scores=True, **memory_of(decoder))
    (_, own_pieces, cross_pieces), _ = in_pieces(decoder, x, PIECES, over_slots(MASK), return_attention_scores=True)
    assert own_pieces.shape == (B, 2, N, T, SLOTS) and cross_pieces.shape == (B, 2, N, T, S)
    real = np.broadcast_to(MASK[:, None, None, :], own.shape[:-1])
    assert_close(own_pieces[real][:, :T], to_numpy(own)[real], atol=1e-5)
    assert_close(cross_pieces[real], to_numpy(cross)[real], atol=1e-5)
    assert not own_pieces[..., T:].any()
    assert_close(own_pieces[real].sum(-1), np.ones(real.sum()), atol=1e-5)


@pytest.mark.parametrize("lengths", [ONE_BY_ONE, PIECES], ids=str)
def test_a_decoder_layer_and_an_attention_go_in_steps_by_themselves(lengths):
    layer, x = DecoderLayer(F, N, cross_attention=True, attention_options={"rotary": True}), normal(B, T, D)
    layer(x, MEMORY)
    randomize(layer)
    (outputs,), _ = in_pieces(layer, x, lengths)
    assert_close(outputs, layer(x, MEMORY, memory_mask=MEMORY_MASK), atol=1e-5)

    attention = MultiHeadAttention(N, 4, value_dim=3, num_key_value_heads=2, rotary=True)
    attention(x, x)
    randomize(attention)
    state, start, outputs = attention.new_cache(B, SLOTS), 0, []
    for length in lengths:
        piece = x[:, start : start + length]
        output, state = attention(piece, piece, cache=state, start=start)
        outputs.append(to_numpy(output))
        start += length
    assert_close(np.concatenate(outputs, axis=1), attention(x, x, use_causal_mask=True), atol=1e-5)


def test_positions_and_masks_and_biases_over_the_slots_are_taken_with_a_cache():
    decoder, x = made("rotary"), normal(B, T, D)
    positions = np.array([3, 4, 9, 10, 11, 20, 21])
    seen = np.random.default_rng(3).random((B, T, SLOTS)) < 0.6
    bias = normal(B, N, T, SLOTS, seed=4)
    whole = decoder(x, positions=positions, attention_mask=seen[..., :T], attention_bias=bias[..., :T])
    state, start, outputs = decoder.new_cache(B, SLOTS), 0, []
    for length in PIECES:
        here = slice(start, start + length)
        output, state = decoder(
            x[:, here],
            positions=positions[here],
            attention_mask=seen[:, here],
            attention_bias=bias[:, :, here],
            cache=state,
            start=start,
        )
        outputs.append(to_numpy(output))
        start += length
    assert_close(np.concatenate(outputs, axis=1), whole, atol=1e-5)


@pytest.mark.parametrize("others", [(), ("value_mask",), ("attention_mask",), ("value_mask", "attention_mask")])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_mask_of_the_keys_counts_with_a_cache(others, rotary):
    """Rotary positions are counted by `value_mask` alone, with a cache and without."""
    attention, x = MultiHeadAttention(N, 4, rotary=rotary), normal(B, T, D)
    attention(x, x)
    slots = np.pad(MASK, [(0, 0), (0, SLOTS - T)], constant_values=True)
    slots[1, 3] = False  # between others
    several = {"value_mask": np.arange(SLOTS)[None] != [[4], [5]], "attention_mask": np.arange(SLOTS)[None, None] != 1}
    others = {name: several[name] for name in others}
    here = {name: mask[..., :T] for name, mask in others.items()}
    if "value_mask" in here:
        here["query_mask"] = here["value_mask"]
    whole = attention(x, x, key_mask=slots[:, :T], use_causal_mask=True, **here)
    state, start, outputs = attention.new_cache(B, SLOTS), 0, []
    for length in PIECES:
        piece = x[:, start : start + length]
        output, state = attention(piece, piece, key_mask=slots, **others, cache=state, start=start)
        outputs.append(to_numpy(output))
        start += length
    real = here.get("query_mask", np.ones((B, T), bool))  # outputs of the others are 0 with the mask
    assert_close(np.concatenate(outputs, axis=1)[real], to_numpy(whole)[real], atol=1e-5)


@pytest.mark.tensorflow
def test_a_graph_of_an_unknown_length_counts_rotary_positions_with_a_cache():
    import tensorflow as tf

    attention, x = MultiHeadAttention(N, 4, rotary=True), normal(B, T, D)
    whole = attention(x, x, use_causal_mask=True)

    @tf.function(input_signature=[tf.TensorSpec((B, None, D)), tf.TensorSpec((), "int32")])
    def step(x, start):
        return attention(x, x, cache=attention.new_cache(B, SLOTS), start=start)[0]

    assert_close(step(x, 0), whole, atol=1e-5)


def test_a_memory_is_computed_once_and_used_in_place_of_value_and_key():
    attention = MultiHeadAttention(N, 3, num_key_value_heads=2, qk_norm=True)
    attention(normal(B, T, D), MEMORY)
    randomize(attention)
    memory = attention.new_memory(MEMORY)
    assert isinstance(memory, cache.Memory) and tuple(memory.key.shape) == (B, 2, S, 3)
    for masked in ({}, {"value_mask": MEMORY_MASK}):
        output, scores, same = attention(normal(B, T, D), None, cache=memory, return_attention_scores=True, **masked)
        expected, expected_scores = attention(normal(B, T, D), MEMORY, return_attention_scores=True, **masked)
        assert_close(output, expected, atol=1e-5)
        assert_close(scores, expected_scores, atol=1e-5)
        assert isinstance(same, cache.Memory)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(
    ("options", "arguments", "shares"),
    [
        ({}, {}, True),
        ({"num_key_value_heads": 2, "qk_norm": True, "use_gate": True, "value_dim": 5}, {"value_mask": True}, True),
        ({"hard_attention": True}, {"value_mask": True}, True),
        ({}, {"query_mask": True, "value_mask": True}, True),
        ({}, {"attention_mask": True}, False),
        ({}, {"attention_bias": True, "value_mask": True}, False),
        ({}, {"key_mask": True, "value_mask": True}, True),
        ({}, {"use_causal_mask": True}, False),
        ({"sliding_window": 2}, {}, False),
        ({}, {"return_attention_scores": True, "value_mask": True}, False),
    ],
    ids=str,
)
def test_rows_that_share_a_memory_get_what_each_gets_alone(options, arguments, shares, length, monkeypatch):
    width = 3  # rows of queries for each row of the memory
    attention = MultiHeadAttention(N, 4, **options)
    attention(normal(B, length, D), MEMORY)
    randomize(attention)
    random = np.random.default_rng(5)
    seen = {
        "query_mask": random.random((B * width, length)) < 0.7,
        "value_mask": MEMORY_MASK.repeat(width, axis=0),
        "key_mask": MEMORY_MASK.repeat(width, axis=0),
        "attention_mask": random.random((B * width, length, S)) < 0.7,
        "attention_bias": normal(B * width, length, S, seed=6),
    }
    given = {name: seen.get(name, value) for name, value in arguments.items()}
    x, memory = normal(B * width, length, D, seed=7), attention.new_memory(MEMORY)
    shared = cache.repeated(memory, width)
    assert isinstance(shared, cache.SharedMemory) and shared.key is memory.key
    repeats = []
    monkeypatch.setattr(memory_module, "repeat_rows", lambda *given: repeats.append(1) or cache.repeat_rows(*given))
    *outputs, same = attention(x, None, cache=shared, **given)
    assert isinstance(same, cache.SharedMemory) and bool(repeats) != shares
    alone = attention(x, None, cache=cache.Memory(*[cache.repeat_rows(one, width) for one in memory]), **given)[:-1]
    for one, expected in zip(outputs, alone, strict=True):
        assert one.shape == expected.shape
        assert_close(one, expected, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.tensorflow
def test_gradients_go_through_a_cache(compiled):
    import tensorflow as tf

    attention, x = MultiHeadAttention(N, 4), tf.constant(normal(B, 3, D))
    attention(x, x)
    randomize(attention)

    def gradient(outputs):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(outputs()[:, 2] ** 2)
        return tape.gradient(loss, x)

    def in_steps():
        state, steps = attention.new_cache(B, 3), []
        for t in range(3):
            step, state = attention(x[:, t : t + 1], x[:, t : t + 1], cache=state, start=t)
            steps.append(step)
        return tf.concat(steps, axis=1)

    found = gradient(tf.function(in_steps) if compiled else in_steps)
    assert_close(found, gradient(lambda: attention(x, x, use_causal_mask=True)), atol=1e-4)


@pytest.mark.tensorflow
@pytest.mark.parametrize(("width", "length"), [(40, 1), (3, None)])
def test_many_rows_and_an_unknown_number_of_tokens_share_a_memory_in_a_graph(width, length):
    import tensorflow as tf

    attention = MultiHeadAttention(N, 4)
    attention(normal(B, 2, D), MEMORY)
    randomize(attention)
    x, memory = normal(B * width, length or 2, D, seed=7), attention.new_memory(MEMORY)

    @tf.function(input_signature=[tf.TensorSpec([None, length, D])])
    def shared(x):
        return attention(x, None, cache=cache.repeated(memory, width))[0]

    assert_close(shared(x), attention(x, np.repeat(MEMORY, width, axis=0)), atol=1e-5)
    kinds = [op.type for op in shared.get_concrete_function().graph.get_operations()]
    assert ("BatchMatMulV3" in kinds) == (length == 1)  # as a decode step, which transposes no source


def test_keys_of_a_memory_have_positions_of_their_own():
    """`positions` are those of the queries, one by one as for the whole."""
    attention = MultiHeadAttention(N, 4, rotary=True)
    queries, values = normal(B, T, D), MEMORY
    whole = to_numpy(attention(queries, values, value_mask=MEMORY_MASK))
    memory = attention.new_memory(values)
    for slot in range(T):
        one = queries[:, slot : slot + 1]
        options = {"positions": np.array([slot]), "value_mask": MEMORY_MASK}
        assert_close(attention(one, None, cache=memory, **options)[0][:, 0], whole[:, slot], atol=1e-5)
        assert_close(attention(one, values, **options)[:, 0], whole[:, slot], atol=1e-5)


def test_a_cache_for_several_rows_shares_the_memory_alone():
    state = made("cross").new_cache(B, SLOTS, MEMORY)
    state = cache.with_growing(state, [normal(*x.shape, seed=i) for i, x in enumerate(cache.growing(state))])
    again = cache.repeated(state, 3)
    for one, other in zip(cache.growing(state), cache.growing(again), strict=True):
        assert_close(other, np.repeat(to_numpy(one), 3, axis=0), atol=0)
    assert again[1][1].key is state[1][1].key and cache.num_slots(again) == SLOTS
    put_back = cache.with_growing(again, cache.growing(again))
    assert put_back[0][1] is again[0][1]


def test_a_cache_has_the_sizes_of_key_heads_and_the_dtype_of_the_computation():
    decoder = Decoder(2, F, N, attention_options={"num_key_value_heads": 3, "value_dim": 5}, dtype="mixed_bfloat16")
    decoder(normal(B, T, D))
    ((first,), (_,)) = state = decoder.new_cache(B, SLOTS)
    assert tuple(first.key.shape) == (B, 3, SLOTS, 4) and tuple(first.value.shape) == (B, 3, SLOTS, 5)
    assert {keras.backend.standardize_dtype(x.dtype) for x in cache.growing(state)} == {"bfloat16"}
    assert cache.num_slots(state) == SLOTS and len(cache.growing(state)) == 4


def test_the_growing_part_of_a_cache_can_be_taken_out_and_put_back():
    state = made("cross").new_cache(B, SLOTS, MEMORY)
    others = [x + 1 for x in cache.growing(state)]
    again = cache.with_growing(state, others)
    assert len(others) == 4 and again[1][1] is state[1][1]
    for one, other in zip(cache.growing(again), others, strict=True):
        assert_close(one, other, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda layer, x, state: layer(x, cache=state),
            "`start` must be given with a `KeyValue` as `cache`, .*Received: start=None, cache of type KeyValue",
        ),
        (
            lambda layer, x, state: layer(x, start=3),
            "`start` must be given with a `KeyValue` as `cache`, .*Received: start=3, cache of type NoneType",
        ),
        (
            lambda layer, x, state: layer(x, cache=state, start=5),
            "`cache` must have slots for the tokens: .* start \\+ T <= slots. Received: start=5, T=7, slots=11",
        ),
        (
            lambda layer, x, state: layer(x, cache=state, start=np.int64(5)),
            "`cache` must have slots for the tokens: .*Received: start=5, T=7, slots=11",
        ),
        (
            lambda layer, x, state: layer(x, cache=state, start=-1),
            "`cache` must have slots for the tokens: .*Received: start=-1, T=7, slots=11",
        ),
        (lambda layer, x, state: layer.new_cache(B, SLOTS, MEMORY), r"`memory` needs `cross_attention=True`"),
        (
            lambda layer, x, state: made("cross").new_cache(B, SLOTS),
            "`memory` must be given with `cross_attention=True`. Received: memory=None, cross_attention=True",
        ),
    ],
)
def test_what_a_cache_cannot_do_is_refused(call, message):
    decoder = made("post-norm")
    with pytest.raises(ValueError, match=message):
        call(decoder, normal(B, T, D), decoder.new_cache(B, SLOTS))


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("size", "dtype", "is_wide"),
    [
        (4, "float32", True),
        (12, "float32", True),
        (5, "float32", False),
        (8, "bfloat16", True),
        (12, "float16", False),
        (2, "float64", True),
        (3, "float64", False),
    ],
)
def test_a_single_token_is_written_into_its_slot_alone(size, dtype, is_wide):
    import tensorflow as tf

    slots, keys = 7, 3

    @tf.function(input_signature=[tf.TensorSpec([None, keys, None, size], dtype)] * 2 + [tf.TensorSpec([], "int32")])
    def written(buffer, update, start):
        update = tf.ensure_shape(update, [None, keys, 1, size])
        return cache.write(cache.KeyValue(buffer, -buffer), update, 2 * update, start)

    with xla.tracing(False):
        kinds = [op.type for op in written.get_concrete_function().graph.get_operations()]
    assert kinds.count("TensorStridedSliceUpdate") == 2 and ("Bitcast" in kinds) == is_wide
    buffer, update = (tf.cast(normal(B, keys, n, size, seed=n), dtype) for n in (slots, 1))
    for start in (0, 2, slots - 1):
        for one, (old, new) in zip(
            written(buffer, update, start), ((buffer, update), (-buffer, 2 * update)), strict=True
        ):
            expected = to_numpy(tf.cast(old, "float64"))
            expected[:, :, start] = to_numpy(tf.cast(new, "float64"))[:, :, 0]
            assert one.dtype == dtype and np.array_equal(to_numpy(tf.cast(one, "float64")), expected)


@pytest.mark.tensorflow
def test_a_graph_refuses_more_tokens_than_slots_when_it_runs():
    import tensorflow as tf

    spec = tf.TensorSpec([None, 3, None, 5])

    @tf.function(input_signature=[spec, spec, spec, spec])
    def written(*given):
        return cache.write(cache.KeyValue(*given[:2]), *given[2:], 0)

    buffer = normal(2, 3, 7, 5)
    for length in (0, 4, 7):
        update = normal(2, 3, length, 5, seed=2)
        for one in written(buffer, buffer, update, update):
            assert_close(one, np.concatenate([update, buffer[:, :, length:]], axis=2), atol=0)
    update = normal(2, 3, 8, 5)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"must have slots for the tokens: .*T and slots\] \[8\] \[7\]"
    ):
        written(buffer, buffer, update, update)


@pytest.mark.tensorflow
def test_a_start_that_only_the_graph_knows_is_checked_there():
    import tensorflow as tf

    decoder, x = made("post-norm"), normal(B, T, D)
    step = tf.function(lambda start: decoder(x, cache=decoder.new_cache(B, SLOTS), start=start)[0])
    for start in (5, -1, 2**31 - 1):
        given = tf.constant(start, "int64" if start == 5 else "int32")
        with pytest.raises(ValueError, match=f"`cache` must have slots for the tokens: .*Received: start={start}, T=7"):
            decoder(x, cache=decoder.new_cache(B, SLOTS), start=given)
        expected = rf"`cache` must have slots for the tokens: .*start, T and slots\] \[{start}\] \[7\] \[11\]"
        with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
            step(given)
    assert_close(step(tf.constant(4)), decoder(x, cache=decoder.new_cache(B, SLOTS), start=4)[0], atol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_a_start_of_any_integer_dtype_is_the_slot(dtype):
    decoder, x = made("post-norm"), normal(B, T, D)
    expected, _ = decoder(x, cache=decoder.new_cache(B, SLOTS), start=3)
    for start in (np.dtype(dtype).type(3), keras.ops.convert_to_tensor(3, dtype)):
        assert_close(decoder(x, cache=decoder.new_cache(B, SLOTS), start=start)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "method"),
    [
        (lambda: MultiHeadAttention(2, 4), "new_memory"),
        (lambda: DecoderLayer(16, 2, cross_attention=True), "new_cache"),
        (lambda: Decoder(2, 16, 2, cross_attention=True), "new_cache"),
    ],
)
def test_what_needs_weights_needs_a_layer_that_is_built(layer, method):
    arguments = [MEMORY] if method == "new_memory" else [B, 5, MEMORY]
    with pytest.raises(ValueError, match=f"`{method}` needs a layer that is built.*is not built"):
        getattr(layer(), method)(*arguments)
