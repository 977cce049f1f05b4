"""The layouts of the matrix: one small model, cut in every way in which trainers cut one.

A layout is a row of `ROWS`: its name and its mesh. The names of the mesh dims say everything:
`ddp`; `fsdp` (FSDP2; with `rep`, HSDP); `tp` (parallelize_module); `cut` (plain local slices
described by a `uc.Layout`);
`pp` and `vpp` (stages; several per rank); `ep` (modules of experts spread over ranks, fused experts
as DTensors).

torch itself is the oracle of every cut: a model whose elements hold their own flat index is sharded
by torch's real wrappers, so each rank knows which elements of a dense tensor it must hold, whatever
the layout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc
from tests.support.equality import same

ROWS: dict[str, dict[str, int]] = {
    "plain": {},
    "ddp2": {"ddp": 2},
    "fsdp2": {"fsdp": 2},
    "tp2": {"tp": 2},
    "cut2": {"cut": 2},
    "pp2": {"pp": 2},
    "vpp2": {"vpp": 2},
    "ep2": {"ep": 2},
    "fsdp4": {"fsdp": 4},
    "fsdp2_tp2": {"fsdp": 2, "tp": 2},
    "hsdp2_2": {"rep": 2, "fsdp": 2},
    "pp2_fsdp2": {"pp": 2, "fsdp": 2},
    "fsdp2_ep2": {"fsdp": 2, "ep": 2},
    "fsdp2_cut2": {"fsdp": 2, "cut": 2},
    "hsdp2_2_tp2": {"rep": 2, "fsdp": 2, "tp": 2},
}
WORLDS = (1, 2, 4)  # the worlds of the default run; 8 ranks are slow
# Trained by the slow tests only: all but `rep` of their wrappers are trained on two ranks too.
TRAINED_SLOWLY = [row for row, mesh in ROWS.items() if math.prod(mesh.values()) == 4]

# Uneven on purpose: 131, 1031, 10, 5 and 3 divide by none of 2, 4 and 8, except 10 by 2. The
# embedding spans two digest blocks.
DIM, HIDDEN, VOCAB, EXPERTS, EXPERT_ROWS = 258, 131, 1031, 5, 10
BATCH, TOKENS = 8, 9
BEFORE, AFTER = 2, 2  # training steps before and after a save

CUTS = {  # what `cut` slices: glob -> (dim, global shape)
    "layers.*.mix.weight": (0, (HIDDEN, DIM)),
    "layers.*.mix.bias": (0, (HIDDEN,)),
    "layers.*.out.weight": (1, (DIM, HIDDEN)),
    "layers.*.experts.*.up.weight": (0, (EXPERT_ROWS, DIM)),
    "layers.*.experts.*.down.weight": (1, (DIM, EXPERT_ROWS)),
    "layers.*.ups": (1, (EXPERTS, EXPERT_ROWS, DIM)),
    "layers.*.downs": (2, (EXPERTS, DIM, EXPERT_ROWS)),
}


def world_of(row: str) -> int:
    return math.prod(ROWS[row].values())


class Copy(torch.autograd.Function):
    """Identity; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Total(torch.autograd.Function):
    """Sum over the group; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Layer(nn.Module):
    """Common to the three kinds: a norm with a frozen bias, a token shift, and the group of the
    parallel layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.norm.bias.requires_grad_(False)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, dim]
        h = self.norm(x)
        return x + self.inner(h + torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1))

    def copied(self, x: Tensor) -> Tensor:
        return x if self.group is None else Copy.apply(x, self.group)

    def total(self, x: Tensor) -> Tensor:
        return x if self.group is None else Total.apply(x, self.group)


class Dense(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, HIDDEN)
        self.out = nn.Linear(HIDDEN, DIM, bias=False)
        self.gain = nn.Parameter(
            torch.zeros(3)
        )  # fewer elements than ranks: some local shards are empty

    def inner(self, h: Tensor) -> Tensor:
        return self.total(self.out(torch.tanh(self.mix(self.copied(h))))) * (1 + self.gain.mean())


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, EXPERT_ROWS, bias=False)
        self.down = nn.Linear(EXPERT_ROWS, DIM, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(h)))


