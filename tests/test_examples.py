"""Runs every example as a newcomer would, each in a process of its own."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from testing.website.scripts import run_script

ROOT = pathlib.Path(__file__).resolve().parents[1]
AS_USERS_COMPILE = ["flax_module.py", "resume.py"]  # slow convolutions otherwise; bits that are compared
SHORTER = {  # where all steps take as long as what is compiled
    "flax_module.py": ["--steps=200"],
    "haiku_equinox.py": ["--steps=300"],
    "hooks.py": ["--steps=300"],
    "train_and_evaluate.py": ["--eval_every_steps=100", "--patience=2"],
}
SEVERAL_RUNS = ["block_sync.py"]  # in one process, each with a log
OTHER_LINES = r"\] (Calling model_fn |Evaluation: |Exported |Values of \d towers on cpu are summed by )"
FRESH = [("digits.py", "--towers=4"), ("-mpytest", "-s")]  # in fresh interpreters, as users do; others in a copy of one


@functools.cache
def run(example: str, *args: str) -> tuple[str, str]:
    """What an example writes to stdout and to stderr; run once for each `args`."""
    flags = {"XLA_FLAGS": ""} if example in AS_USERS_COMPILE else {}
    if (example, *args[:1]) not in FRESH:
        return run_script(f"examples/{example}", *args, folder=ROOT, **flags)
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, example if example.startswith("-m") else f"examples/{example}", *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Runs an example on N towers, with separate checkpoints. Its log shows training, and nothing of orbax."""
    base = tmp_path_factory.mktemp("examples")

    def run_on(example, towers):
        options = [f"--model_dir={base / f'{example}-{towers}'}", *SHORTER.get(example, [])]
        stdout, stderr = run(example, f"--towers={towers}", *options)
        if example not in SEVERAL_RUNS:
            assert losses(stderr)
            others = re.findall(OTHER_LINES, stderr)
            assert len(stderr.splitlines()) - len(others) < 20
        return stdout, stderr

    return run_on


def accuracy(stdout: str) -> float:
    [percent] = re.findall(r"test accuracy ([\d.]+)%", stdout)
    return float(percent) / 100


def losses(stderr: str) -> dict[int, float]:
    """The logged losses by step."""
    return {int(step): float(loss) for loss, step in re.findall(r"loss = (\S+), step = (\d+)", stderr)}


EXAMPLES = {
    "block_sync.py": [4],
    "digits.py": [4],
    "feature_columns.py": [3],
    "flax_module.py": [2],
    "resume.py": [2],
    "sequences.py": [2],
    "serve.py": [2],
    "test_my_model.py": [2, 4],
    "haiku_equinox.py": [2],
    "hooks.py": [2],
    "train_and_evaluate.py": [2],
    "two_processes.py": [2],
    "warm_start.py": [2],
    "wide_towers.py": [2],
}


def test_every_example_is_run_here():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


def test_every_example_is_on_the_page_above_them_and_has_an_output_to_show():
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"^- \[[^]]*\]\(([^)]*)\): ", text, re.MULTILINE)
    scripts = [
        path for pattern in ("*.py", "ports/*.py", "notebooks/*.ipynb") for path in (ROOT / "examples").glob(pattern)
    ]
    assert {path.relative_to(ROOT / "examples").as_posix() for path in scripts} <= set(links)
    assert len(links) == len(set(links)) and all((ROOT / "examples" / link).exists() for link in links)
    outputs = {path.stem for path in (ROOT / "examples" / "output").glob("*.txt")}
    assert {f"{name}.py" for name in outputs} == EXAMPLES.keys(), "Run tests/testing/website/example_outputs.py"


def test_examples_are_short():
    for example in EXAMPLES:
        assert len((ROOT / "examples" / example).read_text(encoding="utf-8").splitlines()) < 150, example


CLASSIFIES = {  # the least accuracy, and how often it prints what
    "digits.py": (0.97, {}),
    "flax_module.py": (0.97, {}),
    "feature_columns.py": (
        0.94,
        {r"always saying the same has 63\.31%": 1, r"(?:malignant|benign) \(\d+%\), is (?:malignant|benign)": 6},
    ),
    "sequences.py": (0.9, {r"(?m)^  .*: (?:angry|happy), is (?:angry|happy)$": 5}),
}


