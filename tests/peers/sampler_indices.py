"""ddpkit::DistributedSampler against torch.utils.data.DistributedSampler, index by index."""
import itertools
import subprocess
import sys

from torch.utils.data import DistributedSampler

program = sys.argv[1]
compared = 0
for size, world, seed, shuffle, drop_last in itertools.product(
    (1, 2, 7, 40, 1001), (1, 2, 3, 8), (0, 12345), (True, False), (True, False)
):
    if drop_last and size < world:
        continue  # Python yields nothing there; ddpkit refuses.
    for rank in {0, world // 2, world - 1}:
        python = DistributedSampler(range(size), world, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        expected = []
        for epoch in range(3):
            python.set_epoch(epoch)
            expected.append(list(python))
        arguments = [size, world, rank, seed, int(shuffle), int(drop_last), 3]
        output = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
        ours = [[int(index) for index in line.split()] for line in output.splitlines()]
        assert ours == expected, f"size, world, rank, seed, shuffle, drop_last, epochs = {arguments}:\n{ours}\n{expected}"
        compared += 1
assert compared > 100, compared
print(f"{compared} samplers agree over 3 epochs each")
