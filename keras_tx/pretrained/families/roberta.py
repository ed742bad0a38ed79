"""RoBERTa, XLM-R and CamemBERT: BERT whose positions do not count padding. Liu et al. 2019, arXiv:1907.11692."""

from collections.abc import Iterator
from typing import Any

from keras_tx.pretrained.families.bert import PostNormEncoder
from keras_tx.pretrained.table import Row

_NAMES = ("Roberta", "Camembert", "XLMRoberta")


class Roberta(PostNormEncoder):
    """Positions start after the padding id; sequences are classified by their first vector, without the pooler."""

    model_types = ("roberta", "camembert", "xlm-roberta")
    tasks = {
        "base": tuple(f"{name}Model" for name in _NAMES),
        "masked_lm": tuple(f"{name}ForMaskedLM" for name in _NAMES),
        "sequence_classification": tuple(f"{name}ForSequenceClassification" for name in _NAMES),
        "token_classification": tuple(f"{name}ForTokenClassification" for name in _NAMES),
        "question_answering": tuple(f"{name}ForQuestionAnswering" for name in _NAMES),
    }
    prefix = "roberta."
    head_key = "lm_head.decoder.weight"
    copies = {"lm_head.decoder.bias": "lm_head.bias"}
    parts = {"pooler": "pooler.dense.weight"}
    heads = (
        r"roberta\.pooler\.dense\.(weight|bias)",
        r"lm_head\.(bias|(dense|layer_norm|decoder)\.(weight|bias))",
        r"classifier\.((dense|out_proj)\.)?(weight|bias)",
        r"qa_outputs\.(weight|bias)",
    )
    counts_padding = False

    def _head(self) -> Any:
        if self.task == "masked_lm":
            return self._token_head("gelu")  # whatever `hidden_act` is
        return self._sentence_head("tanh") if self.task == "sequence_classification" else super()._head()

    def _head_rows(self) -> Iterator[Row]:
        if self.task == "masked_lm":
            yield from self.head.rows("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
        elif self.task == "sequence_classification":
            yield from self.head.rows("classifier.out_proj", "classifier.dense")
        else:
            yield from super()._head_rows()


FAMILIES = (Roberta,)
