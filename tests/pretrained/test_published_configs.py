"""config.json with all keys that the best-known checkpoints have there, and small sizes.

A config that the installed transformers saves has other keys and values than one of an older version: for example
null for a window that is not used. So the tests of options, which let it save, do not meet what is published.
"""

import copy
import json

import numpy as np
import pytest

from keras_tx.pretrained import from_pretrained
from tests.pretrained import torch_models
from tests.tools import assert_close, normal, to_numpy

BERT = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 17,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 31,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 23,
}
LLAMA = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 17,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 23,
}
LLAMA_3_2_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8,
    "rope_type": "llama3",
}
QWEN = {
    **LLAMA,
    "bos_token_id": 3,
    "eos_token_id": 2,
    "max_window_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
}
T5 = {
    "d_ff": 17,
    "d_kv": 5,
    "d_model": 24,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 3,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "use_cache": True,
    "vocab_size": 23,
}
BART = {
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 24,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 17,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 17,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_position_embeddings": 31,
    "num_hidden_layers": 2,
    "scale_embedding": False,
    "use_cache": True,
    "vocab_size": 23,
}
PUBLISHED = {
    "bert-base-uncased": (
        "BertForMaskedLM",
        {
            **BERT,
            "gradient_checkpointing": False,
            "model_type": "bert",
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "transformers_version": "4.6.0.dev0",
            "use_cache": True,
        },
    ),
    "bert-base-cased, multilingual": (
        "BertForMaskedLM",
        {
            **BERT,
            "directionality": "bidi",
            "model_type": "bert",
            "pad_token_id": 0,
            "pooler_fc_size": 768,
            "pooler_num_attention_heads": 12,
            "pooler_num_fc_layers": 3,
            "pooler_size_per_head": 128,
            "pooler_type": "first_token_transform",
        },
    ),
    "roberta-base": (
        "RobertaForMaskedLM",
        {
            **BERT,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "layer_norm_eps": 1e-05,
            "model_type": "roberta",
            "pad_token_id": 1,
            "type_vocab_size": 1,
        },
    ),
    "distilbert-base-uncased-finetuned-sst-2-english": (
        "DistilBertForSequenceClassification",
        {
            "activation": "gelu",
            "attention_dropout": 0.1,
            "dim": 24,
            "dropout": 0.1,
            "finetuning_task": "sst-2",
            "hidden_dim": 17,
            "id2label": {"0": "NEGATIVE", "1": "POSITIVE"},
            "initializer_range": 0.02,
            "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
            "max_position_embeddings": 31,
            "model_type": "distilbert",
            "n_heads": 6,
            "n_layers": 2,
            "output_past": True,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "vocab_size": 23,
        },
    ),
    "electra-small-discriminator": (
        "ElectraForPreTraining",
        {
            **BERT,
            "embedding_size": 11,
            "model_type": "electra",
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "summary_activation": "gelu",
            "summary_last_dropout": 0.1,
            "summary_type": "first",
            "summary_use_proj": True,
        },
    ),
    "ModernBERT-base": (
        "ModernBertForMaskedLM",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "classifier_dropout": 0.0,
            "classifier_pooling": "mean",
            "cls_token_id": 2,
            "decoder_bias": True,
            "deterministic_flash_attn": False,
            "embedding_dropout": 0.0,
            "eos_token_id": 3,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "gradient_checkpointing": False,
            "hidden_activation": "gelu",
            "hidden_size": 24,
            "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02,
            "intermediate_size": 17,
            "layer_norm_eps": 1e-05,
            "local_attention": 4,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 31,
            "mlp_bias": False,
            "mlp_dropout": 0.0,
            "model_type": "modernbert",
            "norm_bias": False,
            "norm_eps": 1e-05,
            "num_attention_heads": 6,
            "num_hidden_layers": 4,
            "pad_token_id": 1,
            "position_embedding_type": "absolute",
            "sep_token_id": 3,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": 23,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "bos_token_id": 22,
            "embd_pdrop": 0.1,
            "eos_token_id": 22,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 31,
            "n_embd": 24,
            "n_head": 6,
            "n_layer": 2,
            "n_positions": 31,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 23,
        },
    ),
    "Llama-2-7b": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 31,
            "model_type": "llama",
            "num_key_value_heads": 6,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-3.2-1B": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "attention_bias": False,
            "bos_token_id": 21,
            "eos_token_id": 22,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "mlp_bias": False,
            "model_type": "llama",
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA_3_2_ROPE,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "Mistral-7B-v0.1": (
        "MistralForCausalLM",
        {
            **LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 31,
            "model_type": "mistral",
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 5,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen2.5-0.5B": (
        "Qwen2ForCausalLM",
        {**QWEN, "max_position_embeddings": 31, "model_type": "qwen2", "sliding_window": 4},
    ),
    "Qwen2.5-72B-Instruct": (
        "Qwen2ForCausalLM",
        {
            **QWEN,
            "max_position_embeddings": 31,
            "model_type": "qwen2",
            "sliding_window": 3,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-0.6B": (
        "Qwen3ForCausalLM",
        {
            **QWEN,
            "attention_bias": False,
            "head_dim": 8,
            "max_position_embeddings": 31,
            "model_type": "qwen3",
            "rope_scaling": None,
            "sliding_window": None,
        },
    ),
    "t5-small": (
        "T5ForConditionalGeneration",
        {
            **T5,
            "task_specific_params": {
                "summarization": {"early_stopping": True, "num_beams": 4, "prefix": "summarize: "}
            },
        },
    ),
    "flan-t5-small": (
        "T5ForConditionalGeneration",
        {
            **T5,
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": 3,
            "relative_attention_max_distance": 128,
            "tie_word_embeddings": False,
        },
    ),
    "mt5-small": (
        "MT5ForConditionalGeneration",
        {
            **T5,
            "feed_forward_proj": "gated-gelu",
            "model_type": "mt5",
            "num_decoder_layers": 2,
            "tie_word_embeddings": False,
            "tokenizer_class": "T5Tokenizer",
        },
    ),
    "bart-base": (
        "BartForConditionalGeneration",
        {
            **BART,
            "add_bias_logits": False,
            "add_final_layer_norm": False,
            "early_stopping": True,
            "forced_eos_token_id": 2,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
            "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
            "model_type": "bart",
            "no_repeat_ngram_size": 3,
            "normalize_before": False,
            "normalize_embedding": True,
            "num_beams": 4,
            "pad_token_id": 1,
        },
    ),
    "opus-mt-en-de": (
        "MarianMTModel",
        {
            **BART,
            "_num_labels": 3,
            "activation_function": "swish",
            "add_bias_logits": False,
            "add_final_layer_norm": False,
            "bad_words_ids": [[22]],
            "decoder_start_token_id": 22,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "max_length": 512,
            "model_type": "marian",
            "normalize_before": False,
            "normalize_embedding": False,
            "num_beams": 6,
            "pad_token_id": 22,
            "scale_embedding": True,
            "static_position_embeddings": True,
        },
    ),
    "vit-base-patch16-224": (
        "ViTForImageClassification",
        {
            "attention_probs_dropout_prob": 0.0,
            "encoder_stride": 16,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 24,
            "image_size": 10,
            "initializer_range": 0.02,
            "intermediate_size": 17,
            "layer_norm_eps": 1e-12,
            "model_type": "vit",
            "num_attention_heads": 6,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 5,
            "qkv_bias": True,
        },
    ),
}


@pytest.mark.parametrize("published", PUBLISHED)
def test_a_published_config_loads_and_computes_what_transformers_computes(tmp_path, published):
    import torch

    name, config = PUBLISHED[published]
    theirs = torch_models.make(tmp_path, name, **copy.deepcopy(config))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **config}))
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval().double()
    model = from_pretrained(tmp_path, dtype="float32")
    if config["model_type"] == "vit":
        inputs = {"pixel_values": normal(3, 3, 10, 10)}
    else:
        inputs = {"input_ids": torch_models.IDS, "attention_mask": torch_models.MASK}
        real = torch_models.MASK.astype(bool)
    if config.get("is_encoder_decoder"):
        inputs |= {"decoder_input_ids": torch_models.IDS[:, 1:6] + 1}
    tensors = {key: torch.tensor(value, device="cpu") for key, value in inputs.items()}
    with torch.no_grad():
        tensors = {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}
        expected = theirs(**tensors).logits.numpy()
    logits = to_numpy(model({key: np.asarray(value) for key, value in inputs.items()})["logits"])
    at = real if logits.shape[:2] == torch_models.IDS.shape else slice(None)
    assert_close(logits[at], expected[at], atol=2e-5 * max(1.0, np.abs(expected[at]).max()), rtol=0)
