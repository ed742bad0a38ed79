"""`IncrementalModel`: a prefill and decode steps give the logits of the whole model, or an error says why not."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.layers import (
    AlibiBias,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    MultiHeadAttention,
    RelativePositionBias,
    TokenEmbedding,
)
from tests.generation import built
from tests.generation.built import LENGTH, SOURCE_V, D, F, N, V, ids_of
from tests.tools import assert_close, normal, randomize, to_numpy

ROWS = [[5, 7, 11, 3, 17, 28, 2], [9, 2, 2, 13, 1]]
SOURCES = np.array([[4, 3, 21, 0], [8, 30 % V, 6, 1]], "int32")


def in_steps(incremental, rows, lengths, sources=(), **options):
    """The logits (B, V) after each piece of `rows`, which are padded on the left; `lengths` are those of the pieces."""
    longest, spare = max(map(len, rows)), 3
    ids = np.array([[0] * (longest - len(row)) + row for row in rows], "int32")
    real = np.array([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    mask = np.concatenate([real, np.ones((len(rows), spare), bool)], axis=1)
    positions = np.maximum(real.cumsum(1) - 1, 0).astype("int32")
    values, cache = incremental.prepare(list(sources), len(rows), longest + spare)
    start, found = 0, []
    for length in lengths:
        here = slice(start, start + length)
        arrays = {"mask": mask, "real": real[:, here], "positions": positions[:, here]}
        arrays = {name: ops.convert_to_tensor(array) for name, array in arrays.items()}
        places = {**arrays, **options, "start": start}
        logits, cache = incremental.step(ops.convert_to_tensor(ids[:, here]), values, cache, **places)
        found.append(to_numpy(logits))
        start += length
    return found


@pytest.mark.parametrize("name", built.MODELS)
def test_a_model_in_steps_gives_what_the_whole_gives(name):
    model = built.made(name)
    incremental = IncrementalModel(model)
    sources = SOURCES if incremental.sources else None
    whole = built.logits_of(model, ROWS, sources)
    pieces = [4, 1, 1, 1]
    given = [] if sources is None else [ops.convert_to_tensor(sources)]
    found = in_steps(incremental, ROWS, pieces, given)
    for end, logits in zip(np.cumsum(pieces), found, strict=True):
        for row, padding in enumerate((0, 2)):
            assert_close(logits[row], whole[row, end - padding - 1], atol=2e-5, rtol=1e-5)
    found = np.concatenate(in_steps(incremental, ROWS, [4, 3], given, every_token=True), axis=1)
    for row, padding in enumerate((0, 2)):
        assert_close(found[row, padding:], whole[row, : 7 - padding], atol=2e-5, rtol=1e-5)


def test_what_an_incremental_model_knows():
    incremental = IncrementalModel(built.encoder_and_decoder())
    assert (incremental.inputs, incremental.sources, incremental.target) == (["source", "target"], ["source"], "target")
    assert incremental.vocabulary_size == V and incremental.vocabulary_sizes == {"source": SOURCE_V, "target": V}
    assert incremental.padding_ids == {"source": 0, "target": 0}
    assert incremental.max_length == LENGTH and incremental.max_source_length is None
    ids = ids_of()
    x = keras.layers.Embedding(31, D, mask_zero=True)(ids)
    keras_embedding = IncrementalModel(keras.Model(ids, keras.layers.Dense(V)(Decoder(1, F, N)(x))))
    assert keras_embedding.vocabulary_sizes == {"ids": 31} and keras_embedding.padding_ids == {"ids": 0}
    assert incremental.target_vocabulary_size == keras_embedding.target_vocabulary_size == V
    padded = IncrementalModel(built.padded_output())
    assert (padded.vocabulary_size, padded.target_vocabulary_size) == (V + 7, V)


def test_the_target_may_be_named():
    one, other = ids_of("one"), ids_of("other")
    embed = TokenEmbedding(V, D)
    attend = lambda x: x + MultiHeadAttention(N, 5)(x, x, use_causal_mask=True)
    x, y = attend(embed(one)), attend(embed(other))
    x = x + MultiHeadAttention(N, 5)(x, y)
    model = keras.Model([one, other], keras.layers.Dense(V)(x))
    assert IncrementalModel(model, "one").sources == ["other"]
    with pytest.raises(
        ValueError, match=r"`target` must be one of the inputs \['one', 'other'\]. Received: target='x'"
    ):
        IncrementalModel(model, "x")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_in_half_precision_steps_stay_near_the_whole(policy):
    model = built.language_model(dtype=policy, decoder_options={"position_bias": "alibi"})
    whole = built.logits_of(model, ROWS).astype("float32")
    found = in_steps(IncrementalModel(model), ROWS, [4, 1, 1, 1])
    assert found[-1].dtype == "float32"
    assert_close(found[-1][0], whole[0, 6], atol=0.03 * np.abs(whole).max())


def decoded(change, head=True):
    """A model from ids to logits, in which `change` computes vectors from the embedded ids."""
    ids = ids_of()
    x = change(TokenEmbedding(V, D, position_encoding="sinusoidal")(ids), ids)
    return keras.Model(ids, keras.layers.Dense(V)(x) if head else x)


def own_positions(x, ids):
    places = ops.cumsum(ops.ones_like(ids), axis=1) - 1
    return Decoder(1, F, N)(x + keras.layers.Embedding(LENGTH, D)(places))


def without_target():
    one, other = ids_of("one"), ids_of("other")
    x = TokenEmbedding(V, D)(one) + TokenEmbedding(V, D)(other)
    return keras.Model([one, other], keras.layers.Dense(V)(Decoder(1, F, N)(x)))


def two_outputs():
    ids = ids_of()
    x = Decoder(1, F, N)(TokenEmbedding(V, D)(ids))
    return keras.Model(ids, [keras.layers.Dense(V)(x), x])


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


class Masked(keras.layers.Layer):
    """Keras would warn that a layer without this destroys the mask of the embedding."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True


