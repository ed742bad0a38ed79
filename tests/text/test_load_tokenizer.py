"""load_tokenizer and the readers behind it: what they pick, what they refuse, and what malformed files say."""

import base64
import json
import re
import shutil

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2 as pb2

from keras_tx import text
from keras_tx.text import files, load
from keras_tx.text.sentencepiece_model import read_model

NAMES = {"gpt2": "BytePairTokenizer", "roberta": "BytePairTokenizer", "t5": "SentencePieceTokenizer"}
NAMES |= {"llama2": "SentencePieceTokenizer", "xlmr": "SentencePieceTokenizer", "marian": "MarianTokenizer"}


@pytest.fixture
def copy(made, tmp_path):
    """A copy of a directory, to break."""

    def copied(kind):
        return shutil.copytree(made / kind, tmp_path / kind)

    return copied


def change(path, function):
    data = json.loads(path.read_text())
    function(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_a_space_before_a_text_is_that_of_the_config(kind, copy):
    transformers = pytest.importorskip("transformers")
    folder = copy(kind)
    found = []
    for space in (False, True):
        change(folder / "tokenizer_config.json", lambda config, space=space: config.update(add_prefix_space=space))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"]
        ours = text.load_tokenizer(folder)(["the cat"])["token_ids"]
        assert np.asarray(ours)[0].tolist() == theirs
        found.append(theirs)
    assert found[0] != found[1]


def test_of_two_vocabularies_that_of_tokenizer_json_counts(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog", "cat"]
    text.BertTokenizer(words).save(tmp_path / "a")
    transformers = pytest.importorskip("transformers")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "vocab.txt").write_text("\n".join([*words[:5], "cat", "dog"]) + "\n")
    assert text.load_tokenizer(tmp_path / "b").vocabulary == words


def refused(directory, message, load=text.load_tokenizer, error=ValueError):
    with pytest.raises(error, match=message):
        load(directory)


@pytest.mark.parametrize("kind", NAMES)
def test_the_files_decide(made, kind):
    assert type(text.load_tokenizer(made / kind)).__name__ == NAMES[kind]
    assert text.load_tokenizer(made / kind, max_length=7).max_length == 7


def test_word_pieces_too(uncased, tmp_path):
    uncased.save(tmp_path)
    tokenizer = text.load_tokenizer(tmp_path, max_length=9)
    assert type(tokenizer) is text.BertTokenizer and tokenizer.get_config() == uncased.get_config() | {"max_length": 9}
    assert tokenizer.in_graph and tokenizer.not_in_graph is None


def test_an_old_tokenizer_json_without_types(copy, made):
    folder = copy("roberta")
    change(folder / "tokenizer.json", lambda data: data["model"].pop("type"))
    assert text.load_tokenizer(folder).tokenize("a dog") == text.load_tokenizer(made / "roberta").tokenize("a dog")


def test_directories_without_a_tokenizer(tmp_path, made):
    refused(tmp_path / "none", r"`directory` must be a directory. Received: directory='.*none'")
    (tmp_path / "a.bin").touch()
    refused(tmp_path, r"must contain one of \['source.spm', .*which contains \['a.bin'\]")
    refused(
        tmp_path,
        r"must contain tokenizer.json, or vocab.json .*which contains \['a.bin'\]",
        text.BytePairTokenizer.from_pretrained,
    )
    refused(
        tmp_path,
        r"must contain \['source.spm', 'target.spm', 'vocab.json'\]. Received: .*\['a.bin'\]",
        text.MarianTokenizer.from_pretrained,
    )
    refused(
        tmp_path, "must name the model type of its SentencePiece model", text.SentencePieceTokenizer.from_pretrained
    )
    (tmp_path / "merges.txt").touch()
    refused(tmp_path, r"must contain tokenizer.json, or vocab.json and merges.txt.*\['a.bin', 'merges.txt'\]")
    refused(made / "t5", "must contain tokenizer.json, or vocab.json", text.BytePairTokenizer.from_pretrained)
    refused(
        made / "gpt2",
        r"must name the model type .*one of \['Camembert'.*Received: 'gpt2'",
        text.SentencePieceTokenizer.from_pretrained,
    )
    with pytest.raises(TypeError, match="`tokenizer` must be a tokenizer of transformers. Received: tokenizer=7"):
        text.BytePairTokenizer.from_transformers(7)


def test_other_kinds_are_refused_by_name(copy):
    folder = copy("roberta")
    change(folder / "tokenizer.json", lambda data: data["model"].update(type="Other"))
    refused(folder, r"must hold WordLevel, WordPiece, byte-level BPE, .*Received: model.type='Other', .*tokenizer.json")
    (folder / "tokenizer.json").write_text(json.dumps({"model": 7}))
    refused(folder, r"must hold WordLevel.*Received: model.type=None, decoder=None in .*tokenizer.json")
    (folder / "tokenizer.json").unlink()
    old = copy("gpt2")
    change(old / "config.json", lambda data: data.update(model_type="clip"))
    refused(
        old, r"must name the model type of its vocab.json and merges.txt.*\['Bart', 'GPT2'.*Received: 'clip' in .*gpt2"
    )
    pieces = copy("t5")
    change(pieces / "config.json", lambda data: data.update(model_type="albert"))
    refused(pieces, r"must name the model type of its SentencePiece model.*\['Camembert'.*Received: 'albert'")
    change(pieces / "config.json", lambda data: data.update(model_type="llama"))
    refused(pieces, r"must hold tokenizer.model for Llama. Received: .*'spiece.model'")


def test_a_definition_of_another_kind(made):
    gpt2, t5 = (text.load_tokenizer(made / kind).definition for kind in ("gpt2", "t5"))
    with pytest.raises(
        ValueError, match="must be a byte-level BPE tokenizer. Received: {'model': 'Unigram', 'decoder': 'Meta"
    ):
        text.BytePairTokenizer(t5)
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    pieces = json.loads(gpt2) | {"decoder": {"type": "Sequence", "decoders": steps}}
    for refuses in (text.BytePairTokenizer, text.SentencePieceTokenizer):
        with pytest.raises(ValueError, match=r"Received: {'model': 'BPE', 'decoder': \['ByteFallback', 'Fuse'\]}"):
            refuses(json.dumps(pieces))
    with pytest.raises(
        ValueError, match="must be a SentencePiece model's. Received: {'model': 'BPE', 'decoder': 'Byte"
    ):
        text.SentencePieceTokenizer(gpt2)
    with pytest.raises(TypeError, match="`definition` must be the content of a tokenizer.json. Received: a int"):
        text.BytePairTokenizer(7)
    with pytest.raises(ValueError, match="must hold a tokenizer that can be read. Received: definition: "):
        text.BytePairTokenizer("{")
    parts = json.loads(gpt2)
    assert text.BytePairTokenizer(parts).definition == gpt2
    parts["model"]["vocab"] = {token: i for token, i in parts["model"]["vocab"].items() if token != "a"}
    parts["model"]["merges"] = []
    with pytest.raises(
        ValueError, match=r"must number its tokens without gaps. Received: \d+ tokens, none or two with id"
    ):
        text.BytePairTokenizer(parts)
    parts = json.loads(t5)
    parts["model"]["unk_id"] = None
    parts["model"]["vocab"] = [["b", 0.0]]
    parts["added_tokens"], parts["post_processor"] = [], None
    with pytest.raises(ValueError, match="`definition` must encode every text. Received: text 'a': .+"):
        text.SentencePieceTokenizer(parts)
    parts = json.loads(text.WordLevelTokenizer.train(["a b"], 9).definition)
    first = parts["post_processor"]["special_tokens"].pop("[SOS]")  # then the library panics
    with pytest.raises(ValueError, match="must encode every text. Received: text 'a': .*no entry found"):
        text.WordLevelTokenizer(parts)
    parts["post_processor"]["special_tokens"]["[SOS]"] = first | {"ids": [6]}
    with pytest.raises(ValueError, match="tokens of its vocabulary around texts. Received: token id 6, of 6 tokens"):
        text.WordLevelTokenizer(parts)
    parts = json.loads(gpt2)
    parts["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    with pytest.raises(ValueError, match=r"must keep the texts that it encodes. Received: ids \[\] for '.'"):
        text.BytePairTokenizer(parts)


def test_tokenizer_config_names_what_roberta_puts_around_texts(copy):
    transformers = pytest.importorskip("transformers")
    folder = copy("roberta")
    change(folder / "tokenizer_config.json", lambda config: config.update(cls_token="[A]", sep_token="the"))
    ours, theirs = text.load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    found, expected = ours("a cat")["token_ids"].tolist(), theirs("a cat")["input_ids"]
    assert found == expected and ours.vocabulary[found[0]] == "[A]" and ours.vocabulary[found[-1]] == "the"


def test_what_stands_around_texts_must_be_named(copy):
    folder = copy("roberta")
    tokenizer = text.load_tokenizer(folder)
    model = tokenizer.parts["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokenizer.vocabulary)}))
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in model["merges"]))
    for role in ("cls_token", "sep_token"):
        change(folder / "tokenizer_config.json", lambda config, role=role: config.update({role: None}))
        refused(folder, f"must name its {role}. Received: none in the vocabulary and files of")
        change(folder / "tokenizer_config.json", lambda config, role=role: config.pop(role))


def test_steps_are_objects(copy):
    folder = copy("gpt2")
    tokenizer = text.load_tokenizer(folder)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer.parts | {name: 7.0}))
        refused(folder, rf"must describe its {name}. Received: 7.0 in .*tokenizer.json")
    for decoder in (
        {"type": "Sequence"},
        {"type": "Sequence", "decoders": None},
        {"type": "Sequence", "decoders": [7]},
    ):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer.parts | {"decoder": decoder}))
        refused(folder, "Received: .*'Sequence'")


