"""A small training watched head by head in TensorBoard; makes the picture in docs/telemetry.md.

    python scripts/telemetry_tensorboard.py tinyshakespeare.txt --logdir runs/telemetry            # trains, minutes
    python scripts/telemetry_tensorboard.py --logdir runs/telemetry --picture docs/pictures/telemetry_tensorboard.png

The first makes the events, from any text in UTF-8; the second opens them in TensorBoard, on this machine alone, and
takes a picture of it with Chromium. Both at once do both. It needs tensorboard, and for the picture Pillow and
Chromium.
"""

import argparse
import io
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import torch
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.base.files import atomic_path
from headwise.edit.healing import learning_rate_factor
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import Corpus

SHOWN = "^(entropy|max_logit|sink_mass)/blocks.1"  # three of six measures, of the second layer's heads
WINDOW = 1800, 1030  # pixels: four curves side by side
MOST = 300_000  # bytes of the picture


def train(files: list[Path], logdir: Path, steps: int) -> None:
    """A decoder of 2 layers × 4 heads on the texts, watched from its first step; TensorBoard gets every fourth."""
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context, batch, lr, warmup = 96, 8, 3e-3, steps // 10
    corpus = Corpus.read(files, context=context)
    decoder = Decoder(DecoderConfig(corpus.tokenizer.vocab_size, 96, 2, 4, d_ff=240, context=context))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    writer = SummaryWriter(str(logdir))
    record = hw.watch(decoder, every=4, steps="manual", during="training").write_to(hw.telemetry.TensorBoard(writer))
    with record:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate_factor(step, steps, warmup, 0.05)
            ids = corpus.batch(batch, context, seed=0, step=step)
            loss = cross_entropy(decoder(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            record.step()
            writer.add_scalar("loss/train", loss.item(), step)
            if step % 100 == 0 or step == steps - 1:
                print(f"step {step}: {loss.item():.3f} nats a token", flush=True)
    writer.close()


def take_picture(logdir: Path, path: Path) -> None:
    """What TensorBoard shows of the events, as a PNG of few colours."""
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no Chromium here to take the picture with")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    board = [
        sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port),
        "--load_fast=false", "--reload_interval=5",
    ]  # fmt: skip
    served = subprocess.Popen(board, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        _wait(f"{address}data/plugin/scalars/scalars?run=.&tag=loss%2Ftrain")
        with tempfile.TemporaryDirectory() as folder:
            shot = Path(folder) / "shot.png"
            page = f"{address}?darkMode=false#scalars&tagFilter={quote(SHOWN)}&_smoothingWeight=0.6"
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-dev-shm-usage", f"--window-size={WINDOW[0]},{WINDOW[1]}", "--virtual-time-budget=60000",
                f"--user-data-dir={folder}/profile", f"--screenshot={shot}", page,
            ]  # fmt: skip
            subprocess.run(command, check=True, timeout=600, capture_output=True)
            data = _small(Image.open(shot))
    finally:
        served.terminate()
        served.wait()
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
    print(f"{path}: {len(data):,} bytes")


def _small(image) -> bytes:  # type: ignore[no-untyped-def]
    """A PNG of as many colours as fit into the size that is allowed."""
    for colours in (256, 128, 64, 32):
        out = io.BytesIO()
        image.convert("RGB").quantize(colours).save(out, "PNG", optimize=True)
        if out.tell() <= MOST:
            return out.getvalue()
    sys.exit(f"the picture does not fit into {MOST:,} bytes")


def _wait(address: str, seconds: float = 180.0) -> None:
    """Until the server has read all events: what it answers grows no more."""
    until, before = time.monotonic() + seconds, b""
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                now = answer.read()
        except OSError:  # it has not begun to listen, or does not know the run yet
            now = b""
        if now and now == before:
            return
        before = now
        time.sleep(6.0)  # it looks for more every five seconds
    sys.exit(f"TensorBoard did not answer within {seconds:.0f} seconds")


def main() -> None:
    """Train, take the picture, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="texts to train on; none: take the picture alone")
    parser.add_argument("--logdir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if not given.files and given.picture is None:
        parser.error("give texts to train on, --picture, or both")
    if given.files:
        train(given.files, given.logdir, given.steps)
    if given.picture is not None:
        take_picture(given.logdir, given.picture)


if __name__ == "__main__":
    main()
