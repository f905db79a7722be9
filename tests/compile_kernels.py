"""Compile the kernels for a GPU that is not here, and read what the compiler allocated.

Run in a process of its own: one that interprets kernels cannot compile them.

    python tests/compile_kernels.py '[["forward", 64, "float16", true, 90], ...]'

prints one JSON row per entry: shared memory, registers, spills, tensor-core instructions.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashattn import backward, forward
from flashattn.configs import SHARED_BYTES, Target, block_config

KERNELS = {
    "forward": forward._attn_fwd_kernel,
    "delta": backward._attn_bwd_delta_kernel,
    "dkdv": backward._attn_bwd_dkdv_kernel,
    "dq": backward._attn_bwd_dq_kernel,
}
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def signature_of(kernel, dtype, constants):
    """Name the type of each argument; pointers and strides as a contiguous call with even sizes would have them."""
    types, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = "*fp32" if name.startswith(("lse", "delta", "dlse")) else f"*{TRITON_TYPES[dtype]}"
            hints[(i,)] = [["tt.divisibility", 16]]
        elif name.startswith("scale"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name.startswith("stride"):
                hints[(i,)] = [["tt.divisibility", 16]]
    return types, hints


def compile_kernel(direction, head_dim, dtype, causal, arch, config=None):
    """Compile one kernel in one configuration and return a dict of what it uses."""
    kernel = KERNELS[direction]
    config = config or block_config(
        direction, head_dim, getattr(torch, dtype), Target(arch, SHARED_BYTES[arch]), causal=causal
    )
    constants = dict(
        HEAD_DIM=head_dim, IS_CAUSAL=causal, HAS_DLSE=True, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=config.block_d,
    )  # fmt: skip
    # A unit stride arrives as the constant 1, as in a launch.
    constants |= dict.fromkeys(("stride_qd", "stride_kd", "stride_vd", "stride_od", "stride_dod"), 1)
    constants |= dict.fromkeys(("stride_dkd", "stride_dvd", "stride_dqd", "stride_dlm"), 1)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, hints = signature_of(kernel, dtype, constants)
    source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, hints)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    report = ptxas_report(compiled.asm["ptx"])
    row = dict(direction=direction, head_dim=head_dim, dtype=dtype, causal=causal, arch=arch, **config._asdict())
    return row | dict(shared_bytes=compiled.metadata.shared, **report)


def ptxas_report(ptx):
    """Assemble PTX with the ptxas that Triton ships and return registers, spills and tensor-core use."""
    ptxas = (
        triton.knobs.nvidia.ptxas_blackwell if re.search(r"\.target sm_1[0-9]{2}", ptx) else triton.knobs.nvidia.ptxas
    )
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
    )


if __name__ == "__main__":
    for entry in json.loads(sys.argv[1]):
        print(json.dumps(compile_kernel(*entry)), flush=True)
