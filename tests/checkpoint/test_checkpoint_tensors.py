"""Tensors on disk: every dtype and shape, as safetensors has them, read by the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from training import plain_manager, stepped

from placement import CannotSave, Checkpoints
from placement.checkpoint import files, tensor_file
from placement.checkpoint.form import DTYPES


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any bits."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
    return bits.to(torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def every_kind() -> dict[str, torch.Tensor]:
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 4), "vector": (7,)}
    return {
        f"{name} {what}": some(dtype, shape)
        for name, dtype in DTYPES.items()
        for what, shape in shapes.items()
        if not (name == "F4" and what == "scalar")
    }


def test_the_table_has_every_dtype_that_safetensors_has() -> None:
    assert set(safetensors.torch._SIZE) == set(DTYPES.values())


def test_every_dtype_and_shape_comes_back_bit_for_bit(device_type: str, tmp_path: Path) -> None:
    tensors = every_kind()
    kept = Checkpoints(tmp_path, stepped(plain_manager()))
    kept.save(1, tensors)
    extras = kept.load().extras
    assert extras.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (extras[name].dtype, extras[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(extras[name]), bits(tensor)), name


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = every_kind()
    files.write(tmp_path / "file", tensor_file.content(tensors))
    read = safetensors.torch.load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(bits(read[name]), bits(tensor)), name


def test_the_bytes_are_the_librarys(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.arange(4, dtype=torch.int8)}
    files.write(tmp_path / "file", tensor_file.content(tensors))
    assert (tmp_path / "file").read_bytes() == safetensors.torch.save(tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.zeros(()).expand(2, 3),
        torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative"],
)
@pytest.mark.parametrize("blocking", [True, False])
def test_views_are_written_as_they_read(
    device_type: str, tmp_path: Path, tensor: torch.Tensor, blocking: bool
) -> None:
    kept = Checkpoints(tmp_path, plain_manager())
    kept.save(1, [tensor, tensor.to(device_type)], blocking=blocking)
    for read in kept.load().extras:
        assert torch.equal(read, tensor)


def test_a_dtype_that_safetensors_has_not_is_refused_before_anything_is_written(
    device_type: str, tmp_path: Path
) -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    kept = Checkpoints(tmp_path / "none", plain_manager(module))
    with pytest.raises(CannotSave, match=r"model/phase: a tensor of torch.complex128"):
        kept.save(1)
    assert not (tmp_path / "none").exists()


def test_everything_but_tensors_is_json(device_type: str, tmp_path: Path) -> None:
    Checkpoints(tmp_path, stepped(plain_manager())).save(3, {"note": (1, 2)})
    found = sorted(path.name for path in (tmp_path / "step-00000003").iterdir())
    assert found == ["contents.json", "manifest.json", "rank-00000.safetensors"]
    manifest = json.loads((tmp_path / "step-00000003" / "manifest.json").read_bytes())
    assert manifest["step"] == 3
    assert manifest["torch"] == torch.__version__
    assert manifest["placement"]["params"] == "gpu"
    contents = json.loads((tmp_path / "step-00000003" / "contents.json").read_bytes())
    assert contents["extras"] == {"note": {"$tuple": [1, 2]}}
