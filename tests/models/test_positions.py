"""Positions are of tokens: padding on either side, by any amount, changes no measure, role, edit or knock-out."""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headwise as hw
from headwise import interventions
from headwise.analysis import attention_knockout
from headwise.analysis.head_roles.score import DEFINITIONS
from headwise.interventions import Edit, Forbid, Replace, Scale, Uniform
from headwise.stats import GIVEN, MEASURES, Measure

LENGTHS = (11, 5, 3)
SIDES = [pytest.param("left", marks=pytest.mark.thorough), pytest.param("right", marks=pytest.mark.thorough), "both"]
NEAR = {"rtol": 1e-3, "atol": 1e-4, "equal_nan": True}
Run = Callable[[nn.Module, Tensor, Tensor], Tensor]  # ids and which of them are tokens, each [b, n], to [b, n, …]


class Own(nn.Module):
    """headwise's layers; `form`: of the mask."""

    def __init__(self, form: str = "masks", causal: bool = True) -> None:
        super().__init__()
        self.embed, self.form, self.causal = nn.Embedding(37, 16), form, causal
        self.layers = nn.ModuleList([hw.MultiHeadAttention(16, 4), hw.MultiHeadAttention(16, 4, num_kv_heads=2)])

    def mask(self, real: Tensor) -> Any:
        n = real.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).tril() if self.causal else torch.ones(n, n, dtype=torch.bool)
        if self.form == "boolean":
            return causal & real[:, None, None]
        if self.form == "added":
            return torch.zeros(()).masked_fill(~(causal & real[:, None, None]), -math.inf)
        if self.form == "padding":
            return real[:, None, None]
        mask: Any = (
            hw.Documents(real.long() - 1)
            if self.form == "documents"
            else hw.Dense(real[:, None, None].expand(-1, -1, n, -1))
        )
        return mask & hw.Causal() if self.causal else mask

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask=self.mask(real))
        return x


class Encoder(nn.Module):
    """`nn.TransformerEncoder`; `own_keys`: with keys that are no tokens."""

    def __init__(self, own_keys: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 19, dropout=0.0, batch_first=True)
        layer.self_attn = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=own_keys, add_zero_attn=own_keys)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        return self.layers(self.embed(ids), src_key_padding_mask=~real)


class ByHand(nn.Module):
    """Causal attention as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(37, 16), nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 48)])

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        allowed = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None]
        for layer in self.qkv:
            q, k, v = layer(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT / 2).masked_fill(~allowed, -1e9).softmax(-1)
            x = x + (weights @ v).transpose(1, 2).flatten(2)
        return x


class Library(nn.Module):
    """A model of transformers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        import transformers

        sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 19}
        more = {"num_key_value_heads": 2} if kind != "Bert" else {}
        config = getattr(transformers, f"{kind}Config")(vocab_size=37, **sizes, **more, **options)
        self.model = getattr(transformers, f"{kind}Model")(config)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        positions = (real.cumsum(-1) - 1).clamp_min(0)
        return self.model(ids, attention_mask=real.long(), position_ids=positions).last_hidden_state


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own, "own, boolean": lambda: Own("boolean"), "own, added": lambda: Own("added"),
    "own, documents": lambda: Own("documents"), "own, padding": lambda: Own("padding", causal=False),
    "encoder": Encoder, "encoder, own keys": lambda: Encoder(True), "by hand": ByHand,
    "bert": lambda: Library("Bert"), "llama": lambda: Library("Llama"),
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def sentences(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 37, (length,), generator=generator) for length in LENGTHS]


