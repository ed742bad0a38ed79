"""Tiny checkpoints with random weights, as transformers saves them, and the outputs of the live PyTorch models.

`make(name, folder, seed)` writes one: config.json, the weights, the tokenizer's files, and reference.npz. The
references are computed in float64 from the saved float32 weights, so that a comparison finds the rounding of keras_tx
alone (a few layers of transformers, such as RMS norms, always compute in float32). reference.npz holds the inputs and

    encoders     hidden_states (L + 1, B, T, D), last_hidden_state, pooler_output, logits or start_logits and end_logits
    decoders     hidden_states and logits of a right-padded batch; lp_* of a left-padded one; greedy_ids; beam4_ids
                 (B * 4 rows, the best first), beam4_scores
    seq2seq      encoder_* and decoder_hidden_states, logits; greedy_ids, beam4_*, and beams with other settings
    all          float32_error: the largest error of transformers' own logits in float32

Values at padding tokens mean nothing.
"""

import contextlib
import copy
import json
import math
import shutil
import warnings
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

NEW_TOKENS = 14
ATTEMPTS = 60  # to find weights whose beams are not decided by rounding
PERTURBATION = 1e-5  # of weights, relative, which must leave the generated ids as they are
ENCODER_GAIN, GENERATIVE_GAIN = 1.2, 1.5  # livelier weights repeat fewer tokens
CORPUS = """the quick brown fox jumps over the lazy dog . a small model reads a small file .
she sells sea shells on the sea shore , and the shells she sells are sea shells for sure .
translate english to german : the house is wonderful . summarize : owning a dog is good for you .
keras layers are composed into models ; models are trained , saved and loaded again .
attention is all you need , said the paper , and the paper was read by many people in 2017 .
hello world ! how are you today ? it's 42 degrees in the sun - isn't that too hot ?
we hold these truths to be simple : weights are numbers , numbers are bits , bits are cheap .
"""


# Weights


def generator(name, seed):
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def randomize(model, seed, gain):
    """Draws every weight anew, by its name. None is near its initial value: zeros and ones would hide mistakes."""
    config, seen = model.config, set()
    is_seq2seq, is_scaled = config.is_encoder_decoder, getattr(config, "scale_embedding", False)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or "Sinusoidal" in type(module).__name__:
                continue
            seen.add(id(parameter))
            mean, scale = 0.0, 0.5
            if parameter.ndim == 1:
                mean, scale = (1.0, 0.2) if name == "weight" else (0.0, 0.1)
            elif isinstance(module, nn.Embedding):
                positions = 1.2 if is_seq2seq else 0.6
                scale = positions if "pos" in path or "wpe" in path else 0.25 if is_scaled else 0.4
                scale = 1.0 if "relative" in path else scale
            elif isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D":
                inputs = parameter.shape[:1] if type(module).__name__ == "Conv1D" else parameter.shape[1:]
                scale = gain / math.sqrt(math.prod(inputs))
                if is_seq2seq and "decoder." in path and path.endswith((".fc2", ".wo")):
                    scale *= 3.0  # so that the layers outweigh the residual copy of a tied embedding
                if is_scaled and path.endswith("attn.out_proj"):
                    scale *= 0.4  # half of a table of sinusoids is nearly constant over short sequences
                if path.endswith(("SelfAttention.q", "EncDecAttention.q")):
                    scale *= config.d_kv**-0.5  # T5 does not scale its scores
            _assign(parameter, mean + scale * generator(f"{path}.{name}", seed).standard_normal(parameter.shape))
    if hasattr(model, "final_logits_bias"):
        bias = model.final_logits_bias
        _assign(bias, 0.3 * generator("final_logits_bias", seed).standard_normal(bias.shape))
    return model.eval()


def _assign(tensor, array):
    tensor.data.copy_(torch.from_numpy(np.asarray(array, "float32")))