def test_t5_ends_texts_with_one_token(copy):
    folder = copy("t5")
    (folder / "tokenizer.json").write_text(text.load_tokenizer(folder).definition)
    change(folder / "tokenizer_config.json", lambda config: config.update(eos_token="the"))
    refused(folder, r"the same token in tokenizer.json and tokenizer_config.json. Received: \['</s>'\] and 'the' in")


@pytest.mark.parametrize(
    "config, message",
    [
        ("[]", r"must hold a JSON object in tokenizer_config.json. Received: list in .*tokenizer_config.json"),
        ("{", r"must hold JSON in tokenizer_config.json. Received: .*tokenizer_config.json: "),
        ("[" * 100_000, r"tokenizer_config.json. Received: .*: values nested more than 100 levels deep"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", r"tokenizer_config.json. Received: .*: values nested more than 100"),
        ({"auto_map": {"AutoTokenizer": ["a.py", None]}}, "must not need code of its own. Received: auto_map={'Auto"),
        ({"split_special_tokens": 1}, r"one of \(True, False\). Received: split_special_tokens=1 in"),
        ({"split_special_tokens": None}, r"one of \(True, False\). Received: split_special_tokens=None in"),
        ({"separate_vocabs": True}, "must not ask for separate_vocabs. Received: separate_vocabs=True in"),
        ({"tokenizer_class": 7}, "must name its class. Received: tokenizer_class=7 in"),
        ({"model_max_length": "7"}, "a positive number as `model_max_length`. Received: model_max_length='7' in"),
        ({"model_max_length": float("-inf")}, "a positive number as `model_max_length`. Received: .*=-inf in"),
        ({"model_max_length": float("nan")}, "a positive number as `model_max_length`. Received: .*=nan in"),
        ({"pad_token": 7}, "must give tokens as text. Received: pad_token: 7 in"),
        ({"pad_token": {"content": ""}}, "must give tokens as text. Received: pad_token: {'content': ''} in"),
        ({"pad_token": {"content": "a", "lstrip": 1}}, "flags as true or false. Received: pad_token: {'content': 'a'"),
        ({"extra_special_tokens": 7}, "must list tokens. Received: extra_special_tokens=7 in"),
        (
            {"added_tokens_decoder": {"a": "b"}},
            "must number its added tokens. Received: added_tokens_decoder={'a': 'b'}",
        ),
        (
            {"added_tokens_decoder": {"3": "<mask>"}},
            r"the same token ids in all files. Received: '<mask>' with ids 3 and 400 in",
        ),
        ({"keras_tx": 7}, r"must have in 'keras_tx' only a string .* Received: 7 in"),
        ({"keras_tx": {"cls_token": 7}}, r"must have in 'keras_tx' only .* Received: {'cls_token': 7} in"),
        ({"keras_tx": {"max_length": 7}}, r"must have in 'keras_tx' only .* Received: {'max_length': 7} in"),
        ({"add_prefix_space": 1}, r"must give one of \(True, False\). Received: add_prefix_space=1 in"),
        ({"truncation_side": "top"}, r"must give one of \('right', 'left'\). Received: truncation_side='top' in"),
        ({"clean_up_tokenization_spaces": 1}, r"one of \(True, False\). Received: clean_up_tokenization_spaces=1 in"),
    ],
)
def test_settings(copy, config, message):
    folder = copy("roberta")
    (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    refused(folder, message)


def test_where_special_tokens_cannot_be_split(copy, uncased, tmp_path):
    uncased.save(tmp_path / "bert")
    for folder in (copy("marian"), tmp_path / "bert"):
        change(folder / "tokenizer_config.json", lambda data: data.update(split_special_tokens=True))
        refused(folder, "must not ask for split_special_tokens. Received: split_special_tokens=True in")
        change(folder / "tokenizer_config.json", lambda data: data.update(split_special_tokens=False))
        assert text.load_tokenizer(folder).tokenize("a dog")[0] is not None


def test_tokens_that_only_the_settings_name(copy):
    folder = copy("gpt2")
    change(folder / "tokenizer_config.json", lambda data: data.update(pad_token="<pad>", extra_special_tokens=["<x>"]))
    tokenizer = text.load_tokenizer(folder)
    assert (tokenizer.vocabulary[-2:], tokenizer.pad_id) == (["<pad>", "<x>"], tokenizer.vocabulary_size - 2)
    assert tokenizer.tokenize("<x><pad>") == [tokenizer.vocabulary_size - 1, tokenizer.pad_id]
    assert tokenizer(["a", "a dog"])["token_ids"][0, 1] == tokenizer.pad_id
    folder = copy("roberta_old")
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 401}))
    tokenizer = text.load_tokenizer(folder)
    assert tokenizer.tokenize("a<new>")[-1] == 401 and "<new>" in tokenizer.decode([401])
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": "7"}))
    refused(folder, "must hold ids in added_tokens.json. Received: '<new>': '7' in")


