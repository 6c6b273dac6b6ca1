"""A report in Chinese has no English words but names, units and letters of formulas."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import headwise as hw
from headwise.reports.data import Report
from headwise.reports.page import write_report
from headwise.reports.pictures import overview
from headwise.reports.views import print_report

TEXT = "武松打虎，武松回来。又打虎，又回来。"
# Names of programs, formats, keys, methods and authors; letters of formulas.
NAMES = {
    "SVG", "CSV", "logit",
    "headwise", "HTML", "PNG", "JavaScript", "Enter", "Esc", "CKA", "Michel", "et", "al", "softmax", "exp", "ln", "max",
    "cpu", "Transformer", "watch", "maps", "lazy", "entries", "all",
}  # fmt: skip


def english(text: str) -> set[str]:
    """Words of two Latin letters or more, without marks for values, identifiers and numbers."""
    text = re.sub(r"\{\w+\}|\b\w+(?:\.\w+)+\b|\w*_\w*|[\w]+=\S+", " ", text)
    return set(re.findall(r"[A-Za-z]{2,}", text)) - NAMES


def texts_of(value: object, name: str = "") -> list[str]:
    """Every text of the page's data, except identifiers and the tokens themselves."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for one in value for text in texts_of(one)]
    if isinstance(value, dict):
        skipped = {"vocabulary", "colour"}
        if "label" in value or "layers" in value:
            skipped = {"name", "names", "tokens", "keys", "colours"}
        return [text for key, one in value.items() if key not in skipped for text in texts_of(one)]
    return []


def shown(report: Report, folder: Path) -> dict[str, str]:
    """The words of the page, of its document, of the table in a terminal, and of a picture."""
    page = write_report(report, folder / "report.html", lang="zh").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="report">(.*?)</script>', page, re.S)[1])
    document = re.sub(r"<(script|style|head)\b.*?</\1>", "", page, flags=re.S)
    attributes = re.findall(r'(?:aria-label|title|placeholder)="([^"]*)"', document)
    console = Console(width=300, file=io.StringIO())
    print_report(report, console, lang="zh")
    picture = overview(report, report.passages[0], "zh")
    drawn = [text.get_text() for axes in picture.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    return {
        "data": "\n".join(texts_of(data)), "document": " ".join([*attributes, re.sub(r"<[^>]*>", " ", document)]),
        "terminal": console.file.getvalue(), "picture": "\n".join(drawn),
    }  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return hw.see(TEXT * 2)


@pytest.mark.thorough
def test_a_report_of_a_text(report, tmp_path):
    parts = shown(report, tmp_path)
    assert "参数" in parts["terminal"]
    assert "字符" in parts["data"]
    assert {word for text in parts.values() for word in english(text)} == set()


@pytest.mark.thorough
@pytest.mark.parametrize("maps", ["lazy", "pooled"])
def test_a_report_of_a_watched_encoder_and_decoder(maps, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Transformer(12, 2, 1, 1, 17, batch_first=True).eval()
    with hw.watch(model, maps=maps) as record, torch.no_grad():
        model(torch.randn(5, 11, 12), torch.randn(5, 7, 12))
    parts = shown(hw.report(record), tmp_path)
    assert "交叉注意力" in parts["data"]
    assert {word for text in parts.values() for word in english(text)} == set()
