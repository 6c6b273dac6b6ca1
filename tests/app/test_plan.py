"""`headwise plan`: the numbers are those of `headwise.costs`, whatever way they are shown; bad options are one line."""

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from commands import Command
from headwise.cli.chinese import lines_of_characters
from headwise.costs import Machine, Work, attention_stages
from headwise.costs.configs import CONFIGS, find
from headwise.costs.model import Load, model_cache_bytes, parameter_parts, pass_stages, step_stages
from headwise.errors import ConfigError
from headwise.nn.registry import attentions_of, counts_of, names
from headwise.plan import (
    Column,
    Plan,
    Table,
    compare_designs,
    listing,
    markdown_table,
    measured_machine,
    plan_design,
    plan_model,
    print_plan,
    to_json,
    to_markdown,
    trade_off,
)
from headwise.plan.tables import named, written
from headwise.wording import in_language, scaled, speaking

GQA = {"d_model": 4096, "num_heads": 32, "num_kv_heads": 8}
MACHINE = Machine(1e12, 5e10)
T5 = find("t5-base")  # with other heads in the first layer, and in the last cross attention
UNEQUAL = T5.with_layers([{"num_heads": 11, "head_dim": 64}, *[{"num_heads": 12}] * 34, {"num_heads": 6}])
PLANS = {
    "model": plan_model(find("llama-2-70b"), Load(1, 4096), machine=MACHINE),
    "encoder": plan_model(find("bert-base"), Load(2, 512)),
    "both": plan_model(find("t5-base"), Load(2, 700, cache="int8")),
    "unequal": plan_model(UNEQUAL, Load(2, 700, source=1100), machine=MACHINE),
    "mixture": plan_model(find("deepseek-v2"), Load(8, 1024, dtype="float32"), machine=MACHINE),
    "windows": plan_model(find("gemma-3-4b"), Load(1, 32_768), machine=MACHINE),
    "quantized": plan_model(replace(find("gpt-oss-20b"), quantized="mxfp4"), Load(1, 150_000)),
    "weights": plan_model(replace(find("gpt-oss-20b"), quantized="mxfp4"), Load(1, 1000, weights="mxfp4")),
    "chunks": plan_model(replace(find("gemma-2-9b"), chunked=True), Load(2, 5000)),
    "to both sides": plan_model(replace(find("gemma-2-9b"), causal=False), Load(2, 5000)),
    "design": plan_design("gqa", GQA, Work(1, 8192, 8192, window=512, sinks=4), machine=MACHINE),
    "list": listing(),
    "trade-off": trade_off(4096, Work(1, 8192, 8192)),
    "designs": compare_designs(4096, 32, Work(1, 8192, 8192)),
}  # fmt: skip