@pytest.mark.parametrize(
    ("example", "towers"), [(example, towers) for example in CLASSIFIES for towers in EXAMPLES[example]]
)
def test_an_example_classifies_right(trained, example, towers):
    least, printed = CLASSIFIES[example]
    stdout, _ = trained(example, towers)
    assert f"on {towers} x cpu:" in stdout
    assert accuracy(stdout) >= least
    for pattern, number in printed.items():
        assert len(re.findall(pattern, stdout)) == number


def test_an_nnx_model_reads_digits_right():
    stdout, _ = run("flax_module.py", "--nnx", "--steps=100")
    assert accuracy(stdout) >= 0.95


@pytest.mark.parametrize("package", ["haiku", "equinox"])
def test_models_of_other_libraries_read_digits_right(trained, package):
    stdout, _ = run("haiku_equinox.py", f"--package={package}", *SHORTER["haiku_equinox.py"])
    assert f"{package}, after 300 steps on 2 x cpu:" in stdout
    assert accuracy(stdout) >= 0.95


def test_hooks_look_into_a_training(trained):
    stdout, _ = trained("hooks.py", 2)
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)% +([\d.]+) +([\d.]+)%$", stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [0, 60, 120, 180, 240, 300]
    assert float(rows[-1][4]) > 94 and float(rows[-1][1]) < 0.25
    assert len(re.findall(r"image \d+, a \d: loss \d", stdout)) == 5
    assert os.path.getsize(re.findall(r"Curves of all this: (\S+\.png)", stdout)[0]) > 10_000


@pytest.mark.parametrize("towers", EXAMPLES["block_sync.py"])
def test_towers_that_meet_once_per_block_read_digits_as_well_as_others(trained, towers):
    stdout, _ = trained("block_sync.py", towers)
    rows = re.findall(r"^(\S.*?) {2,}(\d+) +([\d.]+) +([\d.]+)%$", stdout, re.MULTILINE)
    assert [int(met) for _, met, _, _ in rows] == [640, 40, 40, 40]
    accuracies = {name: float(percent) for name, _, _, percent in rows}
    assert accuracies["block momentum (bmuf)"] >= accuracies["synchronous"] - 0.4  # two of 500 images
    assert min(accuracies.values()) > 94


@pytest.mark.parametrize("towers", EXAMPLES["wide_towers.py"])
def test_wide_towers_have_a_part_of_the_bytes_on_each_device(trained, towers):
    stdout, _ = trained("wide_towers.py", towers)
    assert accuracy(stdout) >= 0.95
    (narrow, wide) = re.findall(r"^2 x [14] +([\d,]+).* ([\d,]+)$", stdout, re.MULTILINE)
    for one, other in zip(narrow, wide, strict=True):  # the state, the peak
        assert int(one.replace(",", "")) / int(other.replace(",", "")) > 3.9