class Spread(Layer):
    """A module per expert; a rank may hold some of them only, under their global names."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def inner(self, h: Tensor) -> Tensor:
        weights = self.copied(torch.softmax(self.router(h), -1))
        h = self.copied(h)
        return self.total(
            sum(expert(h) * weights[..., int(i), None] for i, expert in self.experts.items())
        )


class Fused(Layer):
    """All experts in two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.ups = nn.Parameter(torch.zeros(EXPERTS, EXPERT_ROWS, DIM))
        self.downs = nn.Parameter(torch.zeros(EXPERTS, DIM, EXPERT_ROWS))
        self.held = range(EXPERTS)

    def inner(self, h: Tensor) -> Tensor:
        weights = self.copied(torch.softmax(self.router(h), -1))[
            ..., self.held.start : self.held.stop
        ]
        a = torch.relu(torch.einsum("btd,efd->btef", self.copied(h), local(self.ups)))
        return self.total(torch.einsum("btef,edf,bte->btd", a, local(self.downs), weights))


KINDS = (Dense, Spread, Fused, Dense)


class Net(nn.Module):
    """The layers of one stage; the first stage has the embedding, the last one the head."""

    def __init__(self, layers: range, *, tied: bool) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == len(KINDS)
        if self.first:
            self.embed = nn.Embedding(VOCAB, DIM)
            self.register_buffer("seen", torch.tensor(0, dtype=torch.int64))
        self.layers = nn.ModuleDict({str(i): KINDS[i]() for i in layers})
        if self.last:
            self.norm = nn.LayerNorm(DIM)
            self.head = nn.Linear(DIM, VOCAB, bias=False)
            self.register_buffer("mask", torch.zeros(7, dtype=torch.bool))
        if tied:
            self.tie()

    def tie(self) -> None:
        if self.first and self.last:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return (
            self.head(self.norm(x)) * 1.0 if self.last else x
        )  # FSDP2 warns if the module returns a view


Fill = Callable[[str, torch.Size, torch.dtype], Tensor]


def formula(name: str, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense contents of a tensor, computed from its name alone: a reference independent of the
    code under test.
    """
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw, dtype=dtype) * (
            max(shape[-1], 1) ** -0.5 if shape else 1.0
        )
    return torch.randint(0, 2 if dtype == torch.bool else 1000, shape, generator=draw).to(dtype)


def positions(_name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Every element holds its flat index; exact in float32 below 2**24."""
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape).to(dtype)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Built:
    """What one rank holds of a layout. `where[fqn]`: flat indices, into the dense tensor, of this
    rank's elements.
    """

    row: str
    tied: bool
    mesh: DeviceMesh | None
    chunks: list[nn.Module]
    optimizers: list[torch.optim.AdamW]
    owners: list[int]  # the pipeline rank of each chunk of the model, in order
    layout: uc.Layout | None
    where: dict[str, Tensor]

    @property
    def model(self) -> nn.Module | list[nn.Module]:
        return self.chunks if "vpp" in ROWS[self.row] else self.chunks[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        return list(self.optimizers) if "vpp" in ROWS[self.row] else self.optimizers[0]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.AdamW]]:
        for chunk, optimizer in zip(self.chunks, self.optimizers, strict=True):
            for name, parameter in chunk.named_parameters():
                yield name.removeprefix("module."), parameter, optimizer

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.chunks:
            for name, buffer in chunk.named_buffers():
                yield name.removeprefix("module."), buffer

    def dense_name(self, name: str) -> str:
        return "embed.weight" if self.tied and name == "head.weight" else name

    def coordinate(self, *dims: str) -> tuple[int, int]:
        """This rank's index and the count along these mesh dims together."""
        number, count = 0, 1
        for dim in dims:
            if dim in ROWS[self.row]:
                assert self.mesh is not None
                number = number * ROWS[self.row][dim] + self.mesh.get_local_rank(dim)
                count *= ROWS[self.row][dim]
        return number, count