def text(plan: Plan, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_plan(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_and_shows_every_row_on_one_line(name: str, width: int) -> None:
    plan = PLANS[name]
    lines = text(plan, width).splitlines()
    assert max(map(len, lines)) <= width
    for table in plan.tables:
        if table.key == "designs":
            continue  # a list of sizes may take several lines
        for row in table.rows:
            cells = [written(v, c.unit) for v, c in zip(row, table.columns, strict=True)]
            pattern = r"\s+".join(re.escape(cell) for cell in cells if cell)
            assert any(re.fullmatch(pattern, line.strip()) for line in lines), cells


@pytest.mark.parametrize("name", PLANS)
def test_json_holds_the_numbers_unrounded(name: str) -> None:
    plan = PLANS[name]
    found = json.loads(to_json(plan))["tables"]
    assert list(found) == [table.key for table in plan.tables]
    for table in plan.tables:
        assert [tuple(row.values()) for row in found[table.key]] == list(table.rows)
        assert len(found[table.key][0]) == len(table.columns)


@pytest.mark.parametrize("name", PLANS)
def test_markdown_tables_have_a_cell_for_each_column(name: str) -> None:
    lines = [line for line in to_markdown(PLANS[name]).splitlines() if line.startswith("|")]
    tables = PLANS[name].tables
    assert len(lines) == sum(len(table.rows) + 2 for table in tables)
    for table in tables:
        for line in lines[: len(table.rows) + 2]:
            assert line.count(" | ") == len(table.columns) - 1
        del lines[: len(table.rows) + 2]


def test_a_model_plan_says_what_the_formulas_say() -> None:
    config, load = find("llama-2-70b"), Load(1, 4096)
    plan = PLANS["model"]
    assert plan.table("parameters").rows[-1] == ("all", 68_976_648_192, 1.0)
    memory = dict(plan.table("memory").rows)
    assert memory["weights"] == 2 * 68_976_648_192
    assert memory["cache, all tokens"] == model_cache_bytes(config, attentions_of(config), load) == 4096 * 327_680
    assert memory["scores, materialised, one layer"] == 64 * 4096 * 4096 * 2
    assert memory["scores, blockwise, one layer"] == 64 * 4096 * 4
    for key, stages in (
        ("pass", pass_stages(config, attentions_of(config), load)),
        ("step", step_stages(config, attentions_of(config), load)),
    ):
        *rows, total = plan.table(key).rows
        assert [(row[0], row[1] or 0, row[3] or 0) for row in rows] == [(s.name, s.flops, s.bytes) for s in stages]
        assert total[1] == sum(stage.flops for stage in stages)
        assert total[5] == pytest.approx(MACHINE.seconds(stages))
        assert total[5] == pytest.approx(sum(row[5] or 0 for row in rows))


def test_a_plan_says_which_weights_and_which_active_parameters_it_counts() -> None:
    bytes_of = {row[0]: row[1] for row in PLANS["weights"].table("memory").rows}
    assert (bytes_of["weights"], bytes_of["weights, mxfp4"]) == (2 * 20_914_757_184, 13_761_264_768)
    note = PLANS["weights"].table("memory").note
    assert "4 bits, and a scale of 8 bits for 32 weights, in 19,110,297,600 weights of the experts alone" in note
    assert "all parameters in passes and steps, are counted in bfloat16" in note
    facts = dict(PLANS["weights"].facts)
    assert "4.19 G active, 3.61 G without the input embedding" in facts["sizes"]
    assert "warning" not in facts
    tied = plan_model(replace(find("mixtral-8x7b"), output="tied"), Load(1, 9, weights="int8"))
    assert "active, with the embedding, which is the output matrix too" in dict(tied.facts)["sizes"]
    assert "8 bits, and a scale of 16 bits for 128 weights" in tied.table("memory").note
    assert "attention and feed-forward networks" in tied.table("memory").note


def test_decoding_is_held_back_by_memory_and_prefill_by_arithmetic() -> None:
    plan = PLANS["model"]
    limits = {key: {row[-1] for row in plan.table(key).rows if row[1] and row[-1]} for key in ("pass", "step")}
    assert limits == {"pass": {"arithmetic", "memory"}, "step": {"memory"}}  # a pass ends with one token's logits


def test_a_design_plan_says_what_the_formulas_say() -> None:
    plan = PLANS["design"]
    counts = counts_of("gqa", GQA)
    stages = attention_stages(counts, Work(1, 8192, 8192, window=512, sinks=4))
    assert [row[1] or 0 for row in plan.table("pass").rows][:-1] == [stage.flops for stage in stages]
    memory = dict(plan.table("memory").rows)
    assert memory["cache, one token, bfloat16"] == 2 * 8 * 128 * 2
    assert memory["cache, all tokens, bfloat16"] == (512 + 4 - 1) * 2 * 8 * 128 * 2


def test_only_causal_layers_that_keep_their_keys_decode() -> None:
    for design, sizes, causal, decodes in (
        ("multi_head", {}, True, True), ("multi_head", {}, False, False), ("convolution", {}, False, False),
        ("sparse_mixture", {"per": "sequence"}, True, False),
    ):  # fmt: skip
        plan = plan_design(design, {"d_model": 12, "num_heads": 3, **sizes}, Work(1, 7, 7, causal=causal))
        assert ("step" in {table.key for table in plan.tables}) == decodes
        assert any("cache" in str(row[0]) for row in plan.table("memory").rows) == decodes


def test_the_list_has_all_models_and_designs() -> None:
    plan = PLANS["list"]
    assert [row[0] for row in plan.table("configs").rows] == list(CONFIGS)
    assert [row[0] for row in plan.table("designs").rows] == list(names())
    totals = [sum(parameter_parts(config, attentions_of(config)).values()) for config in CONFIGS.values()]
    assert [row[1] for row in plan.table("configs").rows] == totals


def test_trade_off_keeps_what_does_not_depend_on_h() -> None:
    table = trade_off(96, Work(3, 50, 50)).table("trade_off")
    columns = dict(zip([c.key or c.name for c in table.columns], zip(*table.rows, strict=True), strict=True))
    assert columns["num_heads"] == (1, 2, 4, 8, 16, 32)
    assert all(h * d == 96 for h, d in zip(columns["num_heads"], columns["head_dim"], strict=True))
    for name in ("parameters", "flops", "cache_bytes"):
        assert len(set(columns[name])) == 1
    for name in ("exponentials", "materialised_bytes", "blockwise_bytes"):
        assert [value / columns[name][0] for value in columns[name]] == [1, 2, 4, 8, 16, 32]
    assert [columns["mqa_cache_bytes"][0] / value for value in columns["mqa_cache_bytes"]] == [1, 2, 4, 8, 16, 32]


def test_designs_stand_beside_one_another_as_their_formulas_say() -> None:
    table = compare_designs(96, 12, Work(3, 50, 50)).table("comparison")
    rows = {str(row[0]): row[1:] for row in table.rows}
    assert list(rows) == list(names())
    for name, (parameters, met, flops, exponentials, cache, step) in rows.items():
        sizes = {"d_model": 96} | ({} if name == "single_head" else {"num_heads": 12})
        counts = counts_of(name, sizes | ({"num_kv_heads": 3} if name == "gqa" else {}))
        stages = attention_stages(counts, Work(3, 50, 50, causal=counts.masked))
        assert (parameters, met) == (counts.parameters, counts.met)
        assert flops == sum(stage.flops for stage in stages)
        assert exponentials == sum(stage.exponentials for stage in stages)
        assert cache == (counts.cache if counts.cached else None)
        decoding = attention_stages(counts.at_decoding, Work(3, 1, 50)) if counts.cached else []
        assert step == (sum(stage.flops for stage in decoding) or None)
    assert rows["mqa"][4] * 12 == rows["gqa"][4] * 4 == rows["multi_head"][4]
    assert rows["convolution"][4:] == (None, None)


def test_full_attention_has_no_decoding_step_in_the_comparison() -> None:
    table = compare_designs(96, 12, Work(1, 50, 50, causal=False), num_kv_heads=6).table("comparison")
    assert {row[5:] for row in table.rows} == {(None, None)}
    assert "gqa has 6 KV heads" in table.note


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_machine_can_be_measured(dtype: str) -> None:
    machine = measured_machine(dtype)
    assert machine.peak > 1e6
    assert machine.bandwidth > 1e6
    assert "measured" in machine.by


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0, "bytes", "0 B"), (999, "bytes", "999 B"), (999.6, "bytes", "1.00 kB"), (51.5e9, "bytes", "51.5 GB"),
        (999_600, "bytes", "1.00 MB"), (1e30, "bytes", "1000000 YB"), (2e12, "flops", "2.00 TFLOP"),
        (0.5, "seconds", "500 ms"), (0.9999, "seconds", "1.00 s"), (12345.0, "seconds", "12,345 s"),
        (2e-9, "seconds", "2.00 ns"), (0.9994e-3, "seconds", "999 µs"), (1234567, "count", "1,234,567"),
        (0.125, "share", "12.5 %"), (None, "count", "—"), ("all", "count", "all"), (9.99, "number", "9.99"),
        (9.999, "number", "10"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_figures(value: Any, unit: str, expected: str) -> None:
    assert written(value, unit) == expected


def test_names_of_columns_are_broken_between_words_where_a_table_is_wide() -> None:
    names = [f"{name} 字节/词元" for name in ("键值缓存", "注意力头", "全部参数", "中间结果", "梯度数值", "权重矩阵")]
    table = Table("wide", "表", (Column("模型"), *(Column(name, "count") for name in names)), (("现在", *[10**9] * 6),))
    out = io.StringIO()
    with speaking("zh"), lines_of_characters():
        print_plan(Plan("计划", (), (table,)), Console(file=out, width=88))
    header = out.getvalue().splitlines()[-3:-1]
    assert [line.split() for line in header] == [[name[:4] for name in names], ["模型", *["字节/词元"] * 6]]


def test_scaled_never_shows_a_thousand() -> None:
    for exponent in np.linspace(0, 20, 4001):
        number = float(scaled(10**exponent, "B").split()[0])
        assert 1 <= number < 1000


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("plan.md", listing().table("configs")),
        ("plan.md", trade_off(768, Work(1, 2048, 2048)).tables[0]),
        ("designs.md", compare_designs(768, 12, Work(1, 2048, 2048)).tables[0]),
    ],
)
def test_the_documentation_shows_the_tables_of_today(page: str, table: Table) -> None:
    path = Path(__file__).parents[2] / "docs" / page
    assert markdown_table(table) in path.read_text(encoding="utf-8")