class Gated(Masked):
    """x + gate * (the sum of x so far), with a gate of zero, as in ReZero."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer="zeros", name="gate")

    def call(self, x):
        return x + self.gate * ops.cumsum(x, axis=1)


class Lagged(Masked):
    """x + x of eight tokens before."""

    def call(self, x):
        return x + ops.pad(x, ((0, 0), (8, 0), (0, 0)))[:, : ops.shape(x)[1]]


class Ending(Masked):
    """x + 1 from the seventh token on."""

    def call(self, x):
        place = ops.arange(ops.shape(x)[1])
        return ops.where(place[None, :, None] >= 6, x + ops.arange(D, dtype="float32"), x)


class Counted(Masked):
    """A bias for each of eight tokens, which fits no other number of tokens."""

    def call(self, x):
        return x + ops.ones((8, 1))[:, 0][None, :, None]


def added_source():
    source, target = ids_of("source"), ids_of("target")
    embedding = TokenEmbedding(V, D, position_encoding="sinusoidal")
    x = keras.layers.Add()([Decoder(1, F, N)(embedding(target)), Encoder(1, F, N)(embedding(source))])
    return keras.Model([source, target], keras.layers.Dense(V)(x))


def of_eight_tokens():
    ids = keras.Input((8,), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(V)(Decoder(1, F, N)(Counted(name="counted")(TokenEmbedding(V, D)(ids)))))


class Forbidding(Masked):
    """Minus infinity for the first three ids, as a model may have it for tokens that it must not write."""

    def call(self, x):
        return ops.where(ops.arange(V) < 3, -float("inf"), x)


class Last(Masked):
    """The vector of the last token, (B, 1, D), by a layer of which nothing is known."""

    def call(self, x):
        return x[:, -1:]


def sum_of_tokens(x):
    return ops.cumsum(x, axis=1)


def forbidding(x):
    return Forbidding()(keras.layers.Dense(V)(x))


DIFFER = "in layers of keras_tx. Received: decode steps that differ from the full model by .*"
NOT_CAUSAL = "may attend to other tokens only in `Decoder`, `DecoderLayer` and causal .*Received: layer '.*' of type "
REFUSED = [
    (without_target, r"`target` must be given: .*Received: target=None for a model with the inputs \['one', 'other'\]"),
    (two_outputs, r"one output, logits \(B, T, V\). Received: outputs of shapes .*29\), \(None, None, 12\)"),
    (lambda: decoded(lambda x, ids: Decoder(1, F, N)(x)[:, -1]), "one output, .*Received: outputs of shapes .*29"),
    (lambda: decoded(lambda x, ids: x), "`model` must have a causal layer over the generated ids. Received: a model "),
    (lambda: decoded(lambda x, ids: Encoder(1, F, N)(x)), NOT_CAUSAL + "Encoder"),
    (lambda: decoded(lambda x, ids: Decoder(1, F, N)(EncoderLayer(F, N)(x))), NOT_CAUSAL + "EncoderLayer"),
    (
        lambda: decoded(lambda x, ids: keras.layers.MultiHeadAttention(N, 5)(x, x, use_causal_mask=True)),
        NOT_CAUSAL + "MultiHeadAttention",
    ),
    (lambda: decoded(lambda x, ids: keras.layers.LSTM(D, return_sequences=True)(x)), NOT_CAUSAL + "LSTM"),
    (
        lambda: decoded(lambda x, ids: MultiHeadAttention(N, 5, name="own")(x, x)),
        "needs `use_causal_mask=True`. Received: layer 'own' without it",
    ),
    (
        lambda: decoded(lambda x, ids: DecoderLayer(F, N, cross_attention=True, name="both")(x, x)),
        "The memory of layer 'both' must not depend on `target`. Received: target=ids",
    ),
    (
        lambda: decoded(lambda x, ids: Decoder(1, F, N, name="it")(x, attention_mask=ids[:, None, :] > 3)),
        "`model` must not call layer 'it' with an `attention_mask`, which cannot grow .* Received: attention_mask",
    ),
    (lambda: decoded(own_positions), r"in layers of keras_tx. Received: .*differ from the full model by .*'cumsum"),
    (
        lambda: decoded(lambda x, ids: Decoder(1, F, N)(x) + ops.flip(x, axis=1)),
        "in layers of keras_tx. Received: .*differ from the full model by .*'flip",
    ),
    (lambda: decoded(lambda x, ids: Gated(name="gated")(Decoder(1, F, N)(x))), DIFFER + "'gated'"),
    (lambda: decoded(lambda x, ids: Lagged(name="lagged")(Decoder(1, F, N)(x))), DIFFER + "'lagged'"),
    (lambda: decoded(lambda x, ids: Ending(name="ending")(Decoder(1, F, N)(x))), DIFFER + "'ending'"),
    (
        lambda: decoded(lambda x, ids: keras.layers.Dense(D, sum_of_tokens, name="own")(Decoder(1, F, N)(x))),
        DIFFER + "'own'",
    ),
    (added_source, DIFFER + "'add"),
    (
        lambda: decoded(lambda x, ids: forbidding(Gated(name="gated")(Decoder(1, F, N)(x))), head=False),
        DIFFER + "gated",
    ),
    (
        of_eight_tokens,
        r"in layers of keras_tx. Received: decode steps that fail, because of one of \['counted'\]: \w+: .",
    ),
    (
        lambda: decoded(lambda x, ids: keras.layers.Dense(D, keras.layers.Softmax(1), name="own")(Decoder(1, F, N)(x))),
        r"in layers of keras_tx. Received: decode steps that .*'own'",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_model_that_cannot_go_in_steps_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        IncrementalModel(make())


def test_tokens_that_a_model_forbids_itself_are_compared_too():
    IncrementalModel(decoded(lambda x, ids: forbidding(Decoder(1, F, N)(x)), head=False))


def test_a_model_may_return_the_logits_of_its_last_token_alone():
    IncrementalModel(decoded(lambda x, ids: Last()(Decoder(1, F, N)(x))))


def normalized(layer):
    return decoded(lambda x, ids: layer(Decoder(1, F, N)(x)))


@pytest.mark.tensorflow  # Keras cannot do this on PyTorch
def test_a_norm_over_the_tokens_is_refused():
    layer = keras.layers.LayerNormalization(axis=1, center=False, scale=False, name="norm")
    with pytest.raises(ValueError, match=DIFFER + "'norm'"):
        IncrementalModel(normalized(layer))


@pytest.mark.filterwarnings("ignore:Layer 'rms_normalization")  # which does not pass masks on
@pytest.mark.parametrize("axis", [-1, 2, [-1], (2,)])
@pytest.mark.parametrize("kind", [keras.layers.LayerNormalization, keras.layers.RMSNormalization])
def test_a_norm_of_each_token_needs_no_trial(monkeypatch, kind, axis):
    monkeypatch.setattr("keras_tx.generation.incremental_model.check_steps", None)
    IncrementalModel(normalized(kind(axis=axis)))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        IncrementalModel(normalized(keras.layers.Activation(lambda x: x)))


class Placed(Masked):
    """A learned vector for each of the first `length` positions, and a divisor that begins at zero."""

    def __init__(self, length=16, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(length, D)

    def build(self, shape):
        self.offset = self.add_weight(shape=(), initializer="zeros", name="offset")

    def call(self, x, positions=None):
        positions = ops.arange(ops.shape(x)[1], dtype="int32")[None] if positions is None else positions
        return x + self.table(positions) / ops.cast(self.offset < 0.1, "float32")


@pytest.mark.parametrize("length", [16, 64])
def test_a_layer_that_takes_few_positions_or_not_every_weight_generates(length):
    """On TensorFlow and PyTorch an id outside of the table raises; the divisor makes infinities."""
    model = randomize(decoded(lambda x, ids: Decoder(1, F, N)(Placed(length)(x))))
    whole = to_numpy(model(np.array([ROWS[0]])))
    found = in_steps(IncrementalModel(model), ROWS[:1], [6, 1])
    assert_close(found[-1][0], whole[0, -1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"rotary": True}, {"sliding_window": 3}, {}])
def test_cross_attention_that_depends_on_positions_is_refused(options):
    source, target = ids_of("source"), ids_of("target")
    x, memory = (TokenEmbedding(V, D)(ids) for ids in (target, source))
    x = Decoder(1, F, N)(x)
    x = MultiHeadAttention(N, 4, name="cross", **options)(x, memory, use_causal_mask=not options)
    model = keras.Model([source, target], keras.layers.Dense(V)(x))
    with pytest.raises(ValueError, match=r"Cross-attention .* Received: layer 'cross' with use_causal_mask="):
        IncrementalModel(model, "target")


def cross_attended(bias):
    """A model whose cross-attention has the bias that `bias` makes of vectors of the target and of the source."""
    source, target = ids_of("source"), ids_of("target")
    x, memory = (TokenEmbedding(size, D)(ids) for size, ids in ((V, target), (SOURCE_V, source)))
    x = Decoder(1, F, N)(x)
    x = x + MultiHeadAttention(N, 4)(x, memory, attention_bias=bias(x, memory))
    return keras.Model([source, target], keras.layers.Dense(V)(x))


@pytest.mark.parametrize("kind", [AlibiBias, RelativePositionBias])
def test_a_position_bias_of_cross_attention_is_refused(kind):
    with pytest.raises(ValueError, match=r"Cross-attention .* Received: the position bias 'far' with a `key` that"):
        IncrementalModel(cross_attended(kind(N, name="far")), "target")


def test_cross_attention_may_have_a_bias_that_does_not_depend_on_places():
    model = randomize(cross_attended(lambda x, memory: keras.layers.Dense(1)(memory)[:, None, None, :, 0]))
    whole = built.logits_of(model, ROWS, SOURCES)
    found = in_steps(IncrementalModel(model), ROWS, [6, 1], [ops.convert_to_tensor(SOURCES)])
    assert_close(found[-1], [whole[0, 6], whole[1, 4]], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [Subclassed, lambda: keras.Sequential([keras.layers.Dense(3)]), lambda: normal])
def test_a_model_that_is_not_functional_is_refused(make):
    with pytest.raises(TypeError, match="`model` must be a functional keras.Model, built, .* Received: model=<"):
        IncrementalModel(make())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("positions", ["sinusoidal", None])
def test_a_generated_padding_id_is_a_token_like_others(positions):
    """As in transformers; a model without a padding id shows what is right."""
    from keras_tx.models import CausalLM

    written = []
    for padding_id in (0, None):
        keras.utils.set_random_seed(5)
        rotary = {"attention_options": {"rotary": positions is None}}
        model = CausalLM(
            13,
            hidden_dim=12,
            num_heads=3,
            embedding_options={"position_encoding": positions, "padding_id": padding_id},
            decoder_options=rotary,
        )
        model.set_weights([3 * weight for weight in model.get_weights()])
        options = {"forced_tokens": {1: 0}, "no_repeat_ngram_size": 1}
        written.append(model.generate([[5, 7, 11]], max_new_tokens=8, **options, jit_compile=False))
    assert written[0] == written[1] and written[0][0][4] == 0 and len(set(written[0][0])) == 11
