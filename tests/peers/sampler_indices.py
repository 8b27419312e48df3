"""Compares the indices of ddpkit::DistributedSampler and torch.utils.data.DistributedSampler."""
import itertools
import subprocess
import sys

from torch.utils.data import DistributedSampler

EPOCHS = 3
requests, expected = [], []
for size, world, seed, shuffle, drop_last in itertools.product(
    (1, 2, 7, 40, 1001, 20000), (1, 2, 3, 8), (0, 12345, 2**40), (True, False), (True, False)
):
    if drop_last and size < world:
        continue  # Python yields nothing in this case; ddpkit throws.
    for rank in {0, world // 2, world - 1}:
        requests.append((size, world, rank, seed, int(shuffle), int(drop_last), EPOCHS))
        python = DistributedSampler(range(size), world, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        for epoch in range(EPOCHS):
            python.set_epoch(epoch)
            expected.append(list(python))

output = subprocess.run(
    [sys.argv[1]], input="\n".join(" ".join(map(str, request)) for request in requests),
    check=True, capture_output=True, text=True,
).stdout
ours = [[int(index) for index in line.split()] for line in output.splitlines()]
assert len(ours) == len(expected) > 500, (len(ours), len(expected))
for number, (mine, python) in enumerate(zip(ours, expected)):
    assert mine == python, f"size, world, rank, seed, shuffle, drop_last, epochs = {requests[number // EPOCHS]}"
print(f"{len(requests)} samplers agree over {EPOCHS} epochs each")
