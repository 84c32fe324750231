"""transformers' own tests of a model (`ModelTesterMixin`) on our classes: `make test-transformers`.

They are not installed with transformers. `TRANSFORMERS_TESTS` is the path of `tests` in its source package, without
subfolders; the classes in those (generation, export) are replaced by empty ones.
"""

import importlib
import os
import sys
import types
import unittest
from typing import Any

import torch

from diffllama import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DiffLlamaForQuestionAnswering,
    DiffLlamaForSequenceClassification,
    DiffLlamaForTokenClassification,
    DiffLlamaModel,
)


def add_module(name: str, **contents: Any) -> None:
    """Make a module without a file importable."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


add_module("transformers_tests", __path__=[os.environ["TRANSFORMERS_TESTS"]])
for folder, module, mixin in (
    ("exporters", "test_export", "ExportTesterMixin"),
    ("generation", "test_utils", "GenerationTesterMixin"),
):
    add_module(f"transformers_tests.{folder}", __path__=[])
    add_module(f"transformers_tests.{folder}.{module}", **{mixin: type(mixin, (), {})})
common = importlib.import_module("transformers_tests.test_modeling_common")


class ModelTester:
    """A tiny model and its inputs, with the sizes of transformers' tests of Llama."""

    batch_size, seq_length, is_training = 13, 7, True
    hidden_size, num_hidden_layers = 32, 2
    num_attention_heads = 2  # heads of returned maps: differential heads

    def __init__(self, variant: str, noise_heads: int) -> None:
        self.variant, self.noise_heads = variant, noise_heads

    def get_config(self) -> DiffLlamaConfig:
        return DiffLlamaConfig(
            diff_variant=self.variant,
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads + self.noise_heads,
            num_noise_heads=self.noise_heads,
            head_dim=8,
            max_position_embeddings=512,
            pad_token_id=0,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[DiffLlamaConfig, dict[str, torch.Tensor]]:
        input_ids = torch.randint(1, 99, (self.batch_size, self.seq_length))
        mask = torch.ones_like(input_ids).tril()
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask}


class CommonTests(common.ModelTesterMixin):  # type: ignore[name-defined,misc]
    variant: str
    noise_heads = ModelTester.num_attention_heads
    test_generation_tester_mixin_inheritance = None  # the mixin is not in the source package
    all_model_classes = (
        DiffLlamaModel,
        DiffLlamaForCausalLM,
        DiffLlamaForSequenceClassification,
        DiffLlamaForTokenClassification,
        DiffLlamaForQuestionAnswering,
    )

    def setUp(self) -> None:
        self.model_tester = ModelTester(self.variant, self.noise_heads)


class V1Test(CommonTests, unittest.TestCase):
    variant = "v1"
    test_sdpa_can_dispatch_non_composite_models = None  # expects `sdpa` by default; see test_attention.py


class V2Test(CommonTests, unittest.TestCase):
    variant = "v2"


class GroupedV1Test(V1Test):
    noise_heads = 1


class GroupedV2Test(V2Test):
    noise_heads = 1
