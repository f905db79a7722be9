"""Compile the kernels for a GPU that is not here, and read what the compiler allocated.

Run in a process of its own: one that interprets kernels cannot compile them.

    python tests/compile_kernels.py '[["forward", 64, "float16", true, "sm_90"], ...]'

prints one JSON row per entry: shared memory, registers, spills, tensor-core instructions. An entry may end in a list of
extras: "window", "softcap", "bias", "varlen", "dlse", or "rows" for tiles that are not loaded as boxes.

    python tests/compile_kernels.py --table [FILE]

compiles every kernel for every target and writes flashattn/data/targets.csv, or FILE: the rows of the installed triton.

    python tests/compile_kernels.py --sweep [FILE]

compiles the forward kernel with many block sizes, warps and stages, and writes flashattn/data/blocks.csv, or FILE.
"""

import concurrent.futures
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashattn import backward, configs, forward
from flashattn.configs import TARGETS, BlockConfig, block_config
from flashattn.primitives import SIZES

KERNELS = {
    "forward": forward._attn_fwd_kernel,
    "dq": backward._attn_bwd_dq_kernel,
    "dkdv": backward._attn_bwd_dkdv_kernel,
}
TABLE = Path(configs.__file__).parent / "data" / "targets.csv"
OLD = triton.__version__ < "3.6"  # the linker for AMD comes with Triton from 3.6 on
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def signature_of(kernel, dtype, constants):
    """Name the type of each argument; pointers and strides as a contiguous call with even sizes would have them."""
    types, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            pointee = TRITON_TYPES[dtype]
            if name.startswith(("lse", "delta", "dlse")):
                pointee = "fp32"
            elif name.startswith("cu_seqlens"):
                pointee = "i32"
            types[name] = "*" + pointee
            hints[(i,)] = [["tt.divisibility", 16]]
        elif name.endswith("_desc"):
            rows = constants["BLOCK_M" if "do_desc" in kernel.arg_names else "BLOCK_N"]
            columns = {"q_desc": ["BLOCK_D"], "k_desc": ["BLOCK_D"], "v_desc": ["BLOCK_DV"], "do_desc": ["BLOCK_DV"]}
            box = [1, 1, rows, *(constants[size] for size in columns.get(name, []))]
            types[name] = f"tensordesc<{TRITON_TYPES[dtype] if name in columns else 'fp32'}{box}>"
        elif name in ("scale", "score_scale", "cap_log2"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name not in SIZES:
                hints[(i,)] = [["tt.divisibility", 16]]
    return types, hints


def absent_arguments(kernel, causal, extras, boxes, dtype):
    """Return the arguments that a call leaves out: they are None, and the compiler drops their code."""
    absent = set() if boxes else {name for name in kernel.arg_names if name.endswith("_desc")}
    if not causal:
        absent.add("window_right")
    if "window" not in extras:
        absent.add("window_left")
    if "softcap" not in extras:
        absent.add("cap_log2")
    if "bias" not in extras:
        absent.add("bias_ptr")
        if dtype != "float32":
            absent.add("lse_low_ptr")
    if "varlen" not in extras:
        absent |= {"cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "n_sequences"}
    if "dlse" not in extras:
        absent.add("dlse_ptr")
    return absent


def compile_kernel(direction, head_dim, dtype, causal, target, extras=(), config=None):
    """Compile one kernel in one configuration and return a dict of what it uses."""
    kernel = KERNELS[direction]
    boxes = TARGETS[target].has_boxes and dtype != "float32" and not {"rows", "varlen", "bias"} & set(extras)
    config = config or block_config(
        direction, head_dim, head_dim, getattr(torch, dtype), TARGETS[target], causal=causal
    )
    constants = dict(
        HEAD_DIM=head_dim, HEAD_DIM_V=head_dim, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=config.block_d, BLOCK_DV=config.block_dv,
    )  # fmt: skip
    constants |= dict.fromkeys(absent_arguments(kernel, causal, extras, boxes, dtype))
    # A unit stride arrives as the constant 1, as in a launch.
    constants |= {name: 1 for name in kernel.arg_names if name.startswith("stride") and name.endswith("d")}
    constants |= {"stride_bias_n": 1}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, hints = signature_of(kernel, dtype, constants)
    compiled = compile_for(target, kernel, types, hints, constants, config.launch())
    row = dict(target=target, triton=triton.__version__, direction=direction, head_dim=head_dim, dtype=dtype)
    row |= dict(causal=causal, extras="+".join(extras), **config._asdict(), shared_bytes=compiled.metadata.shared)
    return row | (ptxas_report(compiled.asm["ptx"]) if "ptx" in compiled.asm else amd_report(compiled.asm["amdgcn"]))


def compile_for(target, kernel, types, hints, constants, launch):
    """Compile a kernel for a target: types and hints as ``signature_of`` returns them, constants by name.

    launch: what a configuration's ``launch()`` returns, and other options; constexprs in it are among the constants.
    """
    source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, hints)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    options = {name: x for name, x in launch.items() if not name.startswith("BLOCK")}
    return triton.compile(source, target=gpu, options=options)


def amd_report(assembly):
    """Read vector registers, spills and matrix-core use from AMD's assembly."""
    return dict(
        registers=int(re.search(r"\.vgpr_count:\s+(\d+)", assembly).group(1)),
        spill_stores_bytes=4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly).group(1)),
        tensor_cores="v_mfma" in assembly,
        serialized=False,
    )


