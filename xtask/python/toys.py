"""Saves what some scenarios need besides MODEL, which model.py has saved: with its sizes, and with
fixed random weights.

  toys.py adapters MODEL FOLDER    two LoRA adapters for MODEL, `first` and `second`
  toys.py hybrid MODEL FOLDER      a small Gemma 3 with sliding-window and full-attention layers
  toys.py narrow MODEL FOLDER      the same, with windows of less than a chunk
  toys.py sliding MODEL FOLDER     a small Mistral, all of whose layers have a sliding window
  toys.py worded MODEL FOLDER      MODEL with a tokenizer, which has a word for each token: w0, w1, …
  toys.py latent MODEL FOLDER      a small DeepSeek V2, whose attention is MLA
"""

import json
import os
import shutil
import sys

import torch

RANK = 8
# Values of the model's configuration that the other models have as well.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "max_position_embeddings", "initializer_range",
         "tie_word_embeddings")


def config_of(model):
    """Returns the configuration of a saved model."""
    with open(os.path.join(model, "config.json")) as f:
        return json.load(f)


def adapters(model, folder):
    from safetensors.torch import save_file

    config = config_of(model)
    hidden, heads = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * heads,
        "k_proj": config["num_key_value_heads"] * heads,
        "v_proj": config["num_key_value_heads"] * heads,
    }
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for module, size in outputs.items():
                at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden) * 0.1
                weights[f"{at}.lora_B.weight"] = torch.randn(size, RANK) * 0.1
        os.mkdir(os.path.join(folder, name))
        save_file(weights, os.path.join(folder, name, "adapter_model.safetensors"))
        with open(os.path.join(folder, name, "adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
                       "target_modules": list(outputs), "base_model_name_or_path": "toy"}, f)


def worded(model, folder):
    import tokenizers
    import transformers

    shutil.copytree(model, folder, dirs_exist_ok=True)
    words = {f"w{token}": token for token in range(config_of(model)["vocab_size"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0")
    fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def narrow(model, folder):
    hybrid(model, folder, 100)


def sliding(model, folder):
    import transformers

    torch.manual_seed(7)
    base = config_of(model)
    config = transformers.MistralConfig(
        **{name: base[name] for name in (*SIZES, "num_key_value_heads", "head_dim")},
        sliding_window=300,
    )
    transformers.MistralForCausalLM(config).save_pretrained(folder)


def hybrid(model, folder, window=256):
    import transformers

    torch.manual_seed(7)
    base = config_of(model)
    config = transformers.Gemma3TextConfig(
        **{name: base[name] for name in (*SIZES, "num_key_value_heads", "head_dim")},
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * (base["num_hidden_layers"] // 2),
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)


def latent(model, folder):
    import transformers

    torch.manual_seed(7)
    base = config_of(model)
    config = transformers.DeepseekV2Config(
        **{name: base[name] for name in SIZES},
        # No layer with experts.
        first_k_dense_replace=base["num_hidden_layers"],
        num_key_value_heads=base["num_attention_heads"],
        # vLLM's kernel on CPU knows vectors of 512 + 64 elements only.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=base["head_dim"],
        v_head_dim=base["head_dim"],
        q_lora_rank=None,
        # As DeepSeek's own. vLLM 0.32 on CPU computes MLA with plain rotary embeddings wrongly: what
        # a request gets depends on the others of its batch, without any connector.
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0,
                         "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 1.0},
    )
    transformers.DeepseekV2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    makers = (adapters, hybrid, narrow, sliding, worded, latent)
    {maker.__name__: maker for maker in makers}[sys.argv[1]](*sys.argv[2:])