def test_command_prints_markdown_and_json(headwise: Command) -> None:
    found = headwise("plan", "model", "gpt-2-small", "--seq", 1024, "--json", "--peak", 1e12, "--bandwidth", 5e10)
    assert found.code == 0, found.err
    expected = plan_model(find("gpt-2-small"), Load(1, 1024), machine=MACHINE)
    assert found.out == to_json(expected)
    found = headwise("plan", "layer", "gqa", "--d-model", 4096, "--num-heads", 32, "--num-kv-heads", 8, "--markdown")
    assert found.out == to_markdown(plan_design("gqa", GQA, Work(1, 2048, 2048)))


@pytest.mark.thorough
def test_command_prints_text(headwise: Command) -> None:
    found = headwise("plan", "model", "llama_2_70B", "--seq", "4096", "--batch", "1")
    assert found.code == 0, found.err
    assert found.out.splitlines()[0] == "llama-2-70b: 68,976,648,192 parameters"
    assert re.search(r"cache, all tokens +1\.34 GB", found.out)
    assert "deepseek-v2" in headwise("plan", "list").out


@pytest.mark.thorough
def test_command_draws_the_trade_off(headwise: Command, tmp_path: Path) -> None:
    from matplotlib.image import imread

    out = tmp_path / "new" / "t.png"
    found = headwise("plan", "trade-off", "768", "--plot", out, "--json")
    assert found.code == 0, found.err
    assert len(json.loads(found.out)["tables"]["trade_off"]) == 9
    picture = imread(out)
    assert picture.shape[0] > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20


