"""More ways of writing attention, as in `ways`: spellings of libraries and of research code."""

import math

import einops
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import D, E, H, N, Way, lower, real


class SoftmaxOne(Way):
    """exp / (1 + Σ exp): a sink whose logit is 0."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        e = torch.exp(q @ k.mT / math.sqrt(D))
        self.weights = e / (1 + e.sum(dim=-1, keepdim=True))
        return self.merge(self.weights @ v)


class SafeSoftmaxOne(Way):
    """The same, after the largest score is subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q @ k.mT).div(math.sqrt(D)).masked_fill(~lower(x.shape[1]), float("-inf"))
        top = scores.max(dim=-1, keepdim=True).values
        e = torch.exp(scores - top)
        self.weights = e / (e.sum(dim=-1, keepdim=True) + torch.exp(-top))
        return self.merge(self.weights @ v)


class LogSumExp(Way):
    """exp(scores − logsumexp(scores))."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT * D**-0.5
        self.weights = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))
        return self.merge(self.weights @ v)


class SummedProducts(Way):
    """Products number by number, and sums, instead of matmul."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / math.sqrt(D)
        self.weights = scores.softmax(-1)
        return self.merge((self.weights.unsqueeze(-1) * v.unsqueeze(2)).sum(dim=3))


class DotOfState(nn.Module):
    """A decoder's state [1, b, e] and an encoder's outputs [m, b, e]: torch.sum of a product, as in chat bots."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        outputs = x.transpose(0, 1)
        hidden = self.state(outputs[-1:])
        energies = torch.sum(hidden * outputs, dim=2).t()
        weights = F.softmax(energies, dim=1).unsqueeze(1)
        self.weights = weights[:, None]
        return weights.bmm(outputs.transpose(0, 1))


class AssignedMask(Way):
    """Masked scores are written by an index."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT * D**-0.5
        scores[:, :, ~lower(x.shape[1])] = float("-inf")
        return self.of(x, scores, v)


class ChosenFromFull(Way):
    """torch.where with a tensor of the lowest number."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT * D**-0.5
        return self.of(x, torch.where(lower(x.shape[1]), scores, -9e15 * torch.ones_like(scores)), v)


class Rearranged(Way):
    """einops: rearrange and einsum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            einops.rearrange(y, "b n (h d) -> b h n d", h=H) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        sim = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * D**-0.5
        mask = einops.rearrange(real(5, 3), "b j -> b 1 1 j")
        self.weights = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max).softmax(dim=-1)
        out = einops.einsum(self.weights, v, "b h i j, b h j d -> b h i d")
        return self.out_proj(einops.rearrange(out, "b h n d -> b n (h d)"))


