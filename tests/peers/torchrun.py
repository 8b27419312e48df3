"""torchrun --no-python starts a ddpkit program, with both ways in which torchrun serves the store."""
import os
import subprocess
import sys

program = sys.argv[1]
for share in ("1", "0"):
    environment = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0" if share == "1" else "1", OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", program],
        env=environment, capture_output=True, text=True, timeout=200,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("epoch")]
    # Twenty lines, not forty: only one rank reports, so both joined one group.
    assert len(lines) == 20, result.stdout + result.stderr
    assert float(lines[-1].split()[-1]) < float(lines[0].split()[-1]), lines
    print(f"agent store shared: {share}: {lines[-1]}")
