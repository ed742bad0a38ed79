"""Builds a `tokenizers.Tokenizer`, whose JSON is the definition, from files of BPE and SentencePiece tokenizers.

A tokenizer.json is used as it is. (transformers 5 rebuilds some classes from it: Llama 2's puts a space before the
first text only, whatever the file says.) From the older files, vocab.json with merges.txt or a SentencePiece model, the
tokenizer is built as transformers 5 builds it. One exception: without `add_bos_token` in tokenizer_config.json, Llama's
begins texts with its start token, as the model was trained, and transformers 5 does not. Sennrich et al. 2016,
arXiv:1508.07909; Kudo 2018, arXiv:1804.10959.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.text.files import Settings, read_json, read_vocabulary_json, tokens_in_order
from keras_tx.text.sentencepiece_model import SPACE, merges_of, read_model

tokenizers = Lazy("tokenizers", extra="text")

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Model types of config.json and classes of transformers -> how their older files are read.
BYTE_PAIR = {"gpt2": "GPT2", "GPT2": "GPT2", "qwen2": "Qwen2", "qwen3": "Qwen2", "Qwen2": "Qwen2"}
BYTE_PAIR |= {"roberta": "Roberta", "bart": "Roberta", "Roberta": "Roberta", "Bart": "Roberta"}
SENTENCEPIECE = {
    "t5": "T5",
    "mt5": "T5",
    "T5": "T5",
    "MT5": "T5",
    "llama": "Llama",
    "mistral": "Llama",
    "Llama": "Llama",
}
SENTENCEPIECE |= {
    "xlm-roberta": "XLMRoberta",
    "XLMRoberta": "XLMRoberta",
    "camembert": "Camembert",
    "Camembert": "Camembert",
}
MODEL_FILES = {"T5": "spiece.model", "Llama": "tokenizer.model"}  # all others have sentencepiece.bpe.model

_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>"}
_ROBERTA |= {"pad_token": "<pad>", "mask_token": "<mask>"}
_ENDS = {"sep_token": "sep", "cls_token": "cls"}  # role -> its name in RoBERTa's post-processor
_END = "<|endoftext|>"
DEFAULTS = {  # the default tokens of a class in transformers
    "GPT2": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "Qwen2": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "T5": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "Llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}


def parse_tokenizer_json(text: str, place: Any) -> Any:
    """Builds a `tokenizers.Tokenizer` from the content of a tokenizer.json.

    Raises:
        ValueError: the content is malformed; the error names `place`.
    """
    return _build(lambda: tokenizers.Tokenizer.from_str(text), place)


def read_tokenizer_json(folder: Path, settings: Settings) -> Any:
    """Reads tokenizer.json and adds the tokens that are only in the settings."""
    path = folder / "tokenizer.json"
    data, space = read_json(path), settings.config.get("add_prefix_space")
    added, before = data.get("added_tokens"), data.get("pre_tokenizer")
    content = path.read_text(encoding="utf-8")
    if isinstance(space, bool) and isinstance(before, dict) and before.get("type") == "ByteLevel":
        before["add_prefix_space"] = space  # tokenizer_config.json decides, as in transformers
        content = json.dumps(data, ensure_ascii=False)
    tokenizer = parse_tokenizer_json(content, path)
    for token in added or []:
        if (i := tokenizer.token_to_id(token["content"])) != token["id"]:  # `tokenizers` numbers them itself
            raise ValueError(
                "`directory` must number its tokens without gaps. "
                f"Received: {token['content']!r:.200} with id {token['id']}, which would be {i}, in {path}"
            )
    kind = (BYTE_PAIR | SENTENCEPIECE).get(settings.kind)
    _name_defaults(tokenizer, settings, kind)
    _add_tokens(tokenizer, settings, folder)
    ends = data.get("post_processor")
    if kind == "Roberta" and isinstance(ends, dict) and ends.get("type") == "RobertaProcessing":
        given = [settings.tokens.get(role, ends[end][0]) for role, end in _ENDS.items()]
        if given != [ends[end][0] for end in _ENDS.values()]:
            _put_around_texts(tokenizer, *given)  # tokenizer_config.json decides, as in transformers
    last, put = settings.tokens.get("eos_token"), ends.get("special_tokens") if isinstance(ends, dict) else None
    if kind == "T5" and put and last is not None and last not in put:
        raise ValueError(
            "`directory` must end texts with the same token in tokenizer.json and tokenizer_config.json. Received: "
            f"{list(put)!r:.200} and {last!r:.200} in {folder}"
        )
    return tokenizer


def read_merges_files(folder: Path, settings: Settings) -> Any:
    """Reads vocab.json and merges.txt.

    Raises:
        ValueError: a file is malformed, or the directory does not name the model type.
    """
    kind = _kind(settings, BYTE_PAIR, folder, "vocab.json and merges.txt")
    vocabulary, config = read_vocabulary_json(folder / "vocab.json"), settings.config
    merges = _read_merges(folder / "merges.txt")
    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    model = _build(lambda: tokenizers.models.BPE(vocabulary, merges, **affixes), folder / "merges.txt")
    tokenizer = tokenizers.Tokenizer(model)
    before, space = tokenizers.pre_tokenizers, bool(config.get("add_prefix_space"))
    tokenizer.pre_tokenizer = before.ByteLevel(add_prefix_space=space)
    if kind == "Qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        split = before.Split(tokenizers.Regex(QWEN), behavior="isolated")
        tokenizer.pre_tokenizer = before.Sequence([split, before.ByteLevel(add_prefix_space=space, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    _add_special_tokens(tokenizer, settings, kind, folder)
    return tokenizer


def read_sentencepiece_model(folder: Path, settings: Settings) -> Any:
    """Reads a SentencePiece model: spiece.model, tokenizer.model or sentencepiece.bpe.model.

    Raises:
        ValueError: the file is malformed, or the directory does not name the model type.
    """
    kind = _kind(settings, SENTENCEPIECE, folder, "SentencePiece model")
    path = folder / MODEL_FILES.get(kind, "sentencepiece.bpe.model")
    if not path.is_file():
        names = sorted(file.name for file in folder.iterdir())
        raise ValueError(f"`directory` must hold {path.name} for {kind}. Received: {folder}, which contains {names}")
    proto = read_model(path.read_bytes(), path)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    # Control tokens are of type 3, tokens that the user defined of type 4.
    marked = [(piece.piece, piece.type == 3) for piece in proto.pieces if piece.type in (3, 4)]
    if kind == "Llama":
        tokenizer = _build_llama(pieces, settings.config, path)
    else:
        tokenizer = _build_unigram(kind, pieces, proto.normalizer_spec.precompiled_charsmap, settings, path)
        if kind == "T5":
            marked += [(f"<extra_id_{i}>", True) for i in range(_extra_ids(settings, path))]
    known = {token["content"] for token in settings.added}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "id": None}
    settings.added += [{"content": name, "special": special} | flags for name, special in marked if name not in known]
    _add_special_tokens(tokenizer, settings, kind, folder)
    return tokenizer


def _kind(settings: Settings, known: dict[str, str], folder: Path, what: str) -> str:
    if settings.kind not in known:
        raise ValueError(
            f"`directory` must name the model type of its {what}: tokenizer_class in tokenizer_config.json or "
            f"model_type in config.json, one of {sorted(known)}. Received: {settings.kind!r:.200} in {folder}"
        )
    return known[settings.kind]


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise ValueError(f"`directory` must hold text in {path.name}. Received: {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if (number == 1 and line.startswith("#version")) or not line.rstrip("\r"):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or not all(pair):
            raise ValueError(
                f"`directory` must hold two tokens a line in {path.name}. Received: {line!r:.200}, line {number} of "
                f"{path}"
            )
        merges.append((pair[0], pair[1]))
    return merges


def _build_unigram(kind: str, pieces: list[tuple[str, float]], charsmap: bytes, settings: Settings, path: Path) -> Any:
    """Builds the tokenizer of a Unigram model. XLM-RoBERTa and CamemBERT put fairseq's tokens before its pieces."""
    if kind == "T5":
        pieces = pieces + [(f"<extra_id_{i}>", 0.0) for i in reversed(range(_extra_ids(settings, path)))]
        unknown, scheme = 2, "always"
    else:
        scheme = "always" if settings.config.get("add_prefix_space", True) else "never"
        first = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        if kind == "Camembert":
            first = [
                ("<s>NOTUSED", 0.0),
                ("<pad>", 0.0),
                ("</s>NOTUSED", 0.0),
                ("<unk>", 0.0),
                ("<unk>NOTUSED", -100.0),
            ]
        pieces, unknown = first + pieces[1 if kind == "Camembert" else 3 :] + [("<mask>", 0.0)], 3
    tokenizer = tokenizers.Tokenizer(_build(lambda: tokenizers.models.Unigram(pieces, unk_id=unknown), path))
    if charsmap:
        tokenizer.normalizer = _build(lambda: tokenizers.normalizers.Precompiled(charsmap), path)
    before = tokenizers.pre_tokenizers
    metaspace = before.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=True)
    tokenizer.pre_tokenizer = before.Sequence([before.WhitespaceSplit(), metaspace])
    tokenizer.decoder = tokenizers.decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return tokenizer


