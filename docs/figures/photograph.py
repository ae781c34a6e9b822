"""Takes the pictures of docs/how_to/look_into_a_run.md, of a run of the page's own code.

    python docs/figures/photograph.py [TENSORBOARD]     # needs a Chromium, and TensorBoard's command for its picture

It writes to docs/figures/runs/.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "figures" / "runs"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import results  # noqa: E402
from testing.website import browser, pages  # noqa: E402


def photograph(window: browser.Browser, address: str, name: str, width: int, height: int, wait: float = 0) -> None:
    window.open(address, width)
    window.resize(width, height)
    time.sleep(wait)
    path = OUT / f"{name}.png"
    window.picture(path, whole=False)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    tensorboard = sys.argv[1] if len(sys.argv) > 1 else shutil.which("tensorboard")
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser.opened(browser.executable()) as window:
        folder = pathlib.Path(folder)
        code = "\n".join(code for code, _ in pages.blocks(ROOT / "docs" / "how_to" / "look_into_a_run.md"))
        (folder / "page.py").write_text(code, encoding="utf-8")
        settings = "\n".join(f"{name}: {str(value).lstrip('#')}" for name, value in results.SETTINGS.items())
        (folder / "matplotlibrc").write_text(settings + "\nsavefig.transparent: True\n", encoding="utf-8")
        subprocess.run([sys.executable, "page.py"], cwd=folder, env=pages.environment(), check=True)
        drawn = (folder / "curves.svg").read_text(encoding="utf-8")
        (OUT / "curves.svg").write_text(results.adapted(drawn), encoding="utf-8")
        if tensorboard:
            command = [tensorboard, "--logdir", str(folder / "model"), "--port", "6107", "--load_fast", "false"]
            server = subprocess.Popen(command)
            try:
                time.sleep(15)
                photograph(window, "http://127.0.0.1:6107/#timeseries", "tensorboard", 1100, 800, wait=10)
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
