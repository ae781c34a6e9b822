"""docs/from_caffe2.md: its code runs as it stands there, and it leaves out nothing of what it is about."""

import json
import pathlib
import re
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from testing.cluster import shared_cluster

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "from_caffe2.md"

ON_SEVERAL_HOSTS = "Several hosts"

FUNCTIONS = """
    Parallelize Parallelize_GPU Parallelize_CPU Parallelize_iDeep Parallelize_BMUF Parallelize_GPU_BMUF
    Parallelize_CPU_BMUF CreateNet RunInitNet RunWarmup RunNet Synchronize ConvertNetForDevice ExtractPredictorNet
    GetCheckpointParams FinalizeAfterCheckpoint GetLearningRateBlobNames AddBlobSync AddDistributedBlobSync
    CollectivesConcurrencyControl stripBlobName OptimizeGradientMemory GetActivationBlobs ShiftActivationDevices
""".split()  # the last two of data_parallel_model_utils
PARALLELIZE = """
    model_helper_obj input_builder_fun forward_pass_builder_fun param_update_builder_fun optimizer_builder_fun
    post_sync_builder_fun pre_grad_net_transformer_fun net_transformer_fun devices rendezvous net_type
    broadcast_computed_params optimize_gradient_memory dynamic_memory_management blobs_to_keep use_nccl
    max_concurrent_distributed_ops cpu_device ideep num_threads_per_device shared_model combine_spatial_bn
    barrier_net_timeout_sec
""".split()
BMUF = """
    model_helper_obj input_builder_fun forward_pass_builder_fun param_update_builder_fun block_learning_rate
    block_momentum devices rendezvous net_type master_device use_nccl nesterov optimize_gradient_memory
    reset_momentum_sgd warmup_iterations max_concurrent_distributed_ops add_blobs_to_sync num_threads_per_device
    cpu_device barrier_net_timeout_sec
""".split()
CORE = """
    Net NameScope DeviceScope DeviceOption BlobReference ScopedName ScopedBlobReference DataType CreateOperator
    CreatePythonOperator GlobalInit IsGPUDeviceType device_option_equal InferBlobDevices InferOpBlobDevices
    InferOpDeviceAsBlobDevices GradientSlice IR GradientRegistry AddGradientOperators DeduplicateGradientSlices
    get_ssa get_undefined_blobs get_output_producers get_op_ids_in_path clone_and_bind_net Clone ClonePartial AppendNet
    Proto insert_op_at_idx reroute_tensor AddExternalInput AddExternalOutput Const Python StopGradient LogInfo
    set_rand_seed RunAllOnGPU RunAllOnMKL RunAllOnIDEEP AddObserver Copy CopyGPUToCPU CopyCPUToGPU EnsureCPUOutput
    copy_func_between_devices RemapEntry InjectCrossDeviceCopies InjectDeviceCopiesAmongNets
    InjectDeviceCopiesAmongNetsWithoutB2D Plan AddStep execution_step scoped_execution_step to_execution_step
    add_nets_in_order num_iter SetIter should_stop_blob SetShouldStopBlob report_net report_interval SetReportNet
    only_once SetOnlyOnce concurrent_substeps SetConcurrentSubsteps num_concurrent_instances SetNumConcurrentInstances
    create_workspace SetCreateWorkspace run_every_ms RunEveryMillis SetEnginePref FeedBlob FetchBlob FetchBlobs HasBlob
    Blobs RunNetOnce RunPlan RunPlanInBackground ResetWorkspace SwitchWorkspace InferShapesAndTypes Predictor
""".split()


class Piece(NamedTuple):
    """Code of the page: the lines of a table, or a block, which is one."""

    section: str
    where: str  # "block", "script" or "model_fn"
    lines: list[str]


