"""Capsule networks in PyTorch."""
