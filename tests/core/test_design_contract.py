"""A design says all that is known of it in its own class: one that is made here and registered is found everywhere."""

import re
import runpy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.cli.plan import typed
from headwise.costs import Work
from headwise.costs.work import Counts
from headwise.errors import ConfigError
from headwise.lm.loading.base import remarks_on_map
from headwise.lm.model import Decoder, DecoderConfig
from headwise.nn.base import AttentionLayer, ProjectedLayer
from headwise.nn.layout import Coupling, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import (
    CONTRACT,
    DESIGNS,
    STANDARD,
    Designs,
    build,
    counts_of,
    names,
    options_of,
    sizes_of,
    summary_of,
)
from headwise.nn.steps import Notes, Preset, Steps
from headwise.plan import compare_designs, listing, plan_design
from headwise.wording import Bilingual
from headwise_textbook.trace import trace

ADDED = Bilingual("the heads are added up", "把各个头相加")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "designs.md"
_script = runpy.run_path(str(ROOT / "scripts" / "design_tables.py"))
TABLES, filled, which = (_script[name] for name in ("TABLES", "filled", "which"))


class Doubled(ProjectedLayer):
    """y = factor · (head_1 + … + head_h) W_O."""

    notes = Notes(
        summary=Bilingual("the sum of the heads, times a factor", "各头之和乘以一个系数"),
        use=Bilingual("a test needs a design", "测试需要一种设计时用"),
        source="this file",
        parameters="MHA's − (h − 1)·d_v·d",
        work="h − 1 fewer d_v·d a token",
        cache="MHA's",
        limits={"fewer than two heads": "there would be nothing to add"},
        map=Bilingual("The factor is not in the weights.", "系数不在权重之中。"),
        compared=Bilingual("a factor of 2", "系数为 2"),
        form_of=None,
    )
    presets = (
        Preset(
            name="tripled",
            summary=Bilingual("The sum of the heads, times 3.", "各头之和乘以 3。"),
            given={"factor": 3},
            instead="doubled",
        ),
    )

    coupling = Coupling("output", "the heads are added up before W_O")
    resizing = Resizing()
    outside_attend = ""
    layout = ProjectedLayer.layout

    def __init__(self, d_model: int, num_heads: int, *, factor: int = 2, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        self.factor = factor
        self.o_proj = torch.nn.Linear(self.value_dim, d_model, bias=False)

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        return heads.sum(1)

    def output(self, concat: Tensor) -> Tensor:
        return self.factor * self.o_proj(concat)

    def last_weights(self) -> list[Tensor]:
        return [self.o_proj.weight]

    @staticmethod
    def costs(d_model: int, num_heads: int, *, factor: int = 2, **options: Any) -> Counts:
        """The heads are added up before W_O, which has d_v·d weights.

        factor: takes nothing.
        """
        full = MultiHeadAttention.costs(d_model, num_heads, **options)
        output = full.output // num_heads
        return replace(full, parameters=full.parameters - full.output + output, output=output)

    def steps(self, x: Tensor, note: Steps) -> None:
        heads = note.attended(*note.projected(self, x))
        added = note("added", heads.sum(1), "b n d_v", "A = Σ_i H_i", ADDED)
        y = self.factor * self.o_proj(added)
        note("output_of_sum", y, "b n d_model", "Y = f · A W_O", "the output, times the factor")


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(DESIGNS, "doubled", Doubled)
    return "doubled"


def test_it_is_known_by_its_names(doubled: str) -> None:
    assert names()[-2:] == ("doubled", "tripled")
    assert options_of(doubled)["factor"] == 2
    layer = build("tripled", 12, 3)
    assert (type(layer), layer.factor) == (Doubled, 3)
    with pytest.raises(ConfigError, match="factor=5: tripled has 3; see doubled for other values"):
        build("tripled", 12, 3, {"factor": 5})


def test_its_costs_are_found(doubled: str) -> None:
    sizes = {"d_model": 12, "num_heads": 3, "value_dim": 5, "bias": "q"}
    layer = build(doubled, 12, 3, {"value_dim": 5})
    assert counts_of(doubled, sizes).parameters == sum(p.numel() for p in layer.parameters()) + 12
    assert "factor" in sizes_of(doubled)
    assert "factor" not in sizes_of("tripled")
    assert summary_of(doubled) == "The heads are added up before W_O, which has d_v·d weights."
    assert summary_of("tripled") == "The sum of the heads, times 3."


def test_plan_lists_and_counts_it(doubled: str) -> None:
    assert dict(listing().table("designs").rows)[doubled].startswith("d_model, num_heads, factor, num_kv_heads")
    plan = plan_design("tripled", {"d_model": 12, "num_heads": 3}, Work(1, 7, 7))
    assert ("design", "The sum of the heads, times 3.") in plan.facts
    table = compare_designs(12, 3, Work(1, 7, 7)).table("comparison")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows[doubled] == rows["tripled"]
    assert rows[doubled][0] == counts_of(doubled, {"d_model": 12, "num_heads": 3}).parameters
    assert "doubled: a factor of 2." in table.note


def test_plan_reads_its_sizes_as_its_costs_have_them(doubled: str) -> None:
    assert typed(doubled, ["factor=7", "bias=qk", "qk-norm=1"]) == {"factor": 7, "bias": "qk", "qk_norm": True}
    for option, words in (("factor=x", "a whole number for factor"), ("qk_norm=7", "true or false for qk_norm")):
        with pytest.raises(ConfigError, match=words):
            typed(doubled, [option])


@pytest.mark.parametrize(("lang", "words"), [("en", "the heads are added up"), ("zh", "把各个头相加")])
def test_trace_follows_it(doubled: str, lang: str, words: str) -> None:
    steps = {step.name: step for step in trace(5, 12, 3, design=doubled, causal=True, lang=lang)}
    assert (steps["added"].words, steps["added"].formula) == (words, "A = Σ_i H_i")
    torch.testing.assert_close(steps["added"].tensor, steps["heads"].tensor.sum(1))


def test_tables_of_the_documentation_show_it(doubled: str) -> None:
    page = filled(PAGE.read_text(encoding="utf-8"))
    assert (
        "| `doubled` | `Doubled` | the sum of the heads, times a factor | a test needs a design | this file |" in page
    )
    assert "| `doubled` | MHA's − (h − 1)·d_v·d | h − 1 fewer d_v·d a token | MHA's |" in page
    assert "| `doubled` | fewer than two heads | there would be nothing to add |" in page
    assert re.search(r"\| tripled \| [\d,]+ \|", page)
    assert "| `doubled` | `Doubled` | 各头之和乘以一个系数 | 测试需要一种设计时用 | this file |" in which("zh")


def test_reports_say_what_its_map_does_not_show(doubled: str) -> None:
    (remark,) = remarks_on_map("tripled")
    assert str(remark) == "The factor is not in the weights."
    assert remark.zh == "系数不在权重之中。"


def test_a_decoder_is_made_of_it(doubled: str) -> None:
    decoder = Decoder(DecoderConfig(7, 12, 2, 3, design="doubled", options={"factor": 5}))
    assert decoder(torch.tensor([[1, 2, 3]])).shape == (1, 3, 7)


def test_it_is_gone_with_its_line() -> None:
    assert "doubled" not in names()


@pytest.mark.parametrize("part", CONTRACT)
def test_a_design_that_does_not_describe_itself_is_refused(part: str) -> None:
    described = {name: value for name, value in vars(Doubled).items() if name in CONTRACT and name != part}
    silent = type("Silent", (Doubled,), described)  # what it inherits describes its base class
    with pytest.raises(ConfigError, match=rf"design='silent': Silent does not define {part} in its own class: {part}"):
        Designs(silent=silent)


@pytest.mark.parametrize("part", CONTRACT)
def test_a_part_of_the_wrong_kind_is_refused_with_its_line(part: str) -> None:
    wrong = type("Wrong", (Doubled,), {name: getattr(Doubled, name) for name in CONTRACT} | {part: None})
    with pytest.raises(
        ConfigError, match=rf"design='wrong': Wrong\.{part} is None; expected {re.escape(CONTRACT[part])}"
    ):
        Designs(wrong=wrong)


def test_a_name_that_is_taken_is_refused(doubled: str) -> None:
    other = type("Other", (Doubled,), {name: getattr(Doubled, name) for name in CONTRACT})
    with pytest.raises(ConfigError, match="Doubled has the name 'doubled' already; give Other another name"):
        DESIGNS[doubled] = other
    with pytest.raises(ConfigError, match="Doubled has the name 'tripled' already"):
        DESIGNS["tripled"] = other
    other.presets = (replace(Doubled.presets[0], name="latent"),)
    with pytest.raises(ConfigError, match="LatentAttention has the name 'latent' already"):
        DESIGNS["other"] = other
    assert (DESIGNS[doubled], "tripled" in DESIGNS, "other" in DESIGNS) == (Doubled, False, False)
    DESIGNS[doubled] = Doubled  # the same again
    with pytest.raises(ConfigError, match="design='module': expected a class of AttentionLayer, got ProjectedLayer"):
        DESIGNS["module"] = ProjectedLayer(12, 3)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda self, x, note: None, r"the last step of Wrong\.steps, 'x', is not y of the call: .*Expected steps\(x"),
        (lambda self, x, note: note("y", x[:, :2], "b n d", "Y", "y"), r"'y', is not y of the call: .*Expected"),
        (lambda self, x, note: note("y", x, "b d", "Y", "y"), r"note\('y'\): axes='b d' for a tensor of shape"),
    ],
    ids=["none", "shape", "axes"],
)
def test_steps_that_are_not_those_of_the_call_are_named(
    steps: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {name: getattr(Doubled, name) for name in CONTRACT} | {"steps": steps}
    monkeypatch.setitem(DESIGNS, "wrong", type("Wrong", (Doubled,), parts))
    with pytest.raises(ConfigError, match=message):
        trace(5, 12, 3, design="wrong")


@pytest.mark.parametrize(
    ("field", "value"), [("summary", None), ("use", ""), ("source", ""), ("work", 3), ("limits", None)]
)
def test_a_field_of_the_notes_that_is_empty_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Notes: {field}=.*: expected "):
        replace(Doubled.notes, **{field: value})


def test_no_field_of_the_notes_may_be_left_out() -> None:
    given = {field.name: getattr(Doubled.notes, field.name) for field in fields(Notes)}
    for name in given:
        with pytest.raises(TypeError, match=f"'{name}'"):
            Notes(**{key: value for key, value in given.items() if key != name})


@pytest.mark.parametrize("name", DESIGNS)
def test_notes_are_written_in_both_languages(name: str) -> None:
    notes = DESIGNS[name].notes
    for words in (notes.summary, notes.use, *([] if notes.map is None else [notes.map])):
        assert words.isascii()
        assert re.search(r"[一-鿿]", words.zh)
    assert notes.source
    assert notes.form_of in (None, *(other for other in DESIGNS if other != name))


def test_the_standard_layer_is_registered() -> None:
    assert issubclass(DESIGNS[STANDARD], AttentionLayer)


def test_pages_that_count_the_designs_count_right() -> None:
    own = [name for name, design in DESIGNS.items() if design.__module__.startswith("headwise.")]
    english = ("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen")[len(own) - 11]
    chinese = f"十{'一二三四五六'[len(own) - 11]}种"
    root, page = PAGE.parents[1], PAGE.read_text(encoding="utf-8")
    assert (root / "README.md").read_text(encoding="utf-8").count(f" {english} ") == 1
    assert (root / "README.zh.md").read_text(encoding="utf-8").count(chinese) == 1
    assert f"\n{english.capitalize()} designs " in page
    assert re.findall(r"^\*\*`(\w+)`\*\*: ", page, re.MULTILINE) == own  # the flow of data, in their order


def test_the_documentation_shows_the_tables_of_today() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
    for name in TABLES:
        with pytest.raises(ConfigError, match=f"table: {name}"):
            filled(page.replace(f"<!-- table: {name} -->", ""))
