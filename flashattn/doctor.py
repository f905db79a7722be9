"""Say what this machine has, what would run on it and why, whether that is right, and what to do about what is missing.

``python -m flashattn.doctor`` prints it, to be read or pasted into a bug report. It works wherever the package can be
imported, also where Triton does not exist, and changes nothing: no setting, no environment variable.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from .api import MAX_HEAD_DIM, flash_attention
from .configs import INTERPRETER, TRIED_WITH, Target, block_config, target_of
from .testing import DTYPES, Case, assert_within_budget
from .tiled import attention_tiled

OLDEST_TORCH, OLDEST_TRITON = (2, 6), (3, 4)
SELF_TEST_LIMIT_S = 300
PCI_DEVICES = Path("/sys/bus/pci/devices")


def facts():
    """Read the machine; return a dict of plain values, None for what is not there or cannot be known."""
    triton, triton_file = _triton()
    gpu, gpu_error = _gpu()
    driver, nvidia_gpu = _nvidia()
    interpret_set = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    language = getattr(sys.modules.get("triton"), "language", None)
    # Settled when Triton was first imported, in which case it shows in what a jit function is.
    interpreted = interpret_set if language is None else type(language.sum).__name__ != "JITFunction"
    include = sysconfig.get_path("include", sysconfig.get_default_scheme().replace("posix_local", "posix_prefix"))
    return dict(
        flashattn=sys.modules[__package__].__version__, python=platform.python_version(),
        system=platform.system(), machine=platform.machine(), torch=torch.__version__,
        torch_build="CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU",
        torch_toolkit=torch.version.cuda or torch.version.hip,
        triton=triton, triton_file=triton_file, triton_of_torch=_triton_of_torch(),
        numpy=importlib.metadata.version("numpy") if importlib.util.find_spec("numpy") else None,
        gpu=gpu, gpu_error=gpu_error, nvidia_gpu=nvidia_gpu, driver=driver,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        # What Triton tries, in its order: it does not look for `cc`.
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        python_headers=Path(include, "Python.h").exists(),
        interpret_set=interpret_set, interpreted=interpreted,
    )  # fmt: skip


def _triton():
    """Return (version of Triton or None, the file that hides it or None), without importing it."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a folder of that name without __init__.py has no origin
        return None, None
    if spec.submodule_search_locations is None:
        return None, spec.origin
    # From its source: the distribution that brought it may be called triton, pytorch-triton, triton-windows, ...
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", Path(spec.origin).read_text(), re.MULTILINE)
    return (found[1] if found else "unknown"), None


def _triton_of_torch():
    """Return the version of Triton that torch was built with: GPU builds for Linux require it, others name none."""
    requirements = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires("torch") or []
    for line in requirements if platform.system() == "Linux" else []:
        found = re.match(r"(?:pytorch-)?triton(?:-\w+)?\s*==\s*([\w.+]+)", line)
        if found and ("platform_machine" not in line or platform.machine() in line):
            return found[1]
    return None


def _gpu():
    """Return (what the current GPU is, None), or (None, why torch sees none)."""
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:
            return None, str(error).splitlines()[0]
        return None, "torch sees none"
    index = torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    gpu = dict(
        name=torch.cuda.get_device_name(index), count=torch.cuda.device_count(), target=None,
        capability="{}.{}".format(*capability), bf16=torch.version.hip is not None or capability >= (8, 0),
    )  # fmt: skip
    with contextlib.suppress(AttributeError):  # torch 2.6 does not tell the shared memory
        gpu["target"] = target_of(torch.device("cuda", index))._asdict()
    return gpu, None


