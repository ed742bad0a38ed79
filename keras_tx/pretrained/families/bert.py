"""BERT, and the base class of the encoders derived from it. Devlin et al. 2018, arXiv:1810.04805."""

from collections.abc import Iterator
from typing import Any

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import Encoder, LearnedPositionalEncoding, TokenEmbedding
from keras_tx.layers.projection import Projection
from keras_tx.pretrained import table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family, PaddingMask, Positions, attention_sizes, split
from keras_tx.pretrained.heads import ClassHead, TokenHead, answer_spans
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

# {name in a checkpoint: path inside an `EncoderLayer`}
LAYER = {
    "attention.self.query": "self_attention.query_dense",
    "attention.self.key": "self_attention.key_dense",
    "attention.self.value": "self_attention.value_dense",
    "attention.output.dense": "self_attention.output_dense",
    "attention.output.LayerNorm": "self_attention_norm",
    "intermediate.dense": "feed_forward.intermediate_dense",
    "output.dense": "feed_forward.output_dense",
    "output.LayerNorm": "feed_forward_norm",
}


class PostNormEncoder(Family):
    """An encoder like BERT: embeddings with norm and dropout, post-norm layers, an optional pooler, and a head.

    Subclasses define the keys of config.json (`sizes`), the names of the layers in a checkpoint (`layers`, `layer`),
    and heads that differ from BERT's.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    embedding_key = "embeddings.word_embeddings.weight"
    ignored = {
        r".*\.position_ids": "a buffer of the numbers 0, 1, 2, ...",
        r".*\.token_type_ids": "a buffer of zeros",
    }
    layers, layer = "encoder.layer", LAYER
    sizes = {
        "hidden_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "intermediate_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }
    pooled_tasks: tuple[str, ...] = ()  # the tasks that use the pooler, besides "base"
    is_causal = False
    counts_padding = True  # whether positions count the padding tokens

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        config.refuse("position_embedding_type", "absolute")
        for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
            config.refuse(key, False)
        sizes = self.sizes
        self.hidden_dim, num_heads = attention_sizes(config, sizes["hidden_dim"], sizes["num_heads"])
        self.activation = config.activation(sizes["activation"], default="gelu")
        self.dropout = config.rate(sizes["dropout"], default=0.1)
        self.epsilon = self._epsilon()
        self.num_positions = config.size("max_position_embeddings")
        self.padding_id = None if self.counts_padding else self._padding_id()
        self.padding_mask = PaddingMask(name="padding_mask")
        self.positions = Positions(self.padding_id, name="positions")
        self.embedding = TokenEmbedding(
            config.size("vocab_size"),
            self.hidden_dim,
            padding_id=None,
            embedding_dim=self._embedding_dim(),
            position_encoding=LearnedPositionalEncoding(self.num_positions, dtype=dtype, name="positions"),
            num_segments=self._num_segments(),
            normalization="layer_norm",
            layer_norm_epsilon=self.epsilon,
            dropout=self.dropout,
            dtype=dtype,
            name="embedding",
        )
        self.encoder = Encoder(
            config.number(sizes["num_layers"]),
            config.size(sizes["intermediate_dim"]),
            num_heads,
            dropout=self.dropout,
            attention_dropout=config.rate(sizes["attention_dropout"], default=0.1),
            activation=self.activation,
            layer_norm_epsilon=self.epsilon,
            dtype=dtype,
            name="encoder",
        )
        self.pooler: Any = None
        if task in self.pooled_tasks or (task == "base" and "pooler" in {*self.parts} - {*config.absent}):
            self.pooler = Projection(self.hidden_dim, activation="tanh", dtype=dtype, name="pooler")
        self.head = self._head()

    def _padding_id(self) -> int:
        """The id that positions do not count. Positions start after it, so it is also one of them."""
        value = self.config.token("pad_token_id", default=1)
        if not 0 <= value < self.num_positions - 1:
            raise ValueError(
                "`pad_token_id` in config.json must be a position before the last one. Received: "
                f"pad_token_id={value}, max_position_embeddings={self.num_positions}"
            )
        return int(value)

    def _epsilon(self) -> float:
        return self.config.positive("layer_norm_eps", default=1e-12)

    def _num_segments(self) -> int:
        return int(self.config.size("type_vocab_size", default=2))

    def _embedding_dim(self) -> int | None:
        """The width of the embedding tables, if it differs from D."""
        return None

    def _head(self) -> Any:
        """The head of the task, or None."""
        if self.task in ("masked_lm", "pretraining"):
            return self._token_head(self.activation)
        if self.task in ("sequence_classification", "token_classification"):
            return ClassHead(self.config.num_labels, dropout=self._classifier_dropout(), dtype=self.dtype)
        return ClassHead(2, dtype=self.dtype) if self.task == "question_answering" else None

    def _token_head(self, activation: Any) -> TokenHead:
        return TokenHead(self.embedding, activation, self.epsilon, tied=self.tied, dtype=self.dtype)

    def _sentence_head(self, activation: Any) -> ClassHead:
        """A head that classifies the first vector, with a dense layer of its own."""
        options = {"hidden_dim": self.hidden_dim, "activation": activation, "dropout": self._classifier_dropout()}
        return ClassHead(self.config.num_labels, **options, dtype=self.dtype)

    def _classifier_dropout(self) -> float:
        return self.config.rate("classifier_dropout", default=self.dropout)

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        ids = inputs["input_ids"]
        mask = self.padding_mask(ids, inputs["attention_mask"])
        positions = self.positions(ids, inputs["position_ids"])
        segments = {"segment_ids": inputs["token_type_ids"]} if "token_type_ids" in inputs else {}
        embedded = self.embedding(ids, mask=mask, positions=positions, **segments)
        hidden = self.encoder(embedded, mask=mask, return_hidden_states=hidden_states)
        hidden, beside = (hidden[0], {"hidden_states": split(hidden[1])}) if hidden_states else (hidden, {})
        return {**self._task_outputs(hidden), **beside}

    def limit_positions(self) -> None:
        if self.padding_id is not None:  # positions begin behind it
            self.embedding.positions.max_length = self.num_positions - self.padding_id - 1

    def _task_outputs(self, hidden: Tensor) -> dict[str, Tensor]:
        pooled = None if self.pooler is None else self.pooler(hidden[:, 0])
        if self.task == "base":
            return {"last_hidden_state": hidden, **({} if pooled is None else {"pooler_output": pooled})}
        if self.task == "question_answering":
            return answer_spans(self.head(hidden))
        if self.task == "sequence_classification":
            hidden = hidden[:, 0] if pooled is None else pooled
        return {"logits": self.head(hidden)}

    def rows(self) -> Iterator[Row]:
        embeddings, embedding = f"{self.prefix}embeddings", self.embedding
        yield table.Row(f"{self.prefix}{self.embedding_key}", embeddings_of(embedding.tokens))
        yield table.Row(f"{embeddings}.position_embeddings.weight", embedding.positions.embeddings)
        if embedding.num_segments:
            yield table.Row(f"{embeddings}.token_type_embeddings.weight", embedding.segments)
        yield from table.norm(f"{embeddings}.LayerNorm", embedding.norm)
        if embedding.embedding_dim is not None:
            yield from table.linear(f"{embeddings}_project", embedding.projection)
        for index, layer in enumerate(self.encoder.layers):
            yield from table.by_path(f"{self.prefix}{self.layers}.{index}", self.layer, layer)
        if self.pooler is not None:
            yield from table.linear(f"{self.prefix}pooler.dense", self.pooler)
        yield from self._head_rows()

    def _head_rows(self) -> Iterator[Row]:
        if self.task == "question_answering":
            yield from self.head.rows("qa_outputs")
        elif self.head is not None:
            yield from self.head.rows("classifier")


class Bert(PostNormEncoder):
    """Further tasks are "next_sentence_prediction", and "pretraining": masked tokens and next sentence."""

    model_types = ("bert",)
    tasks = {
        "base": "BertModel",
        "pretraining": "BertForPreTraining",
        "masked_lm": "BertForMaskedLM",
        "next_sentence_prediction": "BertForNextSentencePrediction",
        "sequence_classification": "BertForSequenceClassification",
        "token_classification": "BertForTokenClassification",
        "question_answering": "BertForQuestionAnswering",
    }
    prefix = "bert."
    head_key = "cls.predictions.decoder.weight"
    copies = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    parts = {"pooler": "pooler.dense.weight"}
    pooled_tasks = ("pretraining", "next_sentence_prediction", "sequence_classification")
    heads = (
        r"bert\.pooler\.dense\.(weight|bias)",
        r"cls\.predictions\.(bias|decoder\.(weight|bias)|transform\.(dense|LayerNorm)\.(weight|bias))",
        r"cls\.seq_relationship\.(weight|bias)",
        r"(classifier|qa_outputs)\.(weight|bias)",
    )

    def _head(self) -> Any:
        self.next_sentence: Any = None
        if self.task in ("pretraining", "next_sentence_prediction"):
            self.next_sentence = ClassHead(2, dtype=self.dtype, name="next_sentence")
        return super()._head()

    def _task_outputs(self, hidden: Tensor) -> dict[str, Tensor]:
        if self.next_sentence is None:
            return super()._task_outputs(hidden)
        follows = self.next_sentence(self.pooler(hidden[:, 0]))
        if self.task == "next_sentence_prediction":
            return {"logits": follows}
        return {"prediction_logits": self.head(hidden), "seq_relationship_logits": follows}

    def _head_rows(self) -> Iterator[Row]:
        if self.next_sentence is not None:
            yield from self.next_sentence.rows("cls.seq_relationship")
        if self.task in ("masked_lm", "pretraining"):
            start = "cls.predictions"
            yield from self.head.rows(
                f"{start}.transform.dense", f"{start}.transform.LayerNorm", f"{start}.decoder", f"{start}.bias"
            )
        else:
            yield from super()._head_rows()


FAMILIES = (Bert,)
