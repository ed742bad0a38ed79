"""BLEU of a model's translations at the end of epochs."""

import keras

from keras_tx import checks
from keras_tx.optional import Lazy

sacrebleu = Lazy("sacrebleu.metrics", extra="metrics")


class Bleu(keras.callbacks.Callback):
    """Translates a list of sentences at the end of epochs and puts the corpus BLEU (0 to 100) into the logs.

    The callbacks of a `fit` are given one and the same dict of logs, each in its turn: put this one before those that
    are to see its score, such as `EarlyStopping("val_bleu", mode="max")`, `ModelCheckpoint`, `TensorBoard`,
    `CSVLogger` and `Resume`. The history of `fit` has it wherever it stands.

    Scores are sacrebleu's; report one with its signature, which `verbose` prints beside it. Papineni et al. 2002,
    doi:10.3115/1073083.1073135; Post 2018, arXiv:1804.08771.

    Args:
        sources: strings to translate.
        references: as many strings, the translation of each.
        translate: a function from a list of strings to a list of as many. By default `model.generate`, which is given
            `tokenizer`, `max_new_tokens` and `generate_options`.
        tokenizer: of the model, for `model.generate`.
        max_new_tokens: the most tokens of a translation, for `model.generate`.
        generate_options: a dict of more arguments of `model.generate`, such as `{"strategy": Beam(4)}`.
        batch_size: sentences translated at a time.
        every: translate at the end of every so many epochs; in other epochs the score is not in the logs.
        tokenize: sacrebleu's tokenizer: "13a", "none", "zh", "char", ...; None is sacrebleu's default, "13a".
        lowercase: compare without regard to case.
        samples: how many triples of source, hypothesis and reference are printed.
        name: of the score in the logs.
        verbose: 0 prints nothing; otherwise progress, score, signature and samples.

    Raises:
        ValueError: for no sources, lists of unequal length, or another number of translations than of sources.
        TypeError: for what are not lists of strings; at the start of `fit`, where there is neither `translate` nor a
            `generate` of the model.
        ImportError: when sacrebleu is not installed.
    """

    def __init__(
        self,
        sources,
        references,
        *,
        translate=None,
        tokenizer=None,
        max_new_tokens=128,
        generate_options=None,
        batch_size=32,
        every=1,
        tokenize=None,
        lowercase=False,
        samples=3,
        name="val_bleu",
        verbose=1,
    ):
        super().__init__()
        self.sources = _strings("sources", sources)
        self.references = _strings("references", references)
        if not self.sources or len(self.sources) != len(self.references):
            raise ValueError(
                "`sources` and `references` must be of one length, at least 1. Received: "
                f"{len(self.sources)} sources, {len(self.references)} references"
            )
        if translate is not None and not callable(translate):
            raise TypeError(f"`translate` must be a function or None. Received: translate={translate!r}")
        self.translate = translate
        self.tokenizer = tokenizer
        self.max_new_tokens = checks.positive_int("max_new_tokens", max_new_tokens)
        self.generate_options = dict(generate_options or {})
        self.batch_size = checks.positive_int("batch_size", batch_size)
        self.every = checks.positive_int("every", every)
        if not isinstance(samples, int) or samples < 0:
            raise ValueError(f"`samples` must be an integer of 0 or more. Received: samples={samples!r}")
        self.samples = samples
        self.name = name
        self.verbose = verbose
        checks.one_of("tokenize", tokenize, (None, *sorted(sacrebleu.BLEU.TOKENIZERS)))
        self.metric = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)

    def on_train_begin(self, logs=None):
        if self.translate is None and not callable(getattr(self.model, "generate", None)):
            raise TypeError(
                "`translate` must be given for a model without a method `generate`. Received: "
                f"model={type(self.model).__name__}"
            )

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every:
            return
        hypotheses = self._translations()
        score = self.metric.corpus_score(hypotheses, [self.references])
        if logs is not None:
            logs[self.name] = score.score
        if self.verbose:
            print(f"{self.name}: {score.score:.2f} ({self.metric.get_signature()})")
            for triple in list(zip(self.sources, hypotheses, self.references, strict=True))[: self.samples]:
                for label, text in zip(("source", "hypothesis", "reference"), triple, strict=True):
                    print(f"  {label + ':':<12}{text}")

    def _translations(self):
        """The hypotheses, one for each source."""
        bar = keras.utils.Progbar(len(self.sources), unit_name="sentence", verbose=int(bool(self.verbose)))
        hypotheses = []
        for start in range(0, len(self.sources), self.batch_size):
            batch = self.sources[start : start + self.batch_size]
            found = self._translate(batch)
            if len(found) != len(batch):
                raise ValueError(
                    f"There must be one translation for each source. Received: {len(found)} for {len(batch)} sources"
                )
            hypotheses += found
            bar.update(len(hypotheses))
        return hypotheses

    def _translate(self, batch):
        if self.translate is not None:
            return _strings("the translations", self.translate(list(batch)))
        options = {"tokenizer": self.tokenizer, "max_new_tokens": self.max_new_tokens, **self.generate_options}
        return _strings("the translations", self.model.generate(list(batch), **options))


def _strings(name, value):
    """`value` as a list of strings."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"`{name}` must be a list of strings. Received: {value!r}")
    value = list(value)
    for text in value:
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must be a list of strings. Received: {text!r} among them")
    return value
