"""headwise prune, convert and budget: what they plan is what they write, and the source stays as it was."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from matplotlib.text import Text

import headwise as hw
from headwise.compress import split_text
from headwise.compress.pruning import order_of, units_of
from headwise.compress.source import counts_in, expected_cache_bytes, expected_parameters, open_source
from headwise.lm.checkpoint import load_checkpoint, save_model
from headwise.lm.model import Decoder, DecoderConfig, mean_loss
from headwise.lm.texts import CharTokenizer
from headwise.reports.plots import pruning_figure
from headwise.wording import speaking
from processes import files_no_larger_than

WORDS = ["话说", "武松", "打虎。", "The tiger", " sleeps!", "又来", "再来？\n"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "tale.txt"
    draw = random.Random(5)
    file.write_text("".join(draw.choice(WORDS) for _ in range(2000)), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def shared_folder(model: tuple[Decoder, CharTokenizer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 6 heads that share 3 key heads, in float16."""
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("shared")
    config = DecoderConfig(
        model[1].vocab_size, d_model=24, num_layers=2, num_heads=6, num_kv_heads=3, d_ff=31, context=24
    )
    save_model(folder / "model.safetensors", Decoder(config), model[1], {"step": 3}, dtype=torch.float16)
    return folder


def numbers(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.thorough
def test_named_heads_go_and_the_rest_computes_what_silencing_them_gave(headwise, model_folder, text, tmp_path):
    before = (model_folder / "model.safetensors").read_bytes()
    out, told = tmp_path / "out", tmp_path / "told.json"
    done = headwise(
        "prune", "--model", model_folder, "--file", text, "--heads", "0.1,1.4,0.3", "--out", out, "--windows", 2,
        "--json", told, answer="y\n",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"Write to {out}? [y/N]" in done.out
    assert (model_folder / "model.safetensors").read_bytes() == before
    whole, pruned = load_checkpoint(model_folder)[0], load_checkpoint(out)[0]
    assert [site.num_heads for site in hw.find_heads(pruned)] == [3, 4]
    gates = [torch.tensor([1.0, 0, 1, 0, 1]), torch.tensor([1.0, 1, 1, 1, 0])]
    ids = torch.arange(2 * 17).view(2, 17)
    with torch.no_grad(), hw.models.scale_heads(hw.find_heads(whole), gates):
        torch.testing.assert_close(pruned(ids), whole(ids), rtol=1e-4, atol=1e-5)
    content = numbers(told)
    judged, expected = content["judged"], content["plan"]["expected"]
    assert judged["before"]["parameters"] == whole.num_parameters
    assert judged["pruned"]["parameters"] == pruned.num_parameters == expected["parameters"]
    assert judged["pruned"]["cache_bytes"] == expected["cache_bytes"] == (3 + 4) * 2 * 4 * 4
    assert judged["pruned"]["reading"] > 0
    assert judged["pruned"]["writing"] > 0
    parts = split_text(text, load_checkpoint(out)[1], context=24, windows=2)
    with torch.no_grad():
        assert judged["pruned"]["losses"] == pytest.approx([float(mean_loss(pruned, x)) for x in parts.judge], rel=1e-5)
        assert expected["loss"] == pytest.approx(
            sum(float(mean_loss(pruned, x)) for x in parts.foretell) / len(parts.foretell), rel=1e-5
        )
    info = load_checkpoint(out)[2]
    assert info["changes"] == [{"prune": [[0, 1], [1, 4], [0, 3]], "by": "named"}]


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["ablation", "gradient", "taylor", "gates"])
def test_the_least_important_heads_go(headwise, model_folder, text, tmp_path, by):
    told, png = tmp_path / "told.json", tmp_path / "curve.png"
    done = headwise(
        "prune", "--model", model_folder, "--file", text, "--remove", 4, "--by", by, "--dry-run", "--windows", 2,
        "--orders", 2, "--gate-steps", 3, "--json", told, "--png", png,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert png.read_bytes().startswith(b"\x89PNG")
    plan = numbers(told)["plan"]
    assert numbers(told)["written"] is None
    told = plan["importance"]
    places = list(zip(told["layer"], told["head"], strict=True))
    assert sorted(places) == [(layer, head) for layer in range(2) for head in range(5)]
    values = dict(zip(places, told["values"][told["method"]], strict=True))
    ranked = sorted(places, key=values.__getitem__)
    left, wanted = [5, 5], []
    for layer, head in ranked:
        if left[layer] > 1 and len(wanted) < 4:
            wanted.append([layer, head])
            left[layer] -= 1
    assert plan["heads"] == wanted
    last = {layer: [head for head in range(5) if [layer, head] not in wanted] for layer in range(2)}
    kept = [(layer, heads[0]) for layer, heads in last.items() if len(heads) == 1]
    most = max(values[layer, head] for layer, head in wanted)
    skipped = [head for head in kept if values[head] < most]
    assert ("each as the last one of its layer" in " ".join(done.out.split())) == bool(skipped)
    assert all(f"{layer}.{head}({values[layer, head]:+.4f})" in done.out for layer, head in wanted)
    curve = plan["curve"]
    assert curve["removed"] == list(range(9))  # each layer keeps one
    assert plan["expected"]["loss"] == curve["loss"][4]
    assert all(f"{layer}.{head}" in done.out for layer, head in wanted)


def test_uniform_removes_the_least_important_of_every_layer(headwise, model_folder, text, tmp_path):
    told = tmp_path / "told.json"
    options = ["--uniform", "--by", "taylor", "--dry-run", "--windows", 2, "--orders", 1]
    few = headwise("prune", "--model", model_folder, "--file", text, "--remove", 1, *options)
    assert "--uniform: every layer loses equally many, 2 heads in all at a time" in " ".join(few.err.split())
    done = headwise("prune", "--model", model_folder, "--file", text, "--remove", 5, *options, "--json", told)
    assert done.code == 0, done.err
    assert "equally many in every layer" in " ".join(done.out.split())
    plan = numbers(told)["plan"]
    table = plan["importance"]
    values = dict(zip(zip(table["layer"], table["head"], strict=True), table["values"][table["method"]], strict=True))
    least = [sorted(range(5), key=lambda head: values[layer, head])[:2] for layer in range(2)]
    assert sorted(plan["heads"]) == sorted([layer, head] for layer in range(2) for head in least[layer])
    assert plan["curve"]["removed"] == [0, 2, 4, 6, 8]


@pytest.mark.thorough
def test_the_picture_draws_the_curve_and_the_band_of_chance():
    chance = np.array([[[4.0], [4.3], [4.9], [5.5]], [[4.0], [4.1], [5.3], [5.4]]])
    order = ((0, 0), (1, 2), (0, 1), (1, 1), (1, 0))
    losses = np.array([[4.0], [4.02], [4.2], [5.0]])
    curve = hw.analysis.PruningCurve(order, "taste", "zero", np.array([0, 1, 2, 3]), 5, losses, chance)
    whole, near = pruning_figure(curve, chosen=1, limit=0.01).axes
    drawn = [[[x, round(y, 9)] for x, y in line.get_xydata().tolist()] for line in whole.lines]
    assert [[5, 4.0], [4, 4.02], [3, 4.2], [2, 5.0]] in drawn
    assert [[5, 4.0], [4, 4.2], [3, 5.1], [2, 5.45]] in drawn
    assert [[4, 4.02]] in drawn
    band = whole.collections[0].get_paths()[0].vertices.tolist()
    assert [4, 4.1] in band
    assert [4, 4.3] in band
    assert near.get_ylim()[1] == pytest.approx(4.4)
    one = hw.analysis.PruningCurve(order, "taste", "zero", np.array([0, 1, 2, 3]), 5, losses, chance[:1])
    for lang, several, single in (("en", "2 random orders", "1 random order"), ("zh", "2 个随机顺序", "1 个随机顺序")):
        with speaking(lang):
            drawn, other = ([text.get_text() for text in pruning_figure(x).findobj(Text)] for x in (curve, one))
        assert several in drawn
        assert single in other
        assert any("loss" in text for text in drawn) == (lang == "en")
    alone = hw.analysis.PruningCurve(order, "taste", "zero", np.array([0]), 5, losses[:1], chance[:, :1])
    with pytest.raises(hw.ConfigError, match="1 point"):
        pruning_figure(alone)


def test_as_many_heads_go_as_the_loss_allows(headwise, model_folder, text, tmp_path):
    told = tmp_path / "told.json"
    arguments = ["prune", "--model", model_folder, "--file", text, "--windows", 2, "--orders", 1, "--dry-run"]
    done = headwise(*arguments, "--max-loss", "3%", "--json", told)
    curve = numbers(told)["plan"]["curve"]
    gone = len(numbers(told)["plan"]["heads"])
    assert done.code == 0, done.err
    limit = curve["loss"][0] * 1.03
    assert max(curve["loss"][: gone + 1]) <= limit
    assert gone == curve["removed"][-1] or curve["loss"][gone + 1] > limit


@pytest.mark.thorough
def test_groups_left_uneven_are_told_in_chinese_too(headwise, shared_folder, text):
    given = ("prune", "--model", shared_folder, "--file", text, "--heads", "0.0", "--dry-run", "--windows", 1)
    for lang, words in (("en", "2 query heads share a KV head"), ("zh", "每 2 个查询头共享一个键值头")):
        done = headwise(*given, "--lang", lang)
        assert (done.code, words in done.err) == (2, True), done.err


@pytest.mark.thorough
def test_heads_that_share_keys_go_together_and_the_dtype_stays(headwise, shared_folder, text, tmp_path):
    out, told = tmp_path / "out", tmp_path / "told.json"
    done = headwise(
        "prune", "--model", shared_folder, "--file", text, "--share", "50%", "--out", out, "--windows", 2, "--orders",
        1, "--yes", "--json", told,
    )  # fmt: skip
    assert done.code == 0, done.err
    heads = [tuple(head) for head in numbers(told)["plan"]["heads"]]
    assert len(heads) == 6
    assert all((layer, head ^ 1) in heads for layer, head in heads)  # two query heads a key head
    pruned = load_checkpoint(out)[0]
    expected = numbers(told)["plan"]["expected"]
    assert pruned.num_parameters == expected["parameters"] == numbers(told)["judged"]["pruned"]["parameters"]
    assert numbers(told)["judged"]["pruned"]["cache_bytes"] == expected["cache_bytes"] == 3 * 2 * 4 * 4
    assert (out / "model.safetensors").stat().st_size < (shared_folder / "model.safetensors").stat().st_size


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(1, 3)), min_size=1, max_size=4), st.data())
def test_an_order_holds_every_head_once_and_empties_no_layer(sizes, data):
    sites: Any = [Site(kv * group, kv) for kv, group in sizes]
    values: Any = [
        data.draw(st.lists(st.integers(-3, 3), min_size=site.num_heads, max_size=site.num_heads)) for site in sites
    ]
    order = order_of(values, sites)
    assert sorted(order.heads) == [(layer, head) for layer, site in enumerate(sites) for head in range(site.num_heads)]
    gone = {head for unit in order.going for head in unit}
    for layer, site in enumerate(sites):
        group = site.num_heads // site.num_kv_heads if site.num_kv_heads > 1 else 1
        left = [head for head in range(site.num_heads) if (layer, head) not in gone]
        assert len(left) == group
        assert [head // group for head in left] == [left[0] // group] * group
    sums = [sum(values[layer][head] for layer, head in unit) for unit in order.going]
    assert sums == sorted(sums)
    assert order.counts == tuple(np.cumsum([len(unit) for unit in order.going]))
    rounds = order_of(values, sites, uniform=True)
    assert sorted(rounds.heads) == sorted(order.heads)
    for layer in range(len(sites)):  # each by the same ranking
        for one in (rounds, order):
            assert [unit for unit in (*one.going, *one.last) if unit[0][0] == layer] == sorted(
                units_of(sites[layer], layer), key=lambda unit: sum(values[layer][head] for _, head in unit)
            )
    for count in rounds.counts:
        gone = set(rounds.heads[:count])
        left = [sum(not gone.issuperset(unit) for unit in units_of(site, i)) for i, site in enumerate(sites)]
        assert len(set(left)) == 1


class Site(NamedTuple):
    num_heads: int
    num_kv_heads: int


@pytest.mark.parametrize(
    ("design", "options"),
    [("multi_head", {}), ("multi_head", {"bias": True, "qk_norm": True}), ("gqa", {}), ("latent", {"latent_dim": 6})],
)
def test_formulas_tell_the_parameters_and_bytes_of_a_pruned_decoder(design, options):
    kv = 2 if design == "gqa" else None
    decoder = Decoder(DecoderConfig(37, 24, 2, 4, kv, 31, 24, design=design, options=options))
    heads = [2, 3] if kv else [1, 3]
    after = {1: (2, 1 if kv else 2)}
    expected = expected_parameters(decoder, after), expected_cache_bytes(decoder, after)
    assert expected_cache_bytes(decoder, {}) == nbytes(decoder)
    pruned: Any = hw.edit.prune(decoder, {1: heads}, copy=True).model
    assert expected == (pruned.num_parameters, nbytes(pruned))
    assert counts_in(pruned, 1).parameters == sum(p.numel() for p in pruned.blocks[1].attention.parameters())


def nbytes(decoder: Decoder) -> float:
    """Bytes a token in real caches."""
    caches = [hw.KVCache() for _ in decoder.blocks]
    decoder(torch.arange(11)[None], caches=caches)
    return sum(cache.nbytes for cache in caches) / 11


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["mean", "first", "cluster", "svd"])
def test_heads_with_equal_keys_and_values_are_shared_without_loss(headwise, model, text, tmp_path, method):
    torch.manual_seed(2)
    config = DecoderConfig(model[1].vocab_size, d_model=24, num_layers=2, num_heads=4, d_ff=31, context=24)
    decoder: Any = Decoder(config)
    with torch.no_grad():
        for block in decoder.blocks:
            for x in (block.attention.k_proj.weight, block.attention.v_proj.weight):
                x.copy_(x.view(2, 2, 6, 24)[:, :1].expand(2, 2, 6, 24).reshape(24, 24))
    save_model(tmp_path / "from" / "model.safetensors", decoder, model[1], {})
    out, told = tmp_path / "out", tmp_path / "told.json"
    done = headwise(
        "convert", "--model", tmp_path / "from", "--file", text, "--num-kv-heads", 2, "--method", method, "--out", out,
        "--windows", 2, "--yes", "--json", told,
    )  # fmt: skip
    assert done.code == 0, done.err
    judged, expected = numbers(told)["judged"], numbers(told)["plan"]["expected"]
    assert judged["merged"]["losses"] == pytest.approx(judged["before"]["losses"], rel=1e-5)
    merged = load_checkpoint(out)[0]
    assert [site.num_kv_heads for site in hw.find_heads(merged)] == [2, 2]
    assert merged.num_parameters == expected["parameters"] == judged["merged"]["parameters"]
    assert judged["merged"]["cache_bytes"] == expected["cache_bytes"] == judged["before"]["cache_bytes"] / 2


