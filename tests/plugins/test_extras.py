"""What the parts of another package do in headwise; run by test_plugins.py in a process that has loaded them."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEADWISE_TEST_PLUGINS"), reason="needs a process that has loaded the package"
)


def test_its_parts_hold_what_is_required_of_their_kinds():
    from headwise_extras.dilated import Dilated
    from headwise_extras.fused import fused_model
    from headwise_extras.kerple import Kerple
    from headwise_extras.key_index import KeyIndex
    from headwise_extras.third_power import ThirdPower

    from headwise import testing

    a, r = torch.linspace(0.2, 1.2, 12).reshape(2, 6).requires_grad_().unbind()

    def kerple(logits, positions, keys):
        return logits - a.double()[:, None, None] * torch.log1p(r.double()[:, None, None] * (positions - keys).abs())

    testing.check_mask(Dilated(3))
    testing.check_score(Kerple(a, r), kerple)
    testing.check_measure(ThirdPower(), lambda p, allowed, scores: p.pow(3).sum(-1).mean(-1))
    testing.check_measure(KeyIndex(), lambda p, *_: (p * torch.arange(p.shape[-1])).sum(-1).mean(-1))
    testing.check_kernel("einsum")
    testing.check_design("cosine")
    testing.check_kind(fused_model(), torch.randn(2, 7, 12, dtype=torch.float64), kind="fused")
    testing.check_view("arcs")


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
