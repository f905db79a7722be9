"""Import this first in a notebook: it picks the device, and where there is no GPU it switches on Triton's interpreter.

It prints one line that says what kernels run on. It comes first because TRITON_INTERPRET=1 must be set before Triton is
first imported. Where Triton does not exist (macOS, Windows) cells that begin with ``# needs Triton`` say so in one line
instead of running.
"""

import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import warnings

import torch

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
device = torch.device("cuda" if HAS_GPU else "cpu")
NEEDS_TRITON = "# needs Triton"
CLAIM = "application/vnd.flashattn.claim+json"  # the type of a recorded verdict, which no page shows


def _choose_interpreter():
    """Switch the interpreter on where there is no GPU, and return the line that says what kernels run on."""
    if not HAS_TRITON:
        return f"Triton is not installed on this machine ({platform.system()}): cells that need it are skipped."
    if not HAS_GPU:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton was imported before flashattn.notebook: restart the kernel and run this cell first."
        os.environ["TRITON_INTERPRET"] = "1"
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return f"No GPU in use: kernels run on the CPU in Triton's interpreter, slowly ({versions})."
    return f"Kernels run on {torch.cuda.get_device_name()} ({versions})."


def _skip_cells_that_need_triton(lines):
    """Replace a cell marked with ``# needs Triton`` by a line that says it was skipped; IPython calls this per cell."""
    if lines and lines[0].strip() == NEEDS_TRITON:
        return [f"print('Skipped: this cell needs Triton, which is not installed here ({platform.system()}).')\n"]
    return lines


def _set_up_ipython():
    """Register the skipping of kernel cells, inside IPython only, and keep a harmless warning out of the outputs."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    # PyTorch prints this once when a backward pass is the first to use cuBLAS in its thread; nothing is wrong then.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    if not HAS_TRITON:
        shell.input_transformers_cleanup.append(_skip_cells_that_need_triton)


def glue(name, value, display=False):
    """Hand a computed value to the prose of the built page; without myst_nb (Colab, say) do nothing."""
    if importlib.util.find_spec("myst_nb") is not None:
        from myst_nb import glue as myst_glue

        myst_glue(name, value, display=display)


def compiled_ptx(kernel, variants, capability=90):
    """Compile a kernel for an NVIDIA GPU that need not be here, and return its assembly code, PTX, for each variant.

    It is compiled in a process of its own, since one that interprets kernels cannot compile them.

    Args:
        kernel: a function under ``triton.jit`` whose source names nothing but ``triton``, ``tl`` and its arguments.
        variants: [(types, constants), …]: {argument: its type, such as "*fp16" or "i32"}, in order and before the
            constexprs, and {constexpr: its value}, in order. Pointers and numbers are taken to be multiples of 16.
        capability: the compute capability to compile for, 90 for 9.0.

    Raises:
        RuntimeError: the compiler refuses; its message is passed on.
    """
    script = f"""import json, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
{inspect.getsource(kernel.fn)}
texts = []
for types, constants in {variants}:
    signature = types | dict.fromkeys(constants, "constexpr")
    values = {{(len(types) + i,): value for i, value in enumerate(constants.values())}}
    multiples_of_16 = {{(i,): [["tt.divisibility", 16]] for i in range(len(types))}}
    source = triton.compiler.ASTSource({kernel.fn.__name__}, signature, values, multiples_of_16)
    texts.append(triton.compile(source, target=GPUTarget("cuda", {capability}, 32)).asm["ptx"])
print(json.dumps(texts))
"""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "compile_kernel.py")
        path.write_text(script)
        env = os.environ | {"TRITON_INTERPRET": "0"}
        done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def judge(claim, *, number="", where="", advice="", open="", **parts):
    """Show the verdict on a claim of the source article, and record it for the ledger, `book/claims.md`.

    The verdict is "holds" if every part held, "holds with limits" if some did, "wrong" if none; "advice" or "open" for
    a claim without parts. Each part compares a measured value with a limit that stands in the source before the
    measurement. The cell is tagged ``keep_output`` and ``nbval-check-output``, so what is shown must be the same on
    every machine: a time comes from the recorded rows, not from a clock. A label such as ``(claim-c33)=`` stands before
    the admonition "Claim C33: wrong" that explains the verdict; it makes the ledger's link.

    Args:
        claim: its id, such as "C33", or "C25a" for the first half of one that makes two statements.
        number: the deciding number in words, with its unit, such as "4.3 times the bytes".
        where: where the number comes from, such as "one H200, 2026-11-29" or "arithmetic".
        advice: instead of parts: why there is nothing to measure.
        open: instead of parts: what will settle it.
        parts: the statements that make the claim, each True if it held; underscores are shown as spaces.

    Raises:
        TypeError: a part is not True or False.
        ValueError: not exactly one of parts, advice and open is given, or parts come without number and where.
    """
    for name, held in parts.items():
        if not isinstance(held, bool):
            raise TypeError(f"`{name}` must be True or False, got {held!r}")
    if bool(parts) + bool(advice) + bool(open) != 1:
        raise ValueError(f"{claim} must have parts, `advice` or `open`, and only one of them")
    if parts and not (number and where):
        raise ValueError(f"{claim} must have `number` and `where`, got {number!r} and {where!r}")
    parts = {name.replace("_", " "): held for name, held in parts.items()}
    if parts:
        verdict = "holds" if all(parts.values()) else "holds with limits" if any(parts.values()) else "wrong"
    else:
        verdict = "advice" if advice else "open"
    lines = [f"{claim}, {name}: {held}" for name, held in parts.items()] + [f"{claim}: {verdict}"]
    lines += [f"Decided by: {number}", f"Where: {where}"] if parts else [advice or open]
    record = dict(claim=claim, verdict=verdict, number=number or advice or open, where=where, parts=parts)
    from IPython.display import display  # here: a script that imports this file has no use for it

    display({"text/plain": "\n".join(lines), CLAIM: record}, raw=True)


def must_fail(check, answer):
    """Show that a check rejects a wrong answer: raise AssertionError if it does not."""
    try:
        check(answer)
    except AssertionError as reason:
        print(f"The check rejects it: {reason}")
    else:
        raise AssertionError(f"{check.__name__} accepts a wrong answer")


print(_choose_interpreter())
if importlib.util.find_spec("IPython") is not None:
    _set_up_ipython()
torch.manual_seed(0)
