"""Checkpoints as they are stored in the wild: other names, half precision, shards, copies, buffers, other formats.

Each function writes one into a folder, from the folder of the checkpoint that is named in `VARIANTS`.
"""

import json

import h5py
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.pretrained.making import on_cpu


def bert_gamma_beta(source, folder):
    """google-bert/bert-base-uncased: gamma and beta, the tied decoder, a head beside, a buffer."""
    tensors = load_file(source / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    renamed |= {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.seq_relationship.weight": torch.ones(2, 32),
        "cls.seq_relationship.bias": torch.zeros(2),
        "bert.pooler.dense.weight": torch.eye(32),
        "bert.pooler.dense.bias": torch.zeros(32),
        "bert.embeddings.position_ids": torch.arange(40)[None],
    }
    _save(folder, renamed)
    _copy_config(source, folder, without=["dtype"], torch_dtype="float32")


def bert_unprefixed(source, folder):
    """The base model, as BertModel and sentence-transformers save it."""
    tensors = load_file(source / "model.safetensors")
    _save(folder, {name.removeprefix("bert."): x for name, x in tensors.items() if name.startswith("bert.")})
    _copy_config(source, folder, architectures=["BertModel"])


def bert_fp16(source, folder):
    _save(folder, {name: x.half() for name, x in load_file(source / "model.safetensors").items()})
    _copy_config(source, folder, dtype="float16")


def bert_bin(source, folder):
    """A pickle alone."""
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    _copy_config(source, folder)


def distilbert_cls_tf_h5(source, folder):
    """What Keras users pushed: tf_model.h5 alone. Laid out by the rule of transformers 4, not by TensorFlow."""
    tensors = load_file(source / "model.safetensors")
    with h5py.File(folder / "tf_model.h5", "w") as file:
        file.attrs["layer_names"] = [b"distilbert", b"pre_classifier", b"classifier", b"dropout_19"]
        file.attrs["backend"], file.attrs["keras_version"] = b"tensorflow", b"2.12.0"
        for layer in ("distilbert", "pre_classifier", "classifier", "dropout_19"):
            group, names = file.create_group(layer), []
            for name, tensor in tensors.items():
                *path, module, leaf = name.split(".")
                if name.split(".")[0] != layer:
                    continue
                leaves = {"weight": "kernel", "bias": "bias"}
                if "norm" in module.lower():
                    leaves = {"weight": "gamma", "bias": "beta"}
                elif module.endswith("embeddings"):
                    leaves = {"weight": "weight" if module == "word_embeddings" else "embeddings"}
                array = tensor.numpy().T if leaves[leaf] == "kernel" else tensor.numpy()
                path = "/".join([*path, module]).replace("/layer/", "/layer_._")
                names.append(f"tf_distil_bert_for_sequence_classification/{path}/{leaves[leaf]}:0")
                group.create_dataset(names[-1], data=np.ascontiguousarray(array))
            group.attrs["weight_names"] = [name.encode() for name in names]
    _copy_config(source, folder)


def gpt2_original(source, folder):
    """openai-community/gpt2: no prefix, buffers of the causal mask, no padding token."""
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(source / "model.safetensors").items()}
    for index in range(2):
        tensors[f"h.{index}.attn.bias"] = torch.tril(torch.ones(48, 48))[None, None]
        tensors[f"h.{index}.attn.masked_bias"] = torch.tensor(-1e4)
    _save(folder, tensors)
    _copy_config(source, folder, without=["dtype", "pad_token_id"], n_ctx=48, torch_dtype="float32")


def llama_v4_config(source, folder):
    """The keys of transformers 4, and a buffer of the rotary embedding."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _save(folder, {**load_file(source / "model.safetensors"), name: frequencies})
    theta = json.loads((source / "config.json").read_text())["rope_parameters"]["rope_theta"]
    old = {"rope_theta": theta, "rope_scaling": None, "torch_dtype": "float32", "transformers_version": "4.40.0"}
    _copy_config(source, folder, without=["rope_parameters", "dtype", "head_dim"], **old)


def llama_bf16_sharded(source, folder):
    model = transformers.LlamaForCausalLM.from_pretrained(source).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB")


def t5_original(source, folder):
    """google-t5/t5-small: copies of the token table, a bias that is never used, a short config."""
    tensors = load_file(source / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 4)
    _save(folder, tensors)
    new = [
        "scale_decoder_outputs",
        "tie_word_embeddings",
        "dense_act_fn",
        "is_gated_act",
        "num_decoder_layers",
        "dtype",
    ]
    prefixes = {"summarization": {"prefix": "summarize: "}}
    _copy_config(source, folder, without=new, n_positions=512, output_past=True, task_specific_params=prefixes)


def t5_v11_resaved_by_v5(source, folder):
    """transformers 5 says that the logits are tied, and stores their table."""
    transformers.T5ForConditionalGeneration.from_pretrained(source).save_pretrained(folder)


def bart_unprefixed(source, folder):
    """facebook/bart-base: the base model, with copies of the token table."""
    tensors = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    for side in ("encoder", "decoder"):
        tensors[f"{side}.embed_tokens.weight"] = tensors["shared.weight"].clone()
    _save(folder, tensors)
    _copy_config(source, folder, architectures=["BartModel"])


def marian_original(source, folder):
    """Helsinki-NLP/opus-mt-*: stored sinusoids and copies, keys of another framework, four beams in config.json."""
    tensors, model = load_file(source / "model.safetensors"), transformers.MarianMTModel.from_pretrained(source)
    for side in ("encoder", "decoder"):
        positions = getattr(model.model, side).embed_positions.weight
        tensors[f"model.{side}.embed_positions.weight"] = positions.detach().clone()
        tensors[f"model.{side}.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
    tensors["lm_head.weight"] = tensors["model.shared.weight"].clone()
    _save(folder, tensors)
    pad = model.config.pad_token_id
    off = dict.fromkeys(["normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits"], False)
    said = {**off, "static_position_embeddings": True, "bad_words_ids": [[pad]], "num_beams": 4}
    _copy_config(source, folder, **said)


def _save(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_config(source, folder, *, without=(), **changed):
    config = json.loads((source / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**kept, **changed}))


def make(name, source, folder):
    """Writes the variant `name` of the checkpoint in `source`."""
    with on_cpu():
        globals()[name](source, folder)
