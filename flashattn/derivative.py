"""Say no to second derivatives, loudly: the gradients here are computed by hand and cannot be differentiated again.

``torch.autograd.function.once_differentiable`` says no only where the arriving gradient requires grad itself. After
``grad(out.sum(), q, create_graph=True)`` it does not, and the second derivative would come out as zero in silence.
"""

import functools

import torch

REFUSAL = (
    "the gradient of flash_attention and attention_tiled cannot be differentiated again: use "
    "flashattn.attention_reference where second derivatives are needed"
)


class _Barrier(torch.autograd.Function):
    """Pass the first n_results tensors on; refuse to differentiate them with respect to any of the tensors given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(n_results, *tensors):
        return tuple(x.view_as(x) for x in tensors[:n_results])

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart from forward: so torch.func wants it
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(REFUSAL)


def first_derivative_only(backward):
    """Decorate the backward method of an autograd.Function whose results must not be differentiated again."""

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # autograd enables it here under create_graph=True only
            return results
        computed = [x for x in results if x is not None]
        sources = [x for x in (*ctx.saved_tensors, *grads) if x is not None]
        guarded = iter(_Barrier.apply(len(computed), *computed, *sources))
        return tuple(None if x is None else next(guarded) for x in results)

    return wrapper