def _extra_ids(settings: Settings, path: Path) -> int:
    count = settings.config.get("extra_ids", 100)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10_000:
        raise ValueError(
            f"`directory` must have at most 10000 extra_ids. Received: extra_ids={count!r:.200} beside {path}"
        )
    return count


def _build_llama(pieces: list[tuple[str, float]], config: dict[str, Any], path: Path) -> Any:
    """Builds the tokenizer of a SentencePiece BPE model with byte fallback. Its merges follow from its pieces."""
    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    tokens_in_order(vocabulary, path)
    pairs = merges_of(vocabulary)
    options = {"fuse_unk": True, "byte_fallback": True}
    tokenizer = tokenizers.Tokenizer(_build(lambda: tokenizers.models.BPE(vocabulary, pairs, **options), path))
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    steps = tokenizers.decoders
    decoders = [steps.Replace(SPACE, " "), steps.ByteFallback(), steps.Fuse()]
    tokenizer.decoder = steps.Sequence(decoders + ([steps.Strip(content=" ", left=1)] if prefix else []))
    return tokenizer


def _add_special_tokens(tokenizer: Any, settings: Settings, kind: str, folder: Path) -> None:
    """Adds the added tokens, and the special tokens before and after a text."""
    _name_defaults(tokenizer, settings, kind)
    _add_tokens(tokenizer, settings, folder)
    tokens, config = settings.tokens, settings.config
    around = {
        "Roberta": tuple(_ENDS),
        "XLMRoberta": ("bos_token", "eos_token"),
        "Camembert": ("bos_token", "eos_token"),
    }
    if absent := [role for role in around.get(kind, ()) if role not in tokens]:
        raise ValueError(
            f"`directory` must name its {absent[0]}. Received: none in the vocabulary and files of {folder}"
        )
    if kind == "Roberta":
        _put_around_texts(tokenizer, *[tokens[role] for role in _ENDS])
        return
    first = tokens.get("bos_token") if config.get("add_bos_token", kind == "Llama") else None
    last = tokens.get("eos_token") if config.get("add_eos_token", kind == "T5") else None
    single = [token for token in (first, "$A", last) if token]
    pair = single + [token for token in (first, "$B", last) if token]
    if kind in ("XLMRoberta", "Camembert"):
        first, last = tokens["bos_token"], tokens["eos_token"]
        single, pair = [first, "$A", last], [first, "$A", last, last, "$B", last]
    special = [(token, tokenizer.token_to_id(token)) for token in {first, last} if token]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )


