"""Graphs of torch.export and torch.fx: recognised with the names and lines of the model, certified, and attached."""

import pytest
import test_recognise
import torch
import torch.nn.functional as F
import ways
from test_recognise import model_of
from torch import fx, nn
from ways import B, E, N, Way

import headwise as hw
from headwise.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export warns of tensors that the ways keep

WAYS = ["SmallGPT", "GroupedKeys", "WrittenSoftmax", "FoldedHeads", "Sinks", "TwoPackages"]


class Fused(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(B, N, E, dtype=torch.float64)


def exported(module, decomposed):
    with torch.no_grad():
        program = torch.export.export(model_of(module), (batch(0),), strict=False)
        return (program.run_decompositions() if decomposed else program).module()


@pytest.mark.thorough_except("SmallGPT-exported", "GroupedKeys-exported", "Sinks-exported")
@pytest.mark.parametrize("decomposed", [
    pytest.param(False, id="exported"), pytest.param(True, id="core ATen", marks=pytest.mark.thorough),
])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_is_recognised_and_attached_as_the_model_is(way, decomposed):
    module = getattr(ways, way)()
    model = model_of(module)
    graph = exported(module, decomposed)
    call = hw.models.recognise(graph, batch(0))[0]
    model(batch(0))
    test_recognise.check(call, "blocks.0.attn", test_recognise.WAYS[way], module.weights)
    assert "ways.py:" in call.line
    expected = graph(batch(1))
    if way == "TwoPackages" and decomposed:
        with pytest.raises(ConfigError, match=r"blocks\.0\.attn: the weights are changed after the softmax, by where"):
            hw.attach(graph, batch=batch(0))
    else:
        assert hw.models.certify(graph, batch(0))["blocks.0.attn"].same
        with hw.attach(graph, batch=batch(0)) as handle:
            torch.testing.assert_close(graph(batch(1)), expected, rtol=1e-9, atol=1e-11)
            assert (handle.attached, handle.skipped) == (("blocks.0.attn",), {})
    assert torch.equal(graph(batch(1)), expected)


@pytest.mark.thorough
def test_a_fused_function_in_a_graph_keeps_the_order_that_later_views_require():
    graph = exported(Fused(), False)
    assert any("view" in str(node.target) for node in graph.graph.nodes)
    expected = graph(batch(1))
    with hw.attach(graph, batch=batch(0)) as handle:
        torch.testing.assert_close(graph(batch(1)), expected, rtol=1e-9, atol=1e-11)
        assert handle.attached == ("blocks.0.attn",)


def test_a_graph_of_torch_fx():
    model = model_of(ways.VisionTransformer())
    graph = fx.symbolic_trace(model)
    expected = model(batch(1))
    assert hw.models.recognise(graph, batch(0))[0].name == "blocks.0.attn"
    with hw.attach(graph, batch=batch(0)) as handle:
        torch.testing.assert_close(graph(batch(1)), expected, rtol=1e-9, atol=1e-11)
        assert handle.attached == ("blocks.0.attn",)


@pytest.mark.thorough
def test_layers_of_a_graph_have_their_own_names():
    model = nn.Sequential(ways.DividedByTensor(), ways.SlidingWindow(), ways.DividedByTensor()).double().eval()
    with torch.no_grad():
        graph = torch.export.export(model, (batch(0),), strict=False).module()
    assert [call.name for call in hw.models.recognise(graph, batch(0))] == ["0", "1", "2"]
    with hw.attach(graph, batch=batch(0)) as handle:
        assert handle.attached == ("0", "1", "2")


@pytest.mark.thorough
def test_heads_of_a_graph_have_no_module_that_receives_them():
    graph = exported(ways.SmallGPT(), False)
    (site,) = hw.find_heads(graph, batch(0))
    assert (site.name, site.num_heads) == ("blocks.0.attn", 3)
    reason = "its output projection is a function, not a module that is called"
    assert site.layout().missing == reason
    with pytest.raises(ConfigError, match=f"blocks.0.attn: {reason}"), hw.models.record_heads([site]):
        pass
