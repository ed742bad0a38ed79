"""Classes of a user's own in models that generate: they are computed as the user wrote them, or refused."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import layers
from keras_tx.generation import generate
from keras_tx.models import CausalLM, Seq2Seq
from keras_tx.pretrained import PretrainedModel
from tests.generation.asked import Letters
from tests.tools import assert_close, randomize, to_numpy


@keras.saving.register_keras_serializable(package="tests")
class Scaled(layers.TokenEmbedding):
    """Logits of a user's own."""

    def call(self, inputs, segment_ids=None, mask=None, positions=None, reverse=False, training=None):
        outputs = super().call(inputs, segment_ids, mask, positions, reverse, training)
        return outputs * 0.25 if reverse else outputs


@pytest.mark.tensorflow
@pytest.mark.usefixtures("eager")
def test_an_embedding_with_a_call_of_its_own_makes_the_logits():
    ids = keras.Input((None,), dtype="int32")
    embedding = Scaled(23, 12)
    model = randomize(keras.Model(ids, embedding(layers.Decoder(1, 7, 3)(embedding(ids)), reverse=True)))
    row, options = [5, 7], {"max_new_tokens": 3, "return_scores": True, "jit_compile": False}
    found, score = generate(model, row, **options)
    log_probs = to_numpy(ops.log_softmax(ops.cast(model(np.array([found])), "float32")))[0]
    assert_close(score, sum(log_probs[place, found[place + 1]] for place in range(1, len(found) - 1)), atol=1e-4)


@pytest.mark.usefixtures("eager")
def test_a_norm_over_tokens_inside_a_decoder_is_found():
    ids = keras.Input((None,), dtype="int32")
    norm = keras.layers.GroupNormalization(groups=1)
    x = layers.Decoder(1, 7, 3, normalization=norm)(layers.TokenEmbedding(23, 12)(ids))
    with pytest.raises(ValueError, match="decode steps that differ from the full model"):
        generate(keras.Model(ids, keras.layers.Dense(23)(x)), [5, 7, 9], max_new_tokens=3, jit_compile=False)


GPT2 = {"model_type": "gpt2", "vocab_size": 23, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 16}
SIZES = {"num_layers": 1, "hidden_dim": 6, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [(CausalLM, [23], SIZES), (CausalLM, [23], {**SIZES, "packed": True}), (PretrainedModel, [GPT2, "causal_lm"], {})],
)
def test_a_model_whose_class_has_a_call_of_its_own_is_refused(kind, arguments, options):
    class Sharper(kind):
        def call(self, inputs, **given):
            return super().call(inputs, **given)

    model = Sharper(*arguments, **options)
    with pytest.raises(TypeError, match="whose class has no `call` of its own. Received: model=<Sharper"):
        model.generate([5, 7], max_new_tokens=3)


@pytest.mark.parametrize("given", [list, "tokenizer.json"])
def test_a_tokenizer_of_sources_needs_sources(given):
    model = CausalLM(23, num_layers=1, hidden_dim=6, num_heads=2)
    tokenizer = SimpleNamespace(tokenize=list, decode=list, vocabulary_size=23)
    with pytest.raises(
        ValueError, match="`source_tokenizer` is only for models with sources. Received: source_tokenizer of"
    ):
        model.generate([5, 7], max_new_tokens=3, tokenizer=tokenizer, source_tokenizer=given)


@pytest.mark.usefixtures("eager")
def test_a_tokenizer_of_texts_as_sources_is_callable():
    model, letters = randomize(Seq2Seq(23, **SIZES)), Letters()
    without_call = SimpleNamespace(tokenize=letters.tokenize, decode=letters.decode)
    options = {"max_new_tokens": 3, "start_token": 1, "stop_tokens": (), "jit_compile": False}
    rule = 'must be callable for sources that are texts, and return a dict with "token_ids". Received: '
    for given, argument, received in (
        ({"tokenizer": without_call}, "tokenizer", r"tokenizer=namespace\("),
        ({"source_tokenizer": letters.tokenize}, "source_tokenizer", r"a call that returned \[\[3, 4\]\]"),
        (
            {"source_tokenizer": lambda texts: {"ids": [3]}},
            "source_tokenizer",
            r"a call that returned \{'ids': \[3\]\}",
        ),
    ):
        with pytest.raises(TypeError, match=f"`{argument}` {rule}{received}"):
            generate(model, ["ab"], **{"tokenizer": letters, **given}, **options)
    with pytest.raises(TypeError, match="`source_tokenizer` must be callable with texts. Received: .*=5"):
        generate(model, [[1, 3, 4, 2]], source_tokenizer=5, **options)
    found = generate(model, [[1, 3, 4, 2]], tokenizer=without_call, **options)
    as_texts = generate(model, ["ab"], tokenizer=without_call, source_tokenizer=letters, **options)
    assert as_texts == letters.decode(found)


def test_a_checkpoint_inside_a_model_that_leaves_inputs_out_is_refused():
    checkpoint, ids = PretrainedModel(GPT2, "causal_lm"), keras.Input((None,), dtype="int32")
    model = keras.Model(ids, checkpoint(ids)["logits"])
    with pytest.raises(
        ValueError, match=r"must give all inputs to the models inside it. .* without \['attention_mask'"
    ):
        generate(model, [5, 7, 9], max_new_tokens=3)