@pytest.mark.thorough
def test_a_conversion_is_healed_and_both_losses_are_told(headwise, model_folder, text, tmp_path):
    out, told = tmp_path / "out", tmp_path / "told.json"
    done = headwise(
        "convert", "--model", model_folder, "--file", text, "--num-kv-heads", 1, "--heal", 40, "--lr", "0.01", "--out",
        out, "--windows", 2, "--yes", "--json", told,
    )  # fmt: skip
    assert done.code == 0, done.err
    judged = numbers(told)["judged"]
    assert list(judged) == ["before", "merged", "healed"]
    assert judged["healed"]["loss"] < judged["merged"]["loss"]
    healed, tokenizer, info = load_checkpoint(out)
    assert info["changes"] == [{"convert": 1, "method": "svd", "heal": 40, "lr": 0.01}]
    with torch.no_grad():
        batches = split_text(text, tokenizer, context=24, windows=2).judge
        assert judged["healed"]["losses"] == pytest.approx([float(mean_loss(healed, x)) for x in batches], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("command", [("prune", "--heads", "0.1"), ("convert", "--num-kv-heads", 1)])
def test_healing_gives_the_same_bits_for_the_same_seed(headwise, model, text, tmp_path, command):
    decoder = Decoder(replace(model[0].config, dropout=0.3))
    save_model(tmp_path / "from" / "model.safetensors", decoder, model[1], {})
    made = []
    for name, seed in (("one", 7), ("two", 7), ("other", 8)):
        torch.manual_seed(len(made))
        before = torch.get_rng_state()
        done = headwise(
            *command, "--model", tmp_path / "from", "--file", text, "--windows", 1, "--heal", 5, "--lr", "0.01",
            "--seed", seed, "--out", tmp_path / name, "--yes",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert torch.equal(torch.get_rng_state(), before)
        made.append(load_checkpoint(tmp_path / name)[0].state_dict())
    same = [all(torch.equal(x, other[name]) for name, x in made[0].items()) for other in made[1:]]
    assert same == [True, False]
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


@pytest.mark.thorough
def test_a_budget_is_written_and_obeyed(headwise, model_folder, text, tmp_path):
    out, told = tmp_path / "short.json", tmp_path / "told.json"
    done = headwise(
        "budget", "--model", model_folder, "--file", text, "--window", 5, "--sinks", 2, "--threshold", "0.3", "--out",
        out, "--windows", 2, "--yes", "--json", told, "--lengths", "7,100",
    )  # fmt: skip
    assert done.code == 0, done.err
    found, plan = hw.edit.read_budget(out), numbers(told)["plan"]
    assert [list(layer) for layer in found.windows] == plan["windows"]
    assert {5} < {window for layer in found.windows for window in layer} | {None}
    decoder, tokenizer, _ = load_checkpoint(model_folder)
    batches = split_text(text, tokenizer, context=24, windows=2).judge
    losses = [hw.edit.budget_effect(decoder, [x], found).short for x in batches]
    assert numbers(told)["judged"]["budget"]["losses"] == pytest.approx(losses, rel=1e-5)
    caches = found.caches()
    decoder(torch.arange(100)[None] % 40, mask=found.masks(), caches=caches)
    assert plan["bytes"][1] == {"tokens": 100, "full_bytes": 100 * 320, "bytes": sum(cache.nbytes for cache in caches)}
    written = headwise("write", "--model", model_folder, "--budget", out, "--prompt", "武", "--length", 9,
                       "--temperature", 0)  # fmt: skip
    assert written.code == 0, written.err
    assert written.out == written_by_hand(decoder, tokenizer, found)
    far = headwise("write", "--model", model_folder, "--budget", out, "--prompt", "武", "--length", 24)
    assert far.code == 2
    assert "length=24" in far.err
    out.write_text(out.read_text("utf-8").replace('"model": ""', '"model": "LlamaForCausalLM"'), "utf-8")
    other = headwise("write", "--model", model_folder, "--budget", out, "--prompt", "武", "--length", 9)
    assert other.code == 2
    assert "was made for a LlamaForCausalLM" in other.err
    assert "--sinks 0" in far.err


def written_by_hand(decoder: Decoder, tokenizer: CharTokenizer, found: Any) -> str:
    """The likeliest characters, each by a full pass under the masks of the budget."""
    text = "武"
    while len(text) < 10:
        ids = torch.from_numpy(tokenizer.encode(text))[None]
        with torch.no_grad():
            text += tokenizer.decode([int(decoder(ids, mask=found.masks())[0, -1].argmax())])
    return text + "\n"


@pytest.mark.thorough
def test_a_budget_that_keeps_all_writes_what_no_budget_writes(headwise, model_folder, tmp_path):
    layer = {"windows": [None] * 5, "kept": [1.0] * 5, "key_width": 4, "value_width": 4}
    content = {"format": "headwise-budget-1", "window": 5, "sinks": 0, "threshold": 0.9, "tokens": 24}
    (tmp_path / "all.json").write_text(json.dumps({**content, "layers": [layer, layer]}))
    common = ("write", "--model", model_folder, "--prompt", "武", "--length", 40, "--temperature", 0)
    assert headwise(*common, "--budget", tmp_path / "all.json").out == headwise(*common).out
    (tmp_path / "other.json").write_text(json.dumps({**content, "layers": [layer]}))
    other = headwise(*common, "--budget", tmp_path / "other.json")
    assert other.code == 2
    assert "budget: was made for layers of [5] KV heads; this model has [5, 5]" in other.err


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["prune", "--file", "missing.txt", "--remove", "1"], ["missing.txt"]),
        (["prune", "--file", "short.txt", "--remove", "1"], ["short.txt", "400 characters", "at least 500"]),
        (["prune", "--remove", "1", "--windows", "0"], ["--windows 0"]),
        (["prune", "--heads", "0.9"], ["--heads 0.9", "layer 0 has no head 9", "0 to 4"]),
        (["prune", "--heads", "2.0"], ["--heads 2.0", "no layer 2", "0 to 1"]),
        (["prune", "--heads", "0.1,0.1"], ["--heads 0.1", "twice"]),
        (["prune", "--heads", "0-1"], ["'0-1'", "LAYER.HEAD"]),
        (["prune", "--heads", "1.0,1.1,1.2,1.3,1.4"], ["all 5 heads of layer 1", "at least one"]),
        (["prune", "--heads", "0.1", "--by", "gates"], ["--heads cannot be combined with --by"]),
        (["prune"], ["nothing given", "--max-loss"]),
        (["prune", "--remove", "2", "--share", "0.5"], ["--remove and --share given"]),
        (["prune", "--remove", "9"], ["--remove 9", "at most 8"]),
        (["prune", "--share", "0.05"], ["--share 0.05", "none"]),
        (["prune", "--share", "many"], ["--share 'many'", "25%"]),
        (["prune", "--max-loss", "-1%"], ["--max-loss -0.01"]),
        (["prune", "--remove", "1", "--by", "magic"], ["--by 'magic'", "'ablation', 'gradient', 'taylor', 'gates'"]),
        (["prune", "--remove", "1", "--out", "full"], ["'full'", "not empty", "--force"]),
        (["prune", "--remove", "1", "--out", "short.txt"], ["short.txt", "is a file"]),
        (["prune", "--remove", "1", "--model", "nowhere"], ["nowhere", "does not exist"]),
        (["convert", "--num-kv-heads", "2"], ["num_kv_heads=2", "5 KV heads", "divisor"]),
        (["convert", "--num-kv-heads", "5"], ["--num-kv-heads 5", "already"]),
        (["convert", "--num-kv-heads", "3", "--lang", "zh"], ["num_kv_heads=3", "5 个键值头；应为其约数"]),
        (["convert", "--num-kv-heads", "1", "--method", "magic"], ["--method 'magic'", "'svd'"]),
        (["convert", "--num-kv-heads", "1", "--heal", "-1"], ["--heal -1"]),
        (["budget", "--window", "24"], ["--window 24", "24 tokens"]),
        (["budget", "--window", "5", "--threshold", "1.5"], ["--threshold 1.5"]),
        (["budget", "--window", "5", "--lengths", "many"], ["--lengths 'many'"]),
        (["budget", "--out", "short.txt"], ["short.txt", "already exists"]),
        (["write", "--budget", "short.txt"], ["short.txt", "cannot be read"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(headwise, model_folder, text, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("武松打虎" * 100, encoding="utf-8")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    given = [*args, *(() if args[0] == "write" or "--file" in args else ("--file", text))]
    given += () if "--model" in args else ("--model", model_folder)
    given += () if "--out" in args or args[0] == "write" else ("--out", "new")
    done = headwise(*given)
    assert done.code == 2, done.out
    assert len(done.err.strip().splitlines()) == 1, done.err
    for word in words:
        assert word in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "short.txt"]


def test_a_model_of_transformers_is_refused_with_the_way_out(headwise, text, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for command in (["prune", "--remove", "1"], ["convert", "--num-kv-heads", "1"]):
        done = headwise(*command, "--file", text, "--model", tmp_path, "--out", tmp_path / "new")
        assert (done.code, "hw.edit.prune" in done.err, len(done.err.strip().splitlines())) == (2, True, 1)


@pytest.mark.thorough
def test_without_a_yes_nothing_is_written(headwise, model_folder, text, tmp_path):
    out = tmp_path / "out"
    given = ("prune", "--model", model_folder, "--file", text, "--heads", "0.1", "--out", out, "--windows", 1)
    declined = headwise(*given, answer="\n")
    assert declined.code == 0
    assert "Nothing was written." in declined.out
    for answer in ("", None):
        unanswered = headwise(*given, answer=answer)
        assert unanswered.code == 2
        assert "no answer on standard input, so nothing was written" in unanswered.err
    assert not out.exists()


@pytest.mark.thorough
def test_a_source_is_never_overwritten_and_another_only_by_force(headwise, model_folder, text, tmp_path):
    given = ("prune", "--file", text, "--heads", "0.1", "--windows", 1, "--yes")
    refused = headwise(*given, "--model", model_folder, "--out", model_folder, "--force")
    assert refused.code == 2
    assert "the source is never overwritten" in refused.err
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("an old one")
    assert headwise(*given, "--model", model_folder, "--out", out).code == 2
    assert (out / "model.safetensors").read_text() == "an old one"
    assert headwise(*given, "--model", model_folder, "--out", out, "--force").code == 0
    again = headwise("prune", "--file", text, "--heads", "1.0", "--windows", 1, "--yes", "--model", out, "--out",
                     tmp_path / "twice")  # fmt: skip
    assert again.code == 0, again.err
    decoder, _, info = load_checkpoint(tmp_path / "twice")
    assert [site.num_heads for site in hw.find_heads(decoder)] == [4, 4]
    assert len(info["changes"]) == 2


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["prune", "--heads", "0.1", "--json", "m/model.safetensors", "--dry-run"], ["--json", "the file of --model"]),
        (["prune", "--remove", "1", "--png", "tale.txt", "--dry-run"], ["--png 'tale.txt'", "the file of --file"]),
        (["prune", "--remove", "1", "--png", "a", "--json", "b/../a", "--dry-run"], ["--png 'a'", "of --json"]),
        (["prune", "--heads", "0.1", "--json", "new/model.safetensors", "--out", "new"], ["--json", "file of --out"]),
        (["convert", "--num-kv-heads", "1", "--json", "tale.txt", "--dry-run"], ["--json", "the file of --file"]),
        (["budget", "--window", "5", "--json", "x", "--out", "x", "--yes"], ["--json 'x'", "the file of --out"]),
        (["budget", "--window", "5", "--json", "m/budget.json", "--yes"], ["--json", "the file of --out"]),
        (["budget", "--window", "5", "--out", "tale.txt", "--force"], ["--out", "the file of --file"]),
        (["convert", "--num-kv-heads", "1", "--out", "m", "--force"], ["never overwritten"]),
        (["see", "--out", "tale.txt", "--no-open"], ["--out 'tale.txt'", "the file of --file"]),
        (["see", "--out", "m/tokenizer.json", "--no-open"], ["--out", "the file of --model"]),
        (["see", "--beside", "b.txt", "--out", "b.txt", "--no-open"], ["--out 'b.txt'", "the file of --beside"]),
        (["see", "--view", "html=tale.txt", "--view", "html=x", "--no-open"], ["--view html", "the file of --file"]),
        (["see", "--out", "self", "--beside", "gone.txt", "--no-open"], ["--beside 'gone.txt'"]),
    ],
)  # fmt: skip
def test_no_output_replaces_an_input(headwise, model_folder, text, tmp_path, monkeypatch, args, words):
    """Nor another output; the model is a link, as in a cache of downloads."""
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    Path("b").mkdir()
    Path("m/model.safetensors").symlink_to(model_folder / "model.safetensors")
    Path("m/tokenizer.json").touch()
    Path("self").symlink_to("self")
    for name in ("tale.txt", "b.txt"):
        Path(name).write_bytes(text.read_bytes())
    before = (model_folder / "model.safetensors").read_bytes()
    done = headwise(*args, "--model", "m", "--file", "tale.txt")
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1), done.out + done.err
    assert all(word in done.err for word in words), done.err
    assert Path("m/model.safetensors").is_symlink()
    assert (model_folder / "model.safetensors").read_bytes() == before
    assert Path("tale.txt").read_bytes() == text.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "b.txt", "m", "self", "tale.txt"]


