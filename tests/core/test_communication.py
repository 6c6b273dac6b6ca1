"""What devices send to one another: formulas against the plans of the real thing, pair by pair and piece by piece."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from headwise.costs import Counts, Machine, Work, attention_stages, kept_bytes
from headwise.costs.communication import (
    Way,
    attention_flops,
    exposed_seconds,
    head_parallel,
    heads_by_ring,
    hiding_tokens,
    hybrid,
    ring,
    ulysses,
    ways,
)
from headwise.costs.configs import find
from headwise.costs.model import Load
from headwise.errors import ConfigError
from headwise.nn.registry import counts_of
from headwise.plan import plan_model, print_plan
from headwise.plan.compare import spread_table

ROOT = Path(__file__).parents[2]
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

LLAMA = counts_of("gqa", {"d_model": 4096, "num_heads": 32, "num_kv_heads": 8})
LONG = Work(1, 1 << 17, 1 << 17)


def layer(h: int, h_kv: int, d_k: int = 6, d_v: int = 10) -> Counts:
    sizes = {"d_model": 24, "num_heads": h, "num_kv_heads": h_kv, "head_dim": d_k, "value_dim": d_v}
    return counts_of("multi_head", sizes)


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(
    ranks=st.integers(1, 9), length=st.integers(1, 3), kind=st.sampled_from(["all", "causal", "chunks"]),
    zigzag=st.booleans(), window=st.none() | st.integers(1, 40), sinks=st.integers(0, 5),
)  # fmt: skip
def test_keys_go_as_far_as_the_rings_own_plan_sends_them(
    ranks: int, length: int, kind: str, zigzag: bool, window: int | None, sinks: int
) -> None:
    from headwise.masks import Causal, Documents, Everything, Grid, Mask, Sinks, Window
    from headwise.parallel.layout import Layout, Way as Blocks
    from headwise.parallel.travel import plan
    from headwise.rule import Rule

    n, layout = 2 * ranks * length, "zigzag" if zigzag else "contiguous"
    causal, chunked = kind != "all", kind == "chunks" and window is not None
    sinks = sinks if kind == "causal" and window is not None else 0
    mask: Mask = Causal() if causal else Everything()
    if window is not None:
        within: Mask = Documents(torch.arange(n) // window) if chunked else Window(window, 0 if causal else window - 1)
        mask = mask & (within | Sinks(sinks) if sinks else within)
    where = Layout(layout, n, ranks)
    found = plan(where, where, Blocks(Rule(mask, 1.0, Grid(3, 4, n, n)), "auto", 0.0, 0, ()))
    numbers = sum(
        hops * (cols.stop - cols.start) * 3 * 2 * (6 + 10)
        for rank in range(ranks)
        for cols, hops in zip(found.cols(rank), found.hops[rank], strict=True)
    )
    work = Work(3, n, n, causal=causal, window=window, sinks=sinks, chunked=chunked)
    way = ring(layer(4, 2), work, ranks, layout=layout)
    assert way.forward == 2 * (numbers // ranks)
    assert way.backward == 6 * (numbers // ranks)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(1, 6), length=st.integers(1, 5), other=st.integers(1, 5), heads=st.sampled_from([1, 2, 4]))
def test_keys_of_cross_attention_go_as_far_as_the_rings_own_plan_sends_them(
    ranks: int, length: int, other: int, heads: int
) -> None:
    from headwise.masks import Everything, Grid
    from headwise.parallel.layout import Layout, Way as Blocks
    from headwise.parallel.travel import plan
    from headwise.rule import Rule

    n, m = ranks * length, ranks * other
    rule = Rule(Everything(), 1.0, Grid(3, 4, n, m))
    found = plan(
        Layout("contiguous", n, ranks), Layout("contiguous", m, ranks), Blocks(rule, "auto", 0.0, 0, ())
    )  # fmt: skip
    columns = sum(
        hops * (cols.stop - cols.start)
        for rank in range(ranks)
        for cols, hops in zip(found.cols(rank), found.hops[rank], strict=True)
    )
    kv = 4 // heads  # KV heads of a device
    work = Work(3, n, m, causal=False, projected=m, cross=True)
    way = heads_by_ring(layer(4, 4), work, ranks * heads, heads)
    passed = columns // ranks * 3 * kv * (6 + 10)
    reduced = 2 * 24 * (heads - 1)  # of a token, bytes times the number of heads' devices
    assert way.forward == 2 * passed + 2 * 3 * length * reduced // heads
    assert way.backward == 6 * passed + 2 * 3 * (length + other) * reduced // heads
    assert way.passed == 2 * passed


def test_cross_attention_shuffles_queries_of_one_text_and_keys_of_another() -> None:
    """What each of 4 devices sends to the 3 others: their heads of its 5 tokens and of its 7 tokens of the context."""
    work, counts = Work(2, 20, 28, causal=False, projected=28, cross=True, dtype="float32"), layer(8, 4)
    way = ulysses(counts, work, 4)
    queries, keys, results = 5 * 2 * 6, 7 * 1 * 16, 5 * 2 * 10
    assert way.forward == way.backward == 3 * 2 * 4 * (queries + keys + results)
    assert way.kept == kept_bytes(counts, work) // 4
    assert ring(counts, work, 4).kept == kept_bytes(counts, work) // 4
    whole = head_parallel(counts, work, 4)
    x = 2 * 20 * 24 * 4  # on each device
    assert whole.kept == (kept_bytes(counts, work) - x) // 4 + x


def test_an_encoder_decoder_is_the_sum_of_its_three_kinds_of_layers() -> None:
    plan = asked("t5-base", 128, source=512, devices=4)
    counts = counts_of("multi_head", {"d_model": 768, "num_heads": 12})
    works = [
        Work(1, 512, 512, causal=False), Work(1, 128, 128), Work(1, 128, 512, causal=False, projected=512, cross=True)
    ]  # fmt: skip
    table = plan.table("devices")
    assert "The attention of 36 layers over 4 devices" in table.title
    for make in (head_parallel, ulysses, ring):
        made = [make(counts, work, 4) for work in works]
        sent = [12 * sum(getattr(way, part) for way in made) for part in ("forward", "backward", "gradients")]
        assert list(next(row for row in table.rows if row[0] == made[0].name)[1:4]) == sent


@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(1, 12), h_kv=st.integers(1, 6), group=st.integers(1, 5))
def test_heads_go_to_those_who_read_them(ranks: int, h_kv: int, group: int) -> None:
    from headwise.parallel.ulysses import shares

    h, held = h_kv * group, 5
    counts, work = layer(h, h_kv), Work(2, ranks * held, ranks * held, dtype="float32")
    if h < ranks:
        with pytest.raises(ConfigError, match=rf"num_heads={h} is too small for {ranks} devices"):
            ulysses(counts, work, ranks)
        return
    of = shares(h, h_kv, ranks)
    total = 0
    for here in range(ranks):
        for there in (other for other in range(ranks) if other != here):
            total += 2 * held * (len(of[there].queries) * 6 + len(of[there].keys) * 16) + 2 * held * 10 * len(
                of[here].queries
            )
    way = ulysses(counts, work, ranks)
    assert way.forward == way.backward == 4 * total // ranks


def test_all_reduces_are_those_of_y_and_of_the_gradient_of_x() -> None:
    way = head_parallel(LLAMA, Work(1, 8192, 8192), 8)
    assert way.forward == way.backward == 2 * 8192 * 4096 * 2 * 7 // 8
    assert way.gradients == 0
    shared = head_parallel(LLAMA, Work(1, 8192, 8192), 32)  # four devices to a key head
    assert shared.forward == 2 * 8192 * 4096 * 2 * 31 // 32 + 8192 * 256 * 2 * 3 // 4


@pytest.mark.parametrize(("h", "h_kv", "devices"), [(8, 8, 4), (8, 4, 4), (12, 4, 2)])
def test_memory_is_shared_out(h: int, h_kv: int, devices: int) -> None:
    counts, work = layer(h, h_kv), Work(3, 48, 48)
    whole = kept_bytes(counts, work)
    for way in (ring(counts, work, devices), ulysses(counts, work, devices)):
        assert way.kept == whole // devices
        assert way.weights == 2 * counts.parameters
    way = head_parallel(counts, work, devices)
    x = 2 * 3 * 48 * counts.width  # which all have
    assert way.kept == (whole - x) // devices + x
    assert way.weights == 2 * counts.parameters // devices


def test_a_hybrid_is_either_way_at_its_ends_and_cheaper_than_a_ring_between() -> None:
    def sent(way: Way) -> tuple[int, ...]:
        return way.forward, way.backward, way.gradients, way.rounds, way.hops, way.kept

    assert sent(hybrid(LLAMA, LONG, 16, 1)) == sent(ring(LLAMA, LONG, 16))
    assert sent(hybrid(LLAMA, LONG, 16, 16)) == sent(ulysses(LLAMA, LONG, 16))
    between = hybrid(LLAMA, LONG, 64, 8)
    assert between.name == "hybrid 8 × 8"
    assert between.backward < ring(LLAMA, LONG, 64).backward
    assert between.hops == 7


def test_heads_by_ring_is_either_way_at_its_ends() -> None:
    def sent(way: Way) -> tuple[int, ...]:
        return way.forward, way.backward, way.gradients, way.rounds, way.hops, way.passed, way.weights, way.kept

    assert sent(heads_by_ring(LLAMA, LONG, 16, 1)) == sent(ring(LLAMA, LONG, 16))
    assert sent(heads_by_ring(LLAMA, LONG, 16, 16)) == sent(head_parallel(LLAMA, LONG, 16))
    between = heads_by_ring(LLAMA, LONG, 64, 8)
    inside = head_parallel(LLAMA, Work(1, LONG.queries // 8, LONG.queries // 8), 8)
    alone = ring(layer_of_one_device(), LONG, 8)
    assert between.name == "heads 8 × 8"
    assert between.forward == inside.forward + alone.forward
    assert between.backward == inside.backward + alone.backward
    assert between.weights == inside.weights
    assert between.gradients == alone.gradients


def layer_of_one_device() -> Counts:
    """An eighth of the heads, as a layer of its own."""
    return counts_of("gqa", {"d_model": 4096, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128})


def test_a_ring_does_not_care_how_many_heads_there_are_and_ulysses_does() -> None:
    assert [way.name for way in ways(LLAMA, LONG, 8)] == ["head-parallel", "Ulysses", "ring"]
    assert [way.name for way in ways(LLAMA, LONG, 12)] == ["Ulysses", "ring"]
    assert [way.name for way in ways(LLAMA, LONG, 1024)] == ["ring"]


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_hides_its_transfers_from_the_stated_length_on(causal: bool) -> None:
    peak, link, devices = 4e14, 5e10, 8
    tokens = hiding_tokens(LLAMA, Work(1, 8, 8, causal=causal), peak, link)
    assert tokens == pytest.approx((2 if causal else 1) * 8 / 32 * peak / link)

    def exposed(n: int) -> float:
        work = Work(1, n, n, causal=causal)
        return exposed_seconds(ring(LLAMA, work, devices), LLAMA, work, devices, peak=peak, link=link)

    assert exposed(int(tokens * devices * 0.9)) > 0
    assert exposed(int(tokens * devices * 1.1)) == 0
    back = hiding_tokens(LLAMA, LONG, peak, link, backward=True)
    assert back == pytest.approx(hiding_tokens(LLAMA, LONG, peak, link) * 3 / 2.5)


def test_what_is_not_hidden_is_all_that_the_others_send_and_every_latency() -> None:
    given_: dict[str, Any] = {"peak": 1e15, "link": 1e9}
    for way in (head_parallel(LLAMA, LONG, 8), ulysses(LLAMA, LONG, 8)):
        assert exposed_seconds(way, LLAMA, LONG, 8, **given_) == pytest.approx(way.forward / 1e9)
        slower = exposed_seconds(way, LLAMA, LONG, 8, latency=1e-3, **given_)
        assert slower == pytest.approx(way.forward / 1e9 + way.rounds * 1e-3)
    alone, way = ring(LLAMA, LONG, 8), hybrid(LLAMA, LONG, 64, 8)
    never = exposed_seconds(alone, LLAMA, LONG, 8, peak=1e30, link=1e9)
    assert never == pytest.approx(alone.forward / 1e9)
    hidden = exposed_seconds(way, LLAMA, LONG, 64, peak=1.0, link=1e9)
    shuffled = 2**17 * (2 * 4096 + 8 * 256) * 2 // 64 * 7 // 8
    assert hidden == pytest.approx(shuffled / 1e9)


def test_flops_are_those_of_the_stages() -> None:
    stages = {stage.name: stage.flops for stage in attention_stages(LLAMA, LONG)}
    assert attention_flops(LLAMA, LONG) == stages["scores"] + stages["weighted sum"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: head_parallel(LLAMA, LONG, 12), "num_heads=32 cannot be divided evenly between 12 devices"),
        (lambda: head_parallel(layer(6, 3), LONG, 2), "num_kv_heads=3 and 2 devices: one has to divide the other"),
        (lambda: ring(LLAMA, LONG, 0), "devices=0: expected at least 1"),
        (lambda: ring(LLAMA, LONG, 2, layout="spiral"), "layout='spiral': expected 'zigzag' or 'contiguous'"),
        (lambda: ring(LLAMA, Work(1, 3, 9), 2), "queries=3, keys=9: expected self attention"),
        (lambda: hybrid(LLAMA, LONG, 12, 5), "heads=5: does not divide devices=12"),
        (lambda: heads_by_ring(LLAMA, LONG, 12, 5), "heads=5: does not divide devices=12"),
        (lambda: heads_by_ring(LLAMA, LONG, 12, 3), "num_heads=32 cannot be divided evenly between 3 devices"),
        (
            lambda: ulysses(counts_of("latent", {"d_model": 24, "num_heads": 4}), LONG, 2),
            "each query head uses one KV head",
        ),
        (
            lambda: ring(counts_of("talking_heads", {"d_model": 24, "num_heads": 4}), LONG, 2),
            "each query head uses one KV head",
        ),
        (
            lambda: ring(counts_of("sparse_mixture", {"d_model": 24, "num_heads": 4}), LONG, 2),
            "each query head uses one KV head",
        ),
        (lambda: hiding_tokens(LLAMA, LONG, 0.0, 1.0), "peak=0.0: expected a finite number above 0"),
    ],
)
def test_what_cannot_be_is_one_sentence_with_the_numbers(call: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert said in str(error.value)


def asked(config: str, tokens: int = 2048, *, source: int | None = None, **options: Any) -> Any:
    return plan_model(find(config), Load(1, tokens, source=source), **options)


def test_a_plan_puts_the_ways_beside_one_another() -> None:
    plan = asked("llama-3-8b", 131_072, devices=16, link=5e10, machine=Machine(4e14, 3e12))
    counts, work = LLAMA, LONG
    table = plan.table("devices")
    found = {row[0]: row[1:] for row in table.rows}
    assert set(found) == {"head-parallel", "Ulysses", "ring", "hybrid 8 × 2", "heads 8 × 2"}
    for way in (*ways(counts, work, 16), hybrid(counts, work, 16, 8), heads_by_ring(counts, work, 16, 8)):
        sent = [32 * x for x in (way.forward, way.backward, way.gradients, way.weights, way.kept)]
        waits = 32 * exposed_seconds(way, counts, work, 16, peak=4e14, link=5e10)
        assert found[way.name][:5] == tuple(sent)
        assert found[way.name][5] == pytest.approx(32 * way.step / 5e10)
        assert found[way.name][6] == (pytest.approx(waits) if waits else "nothing")
    assert "from 4,000 tokens per device on; here each has 8,192" in table.note
    steps = [sum(row[1:4]) for row in table.rows]
    assert steps == sorted(steps, reverse=True)


def test_a_plan_says_why_a_way_is_missing_and_fits_a_terminal() -> None:
    plan = asked("llama-3-8b", devices=48, link=5e10, machine=Machine(4e14, 3e12))
    assert "num_heads=32 cannot be divided evenly between 48 devices.\nUlysses: num_heads=32 is too small" in (
        plan.table("devices").note
    )
    console = Console(file=io.StringIO(), width=80)
    print_plan(plan, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert "The attention of 32 layers over 48 devices" in text
    rows = spread_table({(layer(4, 1), Work(1, 8, 8)): 1}, 5).rows
    assert [row[0] for row in rows] == ["ring", "head-parallel", "Ulysses"]
    assert [set(row[1:]) == {None} for row in rows] == [False, True, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": "gpt-2-small", "link": 1e9}, "link=1e+09: requires devices"),
        ({"config": "deepseek-v2", "devices": 4}, "the heads of latent cannot be computed separately"),
        ({"config": "deepseek-v2", "devices": 4}, "supported designs: multi_head, mqa, gqa, single_head, gated_output"),
        ({"config": "gpt-2-small", "devices": 0}, "devices=0: expected more than 0"),
        ({"config": "gpt-2-small", "devices": 2, "link": -1.0}, "link=-1.0: expected more than 0"),
    ],
)
def test_a_plan_refuses_what_it_would_not_heed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(**options)
    assert said in str(error.value)


def test_the_page_shows_what_the_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "parallel"))
    import head_parallel_cases
    import scale

    text = scale.DOC.read_text(encoding="utf-8")
    assert scale.page(text) == text
    assert scale.COUNTED == head_parallel_cases.TRAFFIC
    for name in ("scale", "head_parallel_cases"):
        sys.modules.pop(name)


@pytest.mark.thorough
def test_the_picture_can_be_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the view extra")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import scale

    scale.draw(tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 20_000
    sys.modules.pop("scale")
