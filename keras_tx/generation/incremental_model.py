"""A functional model -> the same model in steps: ids (B, T) at the slots from `start` on -> logits (B, V), and a cache.

B batch, T tokens of this step, S slots of the cache, V vocabulary. The nodes of the model's graph are run one by one,
as Keras itself runs them. Layers that look at other tokens get a part of the cache, layers that need positions get
them, and what does not depend on the growing ids (an encoder) is computed once.
"""

import inspect

import keras
import numpy as np
from keras import ops

from keras_tx.functional_graph import FunctionalGraph
from keras_tx.generation import model_checks
from keras_tx.generation.model_checks import ATTENTION, MIXING, functional, layers_of
from keras_tx.generation.state import without_xla
from keras_tx.layers import Decoder, DecoderLayer, MultiHeadAttention, TokenEmbedding
from keras_tx.layers import cache as caches
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

MASKS = ("mask", "query_mask", "value_mask", "key_mask")  # arguments of the layers that look at other tokens


class IncrementalModel:
    """A functional model that writes, taken apart.

    Args:
        model: functional; integer ids in, logits (B, T, V) out. Its causal layers are `Decoder`, `DecoderLayer` and
            `MultiHeadAttention(...)(x, x, use_causal_mask=True)`; all others must treat each token by itself.
        target: the name of the input that grows; None if it can be told from the graph.

    Raises:
        TypeError: a model that is not functional.
        ValueError: a model with several outputs, without causal layers, or with layers that mix tokens otherwise, or
            that encode positions without being told them, as a step must.
    """

    def __init__(self, model, target=None):
        self._model = functional(model)
        self.inputs = [x.name for x in self._model.inputs]
        graph = FunctionalGraph(self._model)
        self._nodes, inputs, outputs = graph.nodes, graph.inputs, graph.outputs
        if len(outputs) != 1 or len(model.outputs[0].shape) != 3:
            shapes = [tuple(x.shape) for x in model.outputs]
            raise ValueError(f"`model` must have one output, logits (B, T, V). Received: outputs of shapes {shapes}")
        self.vocabulary_size = model.outputs[0].shape[-1]
        self._output = outputs[0]
        self._keep_needed()
        model_checks.check_no_softmax(self._nodes[-1].operation)
        self.target = self._find_target(inputs) if target is None else target
        if self.target not in self.inputs:
            raise ValueError(f"`target` must be one of the inputs {self.inputs}. Received: target={target!r}")
        self._target = inputs[self.inputs.index(self.target)]
        self.sources = [name for name in self.inputs if name != self.target]
        self._source_symbols = [symbol for symbol in inputs if symbol != self._target]
        self._split()
        embeddings = {name: self._embedding_of(symbol) for name, symbol in zip(self.inputs, inputs, strict=True)}
        self.padding_ids = {name: model_checks.padding_id(layer) for name, layer in embeddings.items()}
        self._check_masks()
        self.vocabulary_sizes = {name: model_checks.vocabulary_size(layer) for name, layer in embeddings.items()}
        self.max_length = model_checks.shortest_table(self._growing)
        self.max_source_length = model_checks.shortest_table(self._once)
        unknown = [node.operation for node in self._growing if not model_checks.is_known(node.operation)]
        if unknown:
            self._try(model, [operation.name for operation in unknown])

    def prepare(self, sources, batch_size, num_slots):
        """Everything that does not depend on the growing ids.

        Args:
            sources: tensors in the order of `self.sources`.
            batch_size: B.
            num_slots: S.

        Returns:
            The values that each step needs, a dict, and an empty cache, a tuple.
        """
        values = dict(zip(self._source_symbols, sources, strict=True))
        for node in self._once:
            node.store(values, _call(node.operation, *node.filled(values)))
        cache = tuple(self._new_cache(node, values, batch_size, num_slots) for node in self._cached)
        return {str(symbol): values[symbol] for symbol in self._shared}, cache

    def step(self, ids, values, cache, *, mask, real, positions, start):
        """The model on `ids` (B, T).

        Args:
            ids: (B, T) integers.
            values, cache: of `prepare`, or the cache of the step before.
            mask: (B, S), True at slots that may be looked at once they are filled.
            real: (B, T), True at ids that are not padding.
            positions: (B, T), the number of real tokens before each.
            start: the slot of the first id.

        Returns:
            The logits (B, V) at the last id, float32, and the cache.
        """
        values = {**{int(symbol): value for symbol, value in values.items()}, self._target: ids}
        slots = {"start": start, "num_keys": ops.shape(mask)[1]}
        cache, last = list(cache), {}
        for node in self._growing:
            if node in self._tail:  # after the last attention only the last token is of interest
                positions, real = positions[:, -1:], real[:, -1:]
                for symbol in node.inputs.values():
                    if symbol in self._cut:
                        last[symbol] = values[symbol][:, -1:]
            args, kwargs = node.filled({**values, **last} if node in self._tail else values)
            names = _call_arguments(node.operation)
            if node in self._cached:
                index = self._cached.index(node)
                outputs, cache[index] = self._attend(node, args, kwargs, cache[index], mask, positions, start)
            else:
                if "num_keys" in names:
                    if self._depends(node.numbers_of("key", 1)) or len(node.inputs) == 1:
                        args, kwargs = args[:1], {**kwargs, "key": None, **slots}
                    else:
                        kwargs = {**kwargs, "start": start}
                elif "positions" in names and not kwargs.get("reverse"):
                    # Not the mask that an embedding makes of ids: a padding id that is written is a token like others.
                    given = {"mask": real} if "mask" in names else {}
                    if model_checks.adds_positions(node.operation):
                        given["positions"] = positions
                    kwargs = {**kwargs, **given}
                outputs = self._tied(node, args, kwargs)
                outputs = _call(node.operation, args, kwargs) if outputs is None else outputs
            node.store(values, outputs)
        return ops.cast(values[self._output][:, -1], "float32"), tuple(cache)

    @staticmethod
    def _tied(node, args, kwargs):
        """Logits by the token table, where TensorFlow without XLA would transpose it in every step; else None."""
        operation = node.operation
        tied = isinstance(operation, TokenEmbedding) and kwargs.get("reverse")
        if not tied or operation.tokens.quantization_mode or not without_xla():
            return None
        table = ops.cast(operation.tokens.embeddings, operation.compute_dtype)  # (V, D)
        rows = ops.reshape(ops.cast(args[0], table.dtype), (-1, table.shape[1]))
        logits = tf.transpose(tf.matmul(table, rows, transpose_b=True))  # for many rows faster than to turn the table
        return ops.reshape(logits, (-1, ops.shape(args[0])[1], table.shape[0]))

    def full_logits(self, rows):
        """The logits (B, T, V) of the whole model; `rows` are the ids of `sources`, in their order, and of `target`."""
        by_name = dict(zip([*self.sources, self.target], rows, strict=True))
        inputs = [by_name[name] for name in self.inputs]
        return self._model(keras.tree.pack_sequence_as(self._model.input, inputs), training=False)

    def _attend(self, node, args, kwargs, cache, mask, positions, start):
        kwargs = {**kwargs, "cache": cache, "return_attention_scores": False, "training": False}
        if isinstance(cache, caches.Memory):
            outputs = node.operation(args[0], None, **{k: v for k, v in kwargs.items() if k not in ("value", "key")})
        elif isinstance(cache, caches.KeyValue):
            kwargs = {k: v for k, v in kwargs.items() if k not in ("query_mask", "key_mask")}
            outputs = node.operation(
                *args[:3], **{**kwargs, "value_mask": mask, "positions": positions, "start": start}
            )
        else:
            kwargs = {**kwargs, "memory": None, "mask": mask, "positions": positions, "start": start}
            outputs = node.operation(args[0], **kwargs)
        return outputs[0], outputs[-1]

    def _new_cache(self, node, values, batch_size, num_slots):
        args, kwargs = node.filled(values)
        if not isinstance(node.operation, MultiHeadAttention):
            memory = kwargs.get("memory", args[1] if len(args) > 1 else None)
            return node.operation.new_cache(batch_size, num_slots, memory)
        if self._depends(node.numbers_of("value", 1)):
            return node.operation.new_cache(batch_size, num_slots)
        key = kwargs.get("key", args[2] if len(args) > 2 else None)
        return node.operation.new_memory(kwargs.get("value", args[1] if len(args) > 1 else None), key)

    def _embedding_of(self, symbol):
        """The layer that looks these ids up."""
        layers = [node.operation for node in self._nodes if symbol in node.inputs.values()]
        return next((layer for layer in layers if isinstance(layer, (TokenEmbedding, keras.layers.Embedding))), None)

    def _keep_needed(self):
        needed, kept = {self._output}, []
        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs.values())
                kept.append(node)
        self._nodes = kept[::-1]

    def _find_target(self, inputs):
        """The input that the first causal layer's queries come from."""
        sources = {symbol: {name} for symbol, name in zip(inputs, self.inputs, strict=True)}
        for node in self._nodes:
            found = set().union(*[sources[symbol] for symbol in node.inputs.values()], set())
            sources.update({symbol: found for symbol in node.outputs})
            if isinstance(node.operation, (Decoder, DecoderLayer)) or node.kwargs.get("use_causal_mask"):
                names = set().union(*[sources[symbol] for symbol in node.numbers_of("query", 0)])
                if len(names) == 1:
                    return names.pop()
        if len(self.inputs) == 1:
            return self.inputs[0]
        raise ValueError(
            "`target` must be given: no causal layer says which input grows. Received: target=None for a model with "
            f"the inputs {self.inputs}"
        )

    def _depends(self, symbols):
        return any(symbol in self._dependent for symbol in symbols)

    def _split(self):
        self._dependent, self._once, self._growing, self._cached = {self._target}, [], [], []
        for node in self._nodes:
            if not self._depends(node.inputs.values()):
                self._once.append(node)
                continue
            self._dependent.update(node.outputs)
            self._growing.append(node)
            if isinstance(node.operation, ATTENTION):
                self._check_causal(node)
                self._cached.append(node)
            elif any(isinstance(layer, (*MIXING, *ATTENTION)) for layer in layers_of(node.operation)):
                raise ValueError(
                    "A model that writes may look at other tokens only in `Decoder`, `DecoderLayer` and causal "
                    f"`MultiHeadAttention` of keras_tx. Received: layer '{node.operation.name}' of type "
                    f"{type(node.operation).__name__}"
                )
        if not self._cached:
            raise ValueError("`model` must have a causal layer over the growing ids. Received: a model without one")
        last = self._growing.index(self._cached[-1])
        self._tail = self._growing[last + 1 :]
        self._cut = {self._target, *[symbol for node in self._growing[: last + 1] for symbol in node.outputs]}
        needed = {symbol for node in self._growing for symbol in node.inputs.values()} - self._dependent
        memories = {symbol for node in self._cached for symbol in self._memory_of(node)}
        others = {symbol for node in self._growing for symbol in self._not_memory_of(node)}
        self._shared = sorted((needed - memories) | (needed & others))

    def _memory_of(self, node):
        if isinstance(node.operation, MultiHeadAttention):
            return [*node.numbers_of("value", 1), *node.numbers_of("key", 2)]
        return node.numbers_of("memory", 1)

    def _not_memory_of(self, node):
        memory = self._memory_of(node) if node in self._cached else []
        return [symbol for symbol in node.inputs.values() if symbol not in memory]

    def _check_causal(self, node):
        layer = node.operation
        if node.kwargs.get("attention_mask") is not None:
            raise ValueError(
                f"Layer '{layer.name}' gets an `attention_mask`, which does not grow with the ids. Received: "
                "attention_mask"
            )
        if not isinstance(layer, MultiHeadAttention):
            if self._depends(node.numbers_of("memory", 1)):
                raise ValueError(
                    f"The memory of layer '{layer.name}' must not depend on `target`. Received: target={self.target}"
                )
            return
        causal, own = node.kwargs.get("use_causal_mask"), self._depends(node.numbers_of("value", 1))
        if own and not causal:
            raise ValueError(
                f"Self-attention of a model that writes needs `use_causal_mask=True`. Received: layer '{layer.name}' "
                "without it"
            )
        if not own and (causal or layer.rotary or layer.sliding_window):
            raise ValueError(
                "Cross-attention of a model that writes must not depend on the places of its queries. Received: layer "
                f"'{layer.name}' with use_causal_mask={causal}, rotary={layer.rotary}, "
                f"sliding_window={layer.sliding_window}"
            )

    def _check_masks(self):
        """In a step a mask is that of the padding, whatever the layer was given."""
        made = {symbol: node for node in self._nodes for symbol in node.outputs}
        for node in self._cached:
            for name in MASKS:
                symbols = node.numbers_of(name, len(node.args))
                for source in [made[symbol] for symbol in symbols if symbol in made]:
                    hidden = model_checks.compared_with(source)
                    if hidden is not None and self._target in source.inputs.values() and not self._pads(hidden):
                        raise ValueError(
                            f"The `{name}` of layer '{node.operation.name}' must be that of the padding, in a model "
                            f"that writes. Received: a mask of the id {hidden}, padding_id="
                            f"{self.padding_ids[self.target]}"
                        )

    def _pads(self, token):
        return self.padding_ids[self.target] is not None and token == self.padding_ids[self.target]

    def _try(self, model, unknown):
        """Raises unless a few tokens give in steps what they give as a whole."""
        rows = {}
        for name, symbol in zip(self.inputs, model.inputs, strict=True):
            size, padding_id = self.vocabulary_sizes[name] or self.vocabulary_size, self.padding_ids[name]
            known = [token for token in range(min(size, 50)) if token != padding_id]
            length = symbol.shape[1] or min(5, self.max_length or 5, self.max_source_length or 5)
            rows[name] = ops.convert_to_tensor([[known[3 * i % len(known)] for i in range(length)]], dtype="int32")
        whole = self.full_logits([rows[name] for name in [*self.sources, self.target]])
        whole = ops.convert_to_numpy(ops.cast(whole, "float32"))
        ids, half = rows[self.target], (rows[self.target].shape[1] + 1) // 2
        real = ops.ones_like(ids, dtype="bool")
        values, cache = self.prepare([rows[name] for name in self.sources], 1, ids.shape[1])
        for start, end in ((0, half), *[(i, i + 1) for i in range(half, ids.shape[1])]):
            positions = ops.arange(start, end, dtype="int32")[None]
            step = {"mask": real, "real": real[:, start:end], "positions": positions, "start": start}
            logits, cache = self.step(ids[:, start:end], values, cache, **step)
        error = np.abs(ops.convert_to_numpy(logits) - whole[:, -1]).max()
        exact = all(getattr(node.operation, "compute_dtype", "float32") == "float32" for node in self._growing)
        if error > (1e-3 if exact else 0.1) * np.ptp(whole[:, -1]) + 1e-6:
            raise ValueError(
                "A model that writes must look at other tokens, and at the place of a token, only in layers of "
                f"keras_tx. Received: a model whose steps differ from the whole by {error:.1e}; one of these is why: "
                f"{unknown}"
            )


def _call_arguments(operation):
    """The names of the call arguments of a layer; none of another operation."""
    return inspect.signature(operation.call).parameters if isinstance(operation, keras.layers.Layer) else ()


def _call(operation, args, kwargs):
    """The operation as outside of training."""
    if "training" in _call_arguments(operation):
        kwargs = {**kwargs, "training": False}
    return operation(*args, **kwargs)
