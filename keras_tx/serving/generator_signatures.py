"""A model that writes -> the functions that its SavedModel answers: text in, text out, the whole decoding in the graph.

B batch, S source tokens, T tokens, M new tokens, n results, D hidden, L layers, N heads. Every input and output has the
batch as its first axis, so that a server may put requests together; what is written for a row does not depend on the
others. Texts are those of `keras_tx.generation.generate` with the same options.

- `serving_default`: `text` -> `text` (B,), by the strategy of `generation`. A model without sources goes on from the
  text, and the answer begins with it; a text of "" is the start token alone.
- `generate`: `text`, and for each row `max_new_tokens` (at most those of `generation`), `temperature` (0: greedy),
  `top_k` (0: all), `top_p` and `seed` -> `text` (B,), `num_tokens` (B,), the stop token among them, and `score` (B,),
  the sum of their log-probabilities. A seed gives what `Sample(..., seed=seed)` gives for the text alone.
- `beam`: `text` -> `text` (B, n), `scores` (B, n), the best first: of the strategy, if it is a `Beam`, else of four
  beams. A result that rules leave no tokens for is "" with a score of minus infinity.
- `score`: `text`, `target` (B,) -> `log_probability` (B,) of the target behind the text, a stop token at its end,
  `tokens` (B, T), `token_log_probabilities` (B, T), `num_tokens` (B,).
- `tokens`: `token_ids` (B, T), `lengths` (B,) -> the new `token_ids` (B, M), `lengths` (B,). In the place of
  `serving_default` where there is no tokenizer.
- `explain`, of `CausalLM` and `Seq2Seq`: `text` -> the greedy `text`, `tokens` (B, T) and their attention `scores`
  (B, L, N, T, T); of a `Seq2Seq` `source_tokens` (B, S), `tokens` (B, T), `encoder_scores`, `decoder_scores` and
  `cross_scores`.
- `embed`, of `CausalLM` and `Seq2Seq`: `text` -> `embedding` (B, D), the mean over the tokens of what the decoder, or
  the encoder, makes of them.

A model with several sources has inputs by their names in place of `text`, and `NAME`, `NAME_lengths` in place of
`token_ids`, `lengths`. What is out of range, or does not fit into learned positions, ends the request with a message
that names the input. A text of a source is cut at the tokenizer's `max_length`; a prompt longer than that is refused.
"""

import inspect

from keras_tx.generation import Greedy, in_graph
from keras_tx.optional import Lazy
from keras_tx.serving.request_inputs import id_specs, text_spec
from keras_tx.serving.text_generator import TextGenerator

tf = Lazy("tensorflow")


def generator_signatures(model, tokenizer=None, source_tokenizer=None, generation=None):
    """Returns {name: tf.function with an input signature}; arguments and errors as for `TextGenerator`."""
    writer = TextGenerator(model, tokenizer, source_tokenizer, generation)
    tokens = _tokens(writer)
    if tokenizer is None:
        return {"serving_default": tokens, "tokens": tokens}
    names = writer.names("text")
    read = _signature(lambda *texts: writer.rows_of_texts(texts, names), [text_spec(name) for name in names])
    signatures = {
        "serving_default": _text(writer, read),
        "generate": _generate(writer, read),
        "beam": _beam(writer, read),
        "score": _score(writer, read),
        "tokens": tokens,
    }
    if writer.is_language_model:
        signatures |= {"explain": _explain(writer, read), "embed": _embed(writer, read)}
    return signatures


