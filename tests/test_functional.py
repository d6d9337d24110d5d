import mpmath
import pytest
import torch

from torchcaps.functional import flatten_capsules, length, mask_capsules, side_of, squash, squash_exp

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [0.0, 1e-30, 1e-20, 1e-10, 1e-4, 1e-2, 1.0, 30.0, 1e4, 1e18]


def exact_factor(squasher, norm):
    """What s is multiplied by, in fifty digits."""
    if norm == 0:
        return mpmath.mpf(0 if squasher is squash else 1)
    return norm / (1 + norm**2) if squasher is squash else -mpmath.expm1(-norm) / norm


def exactly(squasher, poses):
    """The paper's formula in fifty digits, on the numbers that `poses` [n, d] really holds; float64 [n, d]."""
    with mpmath.workdps(50):
        rows = [[mpmath.mpf(v) for v in row] for row in poses.double().tolist()]
        scaled = [[v * exact_factor(squasher, mpmath.sqrt(sum(u * u for u in row))) for v in row] for row in rows]
        return torch.tensor([[float(v) for v in row] for row in scaled], dtype=torch.float64)


def rounding_error(exact, dtype):
    """The most that rounding to `dtype` can change each number."""
    finfo = torch.finfo(dtype)
    return torch.maximum(exact.abs() * finfo.eps / 2, torch.tensor(finfo.tiny * finfo.eps, dtype=torch.float64))


def poses_of(size, dtype):
    return (size * torch.randn(5, 8).clamp(-3, 3)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("squasher", [squash, squash_exp])
def test_half_precision_is_the_exact_result_rounded(squasher, dtype, size):
    poses = poses_of(min(size, 1e4) if dtype == torch.float16 else size, dtype)
    exact, ours = exactly(squasher, poses), squasher(poses)
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= 1.001 * rounding_error(exact, dtype)).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("squasher", [squash, squash_exp])
def test_full_precision_is_exact_to_a_few_roundings(squasher, dtype, size):
    poses = poses_of(size, dtype)
    exact, ours = exactly(squasher, poses), squasher(poses)
    vanishing = torch.finfo(dtype).tiny ** 0.5 * poses.double().abs()  # squares below the smallest number are lost
    if squasher is squash_exp:
        vanishing = torch.zeros(())
    assert ((ours.double() - exact).abs() <= 8 * rounding_error(exact, dtype) + vanishing).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [squash, squash_exp, length])
def test_finite_with_gradients(function, dtype, size):
    poses = poses_of(min(size, 1e4) if dtype == torch.float16 else size, dtype)
    poses[0] = 0
    poses[1, 1:] = 0
    poses.requires_grad_()
    out = function(poses)
    (gradient,) = torch.autograd.grad(out.sum(), poses)
    assert out.dtype == gradient.dtype == dtype
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_zero(dtype):
    """s |s| is flat at 0, Mazzia's squash is the identity there, and the length takes gradient 0."""
    for function, expected in [(squash, 0), (squash_exp, 1), (length, 0)]:
        zeros = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
        out = function(zeros)
        assert torch.equal(out, torch.zeros_like(out))
        (gradient,) = torch.autograd.grad(out.sum(), zeros)
        assert torch.equal(gradient, torch.full_like(gradient, expected))


