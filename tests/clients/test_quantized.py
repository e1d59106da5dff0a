"""Weights that libraries quantized, moved as they are: bitsandbytes, torchao and quanto.

Run by ``make test-clients``, which installs them into an environment of their own. The same shapes
of weight, without the libraries, are in ``tests/test_kinds_of_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from placement import PlacementManager

NOT_HERE = "{} is not installed; make test-clients runs this"
SIZE = 64


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=NOT_HERE.format(name))


def four_bits(nested: bool) -> nn.Module:
    bitsandbytes = library("bitsandbytes")
    layer: nn.Module = bitsandbytes.nn.Linear4bit(
        SIZE, SIZE, quant_type="nf4", compress_statistics=nested, compute_dtype=torch.float32
    )
    return layer.to("cpu")  # which quantizes


def eight_bits() -> nn.Module:
    bitsandbytes = library("bitsandbytes")
    layer: nn.Module = bitsandbytes.nn.Linear8bitLt(SIZE, SIZE, has_fp16_weights=False)
    layer.weight._quantize("cpu")  # as a move to CUDA does
    return layer


def torchao() -> nn.Module:
    quantization = library("torchao.quantization")
    module = nn.Sequential(nn.Linear(SIZE, SIZE))
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    return module


def quanto() -> nn.Module:
    quanto = library("optimum.quanto")
    module = nn.Sequential(nn.Linear(SIZE, SIZE))
    quanto.quantize(module, weights=quanto.qint8)
    quanto.freeze(module)
    return module


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "bitsandbytes, 4 bits": lambda: four_bits(nested=False),
    "bitsandbytes, 4 bits, nested": lambda: four_bits(nested=True),
    "bitsandbytes, 8 bits": eight_bits,
    "torchao": torchao,
    "quanto": quanto,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_quantized_layer_computes_the_same_after_each_move(one_rank: str, kind: str) -> None:
    torch.manual_seed(0)
    module = LAYERS[kind]()
    x = torch.randn(4, SIZE)

    @torch.no_grad()
    def output() -> torch.Tensor:
        device = next(module.parameters()).device
        result: torch.Tensor = module(x.to(device)).cpu()
        return result

    on_cpu = output()
    manager = PlacementManager(module, verify="always")
    with manager.evaluating():
        assert {site.device.type for site in manager.census().sites} == {one_rank}
        on_device = output()  # which may round otherwise: bitsandbytes has a kernel for each
    assert torch.allclose(on_device, on_cpu, atol=0.05)
    for _ in range(2):
        assert {site.device.type for site in manager.census().sites} == {"cpu"}
        assert torch.equal(output(), on_cpu)
        with manager.evaluating():
            assert torch.equal(output(), on_device)