def _signature(function, specs):
    """A `tf.function` of inputs with the names of `specs`, which may be given by name; `function` gets them in turn."""
    parameters = [inspect.Parameter(spec.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for spec in specs]
    signature = inspect.Signature(parameters)

    def named(*args, **kwargs):
        return function(*signature.bind(*args, **kwargs).args)

    named.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` reads
    return tf.function(named, input_signature=specs, autograph=False)


def _text(writer, read):
    names = writer.names("text")

    def text(*texts):
        prompts, sources = read(*texts)
        ids, lengths, _ = writer.write(prompts, sources, names[0])
        return {"text": writer.texts(prompts, ids[:, :1], lengths[:, :1])[:, 0]}

    return _signature(text, [text_spec(name) for name in names])


def _generate(writer, read):
    names = writer.names("text")
    of_rows = {"max_new_tokens": "int32", "temperature": "float32", "top_k": "int32", "top_p": "float32"}
    specs = [tf.TensorSpec([None], dtype, name) for name, dtype in {**of_rows, "seed": "int64"}.items()]

    def generate(*inputs):
        texts, numbers = inputs[: len(names)], inputs[len(names) :]
        prompts, sources = read(*texts)
        ids, lengths, scores = writer.write_by_row(prompts, sources, names[0], *numbers)
        return {
            "text": writer.texts(prompts, ids, lengths)[:, 0],
            "num_tokens": lengths[:, 0],
            "score": scores[:, 0],
        }

    return _signature(generate, [*[text_spec(name) for name in names], *specs])


def _beam(writer, read):
    names = writer.names("text")

    def beam(*texts):
        prompts, sources = read(*texts)
        ids, lengths, scores = writer.write(prompts, sources, names[0], writer.beam())
        return {"text": writer.texts(prompts, ids, lengths), "scores": scores}

    return _signature(beam, [text_spec(name) for name in names])


def _tokens(writer):
    names = [
        name
        for one in zip(writer.names("token_ids"), writer.names("lengths", "{}_lengths"), strict=True)
        for name in one
    ]

    def tokens(*inputs):
        prompts, sources = writer.rows_of_ids(inputs, names)
        ids, lengths, _ = writer.write(prompts, sources, names[0])
        ids, lengths = ids[:, 0], lengths[:, 0]
        padding = writer.task.padding_id
        return {
            "token_ids": writer.new_rows(ids, lengths).to_tensor(padding, shape=[None, ids.shape[1]]),
            "lengths": lengths,
        }

    return _signature(tokens, [spec for pair in zip(names[::2], names[1::2], strict=True) for spec in id_specs(*pair)])


def _score(writer, read):
    names = writer.names("text")

    def score(*texts):
        prompts, sources = read(*texts[:-1])
        return writer.score(prompts, sources, texts[-1], names[0])

    return _signature(score, [text_spec(name) for name in [*names, "target"]])


def _explain(writer, read):
    def explain(text):
        prompts, sources = read(text)
        ids, lengths, _ = writer.write(prompts, sources, "text", Greedy())
        ids, lengths = ids[:, :1], lengths[:, :1]
        answer = {"text": writer.texts(prompts, ids, lengths)[:, 0]}
        rows = tf.concat([prompts, writer.new_rows(ids[:, 0], lengths[:, 0])], axis=1)
        rows = in_graph.right_padded(rows, writer.task.padding_id)
        answer["tokens"] = writer.tokens(rows)
        scores = writer.model.attention_scores([*sources, rows])
        if not sources:
            return {**answer, "scores": scores}
        answer["source_tokens"] = writer.tokens(sources[0], writer.source_tokenizer)
        return {**answer, **{f"{name}_scores": one for name, one in scores.items()}}

    return _signature(explain, [text_spec()])


def _embed(writer, read):
    model = writer.model

    def embed(text):
        prompts, sources = read(text)
        if sources:
            padding_id = writer.steps.padding_ids[writer.given[0]]
            real, hidden = (
                sources[0] != padding_id,
                model.encoder(model.embedding(sources[0], training=False), training=False),
            )
        else:
            prompts = writer.fitting(prompts, 0, "text")
            ids = in_graph.right_padded(prompts, writer.task.padding_id)
            real = tf.sequence_mask(prompts.row_lengths(), tf.shape(ids, tf.int64)[1])
            hidden = model.decoder(model.embedding(ids, training=False), training=False)
        real, hidden = tf.cast(real, "float32"), tf.cast(hidden, "float32")
        return {"embedding": tf.einsum("BT,BTD->BD", real, hidden) / tf.reduce_sum(real, axis=1, keepdims=True)}

    return _signature(embed, [text_spec()])
