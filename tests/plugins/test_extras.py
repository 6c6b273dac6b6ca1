"""What the parts of another package do in headwise; run by test_plugins.py in a process that has loaded them."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEADWISE_TEST_PLUGINS"), reason="needs a process that has loaded the package"
)


def test_heads_of_its_models_are_found_scaled_and_pruned():
    from headwise_extras.fused import FusedAttention, fused_model

    from headwise.edit import prune
    from headwise.models import find_heads, scale_heads

    model, x = fused_model(), torch.randn(2, 7, 12, dtype=torch.float64)
    sites = find_heads(model)
    assert [(site.name, site.kind, site.num_heads) for site in sites] == [("0", "fused", 4), ("2", "fused", 3)]
    assert {letter: tuple(w.shape) for letter, w in sites[1].weights().items()} == {
        "q": (3, 12, 4), "k": (3, 12, 4), "v": (3, 12, 4), "o": (3, 4, 12)
    }  # fmt: skip
    with scale_heads(sites, [torch.tensor([1.0, 0, 1, 0]).double(), torch.tensor([0.0, 1, 1]).double()]):
        masked = model(x)
    smaller = prune(model, {"0": [1, 3], "2": [0]}, copy=True).model
    assert isinstance(smaller[0], FusedAttention)
    assert (smaller[0].heads, smaller[0].wqkv.out_features) == (2, 18)
    torch.testing.assert_close(smaller(x), masked)


def test_its_kernel_runs_where_it_is_named_and_may_be_preferred(monkeypatch):
    from headwise_extras.einsum_kernel import Einsum

    from headwise import Causal, attend
    from headwise.kernels import AUTOMATIC, register

    q, k, v = torch.randn(3, 1, 2, 7, 5)
    out, amap = attend(q, k, v, mask=Causal(), kernel="einsum", return_map=True)
    assert (amap.kernel, set(amap.read_by.values())) == ("einsum", set())
    torch.testing.assert_close(amap @ v, out)
    assert set(amap.read_by.values()) == {"einsum"}
    monkeypatch.setattr("headwise.kernels.AUTOMATIC", list(AUTOMATIC))
    register(Einsum(), before="triton_gpu")
    assert attend(q, k, v, mask=Causal(), return_map=True)[1].kernel == "einsum"


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks", "reference"])
def test_its_measure_is_its_formula(kernel):
    from headwise import Causal, attend

    q, k, v = torch.randn(3, 2, 3, 131, 5)
    _, amap = attend(q, k, v, mask=Causal(), kernel=kernel, return_map=True, measures=["third_power", "entropy"])
    p = amap.to_dense().double()
    torch.testing.assert_close(amap.measured["third_power"].double(), p.pow(3).sum(-1).mean(-1), rtol=1e-5, atol=0)
    assert amap.measured.table()["third_power"].unit == "1"


@pytest.mark.parametrize("n", [3, 131])
def test_its_statistic_rides_in_the_compiled_pass(n, monkeypatch):
    from headwise_extras.key_index import KeyIndex

    from headwise import Causal, attend
    from headwise.kernels.cpu.library import library

    if library().handle is None:
        pytest.skip(str(library().reason))
    tiles = []
    monkeypatch.setattr(
        KeyIndex, "partial", lambda self, tile: tiles.append(tile) or (tile.weights * tile.keys).sum(-1)
    )
    q, (k, v) = torch.randn(2, 6, n, 5), torch.randn(2, 2, 3, 131, 5)
    _, amap = attend(q, k, v, mask=Causal(), kernel="cpu", return_map=True, measures=["key_index"])
    truth = (amap.to_dense().double() * torch.arange(131)).sum(-1).mean(-1)
    torch.testing.assert_close(amap.measured["key_index"].double(), truth, rtol=1e-5, atol=0)
    assert tiles == []
    known = {signature: code for signature, code in library().statistics.items() if "key_weights" not in signature}
    monkeypatch.setitem(library().__dict__, "statistics", known)  # of a library that lacks it
    again = attend(q, k, v, mask=Causal(), return_map=True, measures=["key_index"])[1]
    torch.testing.assert_close(again.measured["key_index"].double(), truth, rtol=1e-5, atol=0)
    assert tiles != []


def test_its_mask_and_score_are_computed_read_saved_and_recorded(tmp_path):
    from headwise_extras.dilated import Dilated
    from headwise_extras.kerple import Kerple

    from headwise import AttentionMap, Causal, attend

    b, h, h_kv, n, m, d = 2, 6, 3, 17, 29, 5
    q, k, v = torch.randn(b, h, n, d), torch.randn(b, h_kv, m, d), torch.randn(b, h_kv, m, 3)
    a, r = torch.rand(h), torch.rand(h)
    at, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
    bias = -a[:, None, None].double() * (1 + r[:, None, None].double() * (at - key).abs()).log()
    allowed = ((at - key) % 3 == 0) & (key <= at)
    scores = torch.einsum("bhnd,bhmd->bhnm", q.double(), k.double().repeat_interleave(h // h_kv, 1)) / d**0.5 + bias
    p = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    truth = p @ v.double().repeat_interleave(h // h_kv, 1)
    mask, score = Dilated(3) & Causal(), Kerple(a, r)
    for kernel in ("auto", "torch_blocks", "reference"):
        out, amap = attend(q, k, v, mask=mask, score=score, return_map=True, kernel=kernel)
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(amap[:].double(), p, rtol=1e-5, atol=2e-6)
    amap.save(tmp_path / "map.safetensors")
    found = AttentionMap.load(tmp_path / "map.safetensors")
    torch.testing.assert_close(found[:, 2:4], amap[:, 2:4])
    whole = torch.compile(lambda q, k, v: attend(q, k, v, mask=mask, score=score), fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(q, k, v), attend(q, k, v, mask=mask, score=score))


def test_its_measure_is_in_the_report_and_its_view_draws_it(tmp_path):
    from xml.etree import ElementTree

    import headwise as hw
    from headwise.errors import ConfigError
    from headwise.reports import write_view

    report = hw.see("武松<打>虎。武松打虎。")
    assert "third_power" in report.statistics
    page = write_view(report, "html", tmp_path / "page.html", lang="zh").read_text(encoding="utf-8")
    assert "权重立方和" in page
    tree = ElementTree.parse(write_view(report, "arcs", tmp_path / "arcs.svg", lang="zh"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f"{space}path")) == len(report.heads) * len(report.passages[0].tokens)
    assert "<" in [text.text for text in tree.findall(f"{space}text")]
    with pytest.raises(ConfigError, match=r"view='bars': no such view. Known: html: .*arcs: the strongest key"):
        write_view(report, "bars", tmp_path / "bars.svg")
