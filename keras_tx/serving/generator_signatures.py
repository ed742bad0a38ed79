"""The signatures of a generative model: text in, text out, with all decoding in the graph.

B batch, S source tokens, T tokens, M new tokens, n results, D hidden, L layers, N heads. The first axis of every input
and output is the batch, so that a server can batch requests; the results of a row do not depend on the other rows.
Texts are equal to those of `keras_tx.generation.generate` with the same options.

- `serving_default`: `text` -> `text` (B,), with the strategy of `generation`. A model without sources continues the
  text, and the answer begins with the text; for "" it begins with the start token alone.
- `generate`: `text`, and for each row `max_new_tokens` (at most that of `generation`), `temperature` (0: greedy),
  `top_k` (0: all), `top_p` and `seed` -> `text` (B,), `num_tokens` (B,), which counts the stop token, and `score` (B,),
  the sum of their log-probabilities. A seed gives what `Sample(..., seed=seed)` gives for that text alone. With a
  `Speculative` strategy its drafts are used here, too; drafts of a draft model change the sample of a seed.
- `beam`: `text` -> `text` (B, n), `scores` (B, n), the best first: with the strategy, if it is a `Beam`, else with four
  beams. A result for which the options allow no tokens is "" with a score of minus infinity.
- `score`: `text`, `target` (B,) -> `log_probability` (B,) of the target after the text, with a stop token at its end,
  `tokens` (B, T), `token_log_probabilities` (B, T), `num_tokens` (B,).
- `tokens`: `token_ids` (B, T), `lengths` (B,) -> the new `token_ids` (B, M), `lengths` (B,). Without a tokenizer this
  is also `serving_default`.
- `explain`, of `CausalLM` and `Seq2Seq`: `text` -> the greedy `text`, `tokens` (B, T) and their attention `scores`
  (B, L, N, T, T); of a `Seq2Seq` `source_tokens` (B, S), `tokens` (B, T), `encoder_scores`, `decoder_scores` and
  `cross_scores`.
- `embed`, of `CausalLM` and `Seq2Seq`: `text` -> `embedding` (B, D), the mean over the tokens of the hidden states of
  the decoder, or of the encoder.

A model with several sources has inputs named after them in place of `text`, and `NAME`, `NAME_lengths` in place of
`token_ids`, `lengths`. A request that is out of range, or that does not fit into learned positions, fails with a
message that names the input, and with it the other requests of its batch. A source text is truncated to the tokenizer's
`max_length`; a longer prompt is an error.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras

from keras_tx.generation import in_graph
from keras_tx.optional import Lazy
from keras_tx.serving.request_inputs import graph_function, id_specs, text_spec
from keras_tx.serving.text_generator import TextGenerator
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

Tokenize: TypeAlias = Callable[..., tuple[Tensor, list[Tensor]]]  # texts -> prompts and sources
Answer: TypeAlias = dict[str, Tensor]


def generator_signatures(
    model: keras.Model,
    tokenizer: Any = None,
    source_tokenizer: Any = None,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns {name: tf.function with an input signature}. For arguments and errors, see `TextGenerator`."""
    generator = TextGenerator(model, tokenizer, source_tokenizer, generation)
    tokens = _tokens(generator)
    if tokenizer is None:
        return {"serving_default": tokens, "tokens": tokens}
    names = generator.input_names("text")
    tokenize = _signature(lambda *texts: generator.tokenize(texts, names), [text_spec(name) for name in names])
    signatures = {
        "serving_default": _serving_default(generator, tokenize),
        "generate": _generate(generator, tokenize),
        "beam": _beam(generator, tokenize),
        "score": _score(generator, tokenize),
        "tokens": tokens,
    }
    if generator.is_language_model:
        signatures |= {"explain": _explain(generator, tokenize), "embed": _embed(generator, tokenize)}
    return signatures


