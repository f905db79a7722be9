"""Compile the kernels for Hopper without a GPU, and read what the compiler allocated: see compile_kernels.py.

    python tests/compile_hopper.py '[["forward", 128, "bfloat16", true, []], ...]'

An entry: direction, head dimension, dtype, causal, extras: "window" for a left side, "short" for the forward kernel of
short sequences.

    python tests/compile_hopper.py --table [FILE]

compiles all of them and writes flashattn/data/hopper.csv, or FILE: the rows of the installed triton.
"""

import concurrent.futures
import json
import os
import sys
from pathlib import Path

import torch
import triton
from compile_kernels import TABLE, TRITON_TYPES, ptxas_report, update_table
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flashattn import hopper, hopper_backward
from flashattn.configs import hopper_backward_config, hopper_config


def compile_hopper(direction, head_dim, dtype, causal, extras=()):
    """Compile one kernel as a launch would, with even sizes and contiguous tensors; return a dict of what it uses."""
    kernel = hopper._hopper_fwd_kernel if direction == "forward" else hopper_backward._hopper_bwd_kernel
    if direction == "forward":
        cfg = hopper_config(head_dim, head_dim, 512 if "short" in extras else 4096, masked=causal or "window" in extras)
        boxes = hopper.boxes_of(cfg)
    else:
        cfg = hopper_backward_config(head_dim)
        boxes = hopper_backward.boxes_of(cfg)
    layouts = hopper.layouts_of(boxes, getattr(torch, dtype))
    constants = dict(HEAD_DIM_V=head_dim, DTYPE=hopper.GLUON_TYPES[getattr(torch, dtype)]) | cfg.launch()
    constants |= {} if causal else dict(window_right=None)
    constants |= {} if "window" in extras else dict(window_left=None)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_desc"):
            tensor = name.removesuffix("_desc")
            number = "fp32" if tensor in hopper.SINGLE else TRITON_TYPES[dtype]
            types[name] = f"tensordesc<{number}{list(boxes[tensor])},{layouts[tensor]!r}>"
        elif name.endswith("_ptr"):
            types[name] = "*" + TRITON_TYPES[dtype] if name == "out_ptr" else "*fp32"
            hints[(i,)] = [["tt.divisibility", 16]]
        elif name in ("factor", "power", "scale"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name.startswith("stride"):
                hints[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, hints)
    options = {name: x for name, x in cfg.launch().items() if not name.isupper()}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return dict(shared_bytes=compiled.metadata.shared, config=cfg._asdict()) | ptxas_report(compiled.asm["ptx"])


def product():
    """Return every entry: each kernel that a call can choose."""
    return [
        [direction, head_dim, dtype, causal, extras]
        for direction in ("forward", "backward")
        for head_dim in (64, 128)
        for dtype in ("float16", "bfloat16")
        for causal in (False, True)
        for extras in ([], ["window"], *([["short"]] if direction == "forward" else []))
    ]


def _row(entry):
    direction, head_dim, dtype, causal, extras = entry
    row = compile_hopper(*entry)
    what = dict(target="sm_90", triton=triton.__version__, direction=direction, head_dim=head_dim, dtype=dtype)
    what |= dict(causal=causal, extras="+".join(extras), config=json.dumps(row.pop("config")))
    return what | row


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        path = Path(sys.argv[2]) if len(sys.argv) > 2 else TABLE.with_name("hopper.csv")
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
            update_table(list(pool.map(_row, product())), path)
        print(f"{path} written for triton {triton.__version__}")
    else:
        for entry in json.loads(sys.argv[1]):
            print(json.dumps(compile_hopper(*entry)), flush=True)