def build(row: str, *, tied: bool, fill: Fill) -> Built:
    """Build the model of this layout. `fill` sets its dense tensors before torch's wrappers cut
    them.
    """
    dims = ROWS[row]
    mesh = (
        init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims)) if dims else None
    )
    stages, owners = _stages(dims)
    local_stage = (
        mesh.get_local_rank(next(d for d in dims if d in ("pp", "vpp"))) if len(owners) > 1 else 0
    )
    built = Built(row, tied, mesh, [], [], owners, _layout(dims), {})
    for stage, owner in zip(stages, owners, strict=True):
        if owner != local_stage:
            continue
        net = Net(stage, tied=tied)
        with torch.no_grad():
            for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
                tensor.copy_(fill(built.dense_name(name), tensor.shape, tensor.dtype))
        wrapped = _cut(net, dims, mesh, tied=tied)
        built.chunks.append(wrapped)
        built.optimizers.append(_adamw(wrapped))
    return built


def build_with_oracle(row: str, *, tied: bool) -> Built:
    """A model of this layout whose elements hold their own positions."""
    built = build(row, tied=tied, fill=positions)
    built.where = {
        name: local(p.detach()).clone().long().flatten() for name, p, _ in built.parameters()
    }
    return built


def _stages(dims: dict[str, int]) -> tuple[list[range], list[int]]:
    if "pp" in dims:
        return [range(2), range(2, 4)], [0, 1]
    if "vpp" in dims:
        return [range(i, i + 1) for i in range(4)], [0, 1, 0, 1]
    return [range(4)], [0]


def _layout(dims: dict[str, int]) -> uc.Layout | None:
    if "cut" not in dims:
        return None
    return uc.Layout(
        mesh={"tp" if dim == "cut" else "dp": size for dim, size in dims.items()},
        rules={glob: {"tp": dim} for glob, (dim, _) in CUTS.items()},
        shapes={glob: shape for glob, (_, shape) in CUTS.items()},
    )


def _cut(net: Net, dims: dict[str, int], mesh: DeviceMesh | None, *, tied: bool) -> nn.Module:
    if "cut" in dims:
        _slice_manually(net, mesh["cut"])
    if "tp" in dims:
        _tensor_parallel(net, mesh["tp"], tied=tied)
    if "ep" in dims:
        _expert_parallel(net, mesh["ep"])
    if "fsdp" in dims:
        shards = mesh["rep", "fsdp"] if "rep" in dims else mesh["fsdp"]
        for layer in net.layers.values():
            fully_shard(layer, mesh=shards)
        fully_shard(net, mesh=shards)
    if "ddp" in dims:
        return DistributedDataParallel(net, process_group=mesh.get_group("ddp"))
    return net


def cut_of(name: str) -> tuple[int, tuple[int, ...]] | None:
    """The dim of this parameter that `cut` slices, and its global shape."""
    return next((cut for glob, cut in CUTS.items() if fnmatchcase(name, glob)), None)


def _slice_manually(net: Net, mesh: DeviceMesh) -> None:
    for layer in net.layers.values():
        layer.group = mesh.get_group()
    for name, parameter in list(net.named_parameters()):
        cut = cut_of(name)
        if cut is not None:
            owner, _, leaf = name.rpartition(".")
            piece = parameter.detach().chunk(mesh.size(), cut[0])[mesh.get_local_rank()].clone()
            setattr(net.get_submodule(owner), leaf, nn.Parameter(piece))


def _tensor_parallel(net: Net, mesh: DeviceMesh, *, tied: bool) -> None:
    plan: dict[str, ColwiseParallel | RowwiseParallel] = {}
    for name, module in net.named_modules():
        leaf = name.split(".")[-1]
        if leaf in ("mix", "up"):
            plan[name] = ColwiseParallel(use_local_output=False)
        elif leaf in ("out", "down"):
            plan[name] = RowwiseParallel()
        elif leaf == "embed":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif leaf == "head":
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(module, Fused):
            module.ups = nn.Parameter(distribute_tensor(module.ups.detach(), mesh, [Shard(1)]))
            module.downs = nn.Parameter(distribute_tensor(module.downs.detach(), mesh, [Shard(2)]))
            module.group = mesh.get_group()
    parallelize_module(net, mesh, plan)
    if tied:
        net.tie()


