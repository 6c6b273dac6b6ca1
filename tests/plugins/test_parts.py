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
    smaller = prune(model, {"0": [1, 3], "2": [0]}).model
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
