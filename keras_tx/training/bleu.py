"""A callback that computes BLEU of a model's translations at the end of epochs."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_tx import checks
from keras_tx.optional import Lazy

sacrebleu = Lazy("sacrebleu.metrics", extra="metrics")


class Bleu(keras.callbacks.Callback):
    """A callback that translates sentences at the end of epochs and logs the corpus BLEU score (0 to 100).

    The callbacks of `fit` share one dict of logs and run in the order of the list: put this one before callbacks that
    use its score, such as `EarlyStopping("val_bleu", mode="max")`, `ModelCheckpoint`, `TensorBoard`, `CSVLogger` and
    `Resume`. The history of `fit` contains it in any order.

    The score is computed by sacrebleu. If you report it, add its signature, which is printed with it.

    Args:
        sources: strings to translate.
        references: the translation of each source, a list of strings.
        translate: a function from a list of strings to their translations. By default `model.generate`, which is given
            `tokenizer`, `max_new_tokens` and `generate_options`.
        tokenizer: the model's tokenizer, for `model.generate`.
        max_new_tokens: the largest number of tokens of a translation, for `model.generate`.
        generate_options: a dict of further arguments of `model.generate`, such as `{"strategy": Beam(4)}`.
        batch_size: the number of sentences translated at a time.
        every: the number of epochs from one translation to the next; other epochs have no score in their logs.
            `CSVLogger` takes its columns from the first epoch, so it then omits the score.
        tokenize: sacrebleu's tokenizer: "13a", "none", "zh", "char", ...; None is sacrebleu's default, "13a".
        lowercase: whether to ignore case in the comparison.
        samples: the number of sources that are printed with their translation and reference.
        name: the key of the score in the logs.
        verbose: 1 or 2 prints progress, score, signature and samples; 0 prints nothing.

    Raises:
        ValueError: for an empty list of sources, lists of different lengths, `return_scores` in `generate_options`, or
            a `translate` that returns a different number of translations than of sources.
        TypeError: for sources, references or translations that are not lists of strings; for a `name` that is not a
            string; and at the start of `fit`, if there is no `translate` and the model has no method `generate`.
        ImportError: if sacrebleu is not installed.

    Reference:
        Papineni et al. 2002, doi:10.3115/1073083.1073135; Post 2018, arXiv:1804.08771.

    Examples:
        A model that copies its input, where the reference is the input:

        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", run_eagerly=True)
        >>> texts = ["a small dog runs through the garden"]
        >>> bleu = keras_tx.training.Bleu(texts, texts, translate=lambda sources: sources, verbose=0)
        >>> history = model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0, callbacks=[bleu])
        >>> [round(score, 6) for score in history.history["val_bleu"]]
        [100.0]
    """

    def __init__(
        self,
        sources: Iterable[str],
        references: Iterable[str],
        *,
        translate: Callable[[list[str]], Iterable[str]] | None = None,
        tokenizer: Any = None,
        max_new_tokens: int = 128,
        generate_options: dict[str, Any] | None = None,
        batch_size: int = 32,
        every: int = 1,
        tokenize: str | None = None,
        lowercase: bool = False,
        samples: int = 3,
        name: str = "val_bleu",
        verbose: int = 1,
    ):
        super().__init__()
        self.sources = _strings("sources", sources)
        self.references = _strings("references", references)
        if not self.sources or len(self.sources) != len(self.references):
            raise ValueError(
                "`sources` and `references` must have the same length, at least 1. Received: "
                f"{len(self.sources)} sources, {len(self.references)} references"
            )
        if translate is not None and not callable(translate):
            raise TypeError(f"`translate` must be a function or None. Received: translate={translate!r}")
        self.translate, self.tokenizer = translate, tokenizer
        self.max_new_tokens: int = checks.positive_int("max_new_tokens", max_new_tokens)
        self.generate_options = dict(generate_options or {})
        if self.generate_options.get("return_scores"):
            raise ValueError(
                "`generate_options` must not hold `return_scores`, because only the texts are compared. Received: "
                f"generate_options={generate_options}"
            )
        self.batch_size = checks.positive_int("batch_size", batch_size)
        self.every = checks.positive_int("every", every)
        self.samples = checks.count("samples", samples)
        if not isinstance(name, str):
            raise TypeError(f"`name` must be a string. Received: name={name!r}")
        self.name: str = name
        self.verbose = min(int(checks.one_of("verbose", verbose, (0, 1, 2))), 1)
        checks.one_of("tokenize", tokenize, (None, *sorted(sacrebleu.BLEU.TOKENIZERS)))
        self.metric: Any = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.translate is None and not callable(getattr(self.model, "generate", None)):
            raise TypeError(
                "`translate` must be given for a model without a method `generate`. Received: "
                f"model={type(self.model).__name__}"
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
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

    def _translations(self) -> list[str]:
        """The translations of all sources."""
        bar = keras.utils.Progbar(len(self.sources), unit_name="sentence", verbose=self.verbose)
        hypotheses: list[str] = []
        for start in range(0, len(self.sources), self.batch_size):
            batch = self.sources[start : start + self.batch_size]
            translations = self._translate(batch)
            if len(translations) != len(batch):
                raise ValueError(
                    f"There must be one translation for each source. Received: {len(translations)} for {len(batch)} "
                    "sources"
                )
            hypotheses += translations
            bar.update(len(hypotheses))
        return hypotheses

    def _translate(self, batch: list[str]) -> list[str]:
        if self.translate is not None:
            return _strings("the translations", self.translate(list(batch)))
        options = {"tokenizer": self.tokenizer, "max_new_tokens": self.max_new_tokens, **self.generate_options}
        return _strings("the translations", self.model.generate(list(batch), **options))


def _strings(name: str, value: Any) -> list[str]:
    """`value` as a list of strings."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"`{name}` must be a list of strings. Received: {value!r}")
    texts: list[Any] = list(value)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must be a list of strings. Received: {text!r} among them")
    return texts
