"""Tensors on a CUDA device: files equal those of the CPU, and copies wait for the right work."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.engine.load import tensor_reader
from unified_ckpt.runtime.comm.comm import Comm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

SECONDS = 60.0
CYCLES = 2_000_000_000  # about a second of `torch.cuda._sleep`
Save = Callable[..., object]


class Net(nn.Module):
    """Dtypes and memory of many kinds: transposed, tied, empty, scalar and complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 192, dtype=dtype)
        self.layer = nn.Linear(192, 300, dtype=dtype)
        self.head = nn.Linear(192, 300, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.transposed = nn.Parameter(torch.randn(70, 192).to(dtype).t())
        self.register_buffer("mask", torch.rand(9, 5) > 0.5)
        self.register_buffer("phase", torch.randn(4, 3, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.empty(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.embed(tokens), 0.1)
        rest = self.layer(hidden).square().mean() + (hidden @ self.transposed).square().mean()
        return rest + self.head(hidden).logsumexp(-1).mean()


def job(dtype: torch.dtype = torch.float32, **flags: bool) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(dtype).cuda()
    return net, torch.optim.AdamW(net.parameters(), **flags)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = net(torch.randint(300, (8, 16), device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_cpu(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """The same values as a job of the CPU, with the same strides."""
    twin = copy.deepcopy(net).cpu()
    other = torch.optim.AdamW(twin.parameters())
    other.load_state_dict(optimizer.state_dict())
    return twin, other


def stored(folder: Path) -> Mapping[str, bytes]:
    """Every file with tensors, and the index."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name.endswith((".safetensors", ".index.json"))
    }


def save_now(checkpointer: uc.Checkpointer, name: str, **arguments: Any) -> None:
    checkpointer.save(name, **arguments)


def save_copied(checkpointer: uc.Checkpointer, name: str, **arguments: Any) -> None:
    checkpointer.save_async(name, **arguments).result(SECONDS)


def save_lazily(checkpointer: uc.Checkpointer, name: str, **arguments: Any) -> None:
    checkpointer.save_async(name, lazy=True, **arguments).result(SECONDS)


@pytest.mark.parametrize("save", [save_now, save_copied, save_lazily])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"host_bytes": 200_000},
        {"model_dtype": "bfloat16"},
        {"compression": "lossless"},
        {"compression": "O1"},
        {"compression": "O2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_equal_those_of_the_cpu(
    tmp_path: Path, save: Save, options: Mapping[str, Any], dtype: torch.dtype
) -> None:
    net, optimizer = job(dtype)
    train(net, optimizer, 3)
    twin, other = on_cpu(net, optimizer)
    with uc.Checkpointer(tmp_path, options=uc.SaveOptions(**options)) as checkpointer:
        for name in ("first", "again"):
            save(checkpointer, name, model=net, optimizer=optimizer)
        checkpointer.save("cpu", model=twin, optimizer=other)
    assert stored(tmp_path / "first") == stored(tmp_path / "again") == stored(tmp_path / "cpu")


@pytest.mark.parametrize(
    "flags", [{}, {"fused": True}, {"capturable": True}, {"foreach": False}], ids=str
)
def test_training_resumes_bitwise(tmp_path: Path, flags: Mapping[str, bool]) -> None:
    """Dropout too: the random states of the device are a part of the checkpoint."""
    net, optimizer = job(**flags)
    train(net, optimizer, 3)
    uc.save(tmp_path / "c", model=net, optimizer=optimizer, rank_extra={"rng": uc.RandomStates()})
    expected = train(net, optimizer, 3)
    torch.manual_seed(5)
    other, fresh = job(**flags)
    uc.load(tmp_path / "c", model=other, optimizer=fresh, rank_extra={"rng": uc.RandomStates()})
    assert train(other, fresh, 3) == expected
    for name, tensor in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def captured_job() -> tuple[nn.Linear, torch.optim.Optimizer, torch.cuda.CUDAGraph]:
    """A step that is replayed: it runs no hook of the optimizer."""
    torch.manual_seed(0)
    net = nn.Linear(32, 32).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), capturable=True)
    data = torch.randn(4, 32, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        net(data).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return net, optimizer, graph


def test_graph_replays_the_loaded_state(tmp_path: Path) -> None:
    """A captured step reads the tensors that were there at its capture: a load fills them."""
    net, optimizer, graph = captured_job()
    uc.save(tmp_path / "c", model=net, optimizer=optimizer)
    graph.replay()
    expected = net.weight.detach().clone()
    for _ in range(3):
        graph.replay()
    uc.load(tmp_path / "c", model=net, optimizer=optimizer)
    graph.replay()
    assert torch.equal(net.weight, expected)


def test_graph_replays_beside_a_save(tmp_path: Path) -> None:
    """Replays that follow the call at once change what is copied already."""
    net, optimizer, graph = captured_job()
    with uc.Checkpointer(tmp_path) as checkpointer:
        for number in range(3):
            graph.replay()
            expected = net.weight.detach().clone()
            steps = optimizer.state[net.weight]["step"].clone()
            pending = checkpointer.save_async(f"{number}", model=net, optimizer=optimizer)
            for _ in range(20):
                graph.replay()
            pending.result(SECONDS)
            with uc.open(tmp_path / f"{number}") as opened:
                assert torch.equal(opened["model"]["weight"][...], expected.cpu())
                assert torch.equal(opened["optimizer"]["weight/step"][...], steps.cpu())


@pytest.mark.parametrize("save", [save_now, save_copied, save_lazily])
def test_state_is_offloaded_between_saves(tmp_path: Path, save: Save) -> None:
    """Saves of one plan follow the state to the host and back, where it has other addresses."""
    net, optimizer = job()
    train(net, optimizer, 1)
    with uc.Checkpointer(tmp_path) as checkpointer:
        for number in range(4):
            device = "cpu" if number % 2 else "cuda"
            for parameter, state in optimizer.state.items():
                parameter.data = (parameter.data + 1).to(device)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = (state[name] + 1).to(device)
            save(checkpointer, f"{number}", model=net, optimizer=optimizer)
            twin, other = on_cpu(net, optimizer)
            checkpointer.save(f"{number}-cpu", model=twin, optimizer=other)
            assert stored(tmp_path / f"{number}") == stored(tmp_path / f"{number}-cpu")


@pytest.mark.parametrize("options", [{}, {"model_dtype": "bfloat16"}], ids=str)
def test_copy_waits_for_the_device_once(tmp_path: Path, options: Mapping[str, Any]) -> None:
    """Not once for each tensor: the bus would be idle meanwhile."""
    state = {f"t{i}": torch.full((300, 300), i, dtype=torch.float32).cuda() for i in range(60)}
    state |= {f"turned{i}": torch.full((9, 300), i).float().cuda().t() for i in range(60)}
    with uc.Checkpointer(tmp_path, options=uc.SaveOptions(**options)) as checkpointer:
        checkpointer.save_async("first", model=state).result(SECONDS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                checkpointer.save_async("again", model=state).result(SECONDS)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert sum("synchronizing" in str(warning.message) for warning in caught) < 10
    assert stored(tmp_path / "first") == stored(tmp_path / "again")


@pytest.fixture(params=["default stream", "own stream"])
def loop_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream() if request.param == "own stream" else None):
        yield


@pytest.mark.usefixtures("loop_stream")
@pytest.mark.parametrize("lazy", [False, True])
def test_save_stores_what_was_queued_before_it(tmp_path: Path, lazy: bool) -> None:
    """Not what the tensors hold at the call, nor what later steps make of them."""
    net = nn.Linear(512, 512, bias=False).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with uc.Checkpointer(tmp_path) as checkpointer:
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                torch.cuda._sleep(CYCLES // 8)
                net.weight.fill_(value)
            pending = checkpointer.save_async(
                f"{value:g}", model=net, optimizer=optimizer, lazy=lazy
            )
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
            pending.result(SECONDS)
            with uc.open(tmp_path / f"{value:g}") as opened:
                assert torch.all(opened["model"]["weight"][...] == value)


@pytest.mark.usefixtures("loop_stream")
@pytest.mark.parametrize("options", [{}, {"host_bytes": 0}], ids=str)
def test_lazy_copies_do_not_wait_for_later_work(tmp_path: Path, options: Mapping[str, Any]) -> None:
    """The next forward pass runs on the device while the state is copied."""
    net, optimizer = job()
    train(net, optimizer, 1)
    with uc.Checkpointer(tmp_path, options=uc.SaveOptions(**options)) as checkpointer:
        checkpointer.save_async("1", model=net, optimizer=optimizer, lazy=True).result(SECONDS)
        torch.cuda.synchronize()
        pending = checkpointer.save_async("2", model=net, optimizer=optimizer, lazy=True)
        for _ in range(4):
            torch.cuda._sleep(CYCLES)
        done = torch.cuda.current_stream().record_event()
        while not pending.staged():
            assert not done.query(), "the copy waited for work that was queued after the save"
            time.sleep(0.001)
        pending.result(SECONDS)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_load_slices_to_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, lanes: int
) -> None:
    """Rows by extents, columns by tiles; both by pinned buffers that are used again."""
    monkeypatch.setattr(tensor_reader, "lane_count", lambda *, ranks: lanes)
    saved = {f"w{i}": torch.randn(2 << 10, 6 << 10) for i in range(2)}  # of 48 MiB each
    uc.save(tmp_path / "c", model=saved)
    layout = uc.Layout(mesh={"tp": 2}, rules={"*": {"tp": dim}})

    def act(comm: Comm) -> None:
        shards = {name: tensor.chunk(2, dim)[comm.rank] for name, tensor in saved.items()}
        target = {name: torch.zeros_like(t, device="cuda") for name, t in shards.items()}
        target["w1"] = target["w1"].double()
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model=target, layout=layout)
        assert all(
            torch.equal(target[name].cpu(), t.to(target[name].dtype)) for name, t in shards.items()
        )

    run_ranks(2, act)


@pytest.mark.usefixtures("loop_stream")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lanes", [1, 3])
def test_load_follows_what_was_queued_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, dtype: torch.dtype
) -> None:
    """Lanes copy on streams of their own, and the target is complete when the load returns."""
    monkeypatch.setattr(tensor_reader, "lane_count", lambda *, ranks: lanes)
    saved = {f"w{i}": torch.randn(1 << 10, 3 << 10) for i in range(4)}  # of 12 MiB each
    uc.save(tmp_path / "c", model=saved)
    target = {name: torch.zeros_like(t, dtype=dtype, device="cuda") for name, t in saved.items()}
    target["w3"] = torch.zeros(3 << 10, 1 << 10, dtype=dtype, device="cuda").t()
    torch.cuda._sleep(CYCLES // 8)
    for tensor in target.values():
        tensor.fill_(7)
    uc.load(tmp_path / "c", model=target)
    stream = torch.cuda.Stream()  # which waits for nothing
    with torch.cuda.stream(stream):
        loaded = {name: tensor.cpu() for name, tensor in target.items()}
    assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in saved.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_threads_use_no_other_device() -> None:
    """Each context of another process on it would take hundreds of MB of device 0."""
    program = (
        "import threading, torch\n"
        "from unified_ckpt.runtime.torch_state.devices import record_events, streams_after\n"
        "def copy():\n"
        "    with streams_after(events):\n"
        "        tensor.cpu()\n"
        "torch.cuda.set_device(1)\n"
        "tensor = torch.ones(9, device='cuda')\n"
        "events = record_events([tensor])\n"
        "thread = threading.Thread(target=copy)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[False, True]\n", "")


@pytest.mark.parametrize("options", [{}, {"model_dtype": "bfloat16"}], ids=str)
def test_copy_needs_little_memory_of_the_device(tmp_path: Path, options: Mapping[str, Any]) -> None:
    """Casts and transposed tensors are copied in pieces."""
    state = {"turned": torch.randn(8192, 8192, device="cuda").t()}  # 256 MiB
    with uc.Checkpointer(tmp_path, options=uc.SaveOptions(**options)) as checkpointer:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        checkpointer.save_async("c", model=state).result(SECONDS)
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20
        with uc.open(tmp_path / "c") as opened:
            stored_tensor = opened["model"]["turned"][...]
    assert torch.equal(stored_tensor, state["turned"].cpu().to(stored_tensor.dtype))


def test_memory_of_device_and_host(tmp_path: Path) -> None:
    """A snapshot takes what the state takes, and the system gets it back.

    The device needs some chunks.
    """
    state = {f"t{i}": torch.full((160, 1 << 18), i, dtype=torch.float32).cuda() for i in range(2)}
    state_nbytes = sum(tensor.nbytes for tensor in state.values())  # 320 MiB
    chunk_nbytes = 16 << 20
    with uc.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("warm", model={"t": torch.ones(3).cuda()})
        torch.cuda.reset_peak_memory_stats()
        device, host = torch.cuda.memory_allocated(), resident_nbytes()
        checkpointer.save("now", model=state)
        assert resident_nbytes() - host < 6 * chunk_nbytes
        checkpointer.save_async("copied", model=state).result(SECONDS)
        assert state_nbytes <= resident_nbytes() - host < state_nbytes + 6 * chunk_nbytes
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpointer.load("now", model=target)
        assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
        del target
        extra = torch.cuda.max_memory_allocated() - device - state_nbytes
        assert extra < 4 * chunk_nbytes
    assert resident_nbytes() - host < 6 * chunk_nbytes


def resident_nbytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.parametrize("background", [False, True])
def test_ranks_share_tensors_of_one_device(tmp_path: Path, background: bool) -> None:
    """Columns of four ranks meet in the tiles of a merged file; two ranks load rows of it."""
    whole = {
        "wide": torch.randn(65, 512),
        "half": torch.randn(130, 256).to(torch.bfloat16),
        "few": torch.randn(3),
    }
    columns = {name: {"tp": tensor.dim() - 1} for name, tensor in whole.items() if name != "few"}
    rows = {"wide": {"tp": 0}, "half": {"tp": 0}}

    def parts(world: int, rank: int, dims: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.chunk(world, dims[name]["tp"])[rank].cuda()
            if name in dims
            else tensor.cuda()
            for name, tensor in whole.items()
        }

    def layout(world: int, dims: Mapping[str, Any]) -> uc.Layout:
        return uc.Layout({"tp": world}, dims, {name: tuple(whole[name].shape) for name in dims})

    def save(comm: Comm) -> None:
        model = parts(4, comm.rank, columns)
        with make_checkpointer(comm) as checkpointer:
            if background:
                pending = checkpointer.save_async(
                    tmp_path / "c", model=model, layout=layout(4, columns)
                )
                for tensor in model.values():
                    tensor.zero_()
                pending.result(SECONDS)
            else:
                checkpointer.save(tmp_path / "c", model=model, layout=layout(4, columns))

    def load(comm: Comm) -> None:
        expected = parts(2, comm.rank, rows)
        target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model=target, layout=layout(2, rows))
        assert all(torch.equal(target[name], tensor) for name, tensor in expected.items())

    run_ranks(4, save)
    run_ranks(2, load)
    with uc.open(tmp_path / "c") as opened:
        for name, tensor in whole.items():
            assert torch.equal(opened["model"][name][...], tensor)
