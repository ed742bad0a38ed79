from keras_tx.models.text_classifier import TextClassifier

__all__ = ["TextClassifier"]
