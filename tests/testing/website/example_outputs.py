"""Runs examples and keeps what they print, for their pages on the site.

    python tests/testing/website/example_outputs.py                      # all of them; some minutes
    python tests/testing/website/example_outputs.py digits.py hooks.py

It writes `examples/output/<name>.txt`: the command and what it wrote to stdout.
"""

import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES, OUTPUTS = ROOT / "examples", ROOT / "examples" / "output"
ARGUMENTS = {"digits.py": "--towers=4", "block_sync.py": "--towers=4"}
COMMANDS = {"test_my_model.py": "python -m pytest -q -s examples/test_my_model.py"}


def command(name: str) -> str:
    return COMMANDS.get(name, f"python examples/{name} {ARGUMENTS.get(name, '')}".strip())


def write(name: str) -> None:
    import pages  # beside this file, as a script sees it

    words = [sys.executable, *command(name).split()[1:]]
    with tempfile.TemporaryDirectory() as folder:
        env = pages.environment() | {"TMPDIR": folder}
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=900)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.replace(folder, "/tmp").splitlines() if not line.startswith("[Gloo]")]
    OUTPUTS.mkdir(exist_ok=True)
    text = f"$ {command(name)}\n" + "\n".join(lines).strip() + "\n"
    (OUTPUTS / name).with_suffix(".txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or sorted(path.name for path in EXAMPLES.glob("*.py")):
        print(each, flush=True)
        write(each)
