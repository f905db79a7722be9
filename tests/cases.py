# ruff: noqa: E501  (a table reads better unbroken)
"""What attention kernels got wrong in public: for each case the reports, and in one sentence what must hold here.

``test_cases.py`` tests every case under its id, and ``make status`` makes the page "Robustness" of the two. A report
written owner/repository#number is linked on the page; others do not name their repository beyond doubt.
"""

from typing import NamedTuple

TRITON, TORCH, DAO = "triton-lang/triton#", "pytorch/pytorch#", "Dao-AILab/flash-attention#"


class Known(NamedTuple):
    """reports: where it was reported, separated by commas. rule: what must hold."""

    reports: str
    rule: str


CASES = {
    # Head dimension
    "B1": Known(f"{TRITON}621", "Every channel of a head counts, whatever its dimension; one that is not offered is refused by name."),
    "B2": Known("exllamav3 PR#316", "Padding up to the tile is never read: what lies around the inputs changes no bit of the result."),
    "B3": Known("tiny-flash-attention#12", "Neither head dimension nor sequence length need be a power of two."),
    "B4": Known("sgl-project/sglang#1159", "A head dimension between two powers of two compiles, in a padded and masked tile."),
    "B6": Known("Dao-AILab/flash-attention, notes in flash_attn_triton.py", "Odd head dimensions and a full matrix of biases give right gradients, the same ones a thousand times over."),
    "B7": Known(f"{DAO}1006", "The backward pass at head dimension 128 fits a GPU with 99 KiB of shared memory."),
    "B9": Known("KempnerForge PR#206", "Head dimensions are tried one by one, since a supported set can have holes."),
    # Sequence length
    "B10": Known("kernels#6", "A single query works."),
    "B11": Known(f"{TRITON}2059", "Fewer queries than keys, and more, match the reference."),
    "B12": Known("jvp_flash_attention#13, flash-attn-triton#4, kernl#73", "Any length from 1 on works in both directions, multiple of a block or not, causal or not."),
    "B14": Known(f"{TORCH}159247, {TORCH}133717", "Where the keys do not fill the last tile, nothing behind them is read."),
    "B15": Known(f"{TORCH}153799", "A bias and a mask together, over a ragged length, give finite and right gradients."),
    "B18": Known(f"{TRITON}8853", "Under a causal mask any pair of block sizes is right, more keys than queries in a tile included."),
    "B19": Known("intel/intel-xpu-backend-for-triton#7317", "The two backward kernels may have blocks of unequal sizes, each with a grid of its own."),
    # Alignment, windows, rows without keys
    "B20": Known(f"{DAO}282, {DAO}517, {DAO}1778", "flash_attention aligns a causal mask at the bottom right; rows without a key are exactly 0."),
    "B21": Known(f"{TORCH}103082, {TORCH}108108, {TORCH}144858", "The stand-in for PyTorch's call aligns at the top left, as PyTorch does."),
    "B22": Known("NVIDIA/cutlass#2336", "The reference agrees with a computation that shares no code with it."),
    "B23": Known("flash-attention#158", "A window stands at the end of the keys when a single query arrives."),
    "B24": Known("huggingface/transformers#39408, zml PR#763", "A window keeps as many keys as its documentation says, counted."),
    "B25": Known(f"{DAO}1133", "A window as long as the sequence means the same as a causal mask."),
    "B27": Known("vllm-project/vllm#30887", "What no query sees may hold NaN: outside the window, or outside the packed sequence."),
    "B28": Known(f"{TORCH}103963, cubecl PR#1070, flashinfer-ai/flashinfer#4401", "A row without a visible key gives out 0, lse -inf and gradients 0, exactly."),
    # Large values
    "B30": Known("vllm-project/vllm#56578", "A soft cap saturates at scores of any size."),
    "B31": Known(f"{TORCH}119320, {TORCH}125674", "Large, finite inputs give finite gradients."),
    "B33": Known(f"{DAO}442", "An additive mask of the lowest bf16 number is added in fp32."),
    # Offsets and grids
    "B34": Known("fla-org/flash-linear-attention#1080", "Offsets past 2^31 elements are right in every dimension of every tensor."),
    "B35": Known(f"{DAO}1500", "A batch of many thousands works in the backward pass."),
    "B39": Known("sgl-project/sglang#20389, ffpa-attn PR#299, vllm-project/vllm#47671", "Tokens times heads times head dimension may pass 2^31, in expanded keys too."),
    "B40": Known("fla-org/flash-linear-attention#172, fla-org/flash-linear-attention#64, triton-lang/triton#3299", "Batch times heads may pass 65535."),
    "B41": Known("flashinfer-ai/flashinfer#3125", "A launch that fails raises; one that does not writes every element of its results."),
    "B42": Known(f"{DAO}1812", "Heads and rows swapped by mistake: where it shows, the error names the layout."),
    # Strides
    "B43": Known(f"{DAO}355", "The gradient that arrives may have any strides."),
    "B44": Known(f"{TORCH}64529, {TORCH}194719, NVIDIA/TransformerEngine#623", "A gradient from sum() (stride 0) or through cat() (a wide row) is read where it lies."),
    "B47": Known("FlagGems#5896, FlagAttention#45", "q, k, v and dO each have strides of their own."),
    "B49": Known(f"{TORCH}146377", "Slices of longer keys and values give the gradients of their copies, compiled too."),
    # Head groups, packed and empty sequences
    "B50": Known("native-sparse-attention-triton#27", "Shared key heads give what expanded ones give, their gradients summed over the group; v may have a head dimension of its own."),
    "B51": Known(f"{TORCH}143117, vllm-project/vllm#23424, {TRITON}4469", "Any whole number of query heads may share a key head, 3 and more than 16 too."),
    "B52": Known(f"{DAO}1537, {DAO}1619", "Packed sequences may be empty, or have one query each, with shared key heads."),
    # Device, dtype, precision
    "B55": Known(f"{TRITON}2441, {DAO}523, facebookresearch/xformers#681, {TRITON}5205", "Kernels run on the GPU of their tensors, whichever is current."),
    "B56": Known("triton_docs_tutorials#6", "fp32 is multiplied in full in both directions, never as TF32."),
    "B57": Known(f"{TRITON}1821, {TORCH}138556, {TRITON}5895", "fp32 holds against fp64 whatever PyTorch's precision switch says."),
    "B58": Known("unslothai/unsloth#501, thu-ml/SageAttention#63, triton-lang/triton#1941", "bf16 on a GPU without it is refused, and the error names fp16."),
    "B59": Known(f"{DAO}762, {DAO}887, {DAO}713, {TRITON}1994", "Nothing depends on flash-attn, and every kernel compiles for a T4."),
    # Shared memory, tuning, repeatability, hangs
    "B61": Known(f"{TORCH}133254, vllm-project/vllm#36802, {TRITON}7268, {TRITON}384, gemma-triton-flash-attn PR#4", "On every target the chosen blocks fit its shared memory, with every Triton tried."),
    "B62": Known(f"{TRITON}6547, {TRITON}781, {TRITON}3004, {TRITON}5339", "Nothing is tuned at call time, nothing is accumulated in memory, and the first call is right."),
    "B63": Known(f"{TRITON}7181, {TRITON}9230", "Every configuration is right alone, on results that held NaN before."),
    "B64": Known(f"{DAO}429, {DAO}359, {DAO}988, {TRITON}1558", "Gradients are the same to the bit on every call."),
    "B65": Known(f"{TRITON}1567, stickbreaking-attention#7, {TRITON}2046", "Every test has a time limit, and the kernels finish within it."),
    # Inside PyTorch
    "B66": Known(f"{TORCH}144540, {DAO}2013, cuEquivariance#223, ComfyUI PR#15044", "torch.compile takes it in one graph and knows the strides of its results."),
    "B68": Known(f"{TORCH}116350, {DAO}699, {TORCH}181581", "A second derivative raises; it is not silently cut off."),
    "B71": Known("facebookresearch/xformers#173, pytorch/pytorch#197563, flash-attention#167", "There is no dropout: asking for it raises and names what has it."),
    "B73": Known(f"{TRITON}7666, {TRITON}11568", "Each backward returns exactly one gradient for each argument of its forward."),
    "B74": Known(f"{TRITON}9728, {TRITON}2743", "No kernel asks Triton for warp specialisation (those in Gluon spell it out), and all compile for Hopper."),
    # Platforms and versions
    "B75": Known(f"{TRITON}5570, invoke-ai/InvokeAI#4055, OneTrainer#1182, sam3 PR#510, triton-windows#51", "Importing needs neither Triton nor a GPU; calling a kernel without them is a clear error."),
    "B76": Known("fla-org/flash-linear-attention#1059, assignment2-systems#13, intel#7781, triton-lang/triton#10833", "No kernel uses block pointers."),
    "B77": Known(f"{TRITON}11584, {TRITON}11585", "bf16 products are right in the interpreter."),
    "B78": Known(f"{TRITON}10697, {TRITON}11153, lectures#47", "What passes in the interpreter has passed on a GPU too, on record; NaN and aliased inputs behave alike on both."),
    "B79": Known("srush/Triton-Puzzles#24, srush/Triton-Puzzles#32, srush/Triton-Puzzles#37, srush/Triton-Puzzles#13, triton-viz#33", "Versions are pinned, every notebook is run by the tests, and every block is a power of two."),
    "B80": Known(f"{DAO}1288, {DAO}232, {DAO}239, {DAO}234", "The kernels compile with at least three versions of Triton."),
    # Paged decoding
    "B83": Known("vllm-project/vllm#41339", "A page size that is not offered is refused by name."),
}  # fmt: skip
