"""The Python package ddpkit_torch: torch.distributed over ddpkit's shm backend, compared with Gloo.

shm_in_python.py PACKAGE_FOLDER: starts each test below on its number of ranks, by torchrun."""
import datetime
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def groups(timeout=datetime.timedelta(minutes=2)):
    """Both backends, over the same ranks."""
    import ddpkit_torch  # noqa: F401: registers the backend

    dist.init_process_group("cpu:shm", timeout=timeout)
    return dist.group.WORLD, dist.new_group(backend="gloo")


def collectives(group):
    """The results of all collectives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)

    def drawn(*shape, dtype=torch.float32):
        return torch.randint(-50, 50, shape, generator=generator).to(dtype)

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            tensor = drawn(3, 5, dtype=dtype)
            dist.all_reduce(tensor, op=op, group=group)
            yield tensor
        tensor = drawn(4, 2, dtype=dtype).t()
        dist.broadcast(tensor, size - 1, group=group)
        yield tensor
    tensor = drawn(70001)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    yield tensor
    tensor = drawn(6)
    yield dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]
    parts = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, drawn(2, 3), group=group)
    yield torch.stack(parts)
    output = torch.empty(size * 5)
    dist.all_gather_into_tensor(output, drawn(5), group=group)
    yield output
    output = torch.empty(4)
    dist.reduce_scatter(output, [drawn(4) for _ in range(size)], group=group)
    yield output
    output = torch.empty(7)
    dist.reduce_scatter_tensor(output, drawn(7 * size), group=group)
    yield output
    parts = [torch.empty(3) for _ in range(size)] if rank == 1 else None
    dist.gather(drawn(3), parts, dst=1, group=group)
    yield torch.stack(parts) if rank == 1 else torch.zeros(1)
    output = torch.empty(3)
    dist.scatter(output, [drawn(3) for _ in range(size)] if rank == 1 else None, src=1, group=group)
    yield output
    output = torch.empty(2 * size)
    dist.all_to_all_single(output, drawn(2 * size), group=group)
    yield output
    tensor = drawn(9)
    dist.reduce(tensor, 1, group=group)
    yield tensor if rank == 1 else torch.zeros(1)
    received = torch.empty(5)
    operations = [
        dist.P2POp(dist.isend, drawn(5), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    yield received
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "words": ["a"] * rank}, group=group)
    yield torch.tensor([len(each["words"]) for each in objects])
    dist.barrier(group=group)


def check_collectives():
    shm, gloo = groups()
    results = list(collectives(shm))
    assert len(results) > 35
    for one, other in zip(results, collectives(gloo), strict=True):
        assert torch.equal(one, other), (one, other)
    # Gloo has no all_to_all() of lists.
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(parts, [torch.full((2,), 10.0 * rank + to) for to in range(size)])
    assert [part.tolist() for part in parts] == [[10.0 * source + rank] * 2 for source in range(size)], parts
    part = dist.new_group([0, 1], backend="shm")
    tensor = torch.ones(3)
    if dist.get_rank() < 2:
        dist.all_reduce(tensor, group=part)
        assert tensor.tolist() == [2, 2, 2]
    with torch.profiler.profile() as profile:
        dist.all_reduce(tensor)
    assert any(event.key == "c10d::allreduce_" for event in profile.key_averages()), profile.key_averages()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 32))
        self.unused = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x, with_unused):
        x = self.first(x)
        return self.last(torch.relu(self.unused(x) if with_unused else x))


def trained(wrap, uses):
    """The weights and losses of eight AdamW steps of a wrapped Net."""
    torch.manual_seed(1)
    model, optimizer = wrap(Net().double())
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, generator=generator, dtype=torch.float64), uses(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return [torch.stack(losses), *weights]


def with_ddp(group, **options):
    def wrap(model):
        wrapped = DistributedDataParallel(model, process_group=group, **options)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)

    return wrap


def with_fsdp(group):
    def wrap(model):
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return wrap


def check_training():
    both = groups()
    cases = {
        "ddp": [with_ddp(group) for group in both],
        "ddp, view": [with_ddp(group, gradient_as_bucket_view=True, bucket_cap_mb=0.001) for group in both],
        "ddp, unused": [with_ddp(group, find_unused_parameters=True) for group in both],
        "fsdp": [with_fsdp(group) for group in both],
    }
    for name, wraps in cases.items():
        uses = (lambda step: step % 2 == dist.get_rank() % 2) if "unused" in name else (lambda step: True)
        one, other = (trained(wrap, uses) for wrap in wraps)
        assert len(one) == len(other) == 11
        for a, b in zip(one, other):
            assert torch.allclose(a, b, rtol=1e-7, atol=1e-8), (name, (a - b).abs().max())
        for weight in one[1:]:
            first = weight.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, weight), name
    assert str(init_device_mesh("cpu", (dist.get_world_size(),)))


def failure(fail):
    """Returns the error of a rank whose peer, rank 1, calls fail()."""
    groups(datetime.timedelta(seconds=3))
    tensor = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(tensor)
    try:
        if dist.get_rank() == 1:
            fail()
        dist.all_reduce(tensor)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the collective succeeded")


def check_killed():
    assert "has ended while" in (error := failure(lambda: os.kill(os.getpid(), signal.SIGKILL))), error
    assert "rank 1 (pid" in error, error


def check_silent():
    assert "waiting for rank 1" in (error := failure(lambda: time.sleep(8))), error


def check_mismatched():
    error = failure(lambda: dist.all_reduce(torch.ones(7)))
    assert "rank 1 called all_reduce(sum) of 7 float32" in error, error


TESTS = {
    "collectives": (check_collectives, (2, 3)),
    "training": (check_training, (2, 3)),
    "killed": (check_killed, (3,)),
    "silent": (check_silent, (3,)),
    "mismatched": (check_mismatched, (3,)),
}


def start(name, ranks, environment):
    """Runs a test on `ranks` ranks. Each rank that finishes it prints a line."""
    # The ranks do not depend on torchrun's agent, which ends all ranks at the first failure.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
                    "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, __file__, "--rank", name], env=environment | {"RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    finished = sum(f"finished {name}" in output for output in outputs)
    if finished != ranks - (name == "killed"):
        sys.exit(f"{name}: {finished} of {ranks} ranks finished\n" + "\n".join(outputs))
    print(f"{name} on {ranks} ranks: right")


def main():
    environment = dict(os.environ, PYTHONPATH=sys.argv[1])
    for name, (_, counts) in TESTS.items():
        for ranks in counts:
            start(name, ranks, environment)
    result = subprocess.run(
        [sys.executable, "-c", "import torch; torch.__version__ = '9.9.9'; import ddpkit_torch"],
        env=environment, capture_output=True, text=True)
    assert "built with torch" in result.stderr and "this is torch 9.9.9" in result.stderr, result.stderr


if sys.argv[1] == "--rank":
    TESTS[sys.argv[2]][0]()
    print(f"finished {sys.argv[2]}", flush=True)
    os._exit(0)  # A rank is missing after a failure, so the groups cannot be destroyed in order.
else:
    main()