def raise_stop_token(model, times, inputs):
    """Raises the logit of the stop token by some standard deviations, so that texts end at different lengths."""
    outputs, stop = model(**inputs, output_hidden_states=True), model.config.eos_token_id
    raised = times * float(outputs.logits.std())
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias[0, stop] += raised
        return
    hidden = (outputs.decoder_hidden_states if "decoder_hidden_states" in outputs else outputs.hidden_states)[-1]
    hidden = hidden.reshape(-1, hidden.shape[-1]).mean(0)
    if getattr(model.config, "scale_decoder_outputs", False):
        hidden = hidden * model.config.d_model**-0.5
    row = model.get_output_embeddings().weight.data
    row[stop] = 0.3 * row[stop] + raised * hidden / hidden.dot(hidden)


# Tokenizers: each writes its files into a folder and returns how many tokens it has


def wordpiece(folder, kind="BertTokenizer"):
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = sorted({word for word in CORPUS.split() if word.isalpha() and len(word) > 1})[:60]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"!',-.:;?0123456789", *letters]
    tokens += [*(f"##{letter}" for letter in letters), "##ing", "##ed", "##s1", *words]
    tokens = list(dict.fromkeys(tokens))
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    getattr(transformers, kind).from_pretrained(folder).save_pretrained(folder)
    return len(tokens)


def distilbert_wordpiece(folder):
    return wordpiece(folder, "DistilBertTokenizer")


def _train_byte_pairs(special, at_end=()):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    options = {"vocab_size": 300, "min_frequency": 2, "show_progress": False}
    tokenizer.train_from_iterator([CORPUS], special_tokens=list(special), **options)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = {**model["vocab"], **{token: len(model["vocab"]) + i for i, token in enumerate(at_end)}}
    return vocabulary, [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]


def _byte_pairs(folder, kind, special, at_end):
    vocabulary, merges = _train_byte_pairs(special, at_end)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    getattr(transformers, kind).from_pretrained(folder).save_pretrained(folder)
    return len(vocabulary)


def gpt2_byte_pairs(folder):
    return _byte_pairs(folder, "GPT2Tokenizer", [], ["<|endoftext|>"])


def roberta_byte_pairs(folder):
    return _byte_pairs(folder, "RobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"])


