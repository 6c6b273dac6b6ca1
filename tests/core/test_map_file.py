"""A map on disk is the map that was saved, bit for bit, or an error that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from headwise import (
    ALiBi,
    AttentionMap,
    Bias,
    Causal,
    Dense,
    Documents,
    Lengths,
    RelativeBias,
    SinkLogits,
    SoftCap,
    Window,
    attend,
)
from headwise.base.read import read_tensors, write_tensors
from headwise.errors import CheckpointError, HeadwiseError, ShapeError
from headwise.kernels import KERNELS
from headwise.masks import Everything, Grid
from headwise.rule import DTYPES, Rule

B, H, H_KV, N, M, D = 2, 6, 3, 7, 11, 5
FORMAT = "headwise-map-5"
SCORES = (
    SoftCap(3.0), ALiBi.standard(H), RelativeBias(torch.randn(H, 5), -3), Bias(torch.randn(1, H, 1, M)),
    SinkLogits(torch.randn(H)),
)  # fmt: skip
MASK = (Causal() & Documents(torch.arange(M) // 4)) | (Dense(torch.rand(N, M) < 0.5) & Lengths([3, 9])) | Window(2)


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    q = torch.randn(B, H, N, D, generator=drawn)
    k, v = torch.randn(2, B, H_KV, M, D, generator=drawn)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def made() -> AttentionMap:
    q, k, v = qkv()
    v[1, 2, 0, 1] = torch.nan
    return attend(q, k, v, mask=MASK, score=SCORES, return_map=True)[1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made().save(tmp_path / "map.safetensors")
    return tmp_path / "map.safetensors"


def forge(file: Path, change: Callable[[dict[str, Tensor], dict[str, str]], Any]) -> None:
    """Write a file with other contents, and the checksum of those."""
    tensors, header = read_tensors(file, FORMAT)
    change(tensors, header)
    write_tensors(file, {name: x.clone() for name, x in tensors.items()}, header)


def test_everything_comes_back(file: Path) -> None:
    amap, again = made(), AttentionMap.load(file)
    assert torch.equal(again.to_dense(), amap.to_dense())
    assert torch.equal(again.nonfinite_values, amap.nonfinite_values)
    assert repr(again.rule) == repr(amap.rule)
    assert [again.q.dtype, again.k.shape, again.kernel] == [amap.q.dtype, amap.k.shape, amap.kernel]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {"triton_gpu"}))
def test_the_map_of_any_kernel_and_dtype_can_be_saved(kernel: str, dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        _, amap = attend(*qkv(dtype), return_map=True, kernel=kernel)
    except HeadwiseError as refused:
        pytest.skip(str(refused))
    amap.save(tmp_path / "map")
    again = AttentionMap.load(tmp_path / "map")
    assert torch.equal(again[:], amap.using("auto")[:])
    assert again.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_rows_without_a_number_come_back(tmp_path: Path) -> None:
    q, k, v = qkv()
    q[0, 1, 2, 3] = torch.nan
    _, amap = attend(q, k, v, mask=Causal() & Lengths([0, 9]), return_map=True)
    amap.save(tmp_path / "map")
    again = AttentionMap.load(tmp_path / "map")
    assert torch.equal(again.lse.isnan(), amap.lse.isnan())
    assert torch.equal(again.lse.nan_to_num(), amap.lse.nan_to_num())


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("at", range(0, 100, 3))
def test_a_byte_that_has_changed_is_reported(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) * at // 100] ^= 1 << at % 8
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"attention map '.*map\.safetensors' cannot be read") as caught:
        AttentionMap.load(file)
    assert "\n" not in str(caught.value)


def test_a_loaded_map_does_not_change_with_its_file(file: Path) -> None:
    again = AttentionMap.load(file)
    whole = file.read_bytes()
    with open(file, "r+b") as opened:
        opened.write(bytes(len(whole)))
    assert torch.equal(again.to_dense(), made().to_dense())


def test_files_without_a_checksum_are_refused_by_name(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    from safetensors.torch import save_file

    bare = {name: value for name, value in header.items() if name != "checksum"}
    save_file(tensors, file, metadata=bare)
    with pytest.raises(CheckpointError, match="checksum"):
        AttentionMap.load(file)
    save_file(tensors, file, metadata=bare | {"format": "headwise-map-3"})
    with pytest.raises(CheckpointError, match="not of the format headwise-map-5; its header says 'headwise-map-3'"):
        AttentionMap.load(file)


def _tensor(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, str]], Any]:
    return lambda tensors, header: tensors.update({name: make(tensors[name])})


def _header(**values: str) -> Callable[[dict[str, Tensor], dict[str, str]], Any]:
    return lambda tensors, header: header.update(values)


def _kinds(**changes: Any) -> Callable[[dict[str, Tensor], dict[str, str]], Any]:
    """Other values in the code of the first score of a kind, such as SoftCap={"cap": 0}."""

    def change(tensors: dict[str, Tensor], header: dict[str, str]) -> None:
        codes = json.loads(header["scores"])
        for code in codes:
            code.update(changes.get(code["kind"], {}))
        header["scores"] = json.dumps(codes)

    return change


def _tensor_of(kind: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, str]], Any]:
    def change(tensors: dict[str, Tensor], header: dict[str, str]) -> None:
        waiting = [json.loads(header["mask"]), *json.loads(header["scores"])]
        while waiting:
            code = waiting.pop()
            names = [value for value in code.values() if isinstance(value, str) and value in tensors]
            tensors.update({name: make(tensors[name]) for name in names if code["kind"] == kind})
            waiting += [value for value in code.values() if isinstance(value, dict)]

    return change


def _nested(depth: int) -> str:
    return '{"kind": "And", "left": {"kind": "Causal"}, "right": ' * depth + '{"kind": "Causal"}' + "}" * depth


FORGED: dict[str, tuple[Any, str]] = {
    "lse of other numbers": (_tensor("lse", lambda x: torch.zeros(1, 1, 1, dtype=torch.uint8)), "lse: got torch.uint8"),
    "short lse": (_tensor("lse", lambda x: x[:, :, 1:]), "lse: .*expected torch.float32"),
    "lse in half precision": (_tensor("lse", torch.Tensor.half), "lse: got torch.float16"),
    "k in another dtype": (_tensor("k", torch.Tensor.half), "k is torch.float16, but q is torch.float32"),
    "k without one KV head": (_tensor("k", lambda x: x[:, :2].repeat(1, 2, 1, 1)), "not a multiple of the 4 heads"),
    "k of another head_dim": (_tensor("k", lambda x: x[..., 1:]), "k: shape .* does not match q"),
    "k of another batch": (_tensor("k", lambda x: x[1:]), "k: shape .* does not match q"),
    "k without a key": (_tensor("k", lambda x: x[:, :, 1:]), "mask="),
    "q of whole numbers": (_tensor("q", torch.Tensor.int), "q: dtype torch.int32"),
    "q of three dimensions": (_tensor("q", lambda x: x[0]), "q: expected"),
    "no lse": (lambda tensors, header: tensors.pop("lse"), "'lse' is missing"),
    "a tensor too many": (lambda tensors, header: tensors.update(more=torch.zeros(2)), "'more' belongs to no mask"),
    "counts as floats": (_tensor("nonfinite_values", torch.Tensor.float), "nonfinite_values: got torch.float32"),
    "too many counts": (_tensor("nonfinite_values", lambda x: x.repeat(1, 2)[:, :4]), "a divisor of 6"),
    "no counts": (_tensor("nonfinite_values", lambda x: x[:, :0]), "nonfinite_values"),
    "a count below 0": (_tensor("nonfinite_values", torch.Tensor.neg), "must be >= 0"),
    "too few sinks": (_tensor_of("SinkLogits", lambda x: x[1:]), "5 logits for 6 heads"),
    "whole sinks": (_tensor_of("SinkLogits", torch.Tensor.int), "SinkLogits.*torch.int32"),
    "slopes of two dimensions": (_tensor_of("ALiBi", lambda x: x[None]), "ALiBi"),
    "a bias for other keys": (_tensor_of("Bias", lambda x: x[..., 1:]), "Bias"),
    "ids of other keys": (_tensor_of("Documents", lambda x: x[:, 1:]), "Documents"),
    "ids that are no numbers": (_tensor_of("Documents", torch.Tensor.float), "Documents"),
    "a mask of 2": (_tensor_of("Dense", lambda x: x * 2), "mask: expected a tensor of 0 and 1"),
    "a mask of floats": (_tensor_of("Dense", torch.Tensor.float), "mask: expected a tensor of 0 and 1"),
    "a soft cap of 0": (_kinds(SoftCap={"cap": 0}), "SoftCap"),
    "a soft cap in words": (_kinds(SoftCap={"cap": "wide"}), r"scores\[0\]\.cap: expected a number"),
    "a first distance with a fraction": (_kinds(RelativeBias={"first": 0.5}), "first: expected a whole number"),
    "a tensor twice": (_kinds(ALiBi={"slopes": "tensor.10"}, SinkLogits={"logits": "tensor.10"}),
                       r"scores\[4\].logits: tensor 'tensor.10' is missing, or belongs to two"),
    "two caps": (_header(scores='[{"kind": "SoftCap", "cap": 1}, {"kind": "SoftCap", "cap": 2}]'), "two of SoftCap"),
    "an unknown score": (_header(scores='[{"kind": "Wings"}]'), "unknown score 'Wings'"),
    "scores that are no list": (_header(scores="3"), "scores: expected a list"),
    "an unknown mask": (_header(mask='{"kind": "Part"}'), "unknown mask 'Part'"),
    "a mask without a kind": (_header(mask="{}"), "mask.kind is missing"),
    "a window of 0": (_header(mask='{"kind": "Window", "left": 0, "right": 0}'), "left >= 1"),
    "a window without end": (_header(mask=f'{{"kind": "Window", "left": {10**40}, "right": 0}}'), "mask.left"),
    "too many lengths": (_tensor_of("Lengths", lambda x: x.repeat(2)[:3]), "3 lengths for a batch of 2"),
    "lengths with fractions": (_tensor_of("Lengths", torch.Tensor.float), "Lengths"),
    "lengths below 0": (_tensor_of("Lengths", torch.Tensor.neg), "Lengths"),
    "a tensor that is that of q": (_kinds(ALiBi={"slopes": "q"}), "slopes: tensor 'q' is missing"),
    "a tensor that is a number": (_kinds(ALiBi={"slopes": 3}), "slopes: expected a string"),
    "no slopes": (_kinds(ALiBi={"slopes": None}), "slopes: expected a string"),
    "more than a score holds": (_kinds(ALiBi={"more": 3}), "more: ALiBi has no such field"),
    "a score as a mask": (_header(mask='{"kind": "SoftCap", "cap": 3.0}'), "unknown mask 'SoftCap'"),
    "windows of other heads": (_header(mask='{"kind": "HeadWindows", "windows": [1, null], "sinks": 0}'), "6 query"),
    "windows in words": (_header(mask='{"kind": "HeadWindows", "windows": ["a"], "sinks": 0}'), r"windows\[0\]"),
    "windows that are no list": (_header(mask='{"kind": "HeadWindows", "windows": 3, "sinks": 0}'), "expected a list"),
    "a mask inside a mask inside": (_header(mask=_nested(500)), "masks nested more than|not JSON"),
    "a mask without bottom": (_header(mask="[" * 100_000), "not JSON"),
    "no scale": (lambda tensors, header: header.pop("scale"), "scale is missing"),
    "a scale that is no number": (_header(scale="NaN"), "scale: expected a finite number"),
    "a scale without end": (_header(scale="1" * 5000), "not JSON|finite"),
    "queries between keys": (_header(first="0.5"), "first: expected a whole number"),
    "queries beyond the documents": (_header(first="5"), "Documents"),
}  # fmt: skip


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("what", FORGED)
def test_what_does_not_fit_together_is_refused(file: Path, what: str) -> None:
    change, words = FORGED[what]
    forge(file, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        AttentionMap.load(file)
    assert "map.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_together_is_not_saved(tmp_path: Path) -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, return_map=True)
    with pytest.raises(ShapeError, match="lse"):
        AttentionMap(q, k, amap.lse[:, :, 1:], amap.rule).save(tmp_path / "map")
    with pytest.raises(ShapeError, match="rule"):
        AttentionMap(q[:, :, 1:], k, amap.lse[:, :, 1:], amap.rule).save(tmp_path / "map")
    rule = Rule(Documents(torch.zeros(N, dtype=torch.long)), 1.0, Grid(B, H, N, M))
    with pytest.raises(ShapeError, match="Documents"):
        AttentionMap(q, k, amap.lse, rule).save(tmp_path / "map")
    assert list(tmp_path.iterdir()) == []


def test_signs_that_are_kept_in_a_bit_are_saved(tmp_path: Path) -> None:
    q, k, v = qkv()
    turned = torch.complex(torch.zeros_like(q), q).conj().imag
    assert turned.is_neg()
    _, amap = attend(turned, k, v, return_map=True)
    amap.save(tmp_path / "map")
    again = AttentionMap.load(tmp_path / "map")
    assert torch.equal(again.q, -q)
    assert torch.equal(again[:], amap[:])


@pytest.mark.parametrize("part", ["the same", "shifted", "disjoint", "transposed"])
def test_tensors_that_share_memory_are_saved(part: str, tmp_path: Path) -> None:
    x = torch.randn(1, 1, N + 1, D)
    across = x.mT.contiguous().mT
    q, k = {
        "the same": (x, x), "shifted": (x[:, :, 1:], x[:, :, :-1]), "disjoint": (x[:, :, :3], x[:, :, 3:]),
        "transposed": (across, across),
    }[part]  # fmt: skip
    _, amap = attend(q, k, k, return_map=True)
    amap.save(tmp_path / "map")
    again = AttentionMap.load(tmp_path / "map")
    assert torch.equal(again.q, q)
    assert torch.equal(again.k, k)
    assert again.q.data_ptr() != again.k.data_ptr()


def test_a_class_of_ones_own_is_no_mask_of_headwise(tmp_path: Path) -> None:
    class Causal(Everything):
        pass

    q, k, v = qkv()
    _, amap = attend(q, k, v, mask=Causal(), return_map=True)
    with pytest.raises(CheckpointError, match="a mask of type Causal cannot be saved"):
        amap.save(tmp_path / "map")