def _expert_parallel(net: Net, mesh: DeviceMesh) -> None:
    chunk = math.ceil(EXPERTS / mesh.size())
    local_experts = range(
        mesh.get_local_rank() * chunk, min(EXPERTS, (mesh.get_local_rank() + 1) * chunk)
    )
    for layer in net.layers.values():
        if isinstance(layer, Spread):
            layer.experts = nn.ModuleDict({str(i): layer.experts[str(i)] for i in local_experts})
            layer.group = mesh.get_group()
        elif isinstance(layer, Fused):
            layer.ups = nn.Parameter(distribute_tensor(layer.ups.detach(), mesh, [Shard(0)]))
            layer.downs = nn.Parameter(distribute_tensor(layer.downs.detach(), mesh, [Shard(0)]))
            layer.held = local_experts
            layer.group = mesh.get_group()


LR = {
    True: 1.5e-2,
    False: 3e-3,
}  # of matrices and of other params: two param groups that a load must not mix up
WEIGHT_DECAY = {True: 0.1, False: 0.0}


def _adamw(module: nn.Module) -> torch.optim.AdamW:
    """Two groups; the frozen biases in the second one never have state."""
    groups = [
        {
            "params": [p for p in module.parameters() if (p.ndim > 1) == big],
            "lr": LR[big],
            "weight_decay": WEIGHT_DECAY[big],
        }
        for big in (True, False)
    ]
    return torch.optim.AdamW(groups, eps=1e-5, foreach=False)


def set_state(
    built: Built,
    dense: Callable[[str, torch.Size, torch.dtype], Tensor],
    step: Callable[[str], float],
) -> None:
    """Set the model and its AdamW state to these dense contents; each rank sets its elements."""
    with torch.no_grad():
        for name, parameter, optimizer in built.parameters():
            key = built.dense_name(name)
            pick = _picker(built, name, parameter, dense)
            local(parameter).copy_(pick(key))
            if not parameter.requires_grad:
                continue
            optimizer.state[parameter] = {"step": torch.tensor(step(key))}
            for state in ("exp_avg", "exp_avg_sq"):
                tensor = torch.zeros_like(parameter, requires_grad=False)
                local(tensor).copy_(pick(f"{key}/{state}"))
                optimizer.state[parameter][state] = tensor
        for name, buffer in built.buffers():
            buffer.copy_(dense(name, buffer.shape, buffer.dtype))


def _picker(
    built: Built, name: str, parameter: nn.Parameter, dense: Fill
) -> Callable[[str], Tensor]:
    cut = cut_of(name) if built.layout is not None else None
    shape = parameter.shape if cut is None else torch.Size(cut[1])
    return lambda key: (
        dense(key, shape, parameter.dtype).flatten()[built.where[name]].view(local(parameter).shape)
    )


def formula_step(name: str) -> float:
    return float(3 + zlib.crc32(name.encode()) % 50)


def dense_formula(*, tied: bool) -> dict[str, Tensor]:
    """The whole reference state, by checkpoint name."""
    net = Net(range(len(KINDS)), tied=tied)
    dense = {
        name: formula(name, tensor.shape, tensor.dtype)
        for name, tensor in net.state_dict(keep_vars=True).items()
    }
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            dense[f"{name}/step"] = torch.tensor(formula_step(name))
            dense |= {
                f"{name}/{state}": formula(f"{name}/{state}", parameter.shape)
                for state in ("exp_avg", "exp_avg_sq")
            }
    if tied:
        del dense["head.weight"]
    return dense


