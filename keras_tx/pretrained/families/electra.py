"""ELECTRA: BERT whose embedding tables may be narrower than its layers. Clark et al. 2020, arXiv:2003.10555."""

from collections.abc import Iterator
from typing import Any

from keras_tx.pretrained.families.bert import PostNormEncoder
from keras_tx.pretrained.heads import ClassHead
from keras_tx.pretrained.table import Row
from keras_tx.types import Tensor


class Electra(PostNormEncoder):
    """The task "pretraining" predicts for each token whether it was replaced, (B, T); "masked_lm" is the generator."""

    model_types = ("electra",)
    tasks = {
        "base": "ElectraModel",
        "pretraining": "ElectraForPreTraining",
        "masked_lm": "ElectraForMaskedLM",
        "sequence_classification": "ElectraForSequenceClassification",
        "token_classification": "ElectraForTokenClassification",
        "question_answering": "ElectraForQuestionAnswering",
    }
    prefix = "electra."
    head_key = "generator_lm_head.weight"
    heads = (
        r"discriminator_predictions\.(dense|dense_prediction)\.(weight|bias)",
        r"generator_predictions\.(dense|LayerNorm)\.(weight|bias)",
        r"generator_lm_head\.(weight|bias)",
        r"classifier\.((dense|out_proj)\.)?(weight|bias)",
        r"qa_outputs\.(weight|bias)",
    )

    def _embedding_dim(self) -> int | None:
        width = self.config.size("embedding_size", default=128)
        return None if width == self.hidden_dim else width

    def _head(self) -> Any:
        if self.task == "masked_lm":
            return self._token_head("gelu")  # whatever `hidden_act` is
        if self.task == "pretraining":
            return ClassHead(1, hidden_dim=self.hidden_dim, activation=self.activation, dtype=self.dtype)
        return self._sentence_head("gelu") if self.task == "sequence_classification" else super()._head()

    def _task_outputs(self, hidden: Tensor) -> dict[str, Tensor]:
        if self.task == "pretraining":
            return {"logits": self.head(hidden)[:, :, 0]}
        return super()._task_outputs(hidden)

    def _head_rows(self) -> Iterator[Row]:
        if self.task == "masked_lm":
            start = "generator_predictions"
            yield from self.head.rows(
                f"{start}.dense", f"{start}.LayerNorm", "generator_lm_head", "generator_lm_head.bias"
            )
        elif self.task == "pretraining":
            start = "discriminator_predictions"
            yield from self.head.rows(f"{start}.dense_prediction", f"{start}.dense")
        elif self.task == "sequence_classification":
            yield from self.head.rows("classifier.out_proj", "classifier.dense")
        else:
            yield from super()._head_rows()


FAMILIES = (Electra,)