def padded(side: str, more: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The sentences as one batch, `more` columns wider than the longest one, and which are tokens; [3, 11 + more]."""
    ids = torch.zeros(len(LENGTHS), max(LENGTHS) + more, dtype=torch.long)
    real = torch.zeros_like(ids).bool()
    for row, here, one in zip(ids, real, sentences(seed), strict=True):
        room = len(row) - len(one)
        start = {"left": room, "right": 0, "both": room // 2}[side]
        row[start : start + len(one)], here[start : start + len(one)] = one, True
    return ids, real


def alone(seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    for one in sentences(seed):
        yield one[None], torch.ones(1, len(one), dtype=torch.bool)


QUICK = ("own, boolean", "encoder, own keys")


@pytest.fixture(params=[one if one in QUICK else pytest.param(one, marks=pytest.mark.thorough) for one in MODELS])
def name(request: Any) -> str:
    return str(request.param)


def run(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(*one)
    return found


def calls_of(model: nn.Module, one: tuple[Tensor, Tensor], measures: Any = ()) -> dict[str, hw.models.AttentionCall]:
    found: dict[str, hw.models.AttentionCall] = {}
    with hw.models.observe(lambda call: found.update({call.name: call}), model=model, measures=measures):
        run(model, one)
    return found


def maps_of(model: nn.Module, one: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {name: call.map for name, call in calls_of(model, one).items()}


# Of each class of edits some, made for a run whose maps in another text are given.
EDITS: dict[type[Edit], list[Callable[[dict[str, Any]], Edit]]] = {
    Forbid: [
        lambda _: Forbid(2, 1), lambda _: Forbid(-1, slice(None, -1), heads=[1]), lambda _: Forbid([1, -2], 0),
        lambda _: Forbid(None, -1), lambda _: Forbid(torch.tensor([False, True, False, True]), [0, 7]),
    ],
    Scale: [lambda _: Scale(0.0, keys=[0]), lambda _: Scale(-0.5, slice(1, None), [-1, 1])],
    Uniform: [lambda _: Uniform(queries=[0, -1]), lambda _: Uniform(heads=[2])],
    Replace: [lambda maps: Replace(maps), lambda maps: Replace(maps, queries=slice(-2, None), heads=[1])],
}  # fmt: skip


def test_every_class_of_edits_is_here() -> None:
    kinds = [getattr(interventions, name) for name in interventions.__all__]
    found = {kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Edit) and kind is not Edit}
    assert found == EDITS.keys()


@pytest.mark.thorough
@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_no_edit(name: str, side: str) -> None:
    with hw.attach(made(name), batch=padded("right", 0)) as handle:
        model = handle.model
        apart = [maps_of(model, one) for one in alone(seed=2)]
        kinds = [make for kind in EDITS.values() for make in kind]
        expected = []
        for one, maps in zip(alone(), apart, strict=True):
            expected.append([])
            for make in kinds:
                with hw.intervene(handle, make(maps), unused="ignore"):
                    expected[-1].append(run(model, one)[0])
        for more in (0, 4):
            batch = padded(side, more)
            maps = maps_of(model, padded(side, more, seed=2))
            for at, make in enumerate(kinds):
                with hw.intervene(handle, edit := make(maps), unused="ignore"):
                    found = run(model, batch)
                for i, real in enumerate(batch[1]):
                    assert_close(found[i][real], expected[i][at], **NEAR, msg=lambda m, e=edit, n=i: f"{e}, {n}: {m}")


@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_no_measure(name: str, side: str) -> None:
    with hw.attach(made(name), batch=padded("right", 0)) as handle:
        apart = [calls_of(handle.model, one, [*MEASURES]) for one in alone()]
        for more in (0, 4):
            for layer, call in calls_of(handle.model, padded(side, more), [*MEASURES]).items():
                assert call.measured is not None
                for measure in MEASURES:
                    mine = torch.cat([calls[layer].measured[measure] for calls in apart])
                    assert_close(call.measured[measure], mine, **NEAR, msg=lambda m, n=measure: f"{n}: {m}")


def of_tokens(ids: Tensor, real: Tensor) -> list[Measure]:
    """The measures that require the tokens."""
    pieces = [[f"{',' if at % 3 else ' '}" if at else "" for at in row] for row in ids.tolist()]
    tokens = hw.stats.Tokens(ids, pieces, ids % 5 == 1)
    found = {name: kind.of(tokens) for name, kind in GIVEN.items()}
    return [hw.stats.ClassMass(ids % 7 == 2) if one is None else one for one in found.values()]


@pytest.mark.thorough_except("encoder, own keys-both")
@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_no_measure_that_is_given_tokens_or_a_size(name: str, side: str) -> None:
    sized = [hw.stats.SinkMass(3), hw.stats.LocalMass(2), hw.stats.TopKMass(3)]
    with hw.attach(made(name), batch=padded("right", 0)) as handle:
        apart = [(one, maps_of(handle.model, one)) for one in alone()]
        for more in (0, 4):
            batch = padded(side, more)
            for layer, amap in maps_of(handle.model, batch).items():
                for at, measure in enumerate([*sized, *of_tokens(*batch)]):
                    if amap.rule.grid.extra and hasattr(measure, "ids"):
                        continue
                    mine = [maps[layer].measure([*sized, *of_tokens(*one)][at])[measure.name] for one, maps in apart]
                    found = amap.measure(measure)[measure.name]
                    assert_close(found, torch.cat(mine), **NEAR, msg=lambda m, n=measure.name: f"{n}: {m}")


@pytest.mark.thorough_except("encoder, own keys-both")
@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_no_role(name: str, side: str) -> None:
    def found(model: nn.Module, one: tuple[Tensor, Tensor]) -> Any:
        pieces = [["" if not at else "," if at % 3 else "word" for at in row] for row in one[0].tolist()]
        table = torch.randn(37, 5, generator=torch.Generator().manual_seed(3))
        often = torch.arange(37, 0, -1)
        maps = [*maps_of(model, one).values()]
        return hw.analysis.roles(maps, tokens=one[0], pieces=pieces, frequencies=often, embeddings=table, reach=3)

    if name == "encoder, own keys":
        pytest.skip("roles are not defined for keys that are no tokens")
    with hw.attach(made(name), batch=padded("right", 0)) as handle:
        apart = [found(handle.model, one) for one in alone()]
        merged = apart[0].merge(apart[1]).merge(apart[2])
        assert set(DEFINITIONS) - set(merged) <= {"induction"}  # which attention to both sides has not
        plain = found(handle.model, padded("right", 0))
        for more in (0, 4):
            roles = found(handle.model, padded(side, more))
            assert roles.rows == merged.rows
            for role in merged:
                for what in ("mass", "uniform", "coverage"):
                    for mine, theirs in (
                        (roles[role], merged[role]),
                        (roles[role].without_first, merged[role].without_first),
                    ):
                        if mine is not None:
                            pair = (torch.as_tensor(getattr(one, what)) for one in (mine, theirs))
                            assert_close(*pair, **NEAR, msg=lambda m, n=role, w=what: f"{n}.{w}: {m}")
                assert_close(roles[role].confidence, plain[role].confidence, **NEAR)
                assert_close(roles[role].interval, plain[role].interval, **NEAR)


def loss_of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)[batch[1]].pow(3).mean()


@pytest.mark.thorough
@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_no_knock_out(name: str, side: str) -> None:
    if name == "by hand":
        pytest.skip("knock-outs need heads of a known kind")
    with hw.attach(made(name), batch=padded("right", 0)) as handle:
        apart = attention_knockout(handle, [*alone()], loss_of_tokens, queries=-1, keys=[0, 1]).samples
        expected = torch.tensor(LENGTHS).double() @ torch.as_tensor(apart) / sum(LENGTHS)
        for more in (0, 4):
            found = attention_knockout(handle, [padded(side, more)], loss_of_tokens, queries=-1, keys=[0, 1])
            assert_close(found.column.flat, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.thorough_except("encoder, own keys-both-resample")
@pytest.mark.parametrize("by", ["mean", "resample"])
@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_no_ablation(name: str, side: str, by: str) -> None:
    if name == "by hand":
        pytest.skip("ablations need heads of a known kind")
    model = made(name)

    def found(more: int, side: str) -> Tensor:
        return hw.analysis.ablation_importance(model, [padded(side, more)], loss_of_tokens, by=by).column.flat

    expected = found(0, "right")
    for more in (0, 4):
        assert_close(found(more, side), expected, rtol=1e-3, atol=1e-6)


def steps(model: nn.Module, ids: Tensor, real: Tensor, later: Tensor) -> list[Tensor]:
    """The outputs of a prompt and of each later token, [b, 1, …]."""
    import transformers

    config, found = model.model.config, []
    cache = transformers.DynamicCache(config=config)
    for step in range(later.shape[1] + 1):
        if step:
            ids, real = later[:, step - 1 : step], torch.nn.functional.pad(real, (0, 1), value=True)
        positions = (real.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given = {"attention_mask": real.long(), "position_ids": positions, "past_key_values": cache}
        found.append(model.model(ids, **given, use_cache=True).last_hidden_state)
    return found


@pytest.mark.parametrize("edit", [
    Scale(0.0, keys=[0, 12]), Scale(0.5, keys=-3), Forbid([12, -1], [8, 11]), Uniform(queries=12),
])  # fmt: skip
@pytest.mark.parametrize("kind", [pytest.param("Llama", marks=pytest.mark.thorough), "Mistral"])
def test_an_edit_of_a_step_with_a_cache_is_of_the_same_tokens(kind: str, edit: Edit) -> None:
    torch.manual_seed(0)
    model = Library(kind, **({"sliding_window": 4} if kind == "Mistral" else {})).eval()  # its cache drops padding, too
    later = torch.randint(1, 37, (len(LENGTHS), 3))
    with torch.no_grad(), hw.intervene(model, edit, unused="ignore"):
        apart = [steps(model, *one, later[i : i + 1]) for i, one in enumerate(alone())]
        for more in (0, 4):
            together = steps(model, *padded("left", more), later)
            for i, length in enumerate(LENGTHS):
                for found, expected in zip(together, apart[i], strict=True):
                    assert_close(found[i, -length:], expected[0], **NEAR)


@pytest.mark.thorough_except("edit0-False")
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("edit", [Scale(0.0, keys=[9, 12]), Forbid([12, -1], [8, 11]), Uniform(queries=12)])
def test_a_window_in_the_mask_of_a_step_is_no_padding(edit: Edit, tensor: bool) -> None:
    torch.manual_seed(0)
    layer, lengths, window = hw.MultiHeadAttention(16, 4), (11, 7), 4
    first, later = [torch.randn(1, length, 16) for length in lengths], torch.randn(2, 3, 16)

    def outputs(x: Tensor, real: Tensor, later: Tensor) -> list[Tensor]:
        cache, found = hw.cache.KVCache(), []
        for step in range(later.shape[1] + 1):
            if step:
                x, real = later[:, step - 1 : step], torch.nn.functional.pad(real, (0, 1), value=True)
            mask: Any = hw.Causal() & hw.Window(window) & hw.Lengths(real.sum(-1), side="right")
            n, m = x.shape[1], real.shape[1]
            found.append(layer(x, mask=mask.to_dense(n, m, batch=len(x)) if tensor else mask, cache=cache))
        return found

    with torch.no_grad(), hw.intervene(layer, edit, unused="ignore"):
        apart = [outputs(x, torch.ones(x.shape[:2]).bool(), later[i : i + 1]) for i, x in enumerate(first)]
        for more in (0, 3):
            x, real = torch.zeros(2, 11 + more, 16), torch.zeros(2, 11 + more).bool()
            for i, one in enumerate(first):
                x[i, -one.shape[1] :], real[i, -one.shape[1] :] = one[0], True
            together = outputs(x, real, later)
            for i, length in enumerate(lengths):
                for found, expected in zip(together, apart[i], strict=True):
                    assert_close(found[i, -length:], expected[0], **NEAR)
