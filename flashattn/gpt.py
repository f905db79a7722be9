"""A small GPT that learns a book byte by byte, with any implementation of attention: chapter 11's model.

Its blocks are those of GPT-2: layer norm before each part, learned positions, a GELU between two linear layers, and one
matrix both for embedding tokens and for scoring them. ``python -m flashattn.train`` trains it on a GPU.
"""

import functools
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

from .peers import IMPLEMENTATIONS, Shape, backend

TEXT = Path(__file__).parent / "data" / "alice.txt"
HELD_OUT = 10  # the last tenth of the text is for testing
INIT_STD = 0.02


def load_text():
    """Return the bytes of "Alice's Adventures in Wonderland" as (for training, for testing), two int64 tensors.

    The text is in the public domain; flashattn/data/README.md says where it comes from.
    """
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    n_training = len(text) - len(text) // HELD_OUT
    return text[:n_training], text[n_training:]


class Block(nn.Module):
    """One layer: each token looks at those before it (attention), then each is worked on alone (MLP)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.to_hidden, self.from_hidden = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend):
        """Apply the layer to x, (batch, seqlen, width); attend is a function of (q, k, v)."""
        qkv = self.to_qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))  # (batch, seqlen, 3, heads, head_dim)
        out = attend(*qkv.permute(2, 0, 3, 1, 4).unbind())
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        return x + self.from_hidden(gelu(self.to_hidden(self.norm_2(x))))


class GPT(nn.Module):
    """Predict each next token from those before it.

    Args:
        vocabulary: number of different tokens; 256 for bytes.
        context: the longest sequence it takes, in tokens.
        layers, width, heads: its size; width must be a multiple of heads.
        attention: a name in ``flashattn.peers.IMPLEMENTATIONS``, such as "eager", "sdpa_flash" or "flashattn", or a
            function of q, k and v, (batch, heads, seqlen, head_dim), that computes causal attention.

    Raises:
        ValueError: width is no multiple of heads, or attention is no such name.
    """

    def __init__(self, vocabulary=256, context=1024, layers=6, width=384, heads=6, attention="flashattn"):
        super().__init__()
        if width % heads:
            raise ValueError(f"`width` must be a multiple of `heads`, {heads}, got {width}")
        self.attention, self.context = attention, context
        self.attend = attention if callable(attention) else causal_attention(attention, heads, context, width // heads)
        self.token_embedding, self.position_embedding = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:  # what is added to the residual stream begins smaller, as there are 2 * layers of it
                added = name.endswith(("to_out.weight", "from_hidden.weight"))
                nn.init.normal_(weight, std=INIT_STD / (2 * layers) ** 0.5 if added else INIT_STD)

    def hidden(self, tokens):
        """Return what the last layer gives for tokens, int64 (batch, seqlen): (batch, seqlen, width)."""
        if tokens.shape[1] > self.context:
            raise ValueError(f"`tokens` must be at most {self.context} long, got {tokens.shape[1]}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        with backend(self.attention):
            for block in self.blocks:
                x = block(x, self.attend)
        return self.norm(x)

    def logits(self, hidden):
        """Return the scores of every possible next token, (batch, seqlen, vocabulary), from what ``hidden`` gave."""
        return linear(hidden, self.token_embedding.weight)

    def forward(self, tokens):
        """Return the scores of every possible next token, (batch, seqlen, vocabulary)."""
        return self.logits(self.hidden(tokens))


def causal_attention(name, heads, seqlen, head_dim):
    """Return the implementation of that name as a function of (q, k, v), causal."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"`attention` must be a function or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return next(iter(IMPLEMENTATIONS[name](Shape(1, heads, heads, seqlen, head_dim, True)).values()))


def next_token_loss(logits, tokens):
    """Return the mean cross-entropy in nats: logits (batch, seqlen, vocabulary) against tokens, (batch, seqlen)."""
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def mixed_precision(device, dtype):
    """Return the context of a forward pass: products in dtype, torch.bfloat16 say, or in fp32 where it is None."""
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)


class Run(NamedTuple):
    """One training run: the loss of each step, test losses {steps done: loss}, both in nats a token, and its speed.

    steps_s: the seconds each step took. peak_bytes: the most memory PyTorch handed out on the GPU, 0 on a CPU.
    """

    losses: list[float]
    test_losses: dict[int, float]
    steps_s: list[float]
    peak_bytes: int


def train(
    attention, *, steps, batch, seqlen, layers, width, heads,
    device="cpu", dtype=None, learning_rate=1e-3, warmup=20, seed=0, test_every=0,
):  # fmt: skip
    """Train a GPT on the book with AdamW, and return the run. The same seed gives the same weights and batches.

    Args:
        attention: as for :class:`GPT`.
        steps, batch, seqlen: how many steps, of how many sequences, of how many tokens.
        layers, width, heads: as for :class:`GPT`.
        device: where to train.
        dtype: of the matrix products, as ``torch.autocast`` does it; default None: fp32.
        learning_rate, warmup: the rate, reached from 0 in so many steps.
        seed: of weights and batches; drawn on the CPU, so the same on every machine.
        test_every: measure the loss on the held-out text after so many steps; 0 for never.

    Returns:
        A :class:`Run`.
    """
    torch.manual_seed(seed)
    model = GPT(256, seqlen, layers, width, heads, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    text, held_out = (x.to(device) for x in load_text())
    test_batch = held_out[: len(held_out) // (seqlen + 1) * (seqlen + 1)].view(-1, seqlen + 1)[: 2 * batch]
    on_gpu = torch.device(device).type == "cuda"
    wait = functools.partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    generator = torch.Generator().manual_seed(seed)

    def loss_of(tokens):
        with mixed_precision(device, dtype):
            return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    losses, test_losses, steps_s = [], {}, []
    for step in range(steps):
        begins = torch.randint(len(text) - seqlen, (batch, 1), generator=generator)
        tokens = text[(begins + torch.arange(seqlen + 1)).to(device)]
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        wait()
        steps_s.append(time.perf_counter() - begin)
        if test_every and (step + 1) % test_every == 0:
            with torch.no_grad():
                test_losses[step + 1] = loss_of(test_batch).item()
    return Run(losses, test_losses, steps_s, torch.cuda.max_memory_allocated(device) if on_gpu else 0)
