"""A family of somebody's own, in one class: its heads are found, read, scaled and taken out with no other change."""

import pytest
import torch
from design_samples import given
from torch import Tensor, nn

from headwise.edit import merge_kv, prune
from headwise.errors import ConfigError
from headwise.models import HeadSite, Kind, Layout, Resizing, find_heads, scale_heads
from headwise.models.site import put_sizes
from headwise.nn.layout import linear_parts


class Attention(nn.Module):
    """Attention as another library may have it."""

    def __init__(self, heads: int, head: int) -> None:
        super().__init__()
        self.heads = heads
        self.ask, self.tell, self.give = (nn.Linear(12, heads * head) for _ in range(3))
        self.join = nn.Linear(heads * head, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, n, 12] to the same shape."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.ask, self.tell, self.give))
        y: Tensor = self.join(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Family(Kind):
    """All that is known of it."""

    name, about = "family", "a family of one's own"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        if not isinstance(module, Attention):
            return None
        h, d = module.heads, module.ask.out_features // module.heads
        return HeadSite(name, module, self.name, h, h, d, d, module.join, self)

    def layout(self, site: HeadSite) -> Layout:
        maps = zip("qkv", (site.module.get_submodule(x) for x in ("ask", "tell", "give")), strict=True)
        parts = tuple(part for x, owner in maps for part in linear_parts(x, owner, 0, "query", site.head_dim))
        return Layout(parts).into(site.module.get_submodule("join"), site.value_dim)

    def resizing(self, site: HeadSite) -> Resizing:
        return Resizing("two heads belong together") if site.num_heads == 2 else Resizing()

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        put_sizes(site.module, heads=num_heads)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr("headwise.models.find.KINDS", (Family(),))
    torch.manual_seed(3)
    return nn.Sequential(Attention(5, 3), Attention(2, 7)).double()


def test_it_is_found_scaled_and_pruned(model: nn.Module) -> None:
    sites, x = find_heads(model), given()
    assert [(site.kind, site.num_heads, site.head_dim) for site in sites] == [("family", 5, 3), ("family", 2, 7)]
    assert {letter: tuple(w.shape) for letter, w in sites[0].weights().items()} == {
        "q": (5, 12, 3), "k": (5, 12, 3), "v": (5, 12, 3), "o": (5, 3, 12)
    }  # fmt: skip
    with scale_heads(sites, [torch.tensor([1.0, 0, 1, 1, 0]).double(), torch.ones(2).double()]):
        masked = model(x)
    result = prune(model, {0: [1, 4]}, copy=True)
    torch.testing.assert_close(result.model(x), masked)
    assert not torch.allclose(masked, model(x), atol=1e-3)


def test_its_refusals_are_its_own_words(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"^1: two heads belong together$"):
        prune(model, {1: [0]})
    with pytest.raises(
        ConfigError, match="0: Attention does not support merging of KV heads; supported: MultiHeadAttention"
    ):
        merge_kv(model, 1)
    model.get_submodule("0").register_parameter("scale", nn.Parameter(torch.ones(5).double()))
    with pytest.raises(ConfigError, match=r"0: Attention has scale \(5,\), and how it belongs to the heads is not"):
        prune(model, {0: [1]})


def test_a_kind_that_leaves_something_out_is_not_made() -> None:
    class Half(Kind):
        name = "half"

        def site(self, name: str, module: nn.Module) -> HeadSite | None:
            return None

    with pytest.raises(ConfigError, match=r"class Half\(Kind\): declare about .*layout .*resizing .*resize "):
        Half()
