"""Saves a small Llama with fixed random weights: model.py FOLDER

The weights are wide enough apart (`initializer_range`) that greedy decoding in float32 has no
near-ties, so the same prompt gives the same ids on every run.
"""

import sys

import torch
import transformers

torch.manual_seed(7)
config = transformers.LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=8192,
    initializer_range=0.08,
    tie_word_embeddings=False,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
