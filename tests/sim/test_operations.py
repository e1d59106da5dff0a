"""Operations: mixing devices is refused, and the values are the CPU's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from placement import sim

MIXING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "device + host": lambda x, y: x + y,
    "host + device": lambda x, y: y + x,
    "device @ host": lambda x, y: x @ y.t(),
    "host @ device": lambda x, y: y @ x.t(),
    "host module, device input": lambda x, y: nn.Linear(4, 4)(x),
    "device module, host input": lambda x, y: nn.Linear(4, 4).to("sim")(y),
    "device table, host index": lambda x, y: functional.embedding(torch.tensor([1]), x),
    "host table, device index": lambda x, y: functional.embedding(
        torch.tensor([1], device="sim"), y
    ),
    "layer norm": lambda x, y: nn.LayerNorm(4)(x),
    "cat, device first": lambda x, y: torch.cat([x, y]),
    "cat, host first": lambda x, y: torch.cat([y, x]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "foreach": lambda x, y: torch._foreach_add([x], [y]),
    "loss": lambda x, y: functional.mse_loss(x, y),
    "in place": lambda x, y: x.add_(y),
    "two devices": lambda x, y: x + y.to("sim:1"),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING.keys())
def test_an_operation_that_mixes_devices_raises(mix: Callable[[Tensor, Tensor], object]) -> None:
    on_host = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(on_host.to("sim"), on_host)


def test_a_host_tensor_is_not_indexed_by_a_device_tensor() -> None:
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        torch.zeros(3)[torch.tensor([0], device="sim")]


def test_a_host_scalar_and_host_indices_are_accepted_as_on_cuda() -> None:
    x = torch.arange(3.0, device="sim")
    assert (x + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0]
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]


SAME_AS_ON_CPU: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.t(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(2)[1],
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([0], device=x.device),), x[1]),
    "cumsum": lambda x: x.cumsum(1),
    "std": lambda x: x.std(),
    "fft, conj and real": lambda x: torch.fft.fft(x).conj().real,
    "lazy conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "lazy negative": lambda x: torch.complex(x, x + 1).conj().imag,
    "view as complex": lambda x: torch.view_as_complex(x.view(2, 3, 2)).abs(),
    "foreach norm": lambda x: torch.stack(torch._foreach_norm([x, x + 1])),
    "bfloat16": lambda x: x.bfloat16() @ x.bfloat16().t(),
    "out=": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "arange": lambda x: torch.arange(5, device=x.device),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add_(0, torch.zeros_like(x).long(), x),
    "split and cat": lambda x: torch.cat(x.split(1)[::-1]),
    "pad": lambda x: functional.pad(x, (1, 1)),
    "interpolate": lambda x: functional.interpolate(x[None], scale_factor=2.0),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "linalg": lambda x: torch.linalg.svdvals(x),
}


@pytest.mark.parametrize("operation", SAME_AS_ON_CPU.values(), ids=SAME_AS_ON_CPU.keys())
def test_an_operation_gives_the_cpu_values_on_the_device(
    operation: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    result = operation(x.to("sim"))
    assert result.device == torch.device("sim:0")
    assert_close(result.cpu(), operation(x))


class Recurrent(nn.Module):
    """A recurrent layer whose output is a tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    """Attention of a tensor with itself, through torch's fused operator."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(2, 5, 2, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (2, 5, 8)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (1, 3, 8, 8)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(3), (5, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "max pool": (lambda: nn.MaxPool2d(2), (1, 3, 8, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM(4, 6, num_layers=2)), (5, 2, 4)),
    "gru": (lambda: Recurrent(nn.GRU(4, 6, bidirectional=True)), (5, 2, 4)),
    "rnn": (lambda: Recurrent(nn.RNN(4, 6)), (5, 2, 4)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
    ),
}


@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES.keys())
def test_a_module_gives_the_cpu_outputs_and_gradients(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = make()
    x = torch.randn(shape, requires_grad=True)
    twin = copy.deepcopy(module).to("sim")
    y = x.detach().to("sim").requires_grad_()

    expected, result = module(x), twin(y)
    expected.square().sum().backward()
    result.square().sum().backward()

    assert_close(result.cpu(), expected)
    assert_close(y.grad.cpu(), x.grad)
    for parameter, expected_parameter in zip(twin.parameters(), module.parameters(), strict=True):
        assert parameter.grad.device.type == "sim"
        assert_close(parameter.grad.cpu(), expected_parameter.grad)


def test_a_packed_sequence_keeps_its_lengths_on_the_host() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 6)
    x, lengths = torch.randn(5, 3, 4), torch.tensor([5, 3, 2])
    expected = layer(rnn.pack_padded_sequence(x, lengths))[0].data
    packed = rnn.pack_padded_sequence(x.to("sim"), lengths)
    assert packed.batch_sizes.is_cpu
    assert_close(layer.to("sim")(packed)[0].data.cpu(), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_gives_the_cpu_outputs_and_gradients(backend: str) -> None:
    """Inductor, the default backend, has no code generator for the device."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    module(x).sum().backward()
    expected = module[0].weight.grad
    twin = copy.deepcopy(module).to("sim")
    twin.zero_grad()
    torch.compile(twin, backend=backend)(x.to("sim")).sum().backward()
    assert_close(twin[0].weight.grad.cpu(), expected)


