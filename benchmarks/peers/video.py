"""Python's side of `script/bench video`, which starts it: the same clips from the same files (PyAV in DataLoader
workers), the same 3D-CNN under DistributedDataParallel with Gloo, the same augmentation. Prints a JSON line per epoch.

video.py decode|model|both FOLDER SIZE BATCH STEPS WORKERS"""
import csv
import functools
import json
import os
import random
import sys
import time

import av
import numpy as np
import torch
import torch.distributed
from torch import nn

role, folder, size, batch, steps, workers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FRAMES = 17
torch.set_num_threads(1)


@functools.lru_cache(maxsize=32)
def opened(path):
    """Keeps the file open in its worker, as ddpkit does."""
    container = av.open(path)
    container.streams.video[0].thread_type = "NONE"
    container.streams.video[0].codec_context.thread_count = 1
    return container


class Clips(torch.utils.data.Dataset):
    def __init__(self):
        with open(f"{folder}/trials.csv", newline="") as file:
            self.trials = list(csv.DictReader(file))
        self.names = [line.strip() for line in open(f"{folder}/classes.txt")]
        if role == "both":  # The trainer holds out 20 % of the videos.
            videos = sorted({trial["video"] for trial in self.trials})
            kept = set(random.Random(0).sample(videos, len(videos) - round(0.2 * len(videos))))
            self.trials = [trial for trial in self.trials if trial["video"] in kept]

    def __len__(self):
        return len(self.trials)

    def __getitem__(self, index):
        trial = self.trials[index]
        container = opened(f"{folder}/{trial['video']}")
        stream = container.streams.video[0]
        first = int(trial["start_frame"])
        ticks = 1 / (stream.average_rate * stream.time_base)  # Per frame.
        container.seek(int(first * ticks), stream=stream)
        pixels = np.empty((FRAMES, size, size), np.uint8)
        for frame in container.decode(stream):
            number = round(frame.pts / ticks) - first
            if number >= 0:
                pixels[number] = frame.reformat(size, size, "gray", threads=1).to_ndarray()
            if number == FRAMES - 1:
                break
        return torch.from_numpy(pixels), self.names.index(trial["label"])


def block(inputs, outputs, kernel, stride):
    padding = tuple(k // 2 for k in kernel)
    return [nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm3d(outputs), nn.ReLU()]


class Cnn(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        cube, half = (3, 3, 3), (2, 2, 2)
        self.layers = nn.Sequential(
            *block(2, width, (3, 5, 5), (1, 2, 2)), *block(width, 3 * width, cube, half),
            *block(3 * width, 6 * width, cube, half), *block(6 * width, 14 * width, cube, half),
            *block(14 * width, 24 * width, cube, (1, 2, 2)),
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(24 * width, 8)

    def forward(self, x):
        return self.head(self.dropout(self.layers(x).mean((2, 3, 4))))


def sources(count, length):
    """Returns the source of each row (or column) of each clip: shifted, half of them mirrored."""
    shift = ((torch.rand(count, 1) * 2 - 1) * 0.08 * length).round().long()
    moved = (torch.arange(length) + shift).clamp(0, length - 1)
    return torch.where(torch.rand(count, 1) < 0.5, length - 1 - moved, moved)


def prepare(pixels):
    count = len(pixels)
    where = sources(count, size)[:, :, None] * size + sources(count, size)[:, None, :]
    where = where.view(count, 1, -1).expand(-1, FRAMES, -1)
    grey = pixels.flatten(2).gather(2, where).view_as(pixels).float().mul_(2 / 255).sub_(1)
    grey.mul_(torch.empty(count, 1, 1, 1).uniform_(0.8, 1.25)).add_(torch.empty(count, 1, 1, 1).uniform_(-0.2, 0.2))
    change = torch.zeros_like(grey)
    change[:, 1:] = (grey[:, 1:] - grey[:, :-1]) * 4
    return torch.stack([grey, change], 1)


def show(clips, seconds):
    if rank == 0:
        print(json.dumps({"clips_per_second": clips / seconds}), flush=True)


if role == "decode":
    loader = torch.utils.data.DataLoader(
        Clips(), batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True)
    for epoch in range(3):  # The first epoch starts the workers and opens the files.
        start = time.perf_counter()
        clips = sum(len(labels) for _, labels in loader)
        show(clips, time.perf_counter() - start)
    os._exit(0)

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
ddp = nn.parallel.DistributedDataParallel(Cnn())
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)


def step(pixels, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(prepare(pixels)), labels).backward()
    optimizer.step()


if role == "model":
    pixels = torch.randint(0, 256, (batch, FRAMES, size, size), dtype=torch.uint8)
    labels = torch.randint(0, 8, (batch,))
    for _ in range(3):
        step(pixels, labels)
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step(pixels, labels)
    torch.distributed.barrier()
    show(steps * batch * ranks, time.perf_counter() - start)
else:
    dataset = Clips()
    sampler = torch.utils.data.DistributedSampler(dataset, ranks, rank)
    loader = torch.utils.data.DataLoader(
        dataset, batch, sampler=sampler, num_workers=workers, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        clips = 0
        start = time.perf_counter()
        for pixels, labels in loader:
            step(pixels, labels)
            clips += len(labels)
        torch.distributed.barrier()
        show(clips * ranks, time.perf_counter() - start)
torch.distributed.barrier()
os._exit(0)  # Gloo's threads sometimes abort a process at a normal exit.
