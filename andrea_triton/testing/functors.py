"""Functions of a user, as the documentation shows them: jit functions that Score and Mask take."""

import triton
import triton.language as tl


@triton.jit
def same_document(batch, head, q_pos, k_pos, ids):
    """A token sees the tokens of its own document."""
    return tl.load(ids + q_pos) == tl.load(ids + k_pos)


@triton.jit
def distance_penalty(score, batch, head, q_pos, k_pos, rate):
    """Scores change with the distance to the key."""
    return score * (1 + rate * (q_pos - k_pos))


@triton.jit
def distance_penalty_grad(score, batch, head, q_pos, k_pos, rate):
    """d distance_penalty / d score."""
    return 1 + rate * (q_pos - k_pos)
