"""Python's side of `script/bench har`, which starts it: one rank of the har trainer's cnn under
DistributedDataParallel, with NCCL on GPUs and Gloo on the CPU, or nn.DataParallel on the given GPUs. Uses the same
windows in the same batches. Prints one JSON line per epoch.

har.py FOLDER EPOCHS BATCH_SIZE ddp|GPU,..."""
import json
import os
import sys
import time

import torch
import torch.distributed
from torch import nn

folder, epochs, batch_size, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
SIGNALS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]


def read(path):
    with open(path) as file:
        return torch.tensor([[float(word) for word in line.split()] for line in file])


def block(inputs, outputs, kernel):
    return [
        nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(),
    ]


class Cnn(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layers = nn.Sequential(
            *block(channels, 64, 7), nn.MaxPool1d(2, ceil_mode=True),
            *block(64, 128, 5), nn.MaxPool1d(2, ceil_mode=True), *block(128, 128, 3),
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(128, classes)

    def forward(self, x):
        return self.head(self.dropout(self.layers(x).mean(2)))


def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


windows = torch.stack([read(f"{folder}/train/Inertial Signals/{signal}_train.txt") for signal in SIGNALS], 1)
windows = (windows - windows.mean((0, 2), keepdim=True)) / windows.std((0, 2), keepdim=True)
labels = read(f"{folder}/train/y_train.txt").long().flatten() - 1
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
gpus = [] if device.type == "cpu" else [rank] if way == "ddp" else list(map(int, way.split(",")))
if gpus:
    torch.cuda.set_device(device)
torch.distributed.init_process_group("nccl" if gpus else "gloo")
windows, labels = windows.to(device), labels.to(device)
torch.manual_seed(0)
model = Cnn(windows.shape[1], int(labels.max()) + 1).to(device)
if way == "ddp":
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=gpus or None)
else:
    ddp = nn.DataParallel(model, device_ids=gpus)
    batch_size *= len(gpus)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
sampler = torch.utils.data.DistributedSampler(range(len(labels)), ranks, rank)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    order = torch.tensor(list(sampler), device=device)
    start = time.perf_counter()
    for rows in order.split(batch_size):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(windows[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    torch.distributed.barrier()
    seconds = time.perf_counter() - start
    peaks = [None] * ranks
    torch.distributed.all_gather_object(peaks, (peak_bytes(), [torch.cuda.max_memory_allocated(gpu) for gpu in gpus]))
    if rank == 0:
        line = {
            "epoch": epoch + 1, "samples_per_second": len(order) * ranks / seconds, "seconds": seconds,
            "train_loss": loss.item(), "peak_memory_bytes": [host for host, _ in peaks],
            "peak_device_bytes": [size for _, sizes in peaks for size in sizes],
        }
        print(json.dumps(line), flush=True)
torch.distributed.barrier()
os._exit(0)  # Gloo's threads sometimes abort a process at a normal exit.
