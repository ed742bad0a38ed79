"""DistilBERT: BERT without segments and pooler, with other names. Sanh et al. 2019, arXiv:1910.01108."""

from collections.abc import Iterator
from typing import Any

from keras_tx.pretrained.families.bert import PostNormEncoder
from keras_tx.pretrained.heads import ClassHead
from keras_tx.pretrained.table import Row


class DistilBert(PostNormEncoder):
    """In training, dropout also applies to the output of attention; in Hugging Face's model only to the scores."""

    model_types = ("distilbert",)
    tasks = {
        "base": "DistilBertModel",
        "masked_lm": "DistilBertForMaskedLM",
        "sequence_classification": "DistilBertForSequenceClassification",
        "token_classification": "DistilBertForTokenClassification",
        "question_answering": "DistilBertForQuestionAnswering",
    }
    inputs = ("input_ids", "attention_mask", "position_ids")
    prefix = "distilbert."
    head_key = "vocab_projector.weight"
    heads = (
        r"vocab_(transform|layer_norm|projector)\.(weight|bias)",
        r"(pre_classifier|classifier|qa_outputs)\.(weight|bias)",
    )
    layers = "transformer.layer"
    layer = {
        "attention.q_lin": "self_attention.query_dense",
        "attention.k_lin": "self_attention.key_dense",
        "attention.v_lin": "self_attention.value_dense",
        "attention.out_lin": "self_attention.output_dense",
        "sa_layer_norm": "self_attention_norm",
        "ffn.lin1": "feed_forward.intermediate_dense",
        "ffn.lin2": "feed_forward.output_dense",
        "output_layer_norm": "feed_forward_norm",
    }
    sizes = {
        "hidden_dim": "dim",
        "num_heads": "n_heads",
        "num_layers": "n_layers",
        "intermediate_dim": "hidden_dim",
        "activation": "activation",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    }

    def _epsilon(self) -> float:
        return 1e-12  # config.json has none

    def _num_segments(self) -> int:
        return 0

    def _classifier_dropout(self) -> float:
        return float(self.dropout)

    def _head(self) -> Any:
        config, options = self.config, {"dtype": self.dtype}
        if self.task == "sequence_classification":
            dropout = config.rate("seq_classif_dropout", default=0.2)
            options |= {"hidden_dim": self.hidden_dim, "activation": "relu", "first_dropout": 0.0}
            return ClassHead(config.num_labels, dropout=dropout, **options)
        if self.task == "question_answering":
            return ClassHead(2, dropout=config.rate("qa_dropout", default=0.1), **options)
        return super()._head()

    def _head_rows(self) -> Iterator[Row]:
        if self.task == "masked_lm":
            yield from self.head.rows("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
        elif self.task == "sequence_classification":
            yield from self.head.rows("classifier", "pre_classifier")
        else:
            yield from super()._head_rows()


FAMILIES = (DistilBert,)