def test_views_share_the_memory_of_their_base() -> None:
    base = torch.zeros(2, 6, device="sim")
    allocated = torch.sim.memory_allocated()
    views = [base.view(12), base.t(), base[1:], base.unfold(1, 2, 2), base.view(torch.int32)]
    assert torch.sim.memory_allocated() == allocated
    assert {view.untyped_storage().data_ptr() for view in views} == {base.data_ptr()}
    base[1].fill_(7.0)
    assert views[2].tolist() == [[7.0] * 6]


@pytest.mark.parametrize("kind", ["foreach", "fused", "for-loop"])
def test_adamw_trains_as_on_the_cpu(kind: str) -> None:
    flags = {"foreach": kind == "foreach", "fused": kind == "fused"}
    torch.manual_seed(0)
    host_model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    device_model = copy.deepcopy(host_model).to("sim")
    x, labels = torch.randn(5, 4), torch.randint(0, 3, (5,))

    for model, device in ((host_model, "cpu"), (device_model, "sim")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **flags)
        for _ in range(3):
            functional.cross_entropy(model(x.to(device)), labels.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    for trained, expected in zip(device_model.parameters(), host_model.parameters(), strict=True):
        assert_close(trained.cpu(), expected)


def test_autocast_lowers_and_keeps_precision_as_on_cuda() -> None:
    x = torch.randn(4, 4, device="sim")
    layer = nn.Linear(4, 4).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert layer(x).dtype == torch.bfloat16
        assert (x @ x).exp().dtype == torch.float32
        assert functional.layer_norm(x @ x, (4,)).dtype == torch.float32
        assert (x @ x).softmax(-1).dtype == torch.float32
        assert ((x @ x) + x).dtype == torch.float32


def test_random_numbers_follow_the_seed_and_the_state() -> None:
    torch.manual_seed(3)
    state = torch.sim.get_rng_state()
    first = torch.randn(5, device="sim")
    second = torch.randn(5, device="sim")
    torch.sim.set_rng_state(state)
    again = torch.randn(5, device="sim")
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert state.shape == (16,)

    generator = torch.Generator(device="sim").manual_seed(3)
    assert generator.device.type == "sim"
    assert torch.equal(torch.randn(5, device="sim", generator=generator), first)


def test_dropout_on_the_device_leaves_the_generator_of_the_cpu_alone() -> None:
    before = torch.get_rng_state()
    dropped = functional.dropout(torch.ones(100, device="sim"), 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < (dropped == 0).sum().item() < 100


def test_recomputation_repeats_the_dropout_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).to("sim")
    x = torch.randn(8, 16, device="sim", requires_grad=True)
    torch.sim.manual_seed(1)
    block(x).square().sum().backward()
    expected = x.grad.cpu()
    x.grad = None
    torch.sim.manual_seed(1)
    checkpoint(block, x, use_reentrant=False).square().sum().backward()
    assert_close(x.grad.cpu(), expected)


def test_a_copied_and_a_saved_tensor_come_back_on_their_device() -> None:
    x = torch.randn(3, device="sim:1")
    assert copy.deepcopy(x).device == x.device
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == x.device
    assert torch.equal(loaded.cpu(), x.cpu())
    file.seek(0)
    assert torch.load(file, map_location="cpu").device.type == "cpu"


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(NotImplementedError):
        torch.eye(3, device="sim").to_sparse()


def test_operations_count_as_fallbacks_and_not_as_copies() -> None:
    x = torch.ones(4, device="sim")
    before = sim.counters()
    x + x
    counted = sim.counters() - before
    assert counted.fallback_operations == 1
    assert counted.allocations == 1
    assert counted.host_to_device_copies == counted.device_to_host_copies == 0