def test_a_warm_start_is_ahead(trained):
    stdout, _ = trained("warm_start.py", 2)
    rows = re.findall(r"^ +(\d+) +([\d.]+)% +([\d.]+)%$", stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [0, 10, 20, 30, 40, 50, 60]
    assert float(rows[1][2]) > float(rows[1][1])
    assert "used (4): new_layer0/bias (there old_layer0/bias)" in stdout


def test_digits_have_the_same_losses_on_any_number_of_towers(trained):
    one, many = losses(run("digits.py", "--towers=1", "--steps=200")[1]), losses(trained("digits.py", 4)[1])
    assert list(one) == [1, 100, 200] and list(many) == [1, 100, 200, 300, 400, 500, 600]
    assert {step: many[step] for step in one} == pytest.approx(one, abs=1e-3, rel=0)


def test_digits_draw_what_they_read(trained):
    stdout, _ = trained("digits.py", 4)
    captions = re.findall(r"(\d) \(\d+%\), is (\d)( ✗)?", stdout)
    assert len(captions) > 4
    assert all((read != label) == bool(cross) for read, label, cross in captions)
    pictures = [line for line in stdout.splitlines() if set(line) & set("░▒▓█")]
    assert len(pictures) == 16
    assert max(map(len, stdout.splitlines())) <= 80


@pytest.mark.parametrize("towers", EXAMPLES["serve.py"])
def test_a_model_is_served(trained, towers):
    stdout, stderr = trained("serve.py", towers)
    [step, path] = re.findall(r"Serving step (\d+) of (\S+) at http://127.0.0.1:\d+", stdout)[0]
    assert step == "500"
    [percent] = re.findall(r"Of 256 images, ([\d.]+)% are read right", stdout)
    assert float(percent) > 90
    assert len(re.findall(r"images per request: [\d.]+ ms", stdout)) == 3
    assert (
        "Two numbers are not an image: 400, The feature 'pixels' must be float32[b, 64]; got float32[1, 2]." in stdout
    )
    assert "Exported serving_default at step 500" in stderr
    again, stderr = run("serve.py", f"--exported={path}")
    assert f"Of 256 images, {percent}% are read right" in again
    assert "step = " not in stderr


@pytest.mark.parametrize("towers", EXAMPLES["train_and_evaluate.py"])
def test_training_stops_early_with_the_best_model_and_knows_it(trained, towers):
    stdout, stderr = trained("train_and_evaluate.py", towers)
    rows = re.findall(r"^ +(\d+) +([\d.]+)% +([\d.]+)  █+(  exported)?$", stdout, re.MULTILINE)
    evaluations = {int(step): (float(loss), bool(exported), percent) for step, percent, loss, exported in rows}
    best = min(evaluations, key=lambda step: evaluations[step][0])
    last = best + 2 * 100
    assert list(evaluations) == list(range(100, last + 1, 100))
    assert evaluations[best][1]
    assert f"After {last} steps, with the variables of step {best}: test accuracy {evaluations[best][2]}%" in stdout
    assert accuracy(stdout) >= 0.95
    [model_dir] = re.findall(r"model_dir='(\S+)'", stderr)
    options = f"--model_dir={model_dir}", f"--towers={towers}", *SHORTER["train_and_evaluate.py"]
    again, stderr = run("train_and_evaluate.py", *options)
    assert again == stdout
    assert "step = " not in stderr.replace("global_step = ", "")


@pytest.mark.parametrize("towers", EXAMPLES["resume.py"])
def test_a_training_that_was_stopped_is_the_one_that_was_not(trained, towers):
    stdout, stderr = trained("resume.py", towers)
    assert re.findall(r"ended at step (\d+), because of (\w+)\n  exit code (\d+)", stdout) == [
        ("300", "steps", "0"),
        ("130", "SIGTERM", "75"),
        ("300", "steps", "0"),
    ]
    assert "300 of 300 steps had the same 19200 images in the same order;\n11 of 11 variables and slots" in stdout
    assert "The input resumes after its first 130 batches." in stderr


@pytest.mark.parametrize("processes", EXAMPLES["two_processes.py"])
def test_processes_train_what_one_does(processes):
    stdout, _ = run("two_processes.py", f"--processes={processes}", "--steps=60")
    rows = re.findall(
        r"(\d) devices.* test accuracy ([\d.]+)%, test loss ([\d.]+)(?:, predicted (\d+) of 500)?", stdout
    )
    assert [row[0] for row in rows] == ["2"] * processes + [str(2 * processes)]
    assert float(rows[0][1]) > 90 and len({row[1] for row in rows}) == 1
    assert [float(row[2]) for row in rows] == pytest.approx([float(rows[-1][2])] * len(rows), abs=2e-6)
    assert [row[3] for row in rows] == ["260", "240", ""]
    differences = dict(re.findall(r"^(\S.*\S) +differ by at most (\S+)$", stdout, re.MULTILINE))
    variables = {f"{layer}/{kind}" for layer in ("hidden", "logits") for kind in ("bias", "kernel")}
    assert differences.keys() == {"the losses", "the predictions", "global_step"} | variables
    assert max(map(float, differences.values())) < 1e-5


def test_the_tests_of_a_model_pass_and_show_what_is_wrong(tmp_path):
    copy = shutil.copy(ROOT / "examples" / "test_my_model.py", tmp_path)  # away from the conftest.py of these tests
    stdout, _ = run("-mpytest", "-s", copy)
    assert "4 passed" in stdout
    assert re.search(r"^2 towers differ from one in training step 1:\n  the loss: \S+ in 2 towers, ", stdout, re.M)


def test_processes_that_cannot_train_end_with_an_error():
    with pytest.raises(AssertionError, match=r"ended with the exit codes \[1, 1\]. See the messages above.") as failed:
        run("two_processes.py", "--batch_size=95")
    assert "The global_batch_size 95 is not divisible by the number of processes, 2." in str(failed.value)
