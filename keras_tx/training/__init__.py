from keras_tx.training.bleu import Bleu
from keras_tx.training.losses import PaddedCrossentropy
from keras_tx.training.metrics import PaddedAccuracy, Perplexity
from keras_tx.training.muon import Muon
from keras_tx.training.resume import Resume
from keras_tx.training.schedules import NoamSchedule

__all__ = ["Bleu", "Muon", "NoamSchedule", "PaddedAccuracy", "PaddedCrossentropy", "Perplexity", "Resume"]
