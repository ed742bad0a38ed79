"""Tokenizer directories of every kind, made here by `tokenizers` and `sentencepiece`; and texts that are hard."""

import json
import shutil

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GPT2_END = "<|endoftext|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
MASK = AddedToken("<mask>", lstrip=True, special=True, normalized=False)

TRICKY = [
    "", " ", "  ", "\t\n\r", "\n\n", " \n", "\n ", "\n \n  x", " a", "   a  ", "a  b   c", "a\tb", "a\n\n\nb", "a \n b",
    "!\n\n  x", "!!\n", "x\r\ny", "\r\n\r\n", "It's we're I'll DON'T IT'S", "'s's''s 't", "can’t", "1234567 89 3.14",
    "１２３ ½ ² ① Ⅷ ٣", "$1,000.00 €5", "café e\u0301 naïve ﬁne oﬃce", "straße STRASSE ẞ", "ΟΔΟΣ ΣΑΣ", "İstanbul ı",
    "東京タワー", "北京abc上海 中文，标点。", "한국어 각 ㄱㄴ", "ﾊﾛｰ ハロー", "ไทย ภาษา", "हिन्दी में", "עִבְרִית שלום",
    "مَرْحَبًا سلام ١٢٣", "\u202eabc\u202c", "👩\u200d👩\u200d👧 👍🏽 🇩🇪 🥰", "☺\ufe0f ❤️", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙", "a\x00b",
    "\x00", "!\x00!",
    "a\x07b\x7fc\x85d", "\x1b[0m", "a\ufffdb", "soft\u00adhyphen", "zero\u200bwidth\u2060x", "\ufeffbom",
    "A\u030a Å Å", "q\u0307\u0323", "\u0301alone", "ﷺ … ‥", "a\u00a0b", "a\u3000b", "\u3000a", "a\u2028b\u2029c",
    "a\u1680b\u202fc", "a\x0bb\x0cc", "a\x1cb", "a\x85b", "\u2003\u2003x", "x \u00a0 y", "\ue000", "\ufdd0 x\uffff",
    "\U0010fffd", "<s> </s> <pad> <unk> <mask>", "<s>", "a</s>b", "a </s> b", "  </s>  ", "un<mask>ing", "a <mask> b",
    "a  <mask>", "<mask><mask>", "<MASK>", "<extra_id_0> x <extra_id_1>", "<extra_id_0><extra_id_3>y", f"a{GPT2_END}b",
    f"{GPT2_END} {GPT2_END}", "<|begin_of_text|>hi<|eot_id|>", "<|im_start|>user\nhi<|im_end|>\n", "</s", "s>",
    "x<tool_call>y <tool_call>", ">>fra<< Hello", ">>fra<<", "a >>fra<< b", "a</s>>>fra<<b", ">> x << y", ">>zz<< x",
    "▁a ▁ b▁c", "▁", "<0x41> <0x0A>", "[CLS] ##ing", "a" * 50, "ab" * 60, "東" * 40, "x" * 300, " " * 40 + "x",
    "\n" * 30, "https://example.com/a?b=c&d=%20#e", "C++ C# .NET", "def f(x):\n    return x\n", "{\n\t\tc += 1;\n}",
    "“quotes” «guillemets»", "^`~|<>+=", "a\u0345", "ŉ ǰ", "ſ 'ſ 'K\u212a", "x ", "x  ", "x\n", "x \n", "x\t\t",
    "1\n2", "a1b2 3c", "각\u11a8", "🇩🇪🇫🇷", "#️⃣", "㎏ ㍿", "～ 〜", "\u200e\u200fx", "\u1c89x \U00011380",
    "a\U0001fffe\x00 \U0001fffe", "\u0345\u1df6\u0323 \u0c3c\u0301",
]  # fmt: skip


def byte_level(lines, size, *, pattern=None, normalizer=None, special=(), **options):
    """Trains byte-level pairs."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def old_files(tokenizer, folder):
    """vocab.json and merges.txt."""
    data = json.loads(tokenizer.to_str())
    vocabulary = dict(data["model"]["vocab"])
    for token in data["added_tokens"]:
        vocabulary.setdefault(token["content"], token["id"])
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    lines = [" ".join(merge) for merge in data["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")


def pieces(path, lines, size, **options):
    """Trains a SentencePiece model."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=size,
            hard_vocab_limit=options.get("model_type") == "bpe",
            minloglevel=2,
            num_threads=1,
            **options,
        )


