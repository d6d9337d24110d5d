"""The switch between fused kernels and plain PyTorch, and the kernels that are not about votes."""

from torchcaps.fused.switch import autocasted, backend, has_triton, wanted, watched

__all__ = ["autocasted", "backend", "has_triton", "wanted", "watched"]
