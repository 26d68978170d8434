"""What a number is here: constants, the finite pivot of an empty row, the matrix product."""

import triton
import triton.language as tl

FP32, FP64, constant = tl.float32, tl.float64, tl.constexpr  # for the host, which does not import Triton's language
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def lowest(dtype: tl.constexpr):
    """A finite pivot for rows that have seen nothing: exp2(-inf - lowest) is 0 where exp2(-inf + inf) is NaN."""
    return -1.7976931348623157e308 if dtype == tl.float64 else -3.4028234663852886e38


@triton.jit
def near_tf32(x):
    """The fp32 numbers of 11 bits that are nearest to x: what a tensor core takes of a number, but rounded, not cut off."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr, TURNED: tl.constexpr = False):
    """acc + x y in acc's type. PRECISION is how fp32 operands are multiplied: ieee, tf32, or tf32x3: three products of TF32 of
    x = X + dx and y = Y + dy, X and Y of 11 bits, the small ones first; TURNED, in the order in which y^T x^T takes them, to the
    same bits. Tensor cores cut their sums off where fp32 rounds, and over many tiles that would lean to zero: these are added to
    acc outside of them. inf, and what rounds to it, gives NaN. Source: arXiv 2203.03341 (Ootomo, Yokota)."""
    if PRECISION == "tf32x3":
        X, Y = near_tf32(x), near_tf32(y)
        if TURNED:
            small = tl.dot(x - X, Y, tl.dot(X, y - Y, input_precision="tf32"), input_precision="tf32")
        else:
            small = tl.dot(X, y - Y, tl.dot(x - X, Y, input_precision="tf32"), input_precision="tf32")
        return acc + tl.dot(X, Y, small, input_precision="tf32")
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def hold(x, HELD: tl.constexpr):
    """x [ROWS, COLS], HELD in registers for a loop that multiplies it from the left. Triton would leave it in shared memory and
    read it at every step, but not what comes out of arithmetic on a product: so add a product of zeros, or rather two, one on the
    other, as only chained products share out their rows among the warps as the loop's do. -0 becomes 0."""
    if HELD:
        rows, cols = tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype)
        return (x + tl.dot(rows, cols, tl.dot(rows, cols))).to(x.dtype)
    else:
        return x


@triton.jit
def tanh(x, unit, BY: tl.constexpr):
    """tanh(x unit). BY "instruction": NVIDIA's own, relative error 2^-11 (PTX ISA, tanh.approx), a quarter of what rounding to
    bf16 does. BY "exp2": 1 - 2 / (1 + exp(2 x unit)), absolute error 4 units of 1 in the type; the reciprocal is a square of
    rsqrt, as a division asks after the ends of the range. BY "fraction": near zero, where that is a large relative error, the
    seventh convergent of Lambert's continued fraction t / (1 + t² / (3 + t² / (5 + ...)))."""
    if BY == "instruction":
        asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x * unit], dtype=tl.float32, is_pure=True, pack=1)
    elif BY == "exp2":
        root = tl.rsqrt(1 + tl.exp2(x * (2 * LOG2E * unit)))
        return 1 - 2 * (root * root)
    else:
        t = x * unit
        y = t * t
        top = t * (135135 + y * (17325 + y * (378 + y)))
        near = top / (135135 + y * (62370 + y * (3150 + y * 28)))
        return tl.where(y < 0.25, near, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E * unit))))
