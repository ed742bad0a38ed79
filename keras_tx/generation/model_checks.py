"""Which models can generate: each check names the rule and the layer that breaks it."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import keras

from keras_tx.functional_graph import Node
from keras_tx.generation.operations import call_arguments
from keras_tx.internals import keras_models
from keras_tx.layers import MultiHeadAttention

MASKS = ("mask", "query_mask", "value_mask", "key_mask")  # call arguments of the layers with a cache


def has_two_vocabularies(model: Any, source_tokenizer: Any) -> bool:
    """Whether the sources of an `IncrementalModel` have another vocabulary than the target, as their sizes tell.

    Raises:
        ValueError: they have, and there is no `source_tokenizer`: the tokenizer of the target would make wrong ids.
    """
    target = model.vocabulary_sizes[model.target] or model.vocabulary_size
    sources = {name: model.vocabulary_sizes[name] or target for name in model.sources}
    if set(sources.values()) <= {target}:
        return False
    if source_tokenizer is None:
        raise ValueError(
            "`source_tokenizer` must be given for texts if the sources have another vocabulary than the target. "
            f"Received: source_tokenizer=None, vocabulary sizes {sources} of the sources and {target} of the target"
        )
    return True


def checked_functional(model: Any) -> Any:
    """The functional model that `model` is, or that a `Sequential` contains."""
    functional = keras_models.functional_model(model)
    if functional is None:
        raise TypeError(
            "`model` must be a functional keras.Model, built, whose class has no `call` of its own. Received: "
            f"model={model!r}"
        )
    return functional


def check_output(model: Any) -> None:
    if len(model.outputs) != 1 or len(model.outputs[0].shape) != 3:
        shapes = [tuple(x.shape) for x in model.outputs]
        raise ValueError(f"`model` must have one output, logits (B, T, V). Received: outputs of shapes {shapes}")


def check_no_softmax(operation: Any) -> None:
    """Raises for a model that ends in a softmax: strategies would treat the probabilities as logits."""
    activation = getattr(operation, "activation", None)
    if isinstance(operation, keras.layers.Softmax) or activation is keras.activations.softmax:
        raise ValueError(
            "The output of `model` must be logits, not probabilities. Received: a softmax in the last layer, "
            f"'{operation.name}'"
        )


def refuse_layer(layer: Any) -> NoReturn:
    raise ValueError(
        "A generative model may attend to other tokens only in `Decoder`, `DecoderLayer` and causal "
        f"`MultiHeadAttention` of keras_tx. Received: layer '{layer.name}' of type {type(layer).__name__}"
    )


def check_causal(node: Node, target: str, depends_on_target: Callable[[Iterable[int]], bool]) -> None:
    """Raises for attention of the target to later tokens, and for cross-attention whose keys change between steps."""
    layer = node.operation
    if node.kwargs.get("attention_mask") is not None:
        raise ValueError(
            f"`model` must not call layer '{layer.name}' with an `attention_mask`, which cannot grow with the "
            "sequence. Received: attention_mask"
        )
    if not isinstance(layer, MultiHeadAttention):
        if depends_on_target(node.numbers_of("memory", 1)):
            raise ValueError(
                f"The memory of layer '{layer.name}' must not depend on `target`. Received: target={target}"
            )
        return
    is_causal = node.kwargs.get("use_causal_mask")
    is_self_attention = depends_on_target(node.numbers_of("value", 1))
    if is_self_attention and not is_causal:
        raise ValueError(
            f"Self-attention of a generative model needs `use_causal_mask=True`. Received: layer '{layer.name}' "
            "without it"
        )
    if not is_self_attention and (is_causal or layer.rotary or layer.sliding_window):
        raise ValueError(
            "Cross-attention of a generative model must not depend on the positions of its queries. Received: layer "
            f"'{layer.name}' with use_causal_mask={is_causal}, rotary={layer.rotary}, "
            f"sliding_window={layer.sliding_window}"
        )


def check_bias(node: Node, depends_on_target: Callable[[Iterable[int]], bool]) -> None:
    """Raises for a position bias of cross-attention: prompts are padded, which moves queries but not their keys."""
    keys = node.numbers_of("key", 1) if "num_keys" in call_arguments(node.operation) else []
    if keys and not depends_on_target(keys):
        raise ValueError(
            "Cross-attention of a generative model must not depend on the positions of its queries. Received: the "
            f"position bias '{node.operation.name}' with a `key` that does not depend on the target"
        )


def is_cross_attention(node: Node, depends_on_target: Callable[[Iterable[int]], bool]) -> bool:
    """Whether a node is attention to values that do not depend on the target."""
    return isinstance(node.operation, MultiHeadAttention) and not depends_on_target(node.numbers_of("value", 1))


def check_places(
    nodes: list[Node], cached_nodes: list[Node], depends_on_target: Callable[[Iterable[int]], bool]
) -> None:
    """Raises for masks, positions and documents of the target that other inputs give: steps make their own.

    Args:
        nodes: those that depend on the target.
        cached_nodes: those of them with a cache.
        depends_on_target: whether one of some values depends on the target.
    """
    for node in nodes:
        names = ["positions", "document_ids"]
        if node in cached_nodes:
            names += ["query_mask"] if is_cross_attention(node, depends_on_target) else MASKS
        for name in names:
            numbers = node.numbers_of(name, len(node.args))
            if numbers and not depends_on_target(numbers):
                raise ValueError(
                    f"The `{name}` of layer '{node.operation.name}' must not come from another input in a generative "
                    "model, because every step makes its own. Received: a tensor that does not depend on the target"
                )


def check_scores(node: Node, needed: Iterable[int]) -> None:
    """Raises for a layer with a cache of which the model uses more than the output: steps return no scores."""
    if set(node.outputs[1:]).intersection(needed):
        raise ValueError(
            f"A generative model must not use the attention scores or hidden states of layer '{node.operation.name}'. "
            "Received: a model with operations on them"
        )


def check_sources(model: Any) -> None:
    """Raises for an `IncrementalModel` whose sources cannot be padded in a batch, each by itself, as an export does."""
    if model.joined:
        raise ValueError(
            "`model` must not add the embeddings of several sources: an export takes padding out of each by itself. "
            f"Received: a model that adds those of {list(model.joined)}"
        )
    without = [name for name in model.sources if model.padding_ids[name] is None]
    if without:
        raise ValueError(
            "`model` must have a padding id for its sources, or rows of different lengths could not share a batch. "
            f"Received: padding_id=None for {without}"
        )
