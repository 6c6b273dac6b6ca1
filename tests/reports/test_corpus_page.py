"""The passages of a sweep: on the page of the sweep, in a report of the same model, and in the terminal."""

import json
import re
from dataclasses import replace

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import headwise as hw
from headwise.corpus import Passages, measure_corpus
from headwise.corpus.passages import HeadPassages
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import save_model
from headwise.lm.loading import load_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.reports.corpus_page import corpus_page, print_passages, write_corpus_page
from headwise.reports.page import page as report_page
from headwise.wording import speaking
from parameters import thorough

HOSTILE = "</script><b>&amp;\u202e]]>"
LINES = [f"武松{'又' * i}打虎，老虎{HOSTILE}来了，武松便打。" for i in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tokenizer = CharTokenizer.from_text("".join(LINES), min_count=1)
    torch.manual_seed(0)
    config = DecoderConfig(tokenizer.vocab_size, d_model=18, num_layers=2, num_heads=3, d_ff=11, context=48)
    save_model(folder / "model.safetensors", Decoder(config).eval(), tokenizer, info={"step": 0})
    return load_model(folder)


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    path = folder / "<i>a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES), "utf-8")
    names = ["entropy", "sink_mass"]
    return measure_corpus(model, path, folder / "out.csv", measures=names, device="cpu", passages=3)


@pytest.mark.thorough
def test_no_text_becomes_code(found, model):
    for text in (corpus_page(found, "en"), report_page(hw.see("武松", model, sweep=found.passages), "en")):
        assert text.count("<script") == text.count("</script>")
        assert "<b>&amp;" not in text
        assert "<i>a" not in text


@pytest.mark.thorough
def test_a_report_takes_the_sweep_of_its_model_alone(found, model):
    for sweep in (found.path, found.passages):
        report = hw.see("武松打虎", model, sweep=sweep)
        assert report.corpus.found == found.passages.found
    assert hw.see("武松打虎", model).corpus is None
    with pytest.raises(ConfigError, match=r"sweep: its passages are of 'small.*', whose weights differ from those of"):
        hw.see("武松打虎", sweep=found.passages)
    with pytest.raises(CheckpointError, match=r"absent\.csv\.passages\.json' does not exist; headwise measure writes"):
        hw.see("武松打虎", model, sweep="absent.csv")
    with pytest.raises(ConfigError, match="sweep: requires a loaded model"):
        hw.see("武松", model.model, sweep=found.passages)


@pytest.mark.parametrize(
    ("lang", "title"), [("en", "weight in the strongest passage"), ("zh", "最强段落中的权重；括号内为抽样平均")]
)
@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_has_a_line_for_each_distinctive_head(found, lang, title, width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    with speaking(lang):
        print_passages(found.passages, console)
        print_passages(Passages.nothing("weight"), console)
    console.file.close()
    blank, first, *lines = console.export_text().splitlines()
    assert (blank, title in first, len(lines)) == ("", True, 5)
    for line, (layer, head) in zip(lines, found.passages.distinctive(5), strict=True):
        best = found.passages[layer, head].strongest[0]
        assert re.match(rf" *L{layer}H{head}  {best.strength:.3g} \(", line)
        assert cell_len(line) <= width
        assert "\u202e" not in line


def test_heads_whose_strongest_passages_are_the_sample_are_not_named(found, capsys):
    """Of a corpus of few windows all are strongest and all are sampled: no head attends strongly in few of them."""
    every = {place: HeadPassages(one.sampled, one.sampled) for place, one in found.passages.items()}
    place = found.passages.distinctive(1)[0]
    same = replace(found.passages, found=every)
    one = replace(found.passages, found=every | {place: found.passages[place]})
    assert same.distinctive(5) == []
    assert one.distinctive(5) == [place]
    with speaking("en"):
        print_passages(same, Console(width=100))
        assert capsys.readouterr().out == ""
        print_passages(one, Console(width=100))
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_sweep_without_passages_has_a_page(model, found, tmp_path):
    none = measure_corpus(
        model, found.about["files"][0]["path"], tmp_path / "out.csv", measures=["entropy"], device="cpu", passages=0
    )
    text = corpus_page(none, "en")
    assert "corpus-passages" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    with pytest.raises(ConfigError, match="lang='fr'"):
        write_corpus_page(none, tmp_path / "page.html", lang="fr")


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("few", [True, False])
def test_the_first_axes_show_statistics_that_differ(found, chromium, tmp_path, few):
    """Of a corpus of few windows the contrast of every head is 0, up to rounding; without passages there is none."""
    same = {place: HeadPassages(one.sampled, one.sampled) for place, one in found.passages.items()}
    path = write_corpus_page(
        replace(found, passages=replace(found.passages, found=same if few else {})), tmp_path / "page.html", lang="en"
    )
    page = chromium.page(1200, 900)
    page.open(path.as_uri())
    page.wait("document.querySelectorAll('#scatter circle').length == 6")
    assert page.do("['x', 'y'].map((axis) => document.querySelector(`#scatter-${axis}`).value)") == [
        "entropy",
        "sink_mass",
    ]


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("lang", thorough(["en", "zh"], {"zh"}))
def test_the_page_of_a_sweep_answers(found, chromium, tmp_path, lang):
    page = chromium.page(1200, 900)
    path = write_corpus_page(found, tmp_path / "page.html", lang=lang)
    page.open(path.as_uri())
    page.wait("document.querySelectorAll('#corpus-list li').length")
    assert page.do("document.querySelectorAll('#scatter circle').length") == 6
    layer, head = found.passages.distinctive(1)[0]
    shown = "[document.querySelector('#layer').value, document.querySelector('#head').value]"
    assert page.do(shown) == [str(layer), str(head)]
    page.do("document.querySelector('#scatter').focus()")
    page.press("ArrowDown")
    assert page.do(shown) != [str(layer), str(head)]  # the first one is uppermost
    page.do("""(() => { const one = document.querySelector("#layer"); one.value = 1;
        one.dispatchEvent(new Event("change")); })()""")
    page.do("""(() => { const one = document.querySelector("#head"); one.value = 2;
        one.dispatchEvent(new Event("change")); })()""")
    best = found.passages[1, 2].strongest
    page.wait(f"document.querySelector('#corpus-list b').textContent === '{_fixed(best[0].strength)}'")
    items = page.do(
        "[...document.querySelectorAll('#corpus-list ol')].map((list) => [...list.children].map((one) => "
        "[one.querySelector('b').textContent, one.querySelector('.pin').textContent, "
        "one.querySelectorAll('.passage > span[title]').length]))"
    )
    assert [len(part) for part in items] == [3, 3]
    for (strength, query, tinted), one in zip(items[0], best, strict=True):
        assert strength == _fixed(one.strength)
        assert query == one.token or one.token == "\u202e"
        assert tinted == len(one.keys)
    assert page.do("location.hash").startswith("#layer=1&head=2&")
    page.do("""(() => { const one = document.querySelector("#scatter-x"); one.value = "sink_mass";
        one.dispatchEvent(new Event("change")); })()""")
    assert "x=sink_mass" in page.do("location.hash")
    width = page.do("document.documentElement.scrollWidth")
    assert width <= 1200
    assert page.said() == []


@pytest.mark.thorough
@pytest.mark.browser
def test_a_report_shows_the_passages_of_the_opened_head(found, model, chromium, tmp_path):
    report = hw.see("武松打虎，老虎来了。", model, sweep=found.passages, out=tmp_path / "report.html")
    assert report.corpus is found.passages
    page = chromium.page(390, 800)
    page.open(f"{(tmp_path / 'report.html').as_uri()}#layer=1&head=0")
    strongest = _fixed(found.passages[1, 0].strongest[0].strength)
    page.wait(f"document.querySelector('#corpus-list b')?.textContent === '{strongest}'")
    assert page.do("document.querySelector('#corpus-panel').hidden") is False
    assert page.do("document.documentElement.scrollWidth") <= 390
    assert page.said() == []


def _fixed(value: float) -> str:
    """As the page writes numbers from 0.01 to 1: with three digits."""
    return f"{value:#.3g}"