def make(root, lines, other):
    """Writes a directory for each kind below `root`; `lines` and `other` are texts of two languages."""

    def folder(name, **files):
        (root / name).mkdir()
        for file, data in files.items():
            (root / name / f"{file}.json").write_text(json.dumps(data))
        return root / name

    gpt2 = byte_level(lines, 400)
    gpt2.add_special_tokens([GPT2_END])
    old_files(gpt2, folder("gpt2", config={"model_type": "gpt2"}, tokenizer_config={"model_max_length": 1024}))
    options = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
    old_files(gpt2, folder("gpt2_prefix", config={"model_type": "gpt2"}, tokenizer_config=options))

    roberta = byte_level(lines, 400, special=["<s>", "<pad>", "</s>", "<unk>"])
    roberta.add_tokens([MASK])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
    names |= {"cls_token": "<s>", "mask_token": {"content": "<mask>", "lstrip": True, "normalized": False}}
    old_files(roberta, folder("roberta_old", config={"model_type": "roberta"}, special_tokens_map=names))
    roberta.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    options = {"tokenizer_class": "RobertaTokenizer", "model_max_length": 512, "mask_token": "<mask>"}
    new = folder("roberta", config={"model_type": "roberta"}, tokenizer_config=options)
    roberta.save(str(new / "tokenizer.json"))

    llama3 = byte_level(lines, 500, pattern=LLAMA3, ignore_merges=True)
    llama3.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    start = ("<|begin_of_text|>", llama3.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(
        single=f"{start[0]} $A", pair=f"{start[0]} $A {start[0]}:1 $B:1", special_tokens=[start]
    )
    llama3.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": start[0], "eos_token": "<|end_of_text|>"}
    options |= {"model_max_length": 131072, "clean_up_tokenization_spaces": True}
    llama3.save(str(folder("llama3", config={"model_type": "llama"}, tokenizer_config=options) / "tokenizer.json"))

    qwen = byte_level(lines, 400, pattern=QWEN, normalizer=normalizers.NFC())
    qwen.add_special_tokens([GPT2_END, "<|im_start|>", "<|im_end|>"])
    qwen.add_tokens(["<tool_call>"])
    options = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": GPT2_END, "eos_token": "<|im_end|>", "bos_token": None}
    options |= {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    qwen.save(str(folder("qwen2", config={"model_type": "qwen2"}, tokenizer_config=options) / "tokenizer.json"))
    old_files(qwen, folder("qwen2_old", config={"model_type": "qwen2"}, tokenizer_config=options))

    path = folder("t5", config={"model_type": "t5"}, tokenizer_config={"extra_ids": 7}) / "spiece.model"
    pieces(path, lines, 150, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, user_defined_symbols="[X]")
    path = folder("xlmr", config={"model_type": "xlm-roberta"}) / "sentencepiece.bpe.model"
    pieces(path, lines, 150)
    shutil.copy(path, folder("camembert", config={"model_type": "camembert"}))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    options = names | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    path = folder("llama2", config={"model_type": "llama"}, tokenizer_config=options) / "tokenizer.model"
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    pieces(path, lines, 450, model_type="bpe", byte_fallback=True, **plain)
    options |= {"legacy": True, "add_eos_token": True}
    shutil.copy(path, folder("llama2_old", config={"model_type": "llama"}, tokenizer_config=options))

    marian = folder("marian", config={"model_type": "marian"}, tokenizer_config={"tokenizer_class": "MarianTokenizer"})
    pieces(marian / "source.spm", lines, 150)
    pieces(marian / "target.spm", other, 150)
    vocabulary = {"</s>": 0, "<unk>": 1}
    for side in ("source", "target"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(marian / f"{side}.spm"))
        for i in range(3, model.get_piece_size()):
            vocabulary.setdefault(model.id_to_piece(i), len(vocabulary))
    for token in (">>fra<<", "<pad>"):
        vocabulary[token] = len(vocabulary)
    (marian / "vocab.json").write_text(json.dumps(vocabulary))
    return root