def bart_byte_pairs(folder):
    return _byte_pairs(folder, "BartTokenizer", ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"])


def llama_byte_pairs(folder):
    """As Llama 3: tokenizer.json alone, and each text begins with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<s>", "</s>"]
    vocabulary, merges = _train_byte_pairs(special)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    start = {"single": "<s> $A", "pair": "<s> $A <s> $B", "special_tokens": [("<s>", 1)]}
    steps = [processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(**start)]
    tokenizer.post_processor = processors.Sequence(steps)
    tokenizer.add_special_tokens(special)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return len(vocabulary)


def _train_pieces(path, **ids):
    import sentencepiece

    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS.strip().split("\n")), model_writer=file, model_type="unigram", vocab_size=110,
            character_coverage=1.0, hard_vocab_limit=False, num_threads=1, minloglevel=2, **ids,
        )  # fmt: skip


def t5_pieces(folder):
    _train_pieces(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder, extra_ids=4)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def marian_pieces(folder):
    import sentencepiece

    _train_pieces(folder / "source.spm")
    shutil.copy(folder / "source.spm", folder / "target.spm")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    tokens = ["</s>", "<unk>", *(piece for piece in pieces if piece not in ("<unk>", "<s>", "</s>")), "<pad>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    config = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(tokens)


# Checkpoints: {name: (architecture, tokenizer or None, function from the size of the vocabulary to the config)}

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = {**SIZES, "max_position_embeddings": 40}
ROBERTA = {**SIZES, "max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 40}
LABELS = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
MODERNBERT = {
    **SIZES, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 6,
    "global_attn_every_n_layers": 3,
}  # fmt: skip
VIT = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 5}
GPT2 = {"n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2_INNER = {**GPT2, "n_inner": 48, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
T5 = {  # heads together are wider than the model; every rule about distances is used
    "d_model": 32, "d_kv": 12, "d_ff": 64, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10, "decoder_start_token_id": 0,
}  # fmt: skip
# `generate` of transformers 5 raises IndexError where the decoder is deeper than the encoder, so here it is the other.
T5_V11 = {
    **T5,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
}  # fmt: skip


def _of(**config):
    return lambda size: {"vocab_size": size, **config}


def _gpt2(config):
    return lambda size: (
        {"vocab_size": size, **config} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), size - 1)
    )


def _marian(size):
    ids = {"pad_token_id": size - 1, "decoder_start_token_id": size - 1, "eos_token_id": 0, "forced_eos_token_id": 0}
    return {"vocab_size": size, **SEQ2SEQ, **ids, "scale_embedding": True, "activation_function": "swish"}


def _t5(size):  # more rows than tokens, as t5-small has them
    return {"vocab_size": -(-size // 16) * 16, **T5, "num_layers": 2}


CHECKPOINTS = {
    "bart": ("BartForConditionalGeneration", bart_byte_pairs, _of(**SEQ2SEQ)),
    "bert": ("BertForMaskedLM", wordpiece, _of(**BERT)),
    "bert_cls": ("BertForSequenceClassification", wordpiece, _of(**BERT, num_labels=3)),
    "distilbert": ("DistilBertForMaskedLM", distilbert_wordpiece, _of(**DISTILBERT)),
    "distilbert_cls": ("DistilBertForSequenceClassification", distilbert_wordpiece, _of(**DISTILBERT, **LABELS)),
    "distilbert_qa": ("DistilBertForQuestionAnswering", distilbert_wordpiece, _of(**DISTILBERT)),
    "electra": ("ElectraForPreTraining", wordpiece, _of(**BERT, embedding_size=16)),
    "gpt2": ("GPT2LMHeadModel", gpt2_byte_pairs, _gpt2(GPT2)),
    "gpt2_inner": ("GPT2LMHeadModel", gpt2_byte_pairs, _gpt2(GPT2_INNER)),
    "llama": ("LlamaForCausalLM", llama_byte_pairs, _of(**LLAMA, rms_norm_eps=1e-5, tie_word_embeddings=False)),
    "llama3": ("LlamaForCausalLM", None, _of(**LLAMA, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
    "marian": ("MarianMTModel", marian_pieces, _marian),
    "mistral": ("MistralForCausalLM", None, _of(**LLAMA, sliding_window=5)),
    "modernbert": ("ModernBertForMaskedLM", None, _of(**MODERNBERT)),
    "qwen2": ("Qwen2ForCausalLM", None, _of(**LLAMA, tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", None, _of(**LLAMA, head_dim=16, tie_word_embeddings=True)),
    "roberta": ("RobertaForMaskedLM", roberta_byte_pairs, _of(**ROBERTA)),
    "roberta_cls": ("RobertaForSequenceClassification", roberta_byte_pairs, _of(**ROBERTA, num_labels=3)),
    "t5": ("T5ForConditionalGeneration", t5_pieces, _t5),
    "t5_v11": ("T5ForConditionalGeneration", None, lambda size: {"vocab_size": 128, **T5_V11}),
    "vit": ("ViTForImageClassification", None, lambda size: VIT),
}
WITHOUT_TOKENIZER = 160  # tokens
# Beams with other settings than the plain four: those of BART for summaries, and of OPUS-MT.
BEAMS = {
    "bart": ("beam4_cnn", {
        "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 6, "early_stopping": True,
        "forced_bos_token_id": 0, "max_new_tokens": None, "max_length": 16,
    }),
    "marian": ("beam4_lp06", {"length_penalty": 0.6, "early_stopping": True}),
}  # fmt: skip


# Inputs


def batch(name, lengths, ids, padding_id, seed, *, first=None, last=None, left=False):
    """Random ids of the range `ids`, padded to the longest row, and their mask."""
    numbers, width = generator(f"ids:{name}", seed), max(lengths)
    tokens = np.full((len(lengths), width), padding_id)
    mask = np.zeros_like(tokens)
    for index, length in enumerate(lengths):
        row = numbers.integers(ids.start, ids.stop, length)
        row[0] = row[0] if first is None else first
        row[-1] = row[-1] if last is None else last
        slots = slice(width - length, width) if left else slice(length)
        tokens[index, slots], mask[index, slots] = row, 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)


def inputs_of(name, config, seed):
    """What a model is called with, by name."""
    if name == "vit":
        return {"pixel_values": torch.from_numpy(generator("pixels", seed).standard_normal((2, 3, 16, 16))).float()}
    size, pad, stop = config.vocab_size, config.pad_token_id, config.eos_token_id
    if config.is_encoder_decoder:
        ids = range(3, size) if pad < 3 else range(2, size - 1)
        source, mask = batch(name, [12, 8, 5], ids, pad, seed, last=stop)
        start = config.decoder_start_token_id
        target, target_mask = batch(f"{name} target", [9, 6, 3], ids, pad, seed, first=start)
        masks = {"attention_mask": mask, "decoder_attention_mask": target_mask}
        return {"input_ids": source, "decoder_input_ids": target, **masks}
    if name in GENERATIVE:
        ids, mask = batch(name, [11, 7, 4], range(5, size), pad, seed)
        return {"input_ids": ids, "attention_mask": mask}
    first, last = (0, 2) if "roberta" in name else (2, 3)
    ids, mask = batch(name, [12, 8, 5], range(5, size), pad, seed, first=first, last=last)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.startswith(("bert", "electra")):  # the second half of each row is a second segment
        halves = torch.arange(ids.shape[1])[None] >= mask.sum(-1, keepdim=True) // 2
        inputs["token_type_ids"] = halves.long() * mask
    return inputs


GENERATIVE = [name for name, (kind, *_) in CHECKPOINTS.items() if kind.endswith(("Generation", "CausalLM", "MTModel"))]
GENERATIVE = sorted({*GENERATIVE, "gpt2", "gpt2_inner"})


# References


def arrays_of(outputs):
    """The outputs of a model by name, hidden states stacked."""
    found = {}
    for name, value in outputs.items():
        if name.endswith("hidden_states"):
            found[name] = torch.stack(value).numpy()
        elif torch.is_tensor(value):
            found[name] = value.numpy()
    return found


def reference(model, exact, inputs, generated):
    """What `exact`, the model in float64, computes; and how far `model`, in float32, is from it."""
    inputs64 = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    arrays = arrays_of(exact(**inputs64, output_hidden_states=True))
    if not generated:
        base = arrays_of(getattr(exact, exact.base_model_prefix)(**inputs64))
        arrays |= {name: base[name] for name in ("last_hidden_state", "pooler_output") if name in base}
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    key = "start_logits" if "start_logits" in arrays else "logits"
    difference = np.abs(model(**inputs)[key].numpy() - arrays[key])
    real = mask.numpy() == 1 if mask is not None and difference.shape[:2] == tuple(mask.shape) else ...
    error = {"float32_error": difference[real].max()}
    return {**{name: x.numpy() for name, x in inputs.items()}, **arrays, **generated, **error}


def generate(model, prompts, num_beams, **options):
    options = {"max_new_tokens": NEW_TOKENS, "num_beams": num_beams, "num_return_sequences": num_beams, **options}
    return model.generate(**prompts, do_sample=False, return_dict_in_generate=True, output_scores=True, **options)


def lengths(rows, begin, stop):
    return [row.index(stop) + 1 if stop in row else len(row) for row in rows[:, begin:].tolist()]


def generations(name, model, exact, prompts):
    """{key: ids or scores} of greedy and beam search; None where rounding may decide, or all texts are as long."""
    config = model.config
    begin, stop = 1 if config.is_encoder_decoder else prompts["input_ids"].shape[1], config.eos_token_id
    greedy = generate(exact, prompts, 1)
    ends = lengths(greedy.sequences, begin, stop)
    if not (min(ends) < NEW_TOKENS <= max(ends) + 4 and len(set(ends)) > 1):
        return None
    for step, scores in enumerate(greedy.scores):
        best = torch.topk(scores, 2).values
        alive = torch.tensor(ends) > step
        if (best[:, 0] - best[:, 1])[alive].min() < 5e-3:
            return None
    settings = {"beam4": {}, **dict([BEAMS[name]] if name in BEAMS else [])}
    found = {"greedy_ids": greedy.sequences.numpy()}
    for key, options in settings.items():
        beams = generate(exact, prompts, 4, **options)
        scores = beams.sequences_scores.reshape(-1, 4)
        if (scores[:, :-1] - scores[:, 1:]).min() < 1e-4 or len(set(lengths(beams.sequences, begin, stop))) == 1:
            return None
        found |= {f"{key}_ids": beams.sequences.numpy(), f"{key}_scores": beams.sequences_scores.numpy()}
    other = copy.deepcopy(model)  # float32, which rounds too
    for path, parameter in other.named_parameters():
        noise = generator(f"noise:{path}", 0).standard_normal(parameter.shape)
        _assign(parameter, parameter.numpy() * (1 + PERTURBATION * noise))
    for key, options in settings.items():
        if not np.array_equal(generate(other, prompts, 4, **options).sequences.numpy(), found[f"{key}_ids"]):
            return None
    return found


# All together


@contextlib.contextmanager
def on_cpu():
    """PyTorch on the CPU, on one thread, without gradients; and transformers without a word."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def new_model(name, size):
    kind, _, config_of = CHECKPOINTS[name]
    architecture = getattr(transformers, kind)
    model = architecture(architecture.config_class(**config_of(size)))
    if name == "t5_v11":  # transformers 5 ties when it makes a model, whatever the config says
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
        model.all_tied_weights_keys.pop("lm_head.weight", None)
    return model


def with_generations(name, model, seed):
    """Finds weights whose texts end at different lengths and are not decided by rounding."""
    config, prompts, beside = model.config, None, {}
    inputs = inputs_of(name, config, seed)
    if config.is_encoder_decoder:
        prompts = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    else:
        ids, mask = batch(
            f"{name} prompts", [9, 6, 3], range(5, config.vocab_size), config.pad_token_id, seed, left=True
        )
        prompts = {"input_ids": ids, "attention_mask": mask}
        beside = {**prompts, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    for attempt in range(ATTEMPTS):
        randomize(model, seed + attempt, GENERATIVE_GAIN)
        if name == "marian":
            model.generation_config.bad_words_ids = [[config.pad_token_id]]  # as Helsinki-NLP/opus-mt-* have it
            model.final_logits_bias[0, config.pad_token_id] += 6.0  # would often win, were it allowed
        raise_stop_token(model, (1.5, 2.5, 1.0)[attempt % 3], inputs)
        exact = copy.deepcopy(model).double()
        found = generations(name, model, exact, prompts)
        if found is not None:
            if beside:
                found |= {f"lp_{key}": x.numpy() for key, x in beside.items()}
                found["lp_logits"] = exact(**beside).logits.numpy()
            return exact, found
    raise RuntimeError(f"No weights of {name!r} generate texts that rounding does not decide. Give another seed.")


def make(name, folder, seed):
    """Writes the checkpoint `name` and its reference.npz into a folder."""
    with on_cpu():
        torch.manual_seed(seed)
        tokenizer = CHECKPOINTS[name][1]
        model = new_model(name, WITHOUT_TOKENIZER if tokenizer is None else tokenizer(folder))
        if name in GENERATIVE:
            exact, generated = with_generations(name, model, seed)
        else:
            exact, generated = copy.deepcopy(randomize(model, seed, ENCODER_GAIN)).double(), {}
        arrays = reference(model, exact, inputs_of(name, model.config, seed), generated)
        model.save_pretrained(folder)
    if name == "t5_v11":  # as google/flan-t5-* have it
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"tie_word_embeddings": False}
        config.pop("scale_decoder_outputs", None)
        path.write_text(json.dumps(config))
        if "lm_head.weight" not in load_file(folder / "model.safetensors"):
            raise RuntimeError("transformers has tied the logits of 't5_v11'.")
    np.savez(folder / "reference.npz", **arrays)
