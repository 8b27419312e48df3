"""Compares the weights and losses of 50 steps of ddpkit's DistributedDataParallel or FullyShardedDataParallel on two ranks
with Python's (FSDP2), with the same weights and batches.

ddp_training.py DDPKIT DDP_TRAINING CASE:MOMENTUM...: trains the model CASE by SGD. Python's ranks communicate through Gloo."""
import multiprocessing
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import run_each

RANKS, STEPS, BATCH, LEARNING_RATE, TOLERANCE = 2, 50, 8, 0.05, 1e-5
ddpkit, program = sys.argv[1:3]


class Model(nn.Module):
    def begin_step(self, step, rank):
        pass


class Mlp(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, x):
        return self.layers(x)


class DeepMlp(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
        )

    def forward(self, x):
        return self.layers(x)


class Lstm(Model):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 24, num_layers=2, batch_first=True)
        self.output = nn.Linear(24, 5)

    def forward(self, x):
        return self.output(self.lstm(x)[0][:, -1])


class Transformer(Model):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
        self.position = nn.Parameter(0.1 * torch.randn(10, 1, 32))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(10)
        y = self.block(self.embedding(x.t()) + self.position, mask)
        return nn.functional.linear(y.transpose(0, 1), self.embedding.weight).flatten(0, 1)


class Decoder(Model):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0) for _ in range(3))
        self.position = nn.Parameter(0.1 * torch.randn(10, 1, 32))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(10)
        y = self.embedding(x.t()) + self.position
        for block in self.blocks:
            y = block(y, mask)
        return nn.functional.linear(y.transpose(0, 1), self.embedding.weight).flatten(0, 1)


class Cnn(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(64, 5),
        )

    def forward(self, x):
        return self.layers(x)


class Heads(Model):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(20, 32)
        self.heads = nn.ModuleList([nn.Linear(32, 5), nn.Linear(32, 5)])
        self.never = nn.Linear(7, 7)
        self.head = 0

    def begin_step(self, step, rank):
        self.head = 0 if step % 2 == 0 else rank

    def forward(self, x):
        return self.heads[self.head](torch.relu(self.trunk(x)))


def classified(*shape):
    return torch.randn(STEPS, RANKS * BATCH, *shape), torch.randint(5, (STEPS, RANKS * BATCH))


def text():
    tokens = torch.randint(50, (STEPS, RANKS * BATCH, 11))
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def fully_sharded(model, reshard):
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


# Model, data, options of DistributedDataParallel, or a function that shards the model. None: one process on the global
# batch.
CASES = {
    "mlp": (Mlp, lambda: classified(20), {}),
    "lstm": (Lstm, lambda: classified(12, 6), {}),
    "transformer": (Transformer, text, {}),
    # Python's SyncBatchNorm rejects CPU tensors. The reference is batch norm over the global batch in one process.
    "sync_batch_norm": (Cnn, lambda: classified(3, 8, 8), None),
    "fsdp": (Decoder, text, lambda model: fully_sharded(model, True)),
    "fsdp_whole": (Decoder, text, lambda model: fully_sharded(model, False)),
    "unused": (Heads, lambda: classified(20), {"find_unused_parameters": True}),
}


def power_sgd(rank, start, batch):
    def register(ddp):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start, min_compression_rate=1,
            batch_tensors_with_same_shape=batch,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


# Communication hooks, by case.
HOOKS = {
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "power_sgd": power_sgd(1, 5, False),
    "power_sgd_4": power_sgd(4, 35, True),
}
CASES.update({name: (DeepMlp, lambda: classified(20), {}) for name in HOOKS})


# PowerSGD amplifies rounding errors. In float32, equal implementations diverge by an amount that depends on the
# processor.
IN_DOUBLE = {"power_sgd", "power_sgd_4"}


def train(case, momentum, weights, data, part, rank, options):
    """Returns the state after all steps on a part of the samples, and the losses. Uses DistributedDataParallel or FSDP2
    unless options is None."""
    model = CASES[case][0]().to(torch.double if case in IN_DOUBLE else torch.float)
    model.load_state_dict(weights)
    if options is None:
        forward = model
    elif callable(options):
        forward = options(model)
    else:
        forward = nn.parallel.DistributedDataParallel(model, **options)
    if options is not None and case in HOOKS:
        HOOKS[case](forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)
    losses = []
    for step, (x, y) in enumerate(zip(data["x"][:, part], data["y"][:, part])):
        model.begin_step(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    # A tensor that FSDP2 has sharded.
    state = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    return state, torch.tensor(losses, dtype=torch.double)


def run_rank(folder, rank, case, momentum, weights, data, options):
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    result = train(case, momentum, weights, data, slice(rank * BATCH, (rank + 1) * BATCH), rank, options)
    torch.save(result, f"{folder}/python-{rank}.pt")
    torch.distributed.destroy_process_group()


def python_ddp(folder, *arguments):
    # Forks: importing torch takes longer than training. torch has not started a thread yet.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(folder, rank, *arguments)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
        assert process.exitcode == 0, f"a rank of Python's ended with {process.exitcode}"
    results = [torch.load(f"{folder}/python-{rank}.pt") for rank in range(RANKS)]
    return results[0][0], [losses for _, losses in results]


def difference(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def compare(case, momentum):
    torch.manual_seed(7)
    make_model, make_data, options = CASES[case]
    weights = {name: tensor.detach().clone() for name, tensor in make_model().state_dict().items()}
    data = dict(zip("xy", make_data()))
    if case in IN_DOUBLE:
        weights = {name: tensor.double() for name, tensor in weights.items()}
        data["x"] = data["x"].double()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(weights, f"{folder}/weights.pt")
        torch.save(data, f"{folder}/data.pt")
        if options is not None:
            python, losses = python_ddp(folder, case, momentum, weights, data, options)
        else:
            python, losses = train(case, momentum, weights, data, slice(None), 0, None)[0], None
        subprocess.run(
            [ddpkit, "run", "-n", str(RANKS), "--", program, case, folder, str(LEARNING_RATE), str(momentum)], check=True,
            env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=200,
        )
        # Written by pickle_save of LibTorch, whose types weights_only rejects.
        read = lambda what, rank: torch.load(f"{folder}/{what}-{rank}-of-{RANKS}.pt", weights_only=False)
        ours = [read("rank", rank) for rank in range(RANKS)]
        our_losses = [read("losses", rank)["losses"] for rank in range(RANKS)]

    for name in ours[0]:
        assert torch.equal(ours[0][name], ours[1][name]), f"{name} differs between ddpkit's ranks"
    moved, apart = difference(weights, python), difference(python, ours[0])
    # The result of rank 0 alone: the comparison must detect a missing exchange of gradients.
    unlike = difference(python, train(case, momentum, weights, data, slice(0, BATCH), 0, None)[0])
    assert moved > 1000 * TOLERANCE and unlike > 100 * TOLERANCE, (moved, unlike)
    assert apart <= TOLERANCE, f"ddpkit and Python differ by {apart:.2g} after {STEPS} steps"
    for rank in range(RANKS if losses else 0):
        worst = (losses[rank] - our_losses[rank]).abs().max().item()
        assert worst <= TOLERANCE, f"a loss of rank {rank} differs by {worst:.2g}"
    print(f"{case}, momentum {momentum}: weights moved by {moved:.2g}; ddpkit and Python differ by {apart:.2g}")


torch.set_num_threads(1)
run_each([(case, float(momentum)) for case, momentum in (argument.split(":") for argument in sys.argv[3:])], compare)