def ptxas_report(ptx):
    """Assemble PTX with the ptxas that Triton ships and return registers, spills and how it uses the tensor cores."""
    ptxas = triton.knobs.nvidia.ptxas
    if re.search(r"\.target sm_1[0-9]{2}", ptx):  # Triton 3.5 and newer ship a second one for Blackwell
        ptxas = getattr(triton.knobs.nvidia, "ptxas_blackwell", ptxas)
    arch = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas.path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return dict(
        registers=int(re.search(r"Used (\d+) registers", log).group(1)),
        spill_stores_bytes=int(re.search(r"(\d+) bytes spill stores", log).group(1)),
        tensor_cores=bool(re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", ptx)),
        serialized="wgmma.mma_async instructions are serialized" in log,  # each product waits for the one before
    )


def _compile_entry(entry):
    return compile_kernel(*entry)


def product(dtypes=("float16", "bfloat16", "float32")):
    """Return the entries of the full product: every kernel for every target."""
    return [
        [direction, head_dim, dtype, causal, target, extras]
        for target in TARGETS
        for dtype in dtypes
        if not (target == "sm_75" and dtype == "bfloat16") and not (target == "gfx942" and OLD)
        for head_dim in (64, 128, 256)
        for direction in KERNELS
        for causal in (False, True)
        for extras in ([[], ["rows"]] if TARGETS[target].has_boxes and dtype != "float32" else [[]])
    ]


def sweep():
    """Return the entries of the sweep over blocks, warps and stages: the forward kernel in half precision, causal."""
    return [
        [
            "forward",
            head_dim,
            "float16",
            True,
            target,
            [],
            BlockConfig(*blocks, head_dim, head_dim, warps, stages),
        ]
        for target in ("sm_80", "sm_89", "sm_90", "sm_120")
        for head_dim in (64, 128)
        for blocks in ((32, 32), (64, 32), (64, 64), (128, 64), (128, 128))
        for warps in (4, 8)
        for stages in (1, 2, 3, 4)
    ]


def update_table(rows, path):
    """Write rows into a table in place of the ones there of the same triton version."""
    kept = []
    if path.exists():
        with open(path, newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["triton"] != triton.__version__]
    kept += [{name: str(value) for name, value in row.items()} for row in rows]
    kept.sort(key=lambda row: (row["triton"], list(TARGETS).index(row["target"])))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(kept[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)


if __name__ == "__main__":
    if sys.argv[1] in ("--table", "--sweep"):
        entries, path = (product(), TABLE) if sys.argv[1] == "--table" else (sweep(), TABLE.with_name("blocks.csv"))
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
            done = []
            for row in pool.map(_compile_entry, entries):
                done.append(row)
                print(f"\r{len(done)} of {len(entries)} kernels compiled", end="", flush=True)
        path = Path(sys.argv[2]) if len(sys.argv) > 2 else path
        update_table(done, path)
        print(f"\n{path} written for triton {triton.__version__}")
    else:
        for entry in json.loads(sys.argv[1]):
            print(json.dumps(compile_kernel(*entry)), flush=True)
