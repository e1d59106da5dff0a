"""verl's engines on a tiny Qwen2, as the tests about verl share them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VERL_LOGGING_LEVEL"] = "ERROR"

import torch
import torch.distributed as dist
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import left_right_2_no_padding

STOCK = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}
VOCABULARY = 128
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "manual": {"param_offload": True, "optimizer_offload": True},
    "policy": {"offload_policy": True},
}
"""How verl's configuration spells the three ways to offload."""


def write_tiny_model(folder: Path) -> None:
    """A Qwen2 of random weights with its tokenizer, as ``from_pretrained`` reads them."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate(special)}
    vocabulary |= {f"w{i}": i for i in range(len(special), VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def built(
    folder: Path,
    *,
    stock: bool = False,
    strategy: str = "fsdp2",
    model_type: str = "language_model",
    lora_rank: int = 0,
    merge: bool = False,
    contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    param_dtype: str = "fp32",
    deadline: float = 60.0,
    **config: Any,
) -> Any:
    """An initialised engine: the one that verl's registry gives out, or verl's own (``stock``)."""
    torch.manual_seed(0)
    parts = {
        "model_config": HFModelConfig(
            path=str(folder),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            lora_rank=lora_rank,
            lora={"merge": merge},
            override_config={"attn_implementation": "sdpa"},
        ),
        "engine_config": FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            model_dtype="fp32",
            mixed_precision={"param_dtype": param_dtype, "reduce_dtype": "fp32"},
            **config,
        ),
        "optimizer_config": FSDPOptimizerConfig(
            lr=1e-2, total_training_steps=10, lr_warmup_steps=0, weight_decay=0.0
        ),
        "checkpoint_config": CheckpointConfig(
            save_contents=list(contents), load_contents=["model", "optimizer", "extra"]
        ),
    }
    if model_type == "value_model":
        parts["model_config"].model_type = model_type
    if stock:
        engine = STOCK[model_type](**parts)
    else:
        engine = EngineRegistry.new(model_type=model_type, backend=strategy, **parts)
        type(engine).deadline = deadline
    with patch("verl.utils.model.load_valuehead_model", _load_value_model):
        engine.initialize()
    return engine


def _load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Qwen2Config, trust_remote_code: bool
) -> torch.nn.Module:
    """As verl's own, which asks for FlashAttention 2 whatever the configuration says."""
    torch.manual_seed(0)  # of the new head
    model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )
    return model


def batch(step: int) -> TensorDict:
    """Four sequences of twelve tokens, of which the last six are answers; one is shorter."""
    rows, length, answer = 4, 12, 6
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    attention = torch.ones_like(ids)
    attention[0, :2] = 0
    data = DataProto.from_single_dict(
        {
            "input_ids": ids,
            "prompts": ids[:, :-answer],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, -answer:],
            "response_mask": attention[:, -answer:],
        },
        meta_info={"temperature": 1.0},
    )
    tokens = left_right_2_no_padding(data.to_tensordict())
    tensordict_utils.assign_non_tensor(
        tokens,
        global_batch_size=rows * dist.get_world_size(),
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        use_fused_kernels=False,
        pad_mode=DatasetPadMode.NO_PADDING,
        pad_token_id=0,
    )
    answers = torch.zeros(rows, length, dtype=torch.long)
    answers[:, -answer:] = 1
    tokens["loss_mask"] = torch.nested.nested_tensor_from_jagged(
        answers[attention.bool()], offsets=tokens["input_ids"].offsets()
    )
    return tokens


Step = tuple[float, float]
"""Loss and gradient norm."""


def train_batch(engine: Any, step: int) -> Step:
    """A step in the training mode that is open."""
    out = engine.train_batch(batch(step), partial(sft_loss, config=None))
    engine.lr_scheduler_step()
    return sum(out["loss"]), out["metrics"]["grad_norm"]


def train(engine: Any, step: int) -> Step:
    with engine.train_mode():
        return train_batch(engine, step)


def infer_batch(engine: Any, step: int) -> torch.Tensor:
    out = engine.infer_batch(batch(step), None)
    log_probs: torch.Tensor = out["model_output"]["log_probs"].values()
    return log_probs.cpu()


def infer(engine: Any, step: int) -> torch.Tensor:
    with engine.eval_mode():
        return infer_batch(engine, step)


def exported(engine: Any, **options: Any) -> dict[str, torch.Tensor]:
    weights, _ = engine.get_per_tensor_param(**options)
    return {name: weight.detach().cpu() for name, weight in weights}