def pieces():
    pieces, section, block = [], "", None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\| Caffe2 \| here, in the (script|model_fn) \| what differs \|", line)
        if block is not None and line != "```":
            block.append(line)
        elif line.startswith("```"):
            if block and block[0] == "```python":
                pieces.append(Piece(section, "block", ["\n".join(block[1:])]))
            block = [line] if block is None else None
        elif line.startswith("## "):
            section = line.removeprefix("## ")
        elif header:
            pieces.append(Piece(section, header[1], []))
        elif line.startswith("|") and not line.startswith("|---"):
            old, new, _ = (cell.strip() for cell in line.strip("|").split(" |"))
            assert re.fullmatch("`[^`]+`", new), f"{old!r} needs one line of code, not {new!r}"
            pieces[-1].lines.append(new.strip("`"))
    assert block is None
    return pieces


def run(line, scope):
    """Runs a block or a line; one whose value is a bool has to be right."""
    try:
        code = compile(line, "from_caffe2.md", "eval")
    except SyntaxError:
        exec(compile(line, "from_caffe2.md", "exec"), scope)
        return
    value = eval(code, scope)
    assert not isinstance(value, bool) or value, line


def run_in_towers(lines, scope, features, labels):
    """Runs lines in the model_fn of two towers; returns the variables before and after a training step."""

    def model_fn(features, labels, mode):
        here = {**scope, "features": features, "labels": labels, "mode": mode, "image": features["image"]}
        for line in lines:
            run(line, here)
        loss = (est.get_variable("other", ()) * features["image"]).mean()
        train_op = here.get("train_op") or TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    model = est.transform(replicate_model_fn(model_fn, devices=jax.devices()[:2]))
    state = model.init(jax.random.key(0), features, labels)
    after, _ = model.train_step(state, features, labels)
    return jax.device_get((state.variables, after.variables))


@pytest.fixture
def scope(tmp_path):
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    images, labels = np.float32(images / 16), labels.astype(np.int32)
    split = {"x": images[:1400], "y": labels[:1400], "test_x": images[1400:], "test_y": labels[1400:]}
    return split | {"model_dir": str(tmp_path / "model")}


@pytest.mark.slow
def test_every_line_of_the_page_runs_and_does_what_it_says(scope, capsys):
    image, labels = scope["x"][:64], scope["y"][:64]
    before, after = {}, {}
    for piece in pieces():
        if piece.section == ON_SEVERAL_HOSTS:
            continue
        if piece.where == "model_fn":
            one, other = run_in_towers(piece.lines, scope, {"image": image}, labels)
            before |= one
            after |= other
        else:
            for line in piece.lines:
                run(line, scope)
    assert scope["metrics"]["accuracy"] > 0.85
    assert scope["classifier"].get_learning_rates() == {"optimizer": pytest.approx(0.05)}
    assert re.search(r"^4 variables at step \d+$", capsys.readouterr().out, re.MULTILINE)
    np.testing.assert_allclose(after["mean"], image[:32].mean(0), rtol=1e-6)  # of the first of two towers
    assert after["seen"] == 64
    changed = np.flatnonzero((after["words"] != before["words"]).any(1))
    assert changed.tolist() == np.unique(labels).tolist()


def test_the_script_of_several_hosts_runs_in_two_processes(tmp_path):
    model, *others = pieces()
    assert "def model_fn" in model.lines[0]
    lines = model.lines + [line for piece in others if piece.section == ON_SEVERAL_HOSTS for line in piece.lines]
    ended = shared_cluster().run("testing.scenarios.docs.from_caffe2", lines, str(tmp_path / "model"))
    assert [each.code for each in ended] == [0, 0], ended
    outputs = [json.loads(next(line for line in each.lines if line.startswith('{"process"'))) for each in ended]
    assert [each["process"] for each in outputs] == [0, 1]
    assert outputs[0]["kernel"] == outputs[1]["kernel"] != 0
    assert [each["total"] for each in outputs] == [[2, 4]] * 2


@pytest.mark.parametrize(
    ("names", "section"),
    [(FUNCTIONS, None), (PARALLELIZE, "The parameters of Parallelize"), (BMUF, "Parallelize_BMUF"), (CORE, None)],
)
def test_the_page_names_all_of_it(names, section):
    text = PAGE.read_text(encoding="utf-8")
    if section is not None:
        (text,) = re.findall(rf"^## {section}$(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = " ".join(re.findall("`([^`]+)`", text))
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