def test_old_byte_pair_files(copy):
    folder = copy("gpt2")
    good = (folder / "merges.txt").read_text()
    for bad, message in (
        (good + "a b c\n", r"two tokens a line in merges.txt. Received: 'a b c', line \d+ of .*merges.txt"),
        (good + "a\n", r"two tokens a line in merges.txt. Received: 'a', line"),
        (good + "東 京\n", r"tokenizer that can be read. Received: .*merges.txt: .*out of vocabulary"),
    ):
        (folder / "merges.txt").write_text(bad)
        refused(folder, message)
    (folder / "merges.txt").write_bytes(b"\xff\xfe a\n")
    refused(folder, r"must hold text in merges.txt. Received: .*merges.txt: ")
    (folder / "merges.txt").write_text(good)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    for bad, message in (
        ({"a": "b"}, r"must hold ids in vocab.json. Received: 'a': 'b' in .*vocab.json"),
        ({"a": True}, r"must hold ids in vocab.json. Received: 'a': True in"),
        (vocabulary | {"zz": 10**9}, r"without gaps. Received: \d+ tokens, none or two with id \d+, in .*vocab.json"),
        (vocabulary | {"zz": 0}, r"without gaps. Received: \d+ tokens, none or two with id 1, in .*vocab.json"),
        ({"a": -1}, "none or two with id 0"),
        ({}, "without gaps. Received: 0 tokens"),
    ):
        (folder / "vocab.json").write_text(json.dumps(bad))
        refused(folder, message)


