"""Generates text or ids with any functional model whose outputs are next-token logits.

B prompts, P tokens of a prompt, T tokens, V vocabulary, n results for each prompt.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from keras_tx.generation.beam import Beam
from keras_tx.generation.request import GenerationRequest
from keras_tx.generation.strategy import Strategy


def generate(
    model: keras.Model,
    inputs: Any,
    strategy: Strategy | None = None,
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    stop_tokens: Any = None,
    start_token: Any = None,
    tokenizer: Any = None,
    source_tokenizer: Any = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    forbidden_tokens: Any = (),
    forced_tokens: dict[int, int] | None = None,
    renormalize_logits: bool = False,
    return_scores: bool = False,
    target: str | None = None,
    jit_compile: bool = True,
) -> Any:
    """Generates a continuation of each prompt, or a target sequence for each source.

    The model runs once over the prompts (the prefill) and then once for each new token (a decode step), with a
    key-value cache. It may be a model of this package, or any functional model made of `Decoder`, `DecoderLayer` or
    causal `MultiHeadAttention` layers and of layers that treat each token separately. The model is compiled for the
    length of the prompts and `max_new_tokens`, both rounded up to powers of two, so that calls of similar lengths share
    a compiled program; this does not change results. Another strategy, constraint or number of prompts compiles a new
    program. If the encoder of a model does not keep padding out, as a `Conv1D` does not, its sources are padded only to
    the longest one of the call; sources of one length then have no padding.

    As in transformers, the padding id can be generated like any other token, unless it is in `forbidden_tokens`.

    Args:
        model: a functional model whose output is logits (B, T, V). If V is larger than the embedding table of the
            generated ids, ids without an embedding are generated only as stop tokens.
        inputs: the prompts, or the sources for a model with sources (`Seq2Seq`). Texts (a `str` or a list of them),
            with a `tokenizer`; or ids: an array (P,) or (B, P), in which padding is ignored, or a list of rows of any
            lengths. A dict with the names of the model's inputs as keys gives both the sources and the beginnings of
            the targets. In a target that is one row, or a list of rows, the padding id counts as a token: targets of T5
            begin with it. Segment ids and masks have one number for each id of their source, padding included. Sources
            that are texts are truncated to `max_length` tokens of their tokenizer, special tokens included; prompts and
            ids are not truncated.
        strategy: `Greedy()` (the default), `Sample(...)`, `Beam(...)`, `Speculative(...)` or another `Strategy`.
        max_new_tokens: the largest number of tokens to generate.
        min_new_tokens: the number of tokens before which no stop token is generated.
        stop_tokens: an id, or several, that end a row. None: the tokenizer's `sep_id`, if there is one.
        start_token: the id that begins a target or a prompt given as text. None: the tokenizer's `cls_id`. False: no
            start token. It must be None or False for prompts that are ids, which already have theirs.
        tokenizer: a tokenizer of `keras_tx.text`, or an object with the methods `tokenize`, `decode` and, for sources,
            `__call__`. Required for texts. If the model has more ids than the tokenizer, the additional ones are never
            generated.
        source_tokenizer: the tokenizer of the sources, if they have another vocabulary.
        repetition_penalty: above 1, it lowers the probability of tokens that already occur in the row: positive logits
            are divided by it, negative ones are multiplied by it. 1 changes nothing.
        no_repeat_ngram_size: no sequence of this many tokens is generated twice; 0 for no such rule.
        forbidden_tokens: ids, or sequences of ids, that are never generated.
        forced_tokens: dict {index: id} that fixes the new tokens at these indices; -1 is the last token at
            `max_new_tokens`.
        renormalize_logits: whether to normalize the log-probabilities again after these constraints; this only affects
            `Beam`.
        return_scores: whether to also return the score of each result, (B,) or (B, n).
        target: the name of the input that generation continues, required if it cannot be found from the model's graph.
        jit_compile: whether TensorFlow compiles with XLA: the first call takes longer, each token less time.

    Returns:
        The same form as the inputs: texts for texts, lists of ids for lists and ragged tensors, an array for an array.
        Without sources a result is the prompt and its continuation: an array (B, P) becomes (B, P + N), where N is the
        largest number of new tokens, with prompts padded on the left and new tokens on the right. With sources a result
        is only the new tokens, an array (B, N). Ids include the stop token. `Beam(num_return_sequences=n)` with n > 1
        gives a list (or an axis) of n results for each prompt, the best first.

    Raises:
        ValueError: for a prompt that is empty or only padding, an array of targets that all begin with the padding id,
            ids outside the vocabulary, a dict with a name that no input has, segment ids or a mask that do not fit
            their source, a `max_new_tokens` that is not positive or does not fit into learned positions, contradictory
            options, or logits that are NaN.
        TypeError: for a model that is not functional, a `strategy` that is not a `Strategy` or cannot be hashed, a
            `tokenizer` without `tokenize`, `decode` and, for sources that are texts, `__call__`, and inputs that are
            symbolic or neither texts nor rows of ids. Graphs, as in `tf.function`, need `keras_tx.serving.export`.

    Examples:
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> rows = keras_tx.generation.generate(model, [[5, 7, 9], [3]], max_new_tokens=4, jit_compile=False)
        >>> [len(row) for row in rows]
        [7, 5]
        >>> rows[0][:3]
        [5, 7, 9]

        A translation model is given sources:

        >>> model = keras_tx.models.Seq2Seq(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> options = {"max_new_tokens": 4, "start_token": 1, "stop_tokens": 2, "forced_tokens": {1: 2}}
        >>> [row[1:] for row in keras_tx.generation.generate(model, [[5, 7, 9], [3]], jit_compile=False, **options)]
        [[2], [2]]
    """
    request = GenerationRequest(
        model,
        inputs,
        strategy,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_tokens=stop_tokens,
        start_token=start_token,
        tokenizer=tokenizer,
        source_tokenizer=source_tokenizer,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        forbidden_tokens=forbidden_tokens,
        forced_tokens=forced_tokens,
        renormalize_logits=renormalize_logits,
        target=target,
        jit_compile=jit_compile,
    )
    answers, scores = request.run()
    return (answers, scores) if return_scores else answers


def stream(model: keras.Model, inputs: Any, strategy: Strategy | None = None, **options: Any) -> Iterator[Any]:
    """Yields the new tokens of `generate` one by one as soon as they are chosen; pieces of texts three tokens later.

    Args:
        model, inputs, strategy, options: see `generate`. `return_scores` is not available, and neither is `Beam`, whose
            first tokens may change until the end.

    Yields:
        For one text a piece of text, for several a list of pieces; for one row of ids an integer, for several an array
        (B,), with the padding id for rows that have ended.

    Raises:
        ValueError: as `generate`, and for a strategy with several rows for each prompt.
        TypeError: as `generate`.

    Examples:
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> options = {"max_new_tokens": 3, "forced_tokens": {0: 4, 1: 6, 2: 8}, "jit_compile": False}
        >>> for token in keras_tx.generation.stream(model, [5, 7, 9], **options):
        ...     print(token)
        4
        6
        8
    """
    arguments = inspect.signature(generate).bind(model, inputs, strategy, **options)
    arguments.apply_defaults()
    if arguments.arguments.pop("return_scores"):
        raise ValueError(
            "`return_scores` must not be used with `stream`: scores are known only at the end. Received: True"
        )
    request = GenerationRequest(**arguments.arguments)
    if isinstance(request.strategy, Beam) or request.strategy.rows_per_prompt > 1:
        raise ValueError(f"`stream` needs a `strategy` without beams. Received: strategy={strategy}")
    return request.stream()
