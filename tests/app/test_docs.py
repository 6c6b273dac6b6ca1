"""The Python blocks and the `headwise` commands of every page in docs/ and the commands of both READMEs run as printed.

A block below `<!-- not run: reason -->` is skipped. Pages that start from a model of the reader's get a small one here.
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from commands import Command
from headwise.cli.program import app
from headwise.telemetry.record import Record

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
READMES = ["../README.md", "../README.zh.md"]
TEXT = "话说武松在路上行了几日，来到阳谷县地面。The tiger sleeps!\n"
DECODER = """
import torch, headwise as hw
subject = hw.load_model('DIR')
model, loss_fn, ids = subject.model, subject.loss_fn, subject.read("武松打虎，又打虎。" * 9).ids[None]
batches, pieces = [ids], [[str(i) for i in ids[0].tolist()]]
with hw.watch(model, maps="lazy") as record, hw.models.record_heads(hw.find_heads(model)) as outputs:
    model(ids)
maps = list(record.maps.values())
"""
GPT2 = """
import torch, headwise as hw
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=5, n_embd=35, vocab_size=97, n_positions=41)).eval()
inputs = batch = {"input_ids": torch.arange(1, 12)[None], "attention_mask": torch.ones(1, 11)}
"""
# What a page expects you to have before one of its blocks: page → number of the block → Python.
GIVEN: dict[str, dict[int, str]] = {
    "heads.md": {1: DECODER, 6: GPT2 + "maps = []"},  # after the page's own model, a smaller one
    "models.md": {
        0: "import torch\nattention = torch.nn.MultiheadAttention(12, 3)\nmodel = torch.nn.Sequential(attention)\n"
        "x = torch.randn(7, 2, 12)",
        1: GPT2 + "model.save_pretrained('my-model')",
        2: GPT2 + "seen = []\n"
        "with hw.attach(model), hw.models.observe(lambda call: seen.append(call.map), model=model):\n"
        "    model(**inputs)\nhw.edit.save_budget(hw.edit.budget(seen, 3), 'budget.json')",
        3: GPT2 + "gates = [torch.ones(5), torch.ones(5)]",
    },
    "telemetry.md": {
        0: GPT2 + "from headwise.lm.checkpoint import load_checkpoint\ntokenizer = load_checkpoint('DIR')[1]",
        3: GPT2 + "model.train()\nbatches = [batch, batch]\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\n"
        "def loss(model, batch): return model(**batch, labels=batch['input_ids']).loss",
    },
}  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a language that are to run."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"(<!-- not run: .+? -->\s*)?^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for skipped, block in found if not skipped]


def commands(page: str) -> list[list[str]]:
    """The `headwise` lines of a page's console blocks, as arguments."""
    lines = "\n".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words[:1] == ["headwise"]]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader: a model in DIR, and texts under the names that the pages use."""
    shutil.copytree(model_folder, tmp_path / "DIR")
    (tmp_path / "corpus.txt").write_text(TEXT * 9, encoding="utf-8")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/one.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "news/today").mkdir(parents=True)
    (tmp_path / "news/today/a.jsonl").write_text(json.dumps({"body": TEXT}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(folder: Path, page: str) -> None:
    for package in ("transformers", "scipy", "matplotlib", "pyarrow", "tensorboard"):
        pytest.importorskip(package)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(page, "python")):
        exec(GIVEN.get(page, {}).get(number, ""), names)
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    for name in names.values():  # or later tests in this process would see it watch
        if isinstance(name, Record) and name.active:
            name.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in [*PAGES, *READMES] if commands(page)])
def test_the_commands_of_a_page_run(folder: Path, headwise: Command, page: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("matplotlib")
    for words in commands(page):
        done = headwise(*words)
        assert done.code == 0, (words, done.err)


@pytest.mark.thorough
def test_the_table_of_commands_lists_all_commands_with_options_that_exist(headwise: Command) -> None:
    rows = re.findall(
        r"^\| `headwise ([a-z]+(?: [a-z]+)*).*?` \|.*\|(.*?)\|$",
        (DOCS / "commands.md").read_text("utf-8"),
        re.MULTILINE,
    )
    commands: Any = get_command(app)
    assert sorted(name for name, _ in rows) == sorted(commands.commands)
    for name, options in rows:
        inner = getattr(commands.commands[name], "commands", {})
        known = "".join(headwise(*words, "--help").out for words in (name.split(), *([name, one] for one in inner)))
        assert all(option in known for option in re.findall(r"`(--[\w-]+)", options)), name


def test_no_line_breaks_within_chinese_sentences() -> None:
    """Markdown shows the end of a line as a space, which Chinese has not."""
    pages = [DOCS / "../README.zh.md", *DOCS.glob("*.zh.md"), *(DOCS / "guide/zh").glob("*.md")]
    assert len(pages) > 25
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"[\u3000-\u9fff\uff00-\uffef]\n *[\u3000-\u9fff\uff00-\uffef].*", text) == [], page.name