@pytest.mark.thorough
def test_a_single_head_may_be_asked_for_with_its_one_head(headwise: Command) -> None:
    layer = ("plan", "layer", "single_head", "--d-model", 8)
    assert headwise(*layer, "--num-heads", 1) == headwise(*layer)


def test_other_sizes_reach_the_design(headwise: Command) -> None:
    more = ["latent-dim=512", "rope_dim=64", "query_latent_dim=1536", "latent_norm=1"]
    sizes = [
        "--d-model",
        5120,
        "--num-heads",
        128,
        "--head-dim",
        128,
        *(word for one in more for word in ("--set", one)),
    ]
    published = attentions_of(find("deepseek-v2")).layers[0]
    found = headwise("plan", "layer", "latent", *sizes)
    assert found.out.startswith(f"latent: {published.parameters:,} parameters per layer\n")


@pytest.mark.thorough
def test_a_width_may_be_that_of_a_model(headwise: Command) -> None:
    assert headwise("plan", "trade-off", "gpt-2-small") == headwise("plan", "trade-off", "768")


@pytest.mark.parametrize(
    ("before", "today"),
    [
        ("--config llama-3-8b --seq 4096", "model llama-3-8b --seq 4096"),
        ("--seq 7 --config=gpt-3 --devices 4", "model gpt-3 --seq 7 --devices 4"),
        ("--design gqa --d-model 8 --num-heads 2", "layer gqa --d-model 8 --num-heads 2"),
        ("--d-model 8 --num-heads 2 --set bias=true", "layer --d-model 8 --num-heads 2 --set bias=true"),
        ("--trade-off --d-model 768 --plot 'my heads.png'", "trade-off 768 --plot 'my heads.png'"),
        ("--config gpt-3 --trade-off", "trade-off gpt-3"),
        ("--d-model 768 --num-heads 12 --designs --markdown", "designs --d-model 768 --num-heads 12 --markdown"),
        ("--list --json", "list --json"),
        ("--config", "model …"),
    ],
)
def test_options_that_were_a_kind_of_plan_name_the_command(headwise: Command, before: str, today: str) -> None:
    done = headwise("plan", *shlex.split(before))
    assert done == (
        2,
        "",
        f"error: each kind of plan is a command: give `headwise plan {shlex.join(shlex.split(today))}`\n",
    )