@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 30.0])
@pytest.mark.parametrize("squasher", [squash, squash_exp])
def test_squash_gradcheck(squasher, size):
    poses = (size * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(squasher, poses)
    assert torch.autograd.gradcheck(lambda s: squasher(s, dim=0), poses)


@pytest.mark.parametrize("size", [1e-15, 1e-8, 1e-4, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("squasher", [squash, squash_exp])
def test_squash_gradient_is_accurate(squasher, dtype, size):
    """The Jacobian is f I + f' s s^T / |s|; no digits are lost where |s| is small."""
    poses = (size * torch.randn(1, 4)).to(dtype).requires_grad_()
    ours = torch.autograd.functional.jacobian(lambda s: squasher(s)[0], poses)[:, 0].double()
    with mpmath.workdps(50):
        s = [mpmath.mpf(v) for v in poses[0].double().tolist()]
        n = mpmath.sqrt(sum(v * v for v in s))
        slope = mpmath.diff(lambda norm: exact_factor(squasher, norm), n, h=n * mpmath.mpf(10) ** -15)
        f = exact_factor(squasher, n)
        exact = [[float(f * (i == k) + slope * s[i] * s[k] / n) for k in range(4)] for i in range(4)]
    assert (ours - torch.tensor(exact, dtype=torch.float64)).abs().max() <= 16 * torch.finfo(dtype).eps * float(f)


def test_squash_by_hand():
    poses = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    torch.testing.assert_close(squash(poses), torch.tensor([[0.6, 0.8], [0.0, 1.0]]) * torch.tensor([[25 / 26], [0.5]]))
    lengths = 1 - torch.tensor([[5.0], [1.0]]).neg().exp()
    torch.testing.assert_close(squash_exp(poses), torch.tensor([[0.6, 0.8], [0.0, 1.0]]) * lengths)


@pytest.mark.parametrize("function", [squash, squash_exp, length])
def test_other_dimensions(function):
    poses = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    ours = function(poses, dim=2)
    last = function(poses.movedim(2, -1))
    torch.testing.assert_close(ours, last if function is length else last.movedim(-1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_length(dtype):
    poses = torch.tensor([[3.0, 4.0], [0.0, 0.0], [300.0, 400.0]], dtype=dtype)  # 300^2 is infinite in float16
    assert torch.equal(length(poses), torch.tensor([5.0, 0.0, 500.0], dtype=dtype))
    assert torch.autograd.gradcheck(length, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("function", [squash, squash_exp, length])
def test_compiles(function):
    poses = torch.randn(2, 3, 4)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(poses), function(poses))


def test_flatten_capsules():
    """Every entry is its own index: image, type, component, row, column, one digit each."""
    b, c, d, h, w = 2, 3, 4, 5, 6
    digits = [torch.arange(n) for n in (b, c, d, h, w)]
    grids = torch.meshgrid(*digits, indexing="ij")
    poses = sum(10**p * grid for p, grid in zip((4, 3, 2, 1, 0), grids, strict=True))
    flat = flatten_capsules(poses)
    assert flat.shape == (b, c * h * w, d)
    for image in range(b):
        n = 0
        for kind in range(c):
            for row in range(h):
                for column in range(w):
                    expected = [10_000 * image + 1000 * kind + 100 * k + 10 * row + column for k in range(d)]
                    assert flat[image, n].tolist() == expected
                    n += 1
    assert flatten_capsules(flat) is flat


def test_mask_capsules():
    poses = torch.randn(3, 4, 2, requires_grad=True)
    targets = torch.tensor([[2, 0], [-1, 3], [1, 1]])
    masked = mask_capsules(poses, targets)
    assert masked.shape == (3, 2, 4, 2)
    for b in range(3):
        for k in range(2):
            for j in range(4):
                expected = poses[b, j] if targets[b, k] == j else torch.zeros(2)
                assert torch.equal(masked[b, k, j], expected)
    (gradient,) = torch.autograd.grad(masked.sum(), poses)
    counts = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 2, 0, 0]])
    assert torch.equal(gradient, counts[..., None].float().expand_as(gradient))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_keeps_the_dtype(dtype):
    assert mask_capsules(torch.ones(1, 2, 3, dtype=dtype), torch.tensor([[1]])).dtype == dtype


@pytest.mark.parametrize("side", [1, 2, 3, 4, 6, 100])
def test_side_of(side):
    assert side_of(side * side) == side


@pytest.mark.parametrize(("dim", "below", "above"), [(2, 1, 4), (3, 1, 4), (8, 4, 9), (15, 9, 16), (17, 16, 25)])
def test_side_of_no_square(dim, below, above):
    message = f"needs a square number of entries, got {dim}; the nearest that fit are {below} and {above}$"
    with pytest.raises(ValueError, match=message):
        side_of(dim)


@pytest.mark.parametrize("dim", [0, -4])
def test_side_of_nothing(dim):
    with pytest.raises(
        ValueError, match=f"needs a square number of entries, got {dim}; the nearest that fit are 1 and 4"
    ):
        side_of(dim)
