"""python -m flashattn.doctor: what it reads, what it advises, what it says would run, and its exit status."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launches import record_launches
from processes import WITHOUT_TRITON, python

from flashattn import doctor, flash_attention
from flashattn.configs import INTERPRETER, TARGETS, BlockConfig, Target, block_config, target_of
from flashattn.notebook import HAS_GPU
from flashattn.testing import DTYPES, Case

KERNELS = ["forward", "dq", "dkdv"]
ON_GPU = dict(
    flashattn="0.1.0", python="3.12.0", system="Linux", machine="x86_64", torch="2.11.0+cu130", torch_build="CUDA",
    torch_toolkit="13.0", triton="3.6.0", triton_file=None, triton_of_torch="3.6.0", numpy="2.3.5",
    gpu=dict(name="NVIDIA H200", count=1, capability="9.0", bf16=True, target=TARGETS["sm_90"]._asdict()),
    gpu_error=None, nvidia_gpu=True, driver="580.95.05", cuda_visible_devices=None, c_compiler="/usr/bin/gcc",
    python_headers=True, interpret_set=False, interpreted=False,
)  # fmt: skip
T4 = dict(name="Tesla T4", count=1, capability="7.5", bf16=False, target=TARGETS["sm_75"]._asdict())
ON_CPU = ON_GPU | dict(
    torch="2.13.0+cpu", torch_build="CPU", torch_toolkit=None, triton="3.7.1", triton_of_torch=None, numpy="2.4.6", gpu=None,
    gpu_error="Torch not compiled with CUDA enabled", nvidia_gpu=False, driver=None, c_compiler=None, python_headers=False,
)  # fmt: skip
NO_DRIVER = ON_GPU | dict(gpu=None, gpu_error="Found no NVIDIA driver on your system.", driver=None)
RIGHT = [dict(case="a", seconds=1.25, ratio=0.5, error=None)]
WRONG = [dict(case="a", seconds=1.25, ratio=None, error="AssertionError: a: error over budget")]


def run_doctor(*arguments, without_triton=False, cwd=None):
    """Run the command in a fresh process without TRITON_INTERPRET; return (exit status, what it printed)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(WITHOUT_TRITON)] * without_triton + [str(Path(doctor.__file__).parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "flashattn.doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def executable(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.triton
def test_prints_a_report_here():
    status, printed = run_doctor()
    to_do = doctor.advice(doctor.facts() | {"interpret_set": False, "interpreted": False})
    assert printed.endswith("To do\n" + "".join(f"  {sentence}\n" for sentence in to_do or ["nothing"]))
    assert status == (1 if to_do else 0)
    assert f"\n  torch         {torch.__version__}, built for " in printed
    assert "\n  interpreter   off (TRITON_INTERPRET is not set)\n" in printed
    in_interpreter = "the kernels in Triton's interpreter, switched on for this test only"
    assert f"\nSelf-test: {'the kernels on the GPU' if HAS_GPU else in_interpreter}\n" in printed
    assert printed.count(" of the error budget, ") == 3
    if not HAS_GPU:
        assert "flash_attention raises RuntimeError; with TRITON_INTERPRET=1 set before Triton is imported" in printed
        config = block_config("dkdv", 64, 64, torch.bfloat16, INTERPRETER, causal=False)
        assert f"\n  dkdv          {config.block_m} queries x {config.block_n} keys " in printed


def test_without_triton():
    status, printed = run_doctor("--dtype", "fp32", without_triton=True)
    assert "\n  Triton        not installed\n" in printed
    assert "  flash_attention raises ImportError; attention_tiled and attention_reference run\n" in printed
    assert "queries" not in printed
    assert "\nSelf-test: attention_tiled, since no kernel can run here\n  fp32-D64-257x300-h2/1         0." in printed
    assert printed.count(" of the error budget, ") == 3
    if platform.system() == "Linux":
        assert status == 1 and "\n  Install Triton: pip install 'triton" in printed
    else:
        assert "Install Triton" not in printed


def test_json_and_a_file_that_hides_triton(tmp_path):
    (tmp_path / "triton.py").write_text("raise SystemExit('nobody may run this')")
    status, printed = run_doctor(
        "--json", "--causal", "--shape", "1", "4", "100", "80", "--heads-kv", "2", cwd=tmp_path
    )  # fmt: skip
    found = json.loads(printed)
    assert set(found) == {"facts", "request", "plan", "self_test", "to_do"}
    sizes = dict(batch=1, heads=4, heads_kv=2, seqlen=100, head_dim=80)
    assert found["request"] == sizes | dict(dtype=found["request"]["dtype"], causal=True)
    assert status == 1
    assert found["to_do"][0] == f"Rename {tmp_path / 'triton.py'}: Python imports it in place of Triton."
    assert not any("Install Triton" in sentence for sentence in found["to_do"])
    assert [test["case"] for test in found["self_test"]][0] == f"{found['request']['dtype']}-D80-257x300-h2/1-causal"
    assert all(test["error"] is None and 0 < test["ratio"] <= 1 for test in found["self_test"])


@pytest.mark.triton
def test_interpreter_switched_on_too_late():
    script = (
        "import os, sys; from flashattn import doctor; doctor.facts(); print('triton' in sys.modules);"
        "import triton; os.environ['TRITON_INTERPRET'] = '1'; found = doctor.facts();"
        "print(found['interpret_set'], found['interpreted'])"
    )
    assert python("-c", script).splitlines() == ["False", "True False"]


@pytest.mark.triton
def test_facts_here():
    found = doctor.facts()
    assert found.keys() == ON_GPU.keys()
    assert json.loads(json.dumps(found)) == found
    import triton

    assert found["triton"] == triton.__version__
    assert found["interpret_set"] == found["interpreted"] == (not HAS_GPU)


@pytest.mark.parametrize(
    "base, changes, expected",
    [
        (ON_GPU, {}, []),
        (ON_CPU, {}, []),
        (ON_GPU, dict(torch="2.5.1+cu124"), ["Upgrade torch, 2.5.1+cu124 is too old: pip install --upgrade 'torch>=2.6'"]),
        (ON_GPU, dict(torch="2.6.0", triton="3.2.0", triton_of_torch="3.2.0"), ["Upgrade torch, its Triton (3.2.0) is too old: pip install --upgrade 'torch>=2.8'"]),
        (ON_GPU, dict(torch="2.6.0", triton="3.4.0", triton_of_torch="3.2.0"), ["Upgrade torch, its Triton (3.2.0) is too old: pip install --upgrade 'torch>=2.8'"]),
        (ON_CPU, dict(triton="3.3.1"), ["Upgrade Triton, 3.3.1 is too old: pip install 'triton>=3.4'"]),
        (ON_GPU, dict(triton="3.3.1"), ["Upgrade Triton, 3.3.1 is too old: pip install 'triton==3.6.0'"]),
        (ON_GPU, dict(triton="3.7.1"), ["Install the Triton that torch was built with, 3.6.0 and not 3.7.1: pip install 'triton==3.6.0'"]),
        (ON_GPU, dict(triton="3.6.0+git12ab", triton_of_torch="3.6.0+git12ab34"), []),
        (ON_GPU, dict(triton="unknown", triton_of_torch=None), []),
        (ON_GPU, dict(triton=None), ["Install Triton: pip install 'triton==3.6.0'"]),
        (ON_CPU, dict(triton=None), ["Install Triton: pip install 'triton>=3.4'"]),
        (ON_CPU, dict(triton=None, system="Darwin"), []),
        (ON_CPU, dict(triton=None, system="Windows"), []),
        (ON_CPU, dict(triton=None, triton_file="/tmp/triton.py"), ["Rename /tmp/triton.py: Python imports it in place of Triton."]),
        (ON_GPU, dict(interpret_set=True, interpreted=True), ["Unset TRITON_INTERPRET and restart Python: it makes kernels run on the CPU, not on the GPU."]),
        (ON_GPU, dict(interpreted=True), ["Unset TRITON_INTERPRET and restart Python: it makes kernels run on the CPU, not on the GPU."]),
        (ON_GPU, dict(interpret_set=True), ["Unset TRITON_INTERPRET and restart Python: it makes kernels run on the CPU, not on the GPU."]),
        (ON_GPU, dict(c_compiler=None), ["Install gcc, or set CC to a C compiler: Triton compiles with it what launches a kernel."]),
        (ON_GPU, dict(c_compiler=None, system="Windows"), []),
        (ON_GPU, dict(python_headers=False), ["Install the header files of Python (package python3-dev or python3-devel) for Triton."]),
        (ON_GPU, dict(gpu=T4), []),
        (ON_CPU, dict(nvidia_gpu=True), ["Install torch for CUDA, this one is for CPUs: see https://pytorch.org/get-started/locally"]),
        (ON_CPU, dict(nvidia_gpu=None), []),
        (NO_DRIVER, {}, ["Install the NVIDIA driver; in a container, start it with the GPU (docker run --gpus all)."]),
        (NO_DRIVER, dict(nvidia_gpu=None), ["Install the NVIDIA driver; in a container, start it with the GPU (docker run --gpus all)."]),
        (NO_DRIVER, dict(nvidia_gpu=False), []),
        (NO_DRIVER, dict(driver="535.54", gpu_error="The NVIDIA driver on your system is too old"), ["Update the NVIDIA driver, 535.54, to one for CUDA 13.0, and restart."]),
        (NO_DRIVER, dict(driver="580.1", gpu_error="No CUDA GPUs are available", cuda_visible_devices=""), ["Unset CUDA_VISIBLE_DEVICES (''): it hides the GPU from torch."]),
        (NO_DRIVER, dict(driver="535.54", gpu_error="The NVIDIA driver on your system is too old", cuda_visible_devices="0"), ["Update the NVIDIA driver, 535.54, to one for CUDA 13.0, and restart."]),
        (ON_CPU, dict(interpret_set=True, interpreted=True), []),
        (ON_CPU, dict(interpret_set=True), ["Restart Python and set TRITON_INTERPRET=1 before anything imports Triton: it was set too late."]),
        (ON_CPU, dict(numpy=None), ["Install NumPy, which the interpreter of Triton needs: pip install numpy"]),
        (ON_CPU, dict(numpy=None, triton=None, system="Darwin"), []),
        (ON_CPU, dict(triton="3.4.0"), ["Install an older NumPy for the interpreter of Triton 3.4.0: pip install 'numpy<2.4'"]),
        (ON_CPU, dict(triton="3.5.1"), ["Install an older NumPy for the interpreter of Triton 3.5.1: pip install 'numpy<2.4'"]),
        (ON_CPU, dict(triton="3.5.1", numpy="2.3.5"), []),
        (ON_CPU, dict(triton="3.6.0"), ["Install an older NumPy for the interpreter of Triton 3.6.0: pip install 'numpy<2.4'"]),
        (ON_CPU, dict(triton="3.7.0"), []),
        (ON_GPU, dict(triton="3.5.1", triton_of_torch="3.5.1", numpy="2.4.0"), []),
    ],
)  # fmt: skip
def test_advice(base, changes, expected):
    assert changes.keys() <= base.keys()
    assert doctor.advice(base | changes) == expected


def test_advice_on_bf16():
    facts = ON_GPU | dict(gpu=T4)
    assert doctor.advice(facts, "bf16") == ["Use fp16 or fp32: compute capability 7.5 has no bf16."]
    assert doctor.advice(facts, "fp16") == doctor.advice(ON_GPU, "bf16") == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_plan(name, dtype, causal):
    target = TARGETS[name]
    rows = doctor.plan(2, 8, 4, 1000, 80, dtype, causal, target)
    assert [row["kernel"] for row in rows] == KERNELS
    for row in rows:
        config = block_config(row["kernel"], 80, 80, DTYPES[dtype], target, causal=causal)
        assert {name: row[name] for name in config._fields} == config._asdict()
        heads, block = (4, config.block_n) if row["kernel"] == "dkdv" else (8, config.block_m)
        assert row["programs"] == 2 * heads * len(range(0, 1000, block))
        assert f"{target.shared_bytes // 1024} KiB of shared memory" in row["why"]
        on_matrix_units = dtype != "fp32" and target.matrix_units != "none"
        assert (f"matrix units ({target.matrix_units})" in row["why"]) == on_matrix_units
        assert ("multiply fp32 in full" in row["why"]) == (dtype == "fp32")
        assert (f"no matrix units are used on {name}" in row["why"]) == (dtype != "fp32" and name == "sm_75")


def test_plan_elsewhere():
    small = doctor.plan(1, 1, 1, 64, 64, "fp16", False, Target("sm_99", "mma", 49152))
    assert all("little room, 48 KiB" in row["why"] for row in small)
    assert all("interpreter" in row["why"] for row in doctor.plan(1, 1, 1, 64, 64, "fp16", False, INTERPRETER))


@pytest.mark.triton
def test_plan_is_what_runs(device, monkeypatch):
    launches = record_launches(monkeypatch)
    q = torch.randn(1, 4, 70, 16, device=device, dtype=torch.float16, requires_grad=True)
    k = torch.randn(1, 2, 70, 16, device=device, dtype=torch.float16)
    flash_attention(q, k.requires_grad_(), k.detach(), causal=True).sum().backward()
    planned = doctor.plan(1, 4, 2, 70, 16, "fp16", True, target_of(q.device))
    names = ("programs", "block_m", "block_n", "num_warps", "num_stages")
    planned = [[row[name] for name in names] for row in planned]
    fields = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    assert [[grid[0], *map(options.get, fields)] for grid, options in launches] == planned


def test_text_on_a_gpu(monkeypatch, capsys):
    blocks = dict(forward=(64, 128, 4, 2), dq=(128, 64, 8, 3), dkdv=(32, 64, 4, 3))

    def block_config(kernel, *_, **__):
        block_m, block_n, *schedule = blocks[kernel]
        return BlockConfig(block_m, block_n, 64, 64, *schedule)

    monkeypatch.setattr(doctor, "block_config", block_config)
    monkeypatch.setattr(doctor, "facts", lambda: ON_GPU)
    monkeypatch.setattr(doctor, "self_test", lambda *_: RIGHT)
    assert doctor.main([]) == 0
    expected = """flashattn.doctor
  flashattn     0.1.0
  Python        3.12.0, Linux x86_64
  torch         2.11.0+cu130, built for CUDA 13.0
  Triton        3.6.0
  pair          torch and Triton are a pair
  NumPy         2.3.5
  GPU           NVIDIA H200 (GPUs in all: 1)
  capability    9.0
  shared memory 227 KiB a block, on sm_90
  driver        580.95.05
  C compiler    /usr/bin/gcc, Python.h found
  interpreter   off (TRITON_INTERPRET is not set)
What would run: batch 2, heads 8, heads_kv 8, seqlen 1024, head_dim 64, dtype bf16, causal False
  call          flash_attention runs the kernels on the GPU
  forward       64 queries x 128 keys  warps 4, stages 2, programs 256
  dq            128 queries x 64 keys  warps 8, stages 3, programs 128
  dkdv          32 queries x 64 keys   warps 4, stages 3, programs 256
  why           blocks for the matrix units (wgmma) that fit 227 KiB of shared memory
Self-test: the kernels on the GPU
  a                             0.50 of the error budget, 1.2 s
To do
  nothing
"""
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "base, changes, line",
    [
        (ON_GPU, dict(triton="3.7.1"), "  pair          not a pair: torch requires Triton 3.6.0"),
        (ON_GPU, dict(triton=None), "  pair          not a pair: torch requires Triton 3.6.0"),
        (ON_GPU, dict(triton_of_torch=None), "  pair          torch does not say which Triton it goes with (builds for CPUs do not)"),
        (ON_GPU, dict(triton=None, triton_file="/tmp/triton.py"), "  Triton        hidden by /tmp/triton.py"),
        (ON_GPU, dict(triton=None), "  call          flash_attention raises ImportError; attention_tiled and attention_reference run"),
        (ON_GPU, dict(gpu=T4 | {"target": None}), "  shared memory this torch does not tell, and flash_attention raises AttributeError"),
        (ON_CPU, dict(gpu_error="No CUDA GPUs are available"), "  GPU           none (No CUDA GPUs are available)"),
        (ON_GPU, dict(c_compiler=None, python_headers=False), "  C compiler    none, Python.h not found"),
        (ON_GPU, dict(driver=None, numpy=None), "  driver        none that nvidia-smi knows of"),
        (ON_GPU, dict(numpy=None), "  NumPy         not installed"),
        (ON_CPU, dict(interpret_set=True), "  interpreter   off (TRITON_INTERPRET is set)"),
        (ON_CPU, dict(interpret_set=True, interpreted=True), "  call          flash_attention runs the kernels on the CPU, in the interpreter"),
        (ON_CPU, dict(interpret_set=True, interpreted=True), "Self-test: the kernels in Triton's interpreter"),
        (ON_CPU, {}, "Self-test: the kernels in Triton's interpreter, switched on for this test only"),
        (ON_GPU, dict(interpreted=True), "  interpreter   on (TRITON_INTERPRET is not set)"),
    ],
)  # fmt: skip
def test_lines(monkeypatch, base, changes, line):
    monkeypatch.setattr(doctor, "facts", lambda: base | changes)
    monkeypatch.setattr(doctor, "self_test", lambda *_: RIGHT)
    assert line in doctor.as_text(doctor.report()).splitlines()


def test_default_dtype_where_bf16_does_not_exist(monkeypatch):
    monkeypatch.setattr(doctor, "facts", lambda: ON_GPU | dict(gpu=T4))
    monkeypatch.setattr(doctor, "self_test", lambda *_: RIGHT)
    found = doctor.report()
    assert found["request"]["dtype"] == "fp16" and found["to_do"] == []
    found = doctor.report(dtype="bf16")
    assert found["to_do"] == ["Use fp16 or fp32: compute capability 7.5 has no bf16."]
    assert "flash_attention raises NotImplementedError: no bf16 on this GPU" in doctor.as_text(found)


def test_failed_self_test_is_something_to_do(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", lambda *_: WRONG)
    monkeypatch.setattr(doctor, "facts", lambda: ON_CPU)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    sentence = "Report the error of the self-test as a bug, with this text: nothing that is missing explains it."
    assert "\n  a                             AssertionError: a: error over budget\n" in printed
    assert printed.endswith(f"\nTo do\n  {sentence}\n")
    monkeypatch.setattr(doctor, "facts", lambda: ON_CPU | dict(numpy=None))
    assert doctor.report()["to_do"] == ["Install NumPy, which the interpreter of Triton needs: pip install numpy"]


def test_self_test_sees_a_wrong_result(monkeypatch, capsys):
    def wrong(q, k, v, **kwargs):
        out, lse = right(q, k, v, **kwargs)
        return out * 1.1, lse

    right = doctor.attention_tiled
    cases = json.dumps([Case(20, 40, 16), Case(20, 40, 32, "fp32")])
    doctor._run_cases("tiled", cases)
    monkeypatch.setattr(doctor, "attention_tiled", wrong)
    doctor._run_cases("tiled", cases)
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["case"] for result in results] == ["fp16-D16-20x40-h4/2", "fp32-D32-20x40-h4/2"] * 2
    assert all(result["error"] is None and result["ratio"] <= 1 for result in results[:2])
    for result in results[2:]:
        assert result["ratio"] is None
        assert result["error"].startswith(f"AssertionError: {result['case']}: error over budget")


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script")
def test_self_test_survives_a_crash_and_a_hang(monkeypatch, tmp_path):
    first = json.dumps(dict(case="first", seconds=1.0, ratio=0.5, error=None))
    crash = executable(tmp_path / "crash", f"echo noise; echo '{first}'; echo why >&2; exit 3")
    monkeypatch.setattr(sys, "executable", crash)
    facts = ON_GPU | dict(gpu=T4)
    done, lost = doctor.self_test(facts)
    assert done["case"] == "first" and done["error"] is None
    assert lost == dict(case="fp32-D64-257x300-h2/1-causal", seconds=None, ratio=None, error="exit status 3 why")
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "hang", "exec sleep 60"))
    monkeypatch.setattr(doctor, "SELF_TEST_LIMIT_S", 0.2)
    results = doctor.self_test(ON_GPU, 128, "bf16", True)
    assert [result["case"] for result in results] == [
        "bf16-D128-257x300-h2/1-causal", "fp16-D64-257x300-h2/1", "fp32-D64-257x300-h2/1"
    ]  # fmt: skip
    assert all(result["error"] == "not finished within 0.2 s" for result in results)
    results = doctor.self_test(facts, 128, "bf16", True)
    assert [result["case"] for result in results] == ["fp16-D64-257x300-h2/1", "fp32-D64-257x300-h2/1"]


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script")
@pytest.mark.parametrize(
    "facts, place, interpret",
    [
        (ON_GPU, "GPU", "0"),
        (ON_CPU, "interpreter", "1"),
        (ON_GPU | dict(interpret_set=True, interpreted=True), "interpreter", "1"),
        (ON_GPU | dict(triton=None), "tiled", "0"),
    ],
)
def test_where_the_self_test_runs(monkeypatch, tmp_path, facts, place, interpret):
    monkeypatch.setenv("TRITON_INTERPRET", "as it was")
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "say", 'echo "$3 $TRITON_INTERPRET" >&2; exit 1'))
    assert doctor.self_test(facts)[0]["error"] == f"exit status 1 {place} {interpret}"
    assert os.environ["TRITON_INTERPRET"] == "as it was"