def _put_around_texts(tokenizer: Any, last: str, first: str) -> None:
    ends = [(token, tokenizer.token_to_id(token)) for token in (last, first)]
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(*ends)


def _name_defaults(tokenizer: Any, settings: Settings, kind: str | None) -> None:
    """Sets the special tokens that the class has in transformers if no file named them and the vocabulary has them."""
    known = {token["content"] for token in settings.added}
    for role, token in DEFAULTS.get(kind or "", {}).items():
        if (
            role not in settings.tokens
            and settings.config.get(role, "") is not None
            and tokenizer.token_to_id(token) is not None
        ):
            settings.tokens[role] = token
            if token not in known:
                known.add(token)
                flags = {"single_word": False, "rstrip": False, "normalized": False, "special": True, "id": None}
                lstrip = kind == "Camembert" and role == "mask_token"
                settings.added.append({"content": token, "lstrip": lstrip} | flags)


def _add_tokens(tokenizer: Any, settings: Settings, folder: Path) -> None:
    have = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in settings.added:
        if token["content"] in have and token["id"] is None:
            continue
        flags = {name: value for name, value in token.items() if name not in ("content", "id")}
        tokenizer.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        i = tokenizer.token_to_id(token["content"])
        if token["id"] not in (None, i):
            raise ValueError(
                f"`directory` must have the same token ids in all files. Received: {token['content']!r:.200} with ids "
                f"{token['id']} and {i} in {folder}"
            )


def call_library(call: Callable[[], Any], what: str) -> Any:
    """Returns `call()`. Raises ValueError, which begins with `what`, if the `tokenizers` library fails or panics."""
    try:
        return call()
    except ImportError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {str(error):.300}") from error


def _build(make: Callable[[], Any], place: Any) -> Any:
    return call_library(make, f"`directory` must hold a tokenizer that can be read. Received: {place}")
