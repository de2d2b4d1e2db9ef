"""The tests that all models of transformers share, for a small Llama whose class of blocks computes with our kernels.

They are in the archive of the package but for those of generation and export, whose mixins are empty here.
"""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any, Dict, Tuple

import pytest
import swiglu.hf
import torch
from swiglu._patch import in_force

for _name, _mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
    _module = types.ModuleType(f"tests.{_name}")
    setattr(_module, _mixin, type(_mixin, (), {}))
    sys.modules[f"tests.{_name}"] = _module

from tests.test_modeling_common import ModelTesterMixin  # noqa: E402
from tests.test_training_mixin import TrainingTesterMixin  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from transformers.testing_utils import torch_device  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def our_blocks() -> Any:
    swiglu.hf.apply("llama")
    yield
    swiglu.hf.unapply()


class Small:
    """What the mixins ask of a model's tester."""

    __test__ = False
    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    causal_lm_class, base_model_class = LlamaForCausalLM, LlamaModel

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def get_config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=99, hidden_size=self.hidden_size, intermediate_size=37, num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads, num_key_value_heads=2, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> Tuple[LlamaConfig, Dict[str, Any]]:
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length), device=torch_device)
        mask = torch.ones_like(ids).tril()
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class LlamaTest(ModelTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (
        LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForQuestionAnswering,
        LlamaForTokenClassification,
    )  # fmt: skip
    all_generative_model_classes = (LlamaForCausalLM,)

    def setUp(self) -> None:
        self.model_tester = Small(self)

    def test_blocks_are_ours(self) -> None:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = LlamaForCausalLM(config).to(torch_device).eval()
        model(**inputs)
        assert all(in_force(layer.mlp) for layer in model.model.layers)


del ModelTesterMixin, TrainingTesterMixin
