"""The papers' pseudo-code as loops over plain tensors: slow, and easy to check against the page.

Nothing here imports the library. Letters as everywhere: b batch, i children, j parents, d size of a parent's pose.
Each vote is a vector u[i, j]; what a loop gathers in lists is stacked at the end, so that gradients flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def tensor(nested: list | Tensor) -> Tensor:
    """Lists of lists of tensors as one tensor."""
    return torch.stack([tensor(x) for x in nested]) if isinstance(nested, list) else nested


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def softmax(logits: Sequence[Tensor], leak: bool = False) -> list[Tensor]:
    """Sabour's Eq. 3. The leak is one more logit of 0, "none of the above", whose share is not returned."""
    highest = max([x.item() for x in logits] + [0.0] * leak)
    shares = [torch.exp(x - highest) for x in logits]
    total = sum(shares) + (math.exp(-highest) if leak else 0)
    return [share / total for share in shares]


def squash(s: Tensor) -> Tensor:
    """Sabour's Eq. 1."""
    q = dot(s, s)
    return 0 * s if q == 0 else q / (1 + q) * s / q.sqrt()


def squash_exp(s: Tensor) -> Tensor:
    """Mazzia's Eq. 2."""
    q = dot(s, s)
    return s if q == 0 else (1 - torch.exp(-q.sqrt())) * s / q.sqrt()


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Ba et al. 2016, over one vector."""
    mean = sum(x) / len(x)
    variance = sum((entry - mean) ** 2 for entry in x) / len(x)
    normed = (x - mean) / (variance + eps).sqrt()
    return normed if weight is None else normed * weight + bias


def dynamic_routing(
    votes: Tensor,
    iterations: int = 3,
    logits: Tensor | None = None,
    leak: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sabour's procedure 1; `logits` [i, j] are where b_ij starts, `bias` [j, d] is added to s_j each time.

    Shapes: votes [b, i, j, d] -> poses [b, j, d], coupling [b, i, j]
    """
    batch, children, parents, _ = votes.shape
    poses, coupling = [], []
    for n in range(batch):
        u = votes[n]
        b = [[u.new_zeros(()) if logits is None else logits[i, j] for j in range(parents)] for i in range(children)]
        for _ in range(iterations):
            c = [softmax(b[i], leak) for i in range(children)]
            s = [sum(c[i][j] * u[i, j] for i in range(children)) for j in range(parents)]
            if bias is not None:
                s = [s[j] + bias[j] for j in range(parents)]
            v = [squash(s[j]) for j in range(parents)]
            b = [[b[i][j] + dot(u[i, j], v[j]) for j in range(parents)] for i in range(children)]
        poses.append(v)
        coupling.append(c)
    return tensor(poses), tensor(coupling)