def _signature(function: Callable[..., Any], specs: list[Any]) -> Any:
    """A `tf.function` whose inputs are named as `specs`; `function` gets them in that order."""
    parameters = [inspect.Parameter(spec.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for spec in specs]
    signature = inspect.Signature(parameters)

    def named(*args: Tensor, **kwargs: Tensor) -> Any:
        return function(*signature.bind(*args, **kwargs).args)

    named.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` reads
    return graph_function(*specs)(named)


def _serving_default(generator: TextGenerator, tokenize: Tokenize) -> Any:
    names = generator.input_names("text")

    def serving_default(*texts: Tensor) -> Answer:
        prompts, sources = tokenize(*texts)
        ids, lengths, _ = generator.generate(prompts, sources, names[0])
        return {"text": generator.detokenize(prompts, ids[:, :1], lengths[:, :1])[:, 0]}

    return _signature(serving_default, [text_spec(name) for name in names])


def _generate(generator: TextGenerator, tokenize: Tokenize) -> Any:
    names = generator.input_names("text")
    options = {"max_new_tokens": "int32", "temperature": "float32", "top_k": "int32", "top_p": "float32"}
    specs = [tf.TensorSpec([None], dtype, name) for name, dtype in {**options, "seed": "int64"}.items()]

    def generate(*inputs: Tensor) -> Answer:
        texts, values = inputs[: len(names)], dict(zip([*options, "seed"], inputs[len(names) :], strict=True))
        prompts, sources = tokenize(*texts)
        ids, lengths, scores = generator.generate_per_row(prompts, sources, names[0], values)
        return {
            "text": generator.detokenize(prompts, ids, lengths)[:, 0],
            "num_tokens": lengths[:, 0],
            "score": scores[:, 0],
        }

    return _signature(generate, [*[text_spec(name) for name in names], *specs])


def _beam(generator: TextGenerator, tokenize: Tokenize) -> Any:
    names = generator.input_names("text")

    def beam(*texts: Tensor) -> Answer:
        prompts, sources = tokenize(*texts)
        ids, lengths, scores = generator.generate(prompts, sources, names[0], generator.beam_strategy())
        texts = generator.detokenize(prompts, ids, lengths)
        return {"text": tf.where(tf.math.is_inf(scores), "", texts), "scores": scores}

    return _signature(beam, [text_spec(name) for name in names])


def _tokens(generator: TextGenerator) -> Any:
    id_names, length_names = generator.input_names("token_ids"), generator.input_names("lengths", "{}_lengths")
    pairs = list(zip(id_names, length_names, strict=True))
    names = [name for pair in pairs for name in pair]

    def tokens(*inputs: Tensor) -> Answer:
        prompts, sources = generator.rows_of_ids(inputs, names)
        ids, lengths, _ = generator.generate(prompts, sources, names[0])
        ids, lengths = ids[:, 0], lengths[:, 0]
        rows = generator.ragged(ids, lengths).to_tensor(generator.config.padding_id, shape=[None, ids.shape[1]])
        return {"token_ids": rows, "lengths": lengths}

    return _signature(tokens, [spec for pair in pairs for spec in id_specs(*pair)])


def _score(generator: TextGenerator, tokenize: Tokenize) -> Any:
    names = generator.input_names("text")

    def score(*texts: Tensor) -> Answer:
        prompts, sources = tokenize(*texts[:-1])
        return generator.score(prompts, sources, texts[-1], names[0])

    return _signature(score, [text_spec(name) for name in [*names, "target"]])


def _explain(generator: TextGenerator, tokenize: Tokenize) -> Any:
    def explain(text: Tensor) -> Answer:
        prompts, sources = tokenize(text)
        ids, lengths, _ = generator.generate_greedily(prompts, sources, "text")
        ids, lengths = ids[:, :1], lengths[:, :1]
        answer = {"text": generator.detokenize(prompts, ids, lengths)[:, 0]}
        rows = tf.concat([prompts, generator.ragged(ids[:, 0], lengths[:, 0])], axis=1)
        padding_id, limit = generator.config.padding_id, generator.incremental_model.max_length
        least = in_graph.least_columns(rows.nrows(), limit)
        rows = in_graph.right_padded(rows, padding_id)
        answer["tokens"] = generator.token_strings(rows)
        scores = generator.model.attention_scores(
            [*generator.widened(sources), in_graph.at_least_columns(rows, padding_id, least)]
        )
        scores = tf.nest.map_structure(lambda x: tf.cast(x, "float32"), scores)
        length = tf.shape(rows)[1]
        if not sources:
            return {**answer, "scores": scores[..., :length, :length]}
        answer["source_tokens"] = generator.token_strings(sources[0], generator.source_tokenizer)
        of_source = tf.shape(sources[0])[1]
        sizes = {"encoder": (of_source, of_source), "decoder": (length, length), "cross": (length, of_source)}
        for name, (queries, keys) in sizes.items():
            answer[f"{name}_scores"] = scores[name][..., :queries, :keys]
        return answer

    return _signature(explain, [text_spec()])


def _embed(generator: TextGenerator, tokenize: Tokenize) -> Any:
    model = generator.model

    def embed(text: Tensor) -> Answer:
        prompts, sources = tokenize(text)
        if sources:
            source = generator.widened(sources)[0]
            is_real = source != generator.incremental_model.padding_ids[generator.client_inputs[0]]
            hidden = model.encoder(model.embedding(source, training=False), training=False)
        else:
            prompts = generator.check_positions(prompts, 0, "text")
            least = in_graph.least_columns(prompts.nrows(), generator.incremental_model.max_length)
            ids = in_graph.right_padded(prompts, generator.config.padding_id, least)
            is_real = tf.sequence_mask(prompts.row_lengths(), tf.shape(ids, tf.int64)[1])
            hidden = model.decoder(model.embedding(ids, training=False), training=False)
        is_real, hidden = tf.cast(is_real, "float32"), tf.cast(hidden, "float32")
        return {"embedding": tf.einsum("BT,BTD->BD", is_real, hidden) / tf.reduce_sum(is_real, axis=1, keepdims=True)}

    return _signature(embed, [text_spec()])
