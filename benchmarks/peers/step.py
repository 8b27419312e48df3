"""Python's side of `ddpkit bench step --peers`, which starts it: one rank of a DistributedDataParallel with Gloo (on GPUs
NCCL), with --package FOLDER over the backend shm of ddpkit_torch, with --fsdp of FSDP2, or with --alone one process
without it.

Uses the same models, data, batch, thread and pinning as cli/bench/step_models.cpp and step_rank.cpp, and the same
requests and answers (cli/bench/workers.h, step_row.h)."""
import argparse
import datetime
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--optimizer", choices=("sgd", "adamw"), required=True)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--no-pin", action="store_true")
parser.add_argument("--alone", action="store_true")
parser.add_argument("--package", help="folder of ddpkit_torch")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--control", required=True)
arguments = parser.parse_args()
rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])

# Set before torch starts threads: threads inherit the affinity.
cores = sorted(os.sched_getaffinity(0))
if arguments.device == "cpu" and not arguments.no_pin and len(cores) >= ranks:
    os.sched_setaffinity(0, {cores[rank]})

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
device = torch.device("cpu") if arguments.device == "cpu" else torch.device("cuda", rank)
CLASSES = 6


def mlp(hidden, layers):
    sizes = [561] + [hidden] * layers
    hidden_layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden_layers, nn.Linear(hidden, CLASSES))


def cnn():
    channels = (3, 16, 32, 64)
    parts = [
        part
        for a, b in zip(channels, channels[1:])
        for part in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(9, 100, num_layers=2, batch_first=True)
        self.output = nn.Linear(100, CLASSES)

    def forward(self, x):
        return self.output(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    TOKENS, LENGTH = 1000, 32

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(self.TOKENS, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # As in step_models.cpp.
        self.position = nn.Parameter(0.02 * torch.randn(self.LENGTH, 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0) for _ in range(layers)
        )
        # Not a buffer: buffers would be broadcast.
        self.mask = nn.Transformer.generate_square_subsequent_mask(self.LENGTH).to(device)

    def forward(self, tokens):
        x = self.embedding(tokens.t()) + self.position
        for layer in self.layers:
            x = layer(x, self.mask)
        return nn.functional.linear(x, self.embedding.weight).flatten(0, 1)


def make_task(name, batch):
    torch.manual_seed(1)
    if name.startswith("mlp-"):
        model, shape = mlp(*map(int, name[len("mlp-"):].split("x"))), (561,)
    elif name == "cnn":
        model, shape = cnn(), (3, 32, 32)
    elif name == "lstm":
        model, shape = Lstm(), (128, 9)
    else:
        model = Transformer(*((128, 2) if name == "transformer" else (512, 8)))
        torch.manual_seed(2 + rank)
        text = torch.randint(Transformer.TOKENS, (batch, Transformer.LENGTH + 1))
        return model, text[:, :-1], text[:, 1:].t().flatten()
    torch.manual_seed(2 + rank)
    return model, torch.randn(batch, *shape), torch.randint(CLASSES, (batch,))


def peak_bytes():
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def count_wrong(weights):
    """As count_wrong_weights() in C++."""
    wrong = 0
    for weight in weights:
        own = weight.detach()
        own = own.full_tensor() if arguments.fsdp else own
        reference = own.clone()
        torch.distributed.broadcast(reference, 0)
        different = own.view(torch.int32).ne(reference.view(torch.int32))
        wrong += int(different.logical_or(own.isfinite().logical_not()).sum())
    return wrong


def questions():
    # The pipe was inherited from the parent process.
    with os.fdopen(int(arguments.control.split(",")[rank])) as pipe:
        yield from (line.split() for line in iter(pipe.readline, ""))


def answer(words):
    print("ddpkit bench step: " + words, flush=True)


if arguments.package:
    sys.path.insert(0, arguments.package)
    import ddpkit_torch  # noqa: E402, F401: registers the backend

if not arguments.alone:
    torch.distributed.init_process_group(
        "shm" if arguments.package else "gloo" if device.type == "cpu" else "nccl",
        timeout=datetime.timedelta(minutes=2),
        device_id=None if device.type == "cpu" else device,
    )
if device.type == "cuda":
    torch.cuda.set_device(device)
model, x, y = (part.to(device) for part in make_task(arguments.model, arguments.batch))
if arguments.alone:
    forward = model
elif arguments.fsdp:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The units of FullyShardedDataParallel: the children of the outermost lists.
    mesh = init_device_mesh("cpu", (ranks,))
    for child in model.layers if hasattr(model, "layers") else model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    forward = fully_shard(model, mesh=mesh, reshard_after_forward=False)
else:
    forward = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
# The fastest variant in Python.
if arguments.optimizer == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loss = nn.CrossEntropyLoss()


def train():
    optimizer.zero_grad()
    loss(forward(x), y).backward()
    optimizer.step()


def timed(steps):
    """As StepClock in C++: returns the start time and the times of the steps, in microseconds."""
    if device.type == "cpu":
        times = [time.perf_counter()]
        for _ in range(steps):
            train()
            times.append(time.perf_counter())
        # perf_counter has the same clock as std::chrono::steady_clock.
        return times[0] * 1e6, [(b - a) * 1e6 for a, b in zip(times, times[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        train()
        event.record()
    events[-1].synchronize()
    return start * 1e6, [a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:])]


answer("ready")
for words in questions():
    if words[0] == "end":
        size = sum(p.numel() for p in model.parameters())
        reduced = 0 if arguments.alone else sum(p.numel() * p.element_size() for p in model.parameters())
        wrong = 0 if arguments.alone else count_wrong(model.parameters())
        answer(f"end {size} 0 {reduced} {peak_bytes()} {wrong}")
        continue
    warmup, steps = map(int, words[1:])
    for _ in range(warmup):
        train()
    start, durations = timed(steps)
    answer(f"turn {start:.3f} {','.join(f'{us:.3f}' for us in durations)} ")
if not arguments.alone:
    torch.distributed.destroy_process_group()
