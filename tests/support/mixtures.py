"""Tokens that no router finds balanced."""

import torch


def mixture(generator, num_tokens, dim, spread):
    """Tokens around a few unequal centres, each with a context near it: badly unbalanced by nature."""
    centres = torch.randn(5, dim, generator=torch.Generator().manual_seed(42))
    kind = torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.05, 0.05]), num_tokens, True, generator=generator)
    x = centres[kind] + spread * torch.randn(num_tokens, dim, generator=generator)
    return x, x + spread * torch.randn(num_tokens, dim, generator=generator)
