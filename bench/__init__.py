"""Measurements of andrea_triton, run from a checkout: ``python -m bench``."""