@pytest.mark.parametrize(
    "system, requirements, expected",
    [
        ("Linux", ["filelock", 'triton==3.6.0; platform_system == "Linux"'], "3.6.0"),
        ("Linux", ['pytorch-triton-rocm==3.4.0; platform_system == "Linux"'], "3.4.0"),
        ("Linux", ['triton==3.2.0; platform_system == "Linux" and platform_machine == "x86_64"'], "3.2.0"),
        ("Linux", ['triton==3.2.0; platform_system == "Linux" and platform_machine == "riscv64"'], None),
        ("Darwin", ['triton==3.6.0; platform_system == "Linux"'], None),
        ("Linux", ["filelock", "not-triton==1.0"], None),
        ("Linux", None, None),
    ],
)
def test_triton_that_torch_names(monkeypatch, system, requirements, expected):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("importlib.metadata.requires", lambda name: {"torch": requirements}[name])
    assert doctor._triton_of_torch() == expected


def test_triton_is_found_without_importing_it(monkeypatch, tmp_path):
    source = tmp_path / "__init__.py"
    found = {
        "package": SimpleNamespace(origin=str(source), submodule_search_locations=[str(tmp_path)]),
        "file": SimpleNamespace(origin="/here/triton.py", submodule_search_locations=None),
        "folder": SimpleNamespace(origin=None, submodule_search_locations=[str(tmp_path)]),
        "nothing": None,
    }
    expected = {"package": ("3.5.0+git1", None), "file": (None, "/here/triton.py")}
    source.write_text('"""A package."""\n__version__ = "3.5.0+git1"\n')
    for name, spec in found.items():
        monkeypatch.setattr("importlib.util.find_spec", lambda _, spec=spec: spec)
        assert doctor._triton() == expected.get(name, (None, None)), name
    source.write_text("")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found["package"])
    assert doctor._triton() == ("unknown", None)


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script")
def test_driver_and_gpu_on_the_bus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "PCI_DEVICES", tmp_path / "bus")
    assert doctor._nvidia() == (None, None)
    for i, (vendor, kind) in enumerate([("0x8086", "0x030000"), ("0x10de", "0x040300")]):
        (tmp_path / "bus" / str(i)).mkdir(parents=True)
        (tmp_path / "bus" / str(i) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "bus" / str(i) / "class").write_text(f"{kind}\n")
    assert doctor._nvidia() == (None, False)  # graphics of another maker, and NVIDIA's sound
    (tmp_path / "bus" / "1" / "class").write_text("0x030200\n")
    assert doctor._nvidia() == (None, True)
    executable(tmp_path / "nvidia-smi", "echo no devices were found; exit 6")
    assert doctor._nvidia() == (None, True)
    executable(tmp_path / "nvidia-smi", "echo 580.95.05; echo 580.95.05")
    assert doctor._nvidia() == ("580.95.05", True)


@pytest.mark.parametrize("capability, name, bf16", [((7, 5), "sm_75", False), ((8, 0), "sm_80", True)])
def test_gpu(monkeypatch, capability, name, bf16):
    answers = dict(is_available=True, current_device=0, device_count=2, get_device_name="A")
    answers["get_device_capability"] = capability
    for function, answer in answers.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "target_of", lambda device: TARGETS[name])
    text = "{}.{}".format(*capability)
    expected = dict(name="A", count=2, capability=text, bf16=bf16, target=TARGETS[name]._asdict())
    assert doctor._gpu() == (expected, None)

    def torch_2_6(device):
        raise AttributeError("no attribute 'shared_memory_per_block_optin'")

    monkeypatch.setattr(doctor, "target_of", torch_2_6)
    assert doctor._gpu() == (expected | {"target": None}, None)


@pytest.mark.parametrize(
    "arguments",
    [["--shape", "2", "8", "64", "257"], ["--shape", "0", "8", "64", "64"], ["--heads-kv", "3"], ["--heads-kv", "0"]],
)
def test_bad_sizes(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(arguments)
    assert stopped.value.code == 2
    assert "sizes must be 1 or more, HEAD_DIM at most 256, HEADS a multiple" in capsys.readouterr().err
