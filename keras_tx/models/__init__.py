from keras_tx.models.causal_lm import CausalLM
from keras_tx.models.masked_lm import MaskedLM
from keras_tx.models.seq2seq import Seq2Seq
from keras_tx.models.text_classifier import TextClassifier

__all__ = ["CausalLM", "MaskedLM", "Seq2Seq", "TextClassifier"]
