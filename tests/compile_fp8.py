"""Compile the 8-bit kernel for GPUs that are not here; see compile_kernels.py, which reads what comes out.

    python tests/compile_fp8.py '[["sm_90", 128, true, []], ...]'

prints one JSON row per entry: a target, a head dimension, whether causal, and extras: "rows" (no boxes), "blocks" (a
scale per block), "all" (window, softcap and blocks too).
"""

import json
import re
import sys

import triton
from compile_kernels import compile_for, ptxas_report

from flashattn import fp8_kernel
from flashattn.configs import TARGETS

E4M3 = ("q_ptr", "k_ptr", "vt_ptr")


def compile_fp8(target, head_dim, causal, extras=(), choice=None):
    """Compile the kernel once and return a dict of what it uses. choice: (launch, registers) in place of its own."""
    kernel = fp8_kernel._attn_fp8_kernel
    boxes = TARGETS[target].has_boxes and "rows" not in extras
    config, registers = choice or fp8_kernel.fp8_config(head_dim, head_dim, TARGETS[target], boxes)
    per_block = bool({"blocks", "all"} & set(extras))
    launch = config.launch()
    constants = {name: launch[name] for name in launch if name.startswith("BLOCK")}
    constants |= dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim, SCALE_BLOCK=fp8_kernel.SCALE_BLOCK)
    constants |= dict.fromkeys(("Q_PER_BLOCK", "K_PER_BLOCK", "V_PER_BLOCK"), per_block)
    constants |= dict.fromkeys(("stride_qd", "stride_kd", "stride_vn", "stride_od"), 1)
    constants |= {} if boxes else dict(k_desc=None, vt_desc=None)
    constants |= {} if causal else dict(window_right=None)
    constants |= {} if "all" in extras else dict(window_left=None, cap_log2=None)
    types, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = "*fp8e4nv" if name in E4M3 else "*bf16" if name == "out_ptr" else "*fp32"
            hints[(i,)] = [["tt.divisibility", 16]]
        elif name.endswith("_desc"):
            box = [config.block_n, config.block_d] if name == "k_desc" else [config.block_dv, config.block_n]
            types[name] = f"tensordesc<fp8e4nv{[1, 1, *box]}>"
        elif name in ("score_scale", "cap_log2"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name not in fp8_kernel.SIZES and not name.startswith(("stride_qs", "stride_ks", "stride_vs")):
                hints[(i,)] = [["tt.divisibility", 16]]
    launch |= dict(maxnreg=registers) if registers else {}
    compiled = compile_for(target, kernel, types, hints, constants, launch)
    ptx = compiled.asm["ptx"]
    return dict(
        target=target, triton=triton.__version__, head_dim=head_dim, causal=causal, extras="+".join(extras),
        **config._asdict(), max_registers=registers, shared_bytes=compiled.metadata.shared, **ptxas_report(ptx),
        products=sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*", ptx))),
    )  # fmt: skip


if __name__ == "__main__":
    for entry in json.loads(sys.argv[1]):
        print(json.dumps(compile_fp8(*entry)), flush=True)