class RepeatedGroups(Way):
    """einops.repeat of two KV heads, and heads folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(E, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        q = einops.rearrange(self.q_proj(x), "b n (h d) -> (b h) n d", h=H)
        k, v = (einops.repeat(y, "b n d -> (b h) n d", h=H) for y in self.kv(x).chunk(2, dim=-1))
        weights = torch.softmax(torch.einsum("bid,bjd->bij", q, k) * D**-0.5, dim=-1)
        self.weights = einops.rearrange(weights, "(b h) i j -> b h i j", h=H)
        return self.out_proj(einops.rearrange(weights @ v, "(b h) n d -> b n (h d)", h=H))


class ThreeOperands(Way):
    """einsum with a temperature of each head, and with the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H) + 0.5)
        self.wo = nn.Parameter(torch.randn(H, D, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.einsum("bhid,bhjd,h->bhij", q, k, self.temperature)
        self.weights = scores.softmax(-1)
        return torch.einsum("bhij,bhjd,hde->bie", self.weights, v, self.wo)


class Bilinear(nn.Module):
    """x W x of each head in one einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.wv = nn.Parameter(torch.randn(H, E, E) / 3), nn.Parameter(torch.randn(H, E, D))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bnc,hce,bme->bhnm", x, self.w, x) / math.sqrt(E)
        self.weights = scores.masked_fill(~lower(x.shape[1]), -math.inf).softmax(-1)
        return torch.einsum("bhnm,bmc,hcd->bnhd", self.weights, x, self.wv).flatten(2)


class Sublists(Way):
    """einsum with numbers instead of letters."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.einsum(q, [0, 1, 2, 4], k, [0, 1, 3, 4], [0, 1, 2, 3]) * 0.5
        self.weights = scores.softmax(-1)
        return self.merge(torch.einsum(self.weights, [..., 0, 1], v, [..., 1, 2], [..., 0, 2]))


class OneKey(Way):
    """One query and one key, as in the first step of generation; the weight is 1."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x[:, :1])
        return self.of(x, q @ k.mT * D**-0.5, v)


class OneKeyOfSeveral(Way):
    """Several queries and one key of another sequence."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x[:, :1])
        return self.of(x, q @ k.mT * D**-0.5, v)


class Packed(Way):
    """Packed sequences, causal, of which the last places are padding; scaled_dot_product_attention in float."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
        mask = ((ids[:, :, None] == ids[:, None]) & lower(N))[:, None]
        self.weights = (q @ k.mT * D**-0.5).masked_fill(~mask, -math.inf).softmax(-1)
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Blocks(Way):
    """Block-diagonal attention of a batch that was packed, such as graphs or windows of images."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(N, H, D).transpose(0, 1) for y in (self.q_proj(x[0]), self.k_proj(x[0]), self.v_proj(x[0])))
        mask = torch.full((1, N, N), torch.finfo(x.dtype).min, dtype=x.dtype)
        for start, stop in ((0, 2), (2, 3), (3, 5)):
            mask[..., start:stop, start:stop] = 0
        weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / math.sqrt(D) + mask, dim=-1)
        self.weights = weights[None]
        return self.out_proj(torch.matmul(weights, v).transpose(0, 1).reshape(N, E))


class LowPrecisionBmm(Way):
    """Heads to the batch, baddbmm with a mask as the start, softmax in another dtype, as for images."""

    def to_batch(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.reshape(b, n, H, D).permute(0, 2, 1, 3).reshape(b * H, n, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.to_batch(y) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        mask = ((1 - real(5, 3).to(x.dtype)) * -10000.0).unsqueeze(1).repeat_interleave(H, dim=0)
        scores = torch.baddbmm(mask.expand(-1, N, -1), q, k.transpose(-1, -2), beta=1, alpha=D**-0.5)
        weights = scores.double().softmax(dim=-1).to(x.dtype)
        self.weights = weights.view(-1, H, N, N)
        out = torch.bmm(weights, v).reshape(-1, H, N, D).permute(0, 2, 1, 3).reshape(-1, N, E)
        return self.out_proj(out)


class SpatialTokens(nn.Module):
    """GroupNorm of an image, three layers over its pixels, one head: the attention block of an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, E)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        image = x.mT.reshape(x.shape[0], E, N, 1).expand(-1, -1, -1, 2)
        b, c, height, width = image.shape
        tokens = self.norm(image).view(b, c, height * width).transpose(1, 2)
        q, k, v = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * c**-0.5, dim=-1)
        self.weights = weights[:, None]
        return image + self.to_out(torch.bmm(weights, v)).transpose(1, 2).reshape(b, c, height, width)


class NormalizedQueries(Way):
    """RMS-normalized queries and keys, whose scale is a parameter of each head, capped scores, and memory keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_scale, self.k_scale = nn.Parameter(torch.rand(H, 1, D) + 0.5), nn.Parameter(torch.rand(H, 1, D) + 0.5)
        self.memory = nn.Parameter(torch.randn(2, H, 2, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.normalize(q, dim=-1) * self.q_scale, F.normalize(k, dim=-1) * self.k_scale
        k, v = (
            torch.cat((einops.repeat(one, "h m d -> b h m d", b=len(x)), y), dim=-2)
            for one, y in zip(self.memory, (k, v), strict=True)
        )
        sim = 10 * torch.einsum("b h i d, b h j d -> b h i j", q, k)
        return self.of(x, (sim / 50).tanh() * 50, v)


class LargestScores(Way):
    """The two largest scores of each query are kept: a mask that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT * D**-0.5
        least = scores.topk(2, dim=-1).values[..., -1:]
        return self.of(x, scores.masked_fill(scores < least, -torch.finfo(scores.dtype).max), v)


class CachedKeys(Way):
    """The keys of earlier steps are concatenated; the causal mask is a part of a larger one."""

    def forward(self, x: Tensor) -> Tensor:
        _, past_k, past_v = self.heads(x[:, :3])
        q, k, v = self.heads(x[:, 3:])
        k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        t, total = q.shape[2], k.shape[2]
        scores = q @ k.mT * D**-0.5
        self.weights = scores.masked_fill(~lower(7)[total - t : total, :total], float("-inf")).softmax(-1)
        return self.merge(self.weights @ v)


class MultipliedScale(Way):
    """Scores are multiplied in place, biased by buckets, and masked; [t, b, e] as for proteins."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets = nn.Embedding(9, H)

    def forward(self, x: Tensor) -> Tensor:
        t, b, _ = (x := x.transpose(0, 1)).size()
        q, k, v = (p(x).contiguous().view(t, b * H, D).transpose(0, 1) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.bmm(q, k.transpose(1, 2))
        scores *= D**-0.5
        place = torch.arange(t)
        bias = self.buckets(place[:, None] - place + 4).permute(2, 0, 1)
        scores = scores.view(b, H, t, t) + bias.unsqueeze(0)
        scores = scores.masked_fill(~real(5, 4)[:, None, None].to(torch.bool), float("-inf"))
        weights = F.softmax(scores.view(b * H, t, t), dim=-1)
        self.weights = weights.view(b, H, t, t)
        return self.out_proj(torch.bmm(weights, v).transpose(0, 1).contiguous().view(t, b, E))


class Latents(Way):
    """A few learned latents attend to all tokens and to themselves, with packed keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, E))
        self.to_kv = nn.Linear(E, 2 * E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latents = einops.repeat(self.latents, "n e -> b n e", b=len(x))
        q = self.q_proj(latents)
        k, v = self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = (einops.rearrange(y, "b n (h d) -> b h n d", h=H) for y in (q, k, v))
        sim = torch.einsum("... i d, ... j d -> ... i j", q * D**-0.5, k)
        self.weights = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        out = torch.einsum("... i j, ... j d -> ... i d", self.weights, v)
        return self.out_proj(einops.rearrange(out, "b h n d -> b n (h d)", h=H))