def self_attention_routing(
    votes: Tensor, prior: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mazzia's Eq. 4 to 6, with the sum over all pairs of children written out; `prior` [i, j] comes after the softmax.

    Shapes: votes [b, i, j, d] -> poses [b, j, d], the final routing weights [b, i, j], prior included
    """
    batch, children, parents, dim = votes.shape
    scale = 1 / math.sqrt(dim) if scale is None else scale
    poses, coupling = [], []
    for n in range(batch):
        u = votes[n]
        a = [
            [scale * sum(dot(u[i, j], u[k, j]) for k in range(children)) for j in range(parents)]
            for i in range(children)
        ]
        c = [softmax(a[i]) for i in range(children)]
        b = torch.zeros_like(u[..., 0]) if prior is None else prior
        w = [[c[i][j] + b[i, j] for j in range(parents)] for i in range(children)]
        s = [sum(w[i][j] * u[i, j] for i in range(children)) for j in range(parents)]
        poses.append([squash_exp(s[j]) for j in range(parents)])
        coupling.append(w)
    return tensor(poses), tensor(coupling)


def inverted_attention(
    votes: Tensor,
    parents: Tensor | None = None,
    scale: float | None = None,
    norm: Callable[[Tensor], Tensor] | None = layer_norm,
    activations: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tsai's procedure 1: one step from the parents of the iteration before, 0 at first. `scale=1` is as printed.

    Children weigh their votes by `activations` [b, i] in ablation C.

    Shapes: votes [b, i, j, d], parents [b, j, d] -> poses [b, j, d], coupling [b, i, j]
    """
    batch, children, types, dim = votes.shape
    scale = 1 / math.sqrt(dim) if scale is None else scale
    poses, coupling = [], []
    for n in range(batch):
        v = votes[n]
        p = torch.zeros_like(v[0]) if parents is None else parents[n]
        a = [[scale * dot(p[j], v[i, j]) for j in range(types)] for i in range(children)]
        r = [softmax(a[i]) for i in range(children)]
        present = [1] * children if activations is None else activations[n]
        mixed = [sum(r[i][j] * present[i] * v[i, j] for i in range(children)) for j in range(types)]
        poses.append([mixed[j] if norm is None else norm(mixed[j]) for j in range(types)])
        coupling.append(r)
    return tensor(poses), tensor(coupling)


def concurrent_routing(
    routings: Sequence[Callable[[Tensor, Tensor | None], Tensor]], primary: Tensor, iterations: int
) -> list[Tensor]:
    """Tsai's procedure 2: the poses of every layer, given each layer's step from (poses below, its own poses)."""
    layers = len(routings)
    poses = [primary] + [None] * layers
    for n in range(layers):
        poses[n + 1] = routings[n](poses[n], poses[n + 1])
    for _ in range(iterations - 1):
        updated = [routings[n](poses[n], poses[n + 1]) for n in range(layers)]
        poses = [primary, *updated]
    return poses


def hinton_lambda(t: int) -> float:
    return 0.01 * (1 - 0.95 ** (t + 1))


def m_step(
    mass: Sequence[Tensor], votes: Sequence[Tensor], beta_u: Tensor, beta_a: Tensor, temperature: float, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One parent of Hinton's EM, from each child's R_ij a_i and vote: mean, variance, activation."""
    total = sum(mass).clamp(min=1e-7)
    mean, variance, cost = [], [], []
    for h in range(len(votes[0])):
        mu = sum(r * v[h] for r, v in zip(mass, votes, strict=True)) / total
        var = sum(r * (v[h] - mu) ** 2 for r, v in zip(mass, votes, strict=True)) / total + floor
        mean.append(mu)
        variance.append(var)
        cost.append((beta_u + torch.log(torch.sqrt(var))) * total)
    return tensor(mean), tensor(variance), 1 / (1 + torch.exp(-temperature * (beta_a - sum(cost))))


def parent_activations(
    votes: Tensor, coupling: Tensor, activations: Tensor, beta_u: Tensor, beta_a: Tensor, temperature: float
) -> Tensor:
    """EM's activation of each parent from a coupling that came from elsewhere (Tsai, ablation C).

    Shapes: votes [b, i, j, d], coupling [b, i, j], activations [b, i] -> [b, j]
    """
    batch, children, parents, _ = votes.shape
    presence = []
    for n in range(batch):
        row = []
        for j in range(parents):
            mass = [coupling[n, i, j] * activations[n, i] for i in range(children)]
            row.append(m_step(mass, list(votes[n, :, j]), beta_u[j], beta_a[j], temperature, 5e-4)[2])
        presence.append(row)
    return tensor(presence)


def log_density(vote: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    terms = -((vote - mean) ** 2) / (2 * variance) - torch.log(torch.sqrt(variance)) - 0.5 * math.log(2 * math.pi)
    return terms.sum()


def em_routing(
    votes: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int = 3,
    inverse_temperature: Callable[[int], float] = hinton_lambda,
    variance_floor: float = 5e-4,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hinton's procedure 1; the responsibilities are those of the last M-step, before the children's activations.

    Shapes: votes [b, i, j, d], activations [b, i], betas [j] -> means [b, j, d], activations [b, j], R [b, i, j]
    """
    batch, children, parents, _ = votes.shape
    means, presence, responsibilities = [], [], []
    for n in range(batch):
        V = votes[n]
        R = [[V.new_tensor(1 / parents)] * parents for _ in range(children)]
        for t in range(iterations):
            mean, variance, a = [], [], []
            for j in range(parents):
                mass = [R[i][j] * activations[n, i] for i in range(children)]
                column = [V[i, j] for i in range(children)]
                m, v, p = m_step(mass, column, beta_u[j], beta_a[j], inverse_temperature(t), variance_floor)
                mean.append(m), variance.append(v), a.append(p)
            if t == iterations - 1:
                break
            R = [
                softmax([torch.log(a[j]) + log_density(V[i, j], mean[j], variance[j]) for j in range(parents)])
                for i in range(children)
            ]
        means.append(mean), presence.append(a), responsibilities.append(R)
    return tensor(means), tensor(presence), tensor(responsibilities)


def em_routing_sites(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    stride: int,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int = 3,
    inverse_temperature: Callable[[int], float] = hinton_lambda,
    variance_floor: float = 5e-4,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in a convolutional layer: a child (c, y, x) shares itself out over all parents of all windows it is in.

    Shapes: poses [b, c, p, h, w], activations [b, c, h, w], weight [c, k, k, a, j, e]
        -> means [b, y, x, j, d], activations [b, y, x, j], R [b, y, x, (c k k), j]
    """
    batch, types, _, height, width = poses.shape
    kernel, parents = weight.shape[1], weight.shape[4]
    sites = [(y, x) for y in out_sites(height, kernel, stride) for x in out_sites(width, kernel, stride)]
    within = [(c, dy, dx) for c in range(types) for dy in range(kernel) for dx in range(kernel)]
    children = [(c, y, x) for c in range(types) for y in range(height) for x in range(width)]
    means, presence, responsibilities = [], [], []
    for n in range(batch):
        vote, R = {}, {}
        for child in children:
            c, y, x = child
            reached = [(sy, sx) for sy, sx in sites if 0 <= y - sy < kernel and 0 <= x - sx < kernel]
            for site in reached:
                for j in range(parents):
                    matrix = weight[c, y - site[0], x - site[1], :, j, :]
                    vote[child, site, j] = matrix_vote(poses[n, c, :, y, x], matrix)
                    R[child, site, j] = poses.new_tensor(1 / (parents * len(reached)))
        for t in range(iterations):
            gauss = {}
            for site in sites:
                for j in range(parents):
                    here = [child for child in children if (child, site, j) in vote]
                    mass = [R[child, site, j] * activations[(n, *child)] for child in here]
                    column = [vote[child, site, j] for child in here]
                    gauss[site, j] = m_step(mass, column, beta_u[j], beta_a[j], inverse_temperature(t), variance_floor)
            if t == iterations - 1:
                break
            for child in children:
                reached = [(site, j) for site in sites for j in range(parents) if (child, site, j) in vote]
                logits = []
                for site, j in reached:
                    mean, variance, a = gauss[site, j]
                    logits.append(torch.log(a) + log_density(vote[child, site, j], mean, variance))
                for (site, j), share in zip(reached, softmax(logits) if logits else [], strict=True):
                    R[child, site, j] = share
        rows = [[(sy, sx) for sx in out_sites(width, kernel, stride)] for sy in out_sites(height, kernel, stride)]
        means.append([[[gauss[site, j][0] for j in range(parents)] for site in row] for row in rows])
        presence.append([[[gauss[site, j][2] for j in range(parents)] for site in row] for row in rows])
        responsibilities.append(
            [
                [[[R[(c, y + dy, x + dx), (y, x), j] for j in range(parents)] for c, dy, dx in within] for y, x in row]
                for row in rows
            ]
        )
    return tensor(means), tensor(presence), tensor(responsibilities)


def out_sites(size: int, kernel: int, stride: int) -> range:
    """Where windows begin along one axis."""
    return range(0, size - kernel + 1, stride)


def matrix_vote(pose: Tensor, weight: Tensor) -> Tensor:
    """The pose's entries, row by row, as a matrix times the weight, flattened again; a vector is one row.

    Shapes: pose [p], weight [a, e] -> [(p / a) e]
    """
    inner = len(weight)
    return torch.cat([sum(pose[r * inner + a] * weight[a] for a in range(inner)) for r in range(len(pose) // inner)])


def linear_votes(poses: Tensor, weight: Tensor) -> Tensor:
    """Shapes: poses [b, i, p], weight [i, a, j, e] -> [b, i, j, d]"""
    batch, children, _ = poses.shape
    return tensor(
        [
            [[matrix_vote(poses[n, i], weight[i, :, j]) for j in range(weight.shape[2])] for i in range(children)]
            for n in range(batch)
        ]
    )


def window_poses(poses: Tensor, kernel: int, stride: int) -> Tensor:
    """The children of each window, ordered by type, then row, then column.

    Shapes: poses [b, c, p, h, w] -> [b, y, x, (c k k), p]
    """
    batch, types, _, height, width = poses.shape
    return tensor(
        [
            [
                [
                    [
                        poses[n, c, :, y + dy, x + dx]
                        for c in range(types)
                        for dy in range(kernel)
                        for dx in range(kernel)
                    ]
                    for x in out_sites(width, kernel, stride)
                ]
                for y in out_sites(height, kernel, stride)
            ]
            for n in range(batch)
        ]
    )


def scrambled_window_poses(poses: Tensor, kernel: int, stride: int) -> Tensor:
    """Tsai's released code stacks windows on the last axis, [b, c, k, k, p, (y x)]; seen as [b, c, k, k, y, x, p].

    Shapes: poses [b, c, p, h, w] -> [b, y, x, (c k k), p]
    """
    batch, types, dim, height, width = poses.shape
    ys, xs = out_sites(height, kernel, stride), out_sites(width, kernel, stride)
    patches = [poses[:, :, :, y : y + kernel, x : x + kernel].permute(0, 1, 3, 4, 2) for y in ys for x in xs]
    stacked = torch.stack(patches, dim=-1)
    seen = stacked.contiguous().view(batch, types, kernel, kernel, len(ys), len(xs), dim)
    return seen.permute(0, 4, 5, 1, 2, 3, 6).flatten(3, 5)


def window_votes(poses: Tensor, weight: Tensor, kernel: int, stride: int, scrambled: bool = False) -> Tensor:
    """Shapes: poses [b, c, p, h, w], weight [(c k k), a, j, e] -> [b, y, x, (c k k), j, d]"""
    children = (scrambled_window_poses if scrambled else window_poses)(poses, kernel, stride)
    votes = linear_votes(children.flatten(0, 2), weight)
    return votes.unflatten(0, children.shape[:3])
