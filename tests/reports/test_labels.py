"""No label, chip, colour, legend or finding rests on fewer queries than a label needs, on texts of every length."""

import io
import json
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
from rich.console import Console

import headwise as hw
from headwise.analysis.head_roles.score import DEFINITIONS, ROWS, SURE
from headwise.reports.data import Passage, Report
from headwise.reports.findings import findings
from headwise.reports.notebook import framed
from headwise.reports.page import page
from headwise.reports.passages import text_of
from headwise.reports.pictures import overview
from headwise.reports.views import print_report
from headwise.reports.watched import of_maps
from headwise.table import HeadTable
from headwise.wording import in_language

HEADS = 6
DRAWN = 3, 12  # tokens of texts whose pictures are drawn, which takes longest
ROLES = "|".join(re.escape(str(d.word)) for d in DEFINITIONS.values())


def report_on(n: int, *, causal: bool, seed: int) -> tuple[Report, dict[str, np.ndarray]]:
    """Two layers of heads that are sharp at random, or at a role, on random tokens of a small vocabulary with
    punctuation; and how many queries each role has that can have a key of it."""
    g = torch.Generator().manual_seed(1000 * seed + n)
    kinds = ["the", "cat", "[SEP]", ",", "sat", " on", "a", "mat"]
    ids = torch.randint(0, len(kinds), (n,), generator=g)
    pieces = [kinds[i] for i in ids]
    at = torch.arange(n)
    same = (ids[:, None] == ids) & (at < at[:, None])
    after = torch.nn.functional.pad(same, (1, 0))[:, :n] & (at <= at[:, None])
    seen = (at <= at[:, None]) if causal else torch.ones(n, n, dtype=torch.bool)
    meant = {
        "previous": at == at[:, None] - 1, "next": at == at[:, None] + 1, "self": at == at[:, None],
        "first": (at == 0).expand(n, n), "duplicate": same, "induction": after,
        "separator": torch.tensor([piece == "[SEP]" for piece in pieces]).expand(n, n),
        "punctuation": torch.tensor([piece == "," for piece in pieces]).expand(n, n),
    }  # fmt: skip
    eligible = {role: int((keys & seen).any(1).sum()) for role, keys in meant.items()}
    order = list(meant)
    maps = {}
    for layer in range(2):
        chosen = torch.stack([meant[order[(layer * HEADS + head + seed) % len(order)]] for head in range(HEADS)])
        q = (6.0 * chosen + 2.0 * torch.randn(HEADS, n, n, generator=g))[None]
        k = torch.eye(n).expand(1, HEADS, n, n)
        mask = hw.Causal() if causal else None
        maps[f"layer{layer}"] = hw.attend(q, k, k, mask=mask, scale=1.0, return_map=True)[1]
    text = text_of("", ids, pieces, None)
    return of_maps(maps, (text, None), None, "random", 384), eligible


def views(report: Report) -> dict[str, str]:
    """What each view says: the terminal in both forms, the page, a notebook, and the pictures."""
    said = {}
    for everything in (False, True):
        console = Console(width=200, file=io.StringIO())
        print_report(report, console, everything=everything, lang="en")
        said[f"terminal {everything}"] = console.file.getvalue()
    for name, html in (("page", page(report, "en", embed_font=False)), ("notebook", framed(report, "en"))):
        found = re.search(r'id="report">(.*?)</script>', unescape(html), re.S)
        assert found is not None
        content, keys = json.loads(found[1]), ("patterns", "labels", "kinds", "findings")
        said[name] = "\n".join(json.dumps(content[key], ensure_ascii=False) for key in keys)
    if len(report.passages[0].tokens) in DRAWN:
        figure = overview(report, report.passages[0], "en")
        said["picture"] = "\n".join(axes.get_xlabel() for axes in figure.axes)
    return said


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(1, 3, 8, 13), range(1, 14), range(14, 41, 2)], ids=["few", "short", "long"])
def test_no_label_rests_on_fewer_queries_than_the_rule_says(lengths, causal):
    named, sure = set(), 0
    for n in lengths:
        report, eligible = report_on(n, causal=causal, seed=n % 5)
        every = [label for row in report.labels for head in row for label in head]
        for label in every:
            assert label.rows >= ROWS
            assert eligible.get(label.role, n) >= ROWS, (n, label)
            assert label.role != "induction" or causal
            assert not label.sure or label.confidence >= SURE
        allowed = {f"{label.text} {label.score:.2f}" for label in every}
        for view, text in views(report).items():
            found = set(re.findall(rf"\b((?:{ROLES})(?: [−+]\d+)? \d\.\d\d)", text))
            assert found <= allowed, (n, view)
            assert bool(re.search(r"tendency: ", text)) <= any(not label.sure for label in every), (n, view)
            if not every:
                assert not re.search(rf"“(?:{ROLES})”|is a sink", text), (n, view)
        named |= {label.role for label in every}
        sure += sum(label.sure for label in every)
        for one in findings(report):
            assert len(in_language(one.text, "zh")) > 5
    assert (sure > 0) == (max(lengths) >= ROWS)
    assert len(named) >= 4


def test_the_viewer_names_no_roles():
    """It shows maps of texts of any length, and asks for no roles."""
    import inspect

    from headwise.reports.viewer import app, requests, session, tiles

    assert not any("head_roles" in inspect.getsource(module) for module in (app, requests, session, tiles))


def test_the_pair_of_a_finding_is_compared_with_the_other_queries_and_distances():
    """Neither a head that looks at one key always, nor one that looks back three tokens, is such a pair."""
    n, words = 16, [f"word{i}" for i in range(16)]
    maps = np.full((1, 3, n, n), 1e-3, np.float32)
    maps[0, 0, :, 5] = 0.9
    maps[0, 1, np.arange(3, n), np.arange(n - 3)] = 0.95
    maps[0, 2, 12, 4] = 0.6
    maps[0, 2, 13, 4] = 0.2
    shown = Passage("text", words, maps)
    report = Report("text", [shown], HeadTable({"entropy": [[0.0] * 3]}), [[""] * 3])
    one = next(x for x in findings(report) if x.query is not None)
    assert (one.heads, one.query) == ([(0, 2)], 12)
    assert "“word12” gives “word4” 0.60" in one.text
    assert "15 other queries give it 0.01" in one.text
    assert [x for x in findings(replace(report, passages=[replace(shown, special=[12])])) if x.query == 12] == []
