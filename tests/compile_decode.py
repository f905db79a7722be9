"""Compile the decode kernel for a GPU that is not here; see compile_kernels.py, of which this is the counterpart.

    python tests/compile_decode.py '[["sm_90", "bf16", "fp8", 128, 64, 4, {}], ...]'

An entry is target, dtype of q, dtype of the pages, head_dim, page_size, rows (query heads of a key head times tokens),
and a dict of extras: "window", "softcap", and "merged", false for a call that is not split.
"""

import json
import re
import sys

from compile_kernels import compile_for, ptxas_report

from flashattn import decode_kernels
from flashattn.configs import TARGETS

TYPES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "fp8": "fp8e4nv"}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp8": 1}
OF_Q = ("q_ptr", "out_ptr")
INTEGERS = ("page_table_ptr", "seqlens_ptr")


def compile_decode(target, q, pages, head_dim, page_size, rows, extras, config=None):
    """Compile ``_decode_kernel`` as a call with contiguous tensors would; return what it uses."""
    kernel = decode_kernels._decode_kernel
    choose = decode_kernels.decode_config
    config = config or choose(rows, head_dim, head_dim, BYTES[q], BYTES[pages], TARGETS[target])
    launch = config.launch()
    constants = {name: x for name, x in launch.items() if name.startswith("BLOCK")}
    constants |= dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim, PAGE_SIZE=page_size)
    constants |= dict.fromkeys(("stride_qd", "stride_kd", "stride_vd", "stride_od", "stride_tp"), 1)
    constants |= {} if extras.get("window") else dict(window_left=None)
    constants |= {} if extras.get("softcap") else dict(cap_log2=None)
    constants |= {} if pages == "fp8" else dict(k_scale_ptr=None, v_scale_ptr=None)
    constants |= {} if extras.get("merged", True) else dict(parts_ptr=None)
    types, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            dtype = TYPES[q] if name in OF_Q else TYPES[pages] if "_pages" in name else "fp32"
            types[name] = "*" + ("i32" if name in INTEGERS else dtype)
            hints[(i,)] = [["tt.divisibility", 16]]
        elif name in ("score_scale", "cap_log2"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name not in (*decode_kernels.COUNTS, "stride_ks", "stride_vs"):
                hints[(i,)] = [["tt.divisibility", 16]]
    compiled = compile_for(target, kernel, types, hints, constants, launch)
    ptx = compiled.asm["ptx"]
    copies = sorted(set(re.findall(r"cp\.async\.c[ga]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)))
    limits = dict(shared_bytes=compiled.metadata.shared, shared_limit=TARGETS[target].shared_bytes)
    return config._asdict() | limits | dict(copies=copies, wgmma="wgmma.mma_async" in ptx) | ptxas_report(ptx)


if __name__ == "__main__":
    for entry in json.loads(sys.argv[1]):
        print(json.dumps(compile_decode(*entry)), flush=True)