def test_a_tokenizer_json_with_gaps_or_nonsense(copy):
    folder = copy("roberta")
    change(folder / "tokenizer.json", lambda data: data["added_tokens"][-1].update(id=444))
    refused(folder, r"without gaps. Received: '<mask>' with id 444, which would be 400, in .*tokenizer.json")
    bad = {"model": {"type": "BPE", "vocab": 7, "merges": []}, "decoder": {"type": "ByteLevel"}}
    (folder / "tokenizer.json").write_text(json.dumps(bad))
    refused(folder, r"must hold a tokenizer that can be read. Received: .*tokenizer.json: ")


def test_bert_s_files_too(uncased, tmp_path):
    uncased.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused(tmp_path, r"must hold JSON in tokenizer_config.json. Received: .*tokenizer_config.json: ")
    (tmp_path / "tokenizer_config.json").write_text('{"truncation_side": "left"}')
    refused(tmp_path, "must not ask for truncation on the left, .* Received: truncation_side='left' in")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "vocab.txt").unlink()
    normalizer = {"type": "BertNormalizer", "clean_text": True}
    model = {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": [1]}
    parts = {"model": model, "normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    for change, message in (
        ({}, "must hold a vocabulary. Received: a list in"),
        ({"model": model | {"vocab": {"a": "b"}}}, "must hold ids in tokenizer.json. Received: 'a': 'b' in"),
        (
            {"model": model | {"vocab": {"a": 0}}, "added_tokens": [7]},
            r"list added tokens with their ids. Received: added_tokens=\[7\]",
        ),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(parts | change))
        refused(tmp_path, message)


def test_models_of_sentencepiece(copy):
    folder = copy("t5")
    path = folder / "spiece.model"
    good = path.read_bytes()

    def changed(function):
        proto = pb2.ModelProto.FromString(good)
        function(proto)
        return proto.SerializeToString()

    table = pb2.ModelProto.FromString(good).normalizer_spec.precompiled_charsmap
    size = int.from_bytes(table[:4], "little")
    units = np.frombuffer(table[4 : 4 + size], "<u4").copy()
    leaf = np.flatnonzero(units >= 2**31)[7]

    def table_of(units):
        return lambda proto: setattr(
            proto.normalizer_spec, "precompiled_charsmap", table[:4] + units.tobytes() + table[4 + size :]
        )

    far, beyond = units.copy(), units.copy()
    far[np.flatnonzero(units < 2**31)[3]] = 0x7FFFFC00
    beyond[leaf] = 0xFFFFFFFF
    for bad, message in (
        (b"", r"must be a SentencePiece model with pieces. Received: none in 0 bytes"),
        (b"tiktoken IQ== 0\n", "must be a SentencePiece model. Received: .*spiece.model: |with pieces"),
        (good[: len(good) // 2], "must be a SentencePiece model. Received: .*spiece.model: "),
        (changed(lambda proto: proto.pieces.add(piece="a")), "every piece once, and none empty. Received: 'a'"),
        (changed(lambda proto: proto.pieces.add(piece="")), "every piece once, and none empty. Received: ''"),
        (changed(lambda proto: proto.pieces.add(piece="zz", score=np.nan)), "must hold finite scores. Received"),
        (changed(table_of(units[:-1])), "must hold a well-formed normalizer. Received: a table of"),
        (changed(table_of(far)), "must hold a well-formed normalizer. Received: a table of"),
        (changed(table_of(beyond)), "must hold a well-formed normalizer. Received: a table of"),
    ):
        path.write_bytes(bad)
        refused(folder, message)
    assert read_model(changed(table_of(units)), "model").pieces
    path.write_bytes(good)
    change(folder / "tokenizer_config.json", lambda data: data.update(extra_ids=-1))
    refused(folder, "must have at most 10000 extra_ids. Received: extra_ids=-1 beside")
    assert sentencepiece.__version__


def test_a_definition_s_normalizer_is_checked(made):
    parts = json.loads(text.load_tokenizer(made / "xlmr").definition)
    table = bytearray(base64.b64decode(parts["normalizer"]["precompiled_charsmap"]))
    table[-1] = 65
    parts["normalizer"]["precompiled_charsmap"] = base64.b64encode(bytes(table)).decode()
    with pytest.raises(ValueError, match="`definition` must hold a well-formed normalizer. Received: a table of"):
        text.SentencePieceTokenizer(parts)
    parts["normalizer"]["precompiled_charsmap"] = "AAAA"
    with pytest.raises(ValueError, match="must hold a tokenizer that can be read. Received: definition: "):
        text.SentencePieceTokenizer(parts)


def test_marian_s_files_and_arguments(copy):
    folder = copy("marian")
    config = folder / "tokenizer_config.json"
    good = text.load_tokenizer(folder)
    token = {"content": "<new>", "lstrip": False, "special": True}
    change(config, lambda data: data.update(added_tokens_decoder={"0": token}))
    refused(folder, "must have no special tokens except Marian's three. Received: {'content': '<new>'")
    change(config, lambda data: data.update(added_tokens_decoder={"0": token | {"content": "</s>", "lstrip": True}}))
    refused(folder, "must have no special tokens except Marian's three. Received: {'content': '</s>'")
    change(config, lambda data: data.update(added_tokens_decoder={"7": token | {"content": "</s>"}}))
    refused(folder, "must have the same token ids in all files. Received: {'content': '</s>'")
    change(config, lambda data: data.update(added_tokens_decoder={"0": token | {"content": "</s>"}}))
    assert text.load_tokenizer(folder).get_config() == good.get_config()
    (folder / "source.spm").write_bytes(b"nonsense")
    refused(folder, r"source.spm` must be a SentencePiece model. Received")
    arguments = good.get_config()
    for name, value, error, message in (
        ("source_model", 7, TypeError, "`source_model` must be the bytes of a SentencePiece model. Received: a int"),
        ("target_model", "?", ValueError, r"`target_model` must be bytes, or those in base64. Received: '\?'\.\.\."),
        ("target_model", b"x", ValueError, "`target_model` must be a SentencePiece model"),
        ("vocabulary", 7, TypeError, "`vocabulary` must map tokens to ids. Received: a int"),
        (
            "vocabulary",
            ["a", "a"],
            ValueError,
            "must number its tokens without gaps. Received: 1 tokens, .*in vocabulary",
        ),
        ("sep_token", "<e>", ValueError, "`sep_token` must be in the vocabulary. Received: sep_token='<e>', not among"),
        ("max_length", 0, ValueError, "`max_length` must be a positive integer. Received: max_length=0"),
    ):
        with pytest.raises(error, match=message):
            text.MarianTokenizer(**(arguments | {name: value}))
    broken = pb2.ModelProto.FromString(good.source_model)
    for piece in broken.pieces:
        piece.type = 1
    with pytest.raises(ValueError, match="`source_model` must be a SentencePiece model that can be run. Received: "):
        text.MarianTokenizer(**(arguments | {"source_model": broken.SerializeToString()}))
    with pytest.raises(
        ValueError, match="`pairs` must be None: this tokenizer does not support pairs of texts. Received"
    ):
        good("a", "b")


def test_random_changes_never_do_harm(made, tmp_path):
    """Bytes of every file changed at random: a tokenizer that works, or a ValueError."""
    draw = np.random.default_rng(7)
    outcomes = {"read": 0, "refused": 0}
    for kind in ("gpt2", "llama2", "t5", "marian"):
        for number in range(12):
            folder = shutil.copytree(made / kind, tmp_path / f"{kind}{number}")
            path = draw.choice(sorted(folder.iterdir()))
            data = bytearray(path.read_bytes())
            for _ in range(draw.integers(1, 4)):
                data[draw.integers(len(data))] = draw.integers(256)
            path.write_bytes(data)
            try:
                tokenizer = text.load_tokenizer(folder)
                assert len(tokenizer.tokenize(["a dog é 東"])) == 1
                outcomes["read"] += 1
            except ValueError as error:
                assert re.search("Received", str(error))
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


def test_what_was_saved_last_is_what_is_loaded(tmp_path):
    """Also over a tokenizer of another kind, whose files would come first, and over settings that would be merged."""
    assert tuple(load.FILES) == files.OF_KINDS
    bert = text.BertTokenizer.train(["aa bb cc"] * 3, 40)
    pairs = text.BytePairTokenizer.train(["hot dogs hot dogs"] * 3, 300)
    characters = text.CharacterTokenizer.train(["xyz"])
    for tokenizer in (pairs, bert, characters, bert, pairs):
        (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "</s>"}')
        (tmp_path / "added_tokens.json").write_text('{"<new>": 999}')
        for name in ("source.spm", "target.spm"):
            (tmp_path / name).write_bytes(b"of another")
        tokenizer.save(tmp_path)
        again = text.load_tokenizer(tmp_path)
        assert type(again) is type(tokenizer) and again.get_config() == tokenizer.get_config()


def test_arguments_that_transformers_does_not_read_come_back(tmp_path):
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[P]": 0, "[U]": 1, "[C]": 2, "a": 3}, "[U]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words = text.WordLevelTokenizer(plain.to_str(), pad_token="[P]", cls_token="[C]")
    words.save(tmp_path / "words")
    again = text.load_tokenizer(tmp_path / "words")
    assert again.cls_id == words.cls_id == 2 and again(["a a"])["token_ids"].tolist() == [[3, 3]]
    pairs = text.BytePairTokenizer.train(["the dog"] * 3, 270, clean_up_tokenization_spaces=True)
    pairs.save(tmp_path / "pairs")
    again = text.load_tokenizer(tmp_path / "pairs")
    assert again.get_config() == pairs.get_config() and again.clean_up_tokenization_spaces
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "pairs")
    assert theirs("the dog", add_special_tokens=False)["input_ids"] == pairs.tokenize("the dog")


@pytest.mark.parametrize("kind", ["nothing", "two separators", "bert", "template"])
def test_bert_tokens_around_texts_are_those_of_the_file_or_it_is_refused(kind, tmp_path):
    tokens = "[PAD] [UNK] [CLS] [SEP] [MASK] hot dog".split()
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer()
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    double = "[CLS]:0 $A:0 [SEP]:0 {}$B:1 [SEP]:1"
    template = tokenizers.processors.TemplateProcessing
    single = "[CLS]:0 $A:0 [SEP]:0"
    steps = {
        "two separators": lambda: template(single=single, pair=double.format("[SEP]:0 "), special_tokens=ends),
        "bert": lambda: tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
        "template": lambda: template(single=single, pair=double.format(""), special_tokens=ends),
    }
    if kind in steps:
        library.post_processor = steps[kind]()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=library, unk_token="[UNK]", pad_token="[PAD]")
    if kind in ("nothing", "two separators"):
        with pytest.raises(ValueError, match=r"which puts \[CLS\] and \[SEP\] around texts. Received: post_processor="):
            text.BertTokenizer.from_transformers(fast)
        return
    ours = text.BertTokenizer.from_transformers(fast)
    assert np.asarray(ours("hot dog", "dog")["token_ids"]).tolist() == fast("hot dog", "dog")["input_ids"]


def test_added_tokens_that_a_normalizer_changes_are_not_in_a_graph(made):
    library = tokenizers.Tokenizer.from_str(text.load_tokenizer(made / "t5").definition)
    for content, is_changed in (("\u2103", True), ("dog", False)):
        one = tokenizers.Tokenizer.from_str(library.to_str())
        one.add_tokens([tokenizers.AddedToken(content, normalized=True)])
        changed = one.normalizer is not None and one.normalizer.normalize_str(content) != content
        assert changed == is_changed
        reason = text.SentencePieceTokenizer(one.to_str(), pad_token="<pad>").not_in_graph
        assert reason == ("its normalizer changes its added tokens" if is_changed else None)


@pytest.mark.tensorflow
def test_a_padding_token_of_the_vocabulary_alone_is_left_out_of_texts():
    import tensorflow as tf

    vocabulary = {"[P]": 0, "[U]": 1, "a": 2, "dog": 3}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[U]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = text.WordLevelTokenizer(plain.to_str(), pad_token="[P]")
    ids = tokenizer(["a dog", "cat"])["token_ids"]
    assert tokenizer.decode(ids) == ["a dog", "[U]"]  # the unknown token is no added token, and stays
    assert tokenizer.decode(ids, skip_special_tokens=False)[1] == "[U] [P]"
    in_graph = tf.function(tokenizer.decode)(tf.constant(ids))
    assert [one.decode() for one in in_graph.numpy()] == ["a dog", "[U]"]


def test_a_vocabulary_file_may_begin_with_a_mark_and_must_be_in_utf_8(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "été"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(words), encoding="utf-8-sig")
    assert text.BertTokenizer.from_pretrained(tmp_path).vocabulary == words
    path.write_text("\n".join(words), encoding="latin-1")
    with pytest.raises(
        ValueError, match="`path` must be a vocabulary file in UTF-8. Received: path=.*vocab.txt': .*0xe9"
    ):
        text.BertTokenizer.from_pretrained(tmp_path)