@pytest.mark.thorough
def test_plan_alone_shows_its_commands(headwise: Command) -> None:
    assert headwise("plan") == headwise("plan", "--help")
    assert all(name in headwise("plan").out for name in ("model", "layer", "trade-off", "designs", "list"))


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["model"], ["Missing argument", "; headwise plan model -h"]),
        (["model", "lama-2-70"], ["lama-2-70", "llama-2-70b"]),
        (["model", "absent"], ["absent", "`headwise plan list`"]),
        (["model", "gpt-3", "--num-heads", "3"], ["No such option", "--num-heads", "; headwise plan model -h"]),
        (["model", "gpt-3", "--seq", "0"], ["--seq", "1", "; headwise plan model -h"]),
        (["model", "t5-base", "--source", "0"], ["--source", "1", "; headwise plan model -h"]),
        (["model", "gpt-3", "--source", "5"], ["source=5: gpt-3 is not an encoder-decoder"]),
        (["model", "gpt-3", "--peak", "1e12"], ["--peak", "--bandwidth"]),
        (["model", "gpt-3", "--peak", "1e12", "--bandwidth", "-1"], ["bandwidth=-1.0"]),
        (["model", "gpt-3", "--peak", "1", "--bandwidth", "1", "--measure"], ["--measure", "--peak"]),
        (["model", "gpt-3", "--dtype", "int3"], ["dtype='int3'", "bfloat16"]),
        (["model", "gpt-3", "--weights", "int5"], ["weights='int5'", "did you mean 'int8'", "'mxfp4'"]),
        (["model", "gpt-3", "--json", "--markdown"], ["--json", "--markdown"]),
        (["model", "gpt-3", "--markdown", "--json"], ["--json", "--markdown"]),
        (["model", "gpt-3", "--link", "1e9"], ["link=1e+09: requires devices"]),
        (["layer", "gqq", "--d-model", "8"], ["gqq", "gqa"]),
        (["layer"], ["Missing option", "--d-model"]),
        (["layer", "--d-model", "10", "--num-heads", "3"], ["d_model=10", "num_heads=3"]),
        (["layer", "--d-model", "10"], ["multi_head requires num_heads"]),
        (["layer", "gqa", "--d-model", "8", "--num-heads", "2"], ["gqa requires num_kv_heads"]),
        (
            ["layer", "convolution", "--d-model", "8", "--num-heads", "3"],
            ["convolution does not support masks", "--full"],
        ),
        (["layer", "gated_output", "--d-model", "8", "--num-heads", "2", "--set", "gate=no"], ["gate='no'", "channel"]),
        (["layer", "--d-model", "8", "--num-heads", "2", "--set", "latent_dim=2"], ["latent_dim=2", "multi_head"]),
        (["layer", "--d-model", "8", "--num-heads", "2", "--set", "latent_dim"], ["latent_dim", "NAME=VALUE"]),
        (["layer", "--d-model", "8", "--num-heads", "2", "--set", "head_dim=x"], ["head_dim=x", "whole number"]),
        (["layer", "--d-model", "8", "--num-heads", "2", "--set", "head_dim=2.5"], ["head_dim=2.5", "whole number"]),
        (["layer", "--d-model", "8", "--num-heads", "2", "--window", "8", "--full"], ["--window requires", "--full"]),
        (["layer", "--d-model", "8", "--num-heads", "2", "--sinks", "4"], ["sinks=4", "with a window"]),
        (["layer", "single_head", "--d-model", "8", "--num-heads", "4"], ["one head; leave out --num-heads"]),
        (["designs"], ["Missing option"]),
        (["designs", "--d-model", "10", "--num-heads", "4"], ["d_model=10", "num_heads=4"]),
        (["trade-off"], ["Missing argument", "; headwise plan trade-off -h"]),
        (["trade-off", "7"], ["d_model=7", "odd"]),
        (["trade-off", "lama-2-70"], ["lama-2-70", "llama-2-70b"]),
    ],
)
def test_bad_options_are_one_clear_line(headwise: Command, args: list[str], words: list[str]) -> None:
    found = headwise("plan", *args)
    assert found.code == 2, found.out
    assert found.out == ""
    assert len(found.err.strip().splitlines()) == 1
    for word in words:
        assert word in found.err, found.err