def _nvidia():
    """Return (version of the NVIDIA driver or None, whether an NVIDIA GPU is in the machine, None if unknown)."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return printed.split()[0], True
    with contextlib.suppress(OSError):
        kinds = [[(device / name).read_text() for name in ("vendor", "class")] for device in PCI_DEVICES.iterdir()]
        return None, any(vendor.startswith("0x10de") and kind.startswith("0x03") for vendor, kind in kinds)
    return None, None


def _version(text):
    """Return (major, minor); a version that nobody knows counts as new."""
    return tuple(map(int, re.findall(r"\d+", text)[:2])) or (99, 0)


def _is_pair(facts):
    """Say whether the Triton here is the one that torch requires; None where torch requires none."""
    of_torch = facts["triton_of_torch"]
    return of_torch and (facts["triton"] or "").split("+")[0] == of_torch.split("+")[0]


def advice(facts, dtype=None):
    """Return what to do: one sentence for each thing that is missing or in the way. A pure function.

    Args:
        facts: the dict that :func:`facts` returns.
        dtype: what is going to be used, "fp16", "bf16" or "fp32". Default None: nothing in particular.

    Returns:
        A list of strings, empty where all that the package offers on such a machine can work.
    """
    on_device = _advice_with_gpu(facts, dtype) if facts["gpu"] else _advice_without_gpu(facts)
    return [*_advice_on_packages(facts), *on_device]


def _advice_on_packages(facts):
    triton, of_torch = facts["triton"], facts["triton_of_torch"]
    install = f"pip install 'triton{f'=={of_torch}' if of_torch else '>=3.4'}'"
    if facts["triton_file"]:
        yield f"Rename {facts['triton_file']}: Python imports it in place of Triton."
    if _version(facts["torch"]) < OLDEST_TORCH:
        yield f"Upgrade torch, {facts['torch']} is too old: pip install --upgrade 'torch>=2.6'"
    elif of_torch and _version(of_torch) < OLDEST_TRITON:
        yield f"Upgrade torch, its Triton ({of_torch}) is too old: pip install --upgrade 'torch>=2.8'"
    elif triton is None:
        if facts["system"] == "Linux" and facts["triton_file"] is None:
            yield f"Install Triton: {install}"
    elif _version(triton) < OLDEST_TRITON:
        yield f"Upgrade Triton, {triton} is too old: {install}"
    elif _is_pair(facts) is False:
        yield f"Install the Triton that torch was built with, {of_torch} and not {triton}: {install}"


def _advice_with_gpu(facts, dtype):
    if facts["interpret_set"] or facts["interpreted"]:
        yield "Unset TRITON_INTERPRET and restart Python: it makes kernels run on the CPU, not on the GPU."
    elif facts["triton"] and facts["system"] == "Linux":
        if facts["c_compiler"] is None:
            yield "Install gcc, or set CC to a C compiler: Triton compiles with it what launches a kernel."
        if not facts["python_headers"]:
            yield "Install the header files of Python (package python3-dev or python3-devel) for Triton."
    if dtype == "bf16" and not facts["gpu"]["bf16"]:
        yield f"Use fp16 or fp32: compute capability {facts['gpu']['capability']} has no bf16."


def _advice_without_gpu(facts):
    triton = facts["triton"]
    if facts["nvidia_gpu"] and facts["torch_build"] == "CPU":
        yield "Install torch for CUDA, this one is for CPUs: see https://pytorch.org/get-started/locally"
    elif facts["nvidia_gpu"] is not False and facts["torch_build"] == "CUDA":
        if facts["driver"] is None:
            yield "Install the NVIDIA driver; in a container, start it with the GPU (docker run --gpus all)."
        elif "No CUDA GPUs" in facts["gpu_error"] and facts["cuda_visible_devices"] is not None:
            yield f"Unset CUDA_VISIBLE_DEVICES ({facts['cuda_visible_devices']!r}): it hides the GPU from torch."
        else:
            yield f"Update the NVIDIA driver, {facts['driver']}, to one for CUDA {facts['torch_toolkit']}, and restart."
    if facts["interpret_set"] and not facts["interpreted"]:
        yield "Restart Python and set TRITON_INTERPRET=1 before anything imports Triton: it was set too late."
    if triton and facts["numpy"] is None:
        yield "Install NumPy, which the interpreter of Triton needs: pip install numpy"
    elif triton and OLDEST_TRITON <= _version(triton) < (3, 7) and _version(facts["numpy"]) >= (2, 4):
        yield f"Install an older NumPy for the interpreter of Triton {triton}: pip install 'numpy<2.4'"


def plan(batch, heads, heads_kv, seqlen, head_dim, dtype, causal, target):
    """Return how each kernel would be launched, and why.

    Args:
        batch, heads, heads_kv, seqlen, head_dim: sizes of q, k and v.
        dtype: "fp16", "bf16" or "fp32".
        causal: True or False.
        target: a :class:`flashattn.configs.Target`.

    Returns:
        A list of dicts, one for each kernel in the order of launch: ``kernel``, the fields of
        :class:`flashattn.configs.BlockConfig`, ``programs`` (the size of the grid) and ``why``.
    """
    rows = []
    for kernel in ("forward", "dq", "dkdv"):
        cfg = block_config(kernel, head_dim, head_dim, DTYPES[dtype], target, causal=causal)
        n_heads, block = (heads_kv, cfg.block_n) if kernel == "dkdv" else (heads, cfg.block_m)
        programs = batch * n_heads * -(-seqlen // block)
        rows.append(dict(kernel=kernel, **cfg._asdict(), programs=programs, why=_why(kernel, dtype, target)))
    return rows


def _why(kernel, dtype, target):
    shared = f"{target.shared_bytes / 1024:g} KiB of shared memory"
    if target == INTERPRETER:
        return "the interpreter has no limits that blocks must fit; warps and stages mean nothing to it"
    if dtype == "fp32":
        return f"small blocks on the ordinary cores, which multiply fp32 in full ({shared})"
    if target.matrix_units == "none":
        return f"small blocks on the ordinary cores: no matrix units are used on {target.name} ({shared})"
    if target.shared_bytes < TRIED_WITH.get(target.matrix_units, 0):
        return f"small blocks on the matrix units ({target.matrix_units}): there is little room, {shared}"
    return f"blocks for the matrix units ({target.matrix_units}) that fit {shared}"


def _place(facts):
    """Return where the self-test runs: "GPU", "interpreter", or "tiled" where no kernel can run."""
    if facts["triton"] is None:
        return "tiled"
    return "GPU" if facts["gpu"] and not (facts["interpret_set"] or facts["interpreted"]) else "interpreter"


def self_test(facts, head_dim=64, dtype="fp16", causal=False):
    """Hold a few small cases to the error budget, in a process of its own: a crash there does not end this one.

    Args:
        facts: the dict that :func:`facts` returns. By it the kernels run on the GPU; without one in Triton's
            interpreter, which is switched on in that process only; without Triton the tiled PyTorch version runs alone.
        head_dim, dtype, causal: of the first case. The others have head_dim 64, the other dtypes and the other mask.

    Returns:
        A dict for each case: ``case``, ``seconds``, ``ratio`` (the worst error as a multiple of the budget: at most 1
        is right) and ``error`` (None if it is right).
    """
    place = _place(facts)
    seqlens = (20, 133) if place == "interpreter" else (257, 300)
    dtypes = [x for x in DTYPES if x != "bf16" or place != "GPU" or facts["gpu"]["bf16"]]
    cases = [Case(*seqlens, head_dim, dtype, causal, heads=2, heads_kv=1)] if dtype in dtypes else []
    cases += [Case(*seqlens, 64, other, not causal, heads=2, heads_kv=1) for other in dtypes if other != dtype]
    paths = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    # One thread: for tensors this small a second one only waits for its turn on a busy machine.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if place == "interpreter" else "0"
    code = "import sys; from flashattn.doctor import _run_cases; _run_cases(*sys.argv[1:])"
    command = [sys.executable, "-c", code, place, json.dumps(cases)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SELF_TEST_LIMIT_S)
        printed, end = done.stdout, " ".join([f"exit status {done.returncode}", *done.stderr.splitlines()[-1:]])
    except subprocess.TimeoutExpired as late:
        printed, end = (late.stdout or b"").decode(), f"not finished within {SELF_TEST_LIMIT_S} s"
    results = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    return results + [dict(case=case.id, seconds=None, ratio=None, error=end) for case in cases[len(results) :]]


def _run_cases(place, cases):
    """Print the result of each case as a line of JSON."""
    attention = attention_tiled if place == "tiled" else functools.partial(flash_attention, return_lse=True)
    device = "cuda" if place == "GPU" else "cpu"
    for fields in json.loads(cases):
        case, ratio, error, start = Case(*fields), None, None, time.perf_counter()
        try:
            ratio = max(assert_within_budget(attention, case, device, seed=1).values())
        except Exception as reason:
            error = " ".join([f"{type(reason).__name__}:", *str(reason).strip().splitlines()[:1]])
        print(json.dumps(dict(case=case.id, seconds=time.perf_counter() - start, ratio=ratio, error=error)), flush=True)


def report(batch=2, heads=8, seqlen=1024, head_dim=64, *, heads_kv=None, dtype=None, causal=False):
    """Examine this machine for one use; return a dict of facts, request, plan, self_test and to_do.

    Args:
        batch, heads, seqlen, head_dim, heads_kv: sizes of q, k and v. Default of heads_kv: heads.
        dtype: "fp16", "bf16" or "fp32". Default "bf16", or "fp16" where bf16 does not exist.
        causal: True or False.
    """
    found = facts()
    dtype = dtype or ("bf16" if found["gpu"] is None or found["gpu"]["bf16"] else "fp16")
    sizes = dict(batch=batch, heads=heads, heads_kv=heads_kv or heads, seqlen=seqlen, head_dim=head_dim)
    request = sizes | dict(dtype=dtype, causal=causal)
    place, rows = _place(found), []
    if place == "interpreter":
        rows = plan(**request, target=INTERPRETER)
    elif place == "GPU" and found["gpu"]["target"]:
        rows = plan(**request, target=Target(**found["gpu"]["target"]))
    tests, to_do = self_test(found, head_dim, dtype, causal), advice(found, dtype)
    if not to_do and any(test["error"] for test in tests):
        to_do = ["Report the error of the self-test as a bug, with this text: nothing that is missing explains it."]
    return dict(facts=found, request=request, plan=rows, self_test=tests, to_do=to_do)


def _describe(facts):
    """Yield (label, text) for each fact."""
    gpu, hidden = facts["gpu"], facts["triton_file"] and f"hidden by {facts['triton_file']}"
    pair = {True: "torch and Triton are a pair", False: f"not a pair: torch requires Triton {facts['triton_of_torch']}"}
    yield "flashattn", facts["flashattn"]
    yield "Python", f"{facts['python']}, {facts['system']} {facts['machine']}"
    yield "torch", f"{facts['torch']}, built for {facts['torch_build']} {facts['torch_toolkit'] or ''}".strip()
    yield "Triton", facts["triton"] or hidden or "not installed"
    yield "pair", pair.get(_is_pair(facts), "torch does not say which Triton it goes with (builds for CPUs do not)")
    yield "NumPy", facts["numpy"] or "not installed"
    yield "GPU", f"{gpu['name']} (GPUs in all: {gpu['count']})" if gpu else f"none ({facts['gpu_error']})"
    if gpu:
        yield "capability", gpu["capability"]
        shared = gpu["target"] and f"{gpu['target']['shared_bytes'] / 1024:g} KiB a block, on {gpu['target']['name']}"
        yield "shared memory", shared or "this torch does not tell, and flash_attention raises AttributeError"
    yield "driver", facts["driver"] or "none that nvidia-smi knows of"
    yield "C compiler", f"{facts['c_compiler'] or 'none'}, Python.h {'' if facts['python_headers'] else 'not '}found"
    variable = f"TRITON_INTERPRET is {'set' if facts['interpret_set'] else 'not set'}"
    yield "interpreter", f"{'on' if facts['interpreted'] else 'off'} ({variable})"


def _call(facts, dtype):
    """Say what a call of flash_attention does."""
    if facts["triton"] is None:
        return "flash_attention raises ImportError; attention_tiled and attention_reference run"
    if facts["gpu"] and dtype == "bf16" and not facts["gpu"]["bf16"]:
        return "flash_attention raises NotImplementedError: no bf16 on this GPU"
    if _place(facts) == "GPU":
        return "flash_attention runs the kernels on the GPU"
    if facts["interpreted"]:
        return "flash_attention runs the kernels on the CPU, in the interpreter"
    return "flash_attention raises RuntimeError; with TRITON_INTERPRET=1 set before Triton is imported it runs"


def as_text(report):
    """Return the dict of :func:`report` as lines to read."""
    found, request, rows = report["facts"], report["request"], report["plan"]
    own = "" if found["interpreted"] else ", switched on for this test only"
    places = {"GPU": "the kernels on the GPU", "interpreter": f"the kernels in Triton's interpreter{own}"}
    places["tiled"] = "attention_tiled, since no kernel can run here"
    lines = ["flashattn.doctor", *(f"  {label:<14}{text}" for label, text in _describe(found))]
    lines += ["What would run: " + ", ".join(f"{name} {value}" for name, value in request.items())]
    lines += [f"  {'call':<14}{_call(found, request['dtype'])}"]
    for row in rows:
        blocks = f"{row['block_m']} queries x {row['block_n']} keys"
        schedule = f"warps {row['num_warps']}, stages {row['num_stages']}, programs {row['programs']}"
        lines += [f"  {row['kernel']:<14}{blocks:<23}{schedule}"]
    lines += [f"  {'why':<14}{why}" for why in dict.fromkeys(row["why"] for row in rows)]
    lines += [f"Self-test: {places[_place(found)]}"]
    for test in report["self_test"]:
        outcome = test["error"] or f"{test['ratio']:.2f} of the error budget, {test['seconds']:.1f} s"
        lines += [f"  {test['case']:<30}{outcome}"]
    return "\n".join([*lines, "To do", *(f"  {sentence}" for sentence in report["to_do"] or ["nothing"])])


def main(arguments=None):
    """Say what is here, what would run, whether it is right, and what to do. Exit status 1 if there is something."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.doctor", description=main.__doc__)
    names = ("BATCH", "HEADS", "SEQLEN", "HEAD_DIM")
    parser.add_argument("--shape", type=int, nargs=4, metavar=names, default=(2, 8, 1024, 64), help="of q")
    parser.add_argument("--heads-kv", type=int, metavar="N", help="heads of k and v (default: those of q)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16, or fp16 where bf16 does not exist")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    heads_kv = options.shape[1] if options.heads_kv is None else options.heads_kv
    if min(*options.shape, heads_kv) < 1 or options.shape[1] % heads_kv or options.shape[3] > MAX_HEAD_DIM:
        parser.error(f"sizes must be 1 or more, HEAD_DIM at most {MAX_HEAD_DIM}, HEADS a multiple of the heads of k")
    found = report(*options.shape, heads_kv=heads_kv, dtype=options.dtype, causal=options.causal)
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 1 if found["to_do"] else 0


if __name__ == "__main__":
    sys.exit(main())