def held(built: Built) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(checkpoint name, this rank's elements, their positions in the dense tensor)."""
    for name, parameter, optimizer in built.parameters():
        key, where = built.dense_name(name), built.where[name]
        yield key, local(parameter.detach()), where
        for leaf, tensor in optimizer.state.get(parameter, {}).items():
            if leaf != "step":
                assert type(tensor) is type(parameter.data), f"{key}/{leaf}"
            yield f"{key}/{leaf}", local(tensor), None if leaf == "step" else where
    for name, buffer in built.buffers():
        yield name, buffer, None


def compare(built: Built, dense: Callable[[str], Tensor | None]) -> list[str]:
    """Differences, bit for bit, between this rank's state and the dense one. `dense(key)` is None
    where nothing must exist.
    """
    wrong: list[str] = []
    for key, have, where in held(built):
        want = dense(key)
        if want is not None and where is not None:
            want = want.flatten()[where].view(have.shape)
        if want is None or not same(have, want):
            wrong.append(f"{key}: {have}, the reference is {want}")
    for name, parameter, optimizer in built.parameters():
        states = set(optimizer.state.get(parameter, {}))
        if states != ({"step", "exp_avg", "exp_avg_sq"} if parameter.requires_grad else set()):
            wrong.append(f"{name}: has the states {sorted(states)}")
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        options, big = (group["lr"], group["weight_decay"], group["eps"]), parameter.ndim > 1
        if options != (LR[big], WEIGHT_DECAY[big], 1e-5):
            wrong.append(f"{name}: the options of its group are {options}")
    return wrong


def scramble(built: Built, *, forget: bool) -> None:
    """Overwrite all state, so that a load must restore it; `forget` also removes the optimizer
    state.
    """
    with torch.no_grad():
        for _, parameter, optimizer in built.parameters():
            local(parameter).fill_(7.25)
            for tensor in optimizer.state.get(parameter, {}).values():
                local(tensor).fill_(-3.5)
        for _, buffer in built.buffers():
            buffer.fill_(1)
    for optimizer in built.optimizers:
        if forget:
            optimizer.state.clear()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group.update(lr=99.0, weight_decay=98.0, eps=97.0)


def train_step(built: Built, step: int) -> float:
    """One step on the global batch of this step number, which is the same in every layout. Returns
    the global mean loss.

    Two batches take turns, so that the loss falls and a lost optimizer state shows.
    """
    tokens = torch.randint(
        0, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step % 2)
    )
    number, count = built.coordinate("ddp", "rep", "fsdp")
    tokens = tokens.chunk(count)[number]
    loss = _forward_backward(built, tokens)
    for optimizer in built.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    pair = torch.tensor(
        [0.0 if loss is None else loss.item(), 0.0 if loss is None else 1.0], dtype=torch.float64
    )
    if dist.is_initialized():
        dist.all_reduce(pair)
    return float(pair[0] / pair[1])


def settle(built: Built) -> None:
    """Make the replicas over `tp` equal again. Uneven TP shards give the TP ranks FSDP buffers of
    unequal length. gloo's ring over 4 ranks then sums the gradients of replicas in unequal order.
    The last bit drifts, which `check_replicas` detects and refuses.
    """
    if "tp" not in ROWS[built.row]:
        return
    group = built.mesh.get_group("tp")
    with torch.no_grad():
        for _, parameter, optimizer in built.parameters():
            if isinstance(parameter, DTensor) and "tp" in (
                parameter.device_mesh.mesh_dim_names or ()
            ):
                continue
            for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
                dist.broadcast(local(tensor), group_src=0, group=group)


def _forward_backward(built: Built, tokens: Tensor) -> Tensor | None:
    """Run forward and backward through all chunks; exchange with pipeline neighbours."""
    local_stage, _ = built.coordinate("pp", "vpp")
    group = (
        built.mesh.get_group(next(d for d in ROWS[built.row] if d in ("pp", "vpp")))
        if len(built.owners) > 1
        else None
    )

    def peer(chunk: int) -> int | None:
        if not 0 <= chunk < len(built.owners) or built.owners[chunk] == local_stage:
            return None
        return dist.get_global_rank(group, built.owners[chunk])

    def received(source: int, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape)
        dist.recv(tensor, source)
        return tensor

    local_chunks = [i for i, owner in enumerate(built.owners) if owner == local_stage]
    hidden = torch.Size((*tokens[:, :-1].shape, DIM))
    ends: dict[int, tuple[Tensor, Tensor]] = {}
    loss = None
    for i, chunk in zip(local_chunks, built.chunks, strict=True):
        x = tokens[:, :-1] if i == 0 else received(peer(i - 1), hidden).requires_grad_()
        y = chunk(x)
        ends[i] = (x, y)
        if peer(i + 1) is not None:
            dist.send(y.detach().contiguous(), peer(i + 1))
        if i == len(built.owners) - 1:
            loss = nn.functional.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten())
    for i in reversed(local_chunks):
        x, y = ends[i]
        if i == len(built.owners) - 1:
            loss.backward()
        else:
            y.backward(received(peer(i + 1), hidden))
        if i > 0:
            dist.send(x.grad, peer(i - 1))
    return None if loss is None else loss.detach()
