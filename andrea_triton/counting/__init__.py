"""Counting: what compiled kernels cost, read from their machine code and played clock by clock, without running them."""
