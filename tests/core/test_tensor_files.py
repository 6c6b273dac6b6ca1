"""Tensors on disk: any dtype, size and layout comes back bit for bit, and nothing else does."""

from pathlib import Path

import pytest
import torch

import headwise
from headwise.base.read import read_tensors, reading, write_tensors
from headwise.errors import CheckpointError

SOURCE = Path(headwise.__file__).parent
X = torch.randn(3, 5, 7)
TENSORS = {
    "float32": X, "float64": X.double(), "bfloat16": X.bfloat16(), "float16": X.half(), "int64": (X * 9).long(),
    "int8": (X * 9).to(torch.int8), "bool": X > 0, "a number": X[0, 0, 0], "none": X[:, :0], "NaN": X / 0 * 0,
    "strided": X[:, ::2, 1:], "transposed": X.mT, "expanded": X[:1].expand(3, 5, 7),
    "negated": torch.complex(torch.zeros_like(X), X).conj().imag, "a parameter": torch.nn.Parameter(X),
}  # fmt: skip


def test_all_of_them_come_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", TENSORS, {"format": "test", "more": "武松"})
    tensors, header = read_tensors(tmp_path / "x", "test")
    assert header == {"format": "test", "more": "武松"}
    assert tensors.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert tensors[name].dtype == x.dtype
        torch.testing.assert_close(tensors[name], x.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted(set(TENSORS) - {"none"}))
def test_every_tensor_counts_in_the_checksum(name: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {name: TENSORS[name]}, {"format": "test"})
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x").write_bytes(data)
    with (
        pytest.raises(CheckpointError, match=r"file '.*x' cannot be read: it is damaged"),
        reading(tmp_path / "x", "file"),
    ):
        read_tensors(tmp_path / "x", "test")


def test_the_header_counts_in_the_checksum(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"x": X}, {"format": "test", "scale": "0.5"})
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data.replace(b'"0.5"', b'"0.7"'))
    with pytest.raises(CheckpointError, match="checksum"):
        read_tensors(tmp_path / "x", "test")


def test_tensors_are_written_and_read_in_one_place() -> None:
    """There signs are carried out, memory is parted, and the checksum is made."""
    found = [path for path in SOURCE.rglob("*.py") if "safetensors.torch" in path.read_text(encoding="utf-8")]
    assert [path.name for path in found] == ["read.py"]


def test_lazy_negation_and_conjugation_are_resolved(tmp_path: Path) -> None:
    pairs = torch.randn(5, dtype=torch.complex64)
    lazy = {"negated": pairs.conj().imag, "conjugate": pairs.conj()}
    assert lazy["negated"].is_neg()
    assert lazy["conjugate"].is_conj()
    write_tensors(tmp_path / "x", lazy, {"format": "test"})
    found, _ = read_tensors(tmp_path / "x", "test")
    assert torch.equal(found["negated"], -pairs.imag)
    assert torch.equal(found["conjugate"], torch.complex(pairs.real, -pairs.imag))


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    header = {"format": "test", **{f"key {i}": str(i) for i in range(12)}}
    tensors = {"a": torch.arange(3.0), "b": torch.arange(5)}
    write_tensors(tmp_path / "one", tensors, header)
    write_tensors(tmp_path / "other", dict(reversed(tensors.items())), dict(reversed(header.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
