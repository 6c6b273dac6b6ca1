"""The recipes of docs/measure.md for Ray, Dask and Spark, as they stand there, with the real packages here."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sweep_samples import said

from headwise.corpus import measure_corpus
from headwise.corpus.passages import passages_path

PAGE = Path(__file__).parents[2] / "docs" / "measure.md"
PACKAGES = {"ray": ["ray"], "dask": ["dask", "distributed"], "spark": ["pyspark"]}
# Two shards are killed once, in the middle, without a word.
KILL = """
    def kill(what, done, of):
        if i in (2, 5) and done and not os.path.exists(f"killed-{i}"):
            open(f"killed-{i}", "w").close()
            os.kill(os.getpid(), 9)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["ray", "dask", "spark"])
def test_a_recipe_gives_the_bytes_of_one_run(model_folder, tmp_path, monkeypatch, engine):
    missing = [name for name in PACKAGES[engine] if find_spec(name) is None]
    if missing or (engine == "spark" and shutil.which("java") is None):
        pytest.skip(f"{(*missing, 'java')[0]} is not installed")
    (recipe,) = re.findall(rf"With {engine.title()}:\n+<!--.*?-->\n+```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert len(recipe.splitlines()) <= 20
    lines = [json.dumps({"text": said(12, n), "more": "x" * 500}) + "\n" for n in range(1000)]  # bytes, for eight units
    (tmp_path / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    options = {"measures": ["entropy"], "passages": 2, "window": 24, "batch": 64, "layers": [0], "device": "cpu"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    here = ", ".join(f"{name}={value!r}" for name, value in options.items() if name != "device")
    made = (
        recipe.replace("corpus.txt", "corpus.jsonl")
        .replace('"DIR"', repr(str(model_folder)))
        .replace('device="cpu"', f'device="cpu", {here}, progress=kill')
        .replace("builder.", 'builder.master("local[2,4]").')  # alone, Spark would not repeat what fails
    )
    made = re.sub(r"(def shard.*\n)", lambda found: found[1] + KILL, made)
    lines = made.splitlines()
    main = [line != "" and not line.startswith((" ", "def", "@", "import", "from")) for line in lines]
    lines = [f"    {line}" if own else line for line, own in zip(lines, main, strict=True)]
    lines.insert(main.index(True), "if __name__ == '__main__':")
    (tmp_path / "recipe.py").write_text("import os\n" + "\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("killed-*"))) == 2
    monkeypatch.chdir(tmp_path)
    whole = measure_corpus(model_folder, ["corpus.jsonl"], tmp_path / "whole.csv", **options)
    assert whole.total.windows > 100
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "stats.csv").read_bytes()
    assert passages_path(tmp_path / "whole.csv").read_bytes() == passages_path(tmp_path / "stats.csv").read_bytes()
