"""The weights of one query of each head are those of the whole map."""

import pytest
import torch
from samples import MASKS, SCORES, qkv

import headwise as hw
from headwise.rule.tiles import rows_at

B, H, N, M = 2, 4, 13, 17


@pytest.mark.parametrize("score", ["none", *SCORES])
@pytest.mark.parametrize("mask", MASKS)
def test_one_query_of_each_head_has_the_weights_of_its_row(mask: str, score: str) -> None:
    q, k, v = qkv(b=B, h=H, h_kv=2, n=N, m=M)
    scores = () if score == "none" else SCORES[score](B, H, N, M)
    with torch.no_grad():
        _, amap = hw.attend(q, k, v, mask=MASKS[mask](B, N, M), score=scores, return_map=True)
        query = torch.randint(N, (B, H), generator=torch.Generator().manual_seed(3))
        found = rows_at(amap.q, amap.k, amap.rule, query)
    whole = amap.to_dense().double()
    expected = whole.gather(2, query[..., None, None].expand(B, H, 1, M))[:, :, 0]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