@pytest.mark.thorough
def test_a_full_disk_leaves_nothing(headwise, model_folder, text, tmp_path):
    given = ("--model", model_folder, "--file", text, "--heads", "0.1", "--windows", 1, "--yes")
    with files_no_larger_than(8192):
        done = headwise("prune", *given, "--out", tmp_path / "out")
    assert done.code == 2, done.out + done.err
    assert "could not be written" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error: ")]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_the_embedded_model_loses_a_head(headwise, tmp_path):
    file, told = tmp_path / "tale.txt", tmp_path / "told.json"
    file.write_text("却说武松走上冈子来，只见那株大树背后跳出一只吊睛白额大虫来。" * 60, encoding="utf-8")
    done = headwise(
        "prune", "--file", file, "--heads", "3.6", "--context", 16, "--windows", 1, "--orders", 1, "--out",
        tmp_path / "out", "--yes", "--json", told,
    )  # fmt: skip
    assert done.code == 0, done.err
    judged = numbers(told)["judged"]
    assert judged["before"]["parameters"] - judged["pruned"]["parameters"] == 4 * 256 * 32
    assert judged["before"]["cache_bytes"] - judged["pruned"]["cache_bytes"] == 2 * 32 * 4
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 7_598_584


@pytest.mark.thorough
@pytest.mark.parametrize(
    "args",
    [
        ["prune", "--remove", "2", "--orders", "1"],
        ["prune", "--heads", "0.1,1.4"],
        ["convert", "--num-kv-heads", "1"],
        ["budget", "--lengths", "64", "--window", "11", "--sinks", "2"],
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_a_change_is_described_in_chinese(headwise, model_folder, text, tmp_path, args):
    given = ["--model", model_folder, "--file", text, "--windows", 2, "--lang", "zh", "--out", tmp_path / "new"]
    done = headwise(*args, *given, answer="y\n")
    assert done.code == 0, done.err
    assert "计划：" in done.out
    assert "评估：" in done.out
    plain = done.out.replace(str(tmp_path), "").replace(str(model_folder), "").replace("headwise write --model", "")
    assert re.findall(r"[a-z]{3,}(?: [a-z]{2,}){2,}", plain) == []


@pytest.mark.thorough
def test_the_embedded_model_is_named_in_both_languages():
    named = open_source(None).described
    assert (named[:18], named.zh[:5]) == ("the embedded model", "内置模型，")
