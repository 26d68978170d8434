"""Device code: Triton and itself only, never torch."""
