"""Python's side of `script/bench asr`, which starts it: one rank of the asr trainer's model under DistributedDataParallel
with Gloo, on the same recordings, in batches of the same number of utterances. Prints one JSON line per epoch.

asr.py MANIFEST EPOCHS BATCH_SIZE MODEL    MODEL: JSON of the asr trainer's model and features options

Computes the Legendre memory as ddpkit's trainer does, by products with constant matrices in chunks of time: both call
the same kernels of LibTorch. Computes features in the first epoch and caches them.
"""
import json
import os
import pathlib
import statistics
import sys
import time
import wave

import numpy
import torch
import torch.distributed
from torch import nn
from torch.nn import functional as F

manifest, epochs, batch_size, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
CHUNK, CHARACTERS = 32, " 'abcdefghijklmnopqrstuvwxyz"


class LegendreMemory:
    def __init__(self, order, theta):
        i = torch.arange(order, dtype=torch.float64)
        scale = ((2 * i + 1) / theta)[:, None]
        signs = torch.where((i[:, None] < i) | ((i[:, None] - i) % 2 == 0), -1.0, 1.0)
        both = torch.zeros(order + 1, order + 1, dtype=torch.float64)
        both[:order, :order] = scale * signs
        both[:order, order:] = scale * torch.where(i % 2 == 0, 1.0, -1.0)[:, None]
        both = torch.linalg.matrix_exp(both)
        a, response = both[:order, :order], both[:order, order]
        toeplitz = torch.zeros(CHUNK, order, CHUNK, dtype=torch.float64)
        powers = []
        for delay in range(CHUNK):
            for step in range(delay, CHUNK):
                toeplitz[step, :, step - delay] = response
            response = a @ response
            powers.append(a if not powers else a @ powers[-1])
        self.order = order
        self.within = torch.cat([toeplitz.reshape(CHUNK * order, CHUNK), torch.cat(powers)], 1).float()
        self.end = toeplitz[-1].float()
        self.power = powers[-1]
        self.carries = {}

    def carry(self, chunks):
        if chunks not in self.carries:
            carry = torch.zeros(chunks, self.order, chunks, self.order, dtype=torch.float64)
            power = torch.eye(self.order, dtype=torch.float64)
            for apart in range(chunks):
                for chunk in range(apart, chunks):
                    carry[chunk, :, chunk - apart] = power
                power = power @ self.power
            self.carries = {chunks: carry.reshape(chunks * self.order, -1).float()}
        return self.carries[chunks]

    def __call__(self, u):
        batch, steps, channels = u.shape
        chunks = -(-steps // CHUNK)
        inputs = F.pad(u, (0, 0, 0, chunks * CHUNK - steps)).reshape(batch * chunks, CHUNK, channels)
        ends = torch.bmm(self.end.expand(batch * chunks, -1, -1), inputs).reshape(batch, chunks, self.order, channels)
        added = torch.cat([torch.zeros(batch, 1, self.order, channels), ends[:, :-1]], 1)
        states = torch.bmm(self.carry(chunks).expand(batch, -1, -1), added.reshape(batch, -1, channels))
        both = torch.cat([inputs, states.reshape(batch * chunks, self.order, channels)], 1)
        memory = torch.bmm(self.within.expand(batch * chunks, -1, -1), both)
        return memory.reshape(batch, chunks * CHUNK, self.order * channels)[:, :steps]


class LmuLayer(nn.Module):
    def __init__(self, width, memory_channels, order, theta):
        super().__init__()
        self.memory = LegendreMemory(order, theta)
        self.to_memory = nn.Linear(width, memory_channels)
        self.from_memory = nn.Linear(order * memory_channels, width)
        self.direct = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return F.gelu(self.from_memory(self.memory(self.to_memory(x))) + self.direct(x))


class Recognizer(nn.Module):
    def __init__(self, mels, width, kernel, strides, layers, memory_channels, order, theta, dropout):
        super().__init__()
        self.kernel, self.dropout = kernel, dropout
        self.convolutions = nn.ModuleList(
            nn.Conv1d(mels if i == 0 else width, width, kernel, stride) for i, stride in enumerate(strides)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(LmuLayer(width, memory_channels, order, theta) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS) + 1)

    def forward(self, features):
        x = features.transpose(1, 2)
        for convolution in self.convolutions:
            x = F.gelu(convolution(F.pad(x, (self.kernel - 1, 0))))
        x = x.transpose(1, 2).contiguous()
        for norm, layer in zip(self.norms, self.layers):
            kept = (torch.rand(x.shape[0], 1, x.shape[2]) >= self.dropout).to(x.dtype) / (1 - self.dropout)
            x = torch.addcmul(x, layer(norm(x)), kept)
        return self.head(self.last_norm(x))


def mel_filters(mels, fft, rate):
    to_mel = lambda hz: 2595 * numpy.log10(1 + hz / 700)
    edges = 700 * (10 ** (numpy.linspace(to_mel(20), to_mel(rate / 2), mels + 2) / 2595) - 1)
    bins = numpy.arange(fft // 2 + 1)[:, None] * rate / fft
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    filters = numpy.minimum((bins - left) / (middle - left), (right - bins) / (right - middle))
    return torch.tensor(numpy.maximum(filters, 0), dtype=torch.float32)


def features_of(path, rate, filters, fft):
    with wave.open(str(path)) as recording:
        samples = numpy.frombuffer(recording.readframes(recording.getnframes()), dtype="<i2") / 32768
    sound = F.pad(torch.tensor(samples, dtype=torch.float32), (0, max(0, rate // 40 - len(samples))))
    windows = sound.unfold(0, rate // 40, rate // 100) * torch.hann_window(rate // 40)
    features = torch.log(torch.fft.rfft(windows, fft).abs().square() @ filters + 1e-6)
    return (features - features.mean(0)) / (features.var(0, unbiased=False) + 1e-5).sqrt()


def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


lines = [json.loads(line) for line in open(manifest)]
durations = [line["duration"] for line in lines]
targets = [torch.tensor([CHARACTERS.index(c) + 1 for c in line["text"]]) for line in lines]
rate = options.pop("sample_rate")
fft = 2
while fft < 2 * (rate // 40):
    fft *= 2
filters = mel_filters(options["mels"], fft, rate)
cache = {}


def features(index):
    if index not in cache:
        cache[index] = features_of(pathlib.Path(manifest).parent / lines[index]["audio_filepath"], rate, filters, fft)
    return cache[index]


# Batches of the list sorted by length. Each rank gets a part of a batch with similar total length, as from ddpkit's
# sampler.
order = sorted(range(len(lines)), key=lambda index: -durations[index])
batches = []
for begin in range(0, len(order), batch_size):
    shares, totals = [[] for _ in range(ranks)], [0.0] * ranks
    batch = order[begin : begin + batch_size]
    for index in batch:
        open_ranks = [r for r in range(ranks) if len(shares[r]) < -(-len(batch) // ranks)]
        taker = min(open_ranks, key=lambda r: totals[r])
        shares[taker].append(index)
        totals[taker] += durations[index]
    batches.append((shares[rank], len(batch)))

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = Recognizer(**options)
parameters = sum(parameter.numel() for parameter in model.parameters())
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
first_step_at = None
for epoch in range(epochs):
    turns = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist()
    seconds = []
    for turn in turns:
        start = time.perf_counter()
        indices, whole = batches[turn]
        inputs = [features(index) for index in indices]
        frames = torch.tensor([len(one) for one in inputs])
        for stride in (convolution.stride[0] for convolution in model.convolutions):
            frames = (frames + stride - 1) // stride
        optimizer.zero_grad()
        logits = ddp(nn.utils.rnn.pad_sequence(inputs, batch_first=True))
        labels = [targets[index] for index in indices]
        lengths = torch.tensor([len(one) for one in labels])
        log_probs = F.log_softmax(logits, 2).transpose(0, 1)
        losses = F.ctc_loss(log_probs, torch.cat(labels), frames, lengths, reduction="none")
        loss = (losses / lengths).sum() * ranks / whole
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        seconds.append(time.perf_counter() - start)
        first_step_at = first_step_at or time.time()
    peaks = [None] * ranks
    torch.distributed.all_gather_object(peaks, peak_bytes())
    if rank == 0:
        line = {  # The trainer uses the upper median of an even number of steps.
            "epoch": epoch + 1, "median_step_ms": 1e3 * statistics.median_high(seconds), "seconds": sum(seconds),
            "train_loss": value, "first_step_at": first_step_at, "peak_memory_bytes": peaks, "parameters": parameters,
        }
        print(json.dumps(line), flush=True)
torch.distributed.barrier()
os._exit(0)  # Gloo's threads sometimes abort a process at a normal exit.