def test_library_raises_the_same() -> None:
    with pytest.raises(ConfigError, match="d_model=1"):
        trade_off(1, Work(1, 2, 2))


SPREAD = plan_design("gqa", GQA, Work(1, 2048, 2048), devices=6, link=1e9, machine=Machine(1e12, 1e11))
ALSO_LATIN = {"h", "d_k", "h_kv", "d_model", "d_ff", "FLOPs", "n×n", "lse"}  # formulas


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("plan", [*PLANS.values(), SPREAD], ids=[*PLANS, "devices"])
def test_plans_are_in_chinese(plan: Plan) -> None:
    names = [name for name, _ in plan.facts] + [column.name for table in plan.tables for column in table.columns]
    words = [*names, plan.title, *plan.notes, *(words for table in plan.tables for words in (table.title, table.note))]
    assert [x for x in words if x and x not in ALSO_LATIN and not re.search("[一-鿿]", in_language(x, "zh"))] == []
    sources = "".join(value for name, value in plan.facts if name == "source")
    with speaking("zh"):
        shown = text(plan, 400).replace(sources, "")
    english = re.sub(r"headwise plan[^\n]*|et al", "", shown)
    assert re.findall(r"[A-Za-z-]+ [a-z]+ [a-z]+", english) == []
    assert to_markdown(plan, "zh").startswith(f"## {in_language(plan.title, 'zh')}\n")
    assert "\n| ---" in to_markdown(plan, "zh")


def test_names_of_costs_have_chinese_words() -> None:
    stages, parts = set(), set()
    for config in CONFIGS.values():
        counts = attentions_of(config)
        parts |= set(parameter_parts(config, counts))
        stages |= {stage.name for stage in pass_stages(config, counts, Load())}
    for design in ("talking_heads", "gqa"):
        layer = counts_of(design, {**GQA, "num_kv_heads": 4} if design == "gqa" else {"d_model": 509, "num_heads": 1})
        stages |= {stage.name for stage in attention_stages(layer, Work(1, 7, 7))}
    assert {"head mixing", "vocabulary"} <= stages
    assert "pooler" in parts
    others = "convolutions", "arithmetic", "memory", "ring", "head-parallel", "hybrid 2 × 3", "heads 2 × 3"
    for name in (*stages, *parts, *others):
        assert re.search("[一-鿿]", in_language(named(name), "zh")), name
