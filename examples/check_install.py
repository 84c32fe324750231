# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks an installed diffllama: creates a model from a preset, saves it and loads it through the Auto classes."""

import tempfile

import torch
from transformers import AutoModelForCausalLM

import diffllama
from diffllama.configuration import preset


config = preset("830m", hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16, vocab_size=97)
model = AutoModelForCausalLM.from_config(config).eval()
input_ids = torch.arange(1, 9)[None]
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    if not torch.equal(loaded(input_ids).logits, model(input_ids).logits):
        raise SystemExit("The loaded model's logits differ from the saved one's.")
print(f"diffllama {diffllama.__version__} from {diffllama.__file__} saves and loads a model.")
