"""`ddpkit bench recovery --peers` measures torchft in the same run. Skipped without DDPKIT_PEER_TORCHFT.

bench_recovery.py DDPKIT"""
import csv
import os
import subprocess
import sys
import tempfile

if not os.environ.get("DDPKIT_PEER_TORCHFT"):
    print("skipped: DDPKIT_PEER_TORCHFT names no Python with torchft; script/test --peers does")
    sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "rows.csv")
    result = subprocess.run([sys.argv[1], "bench", "recovery", "--rounds", "1", "--optimizer", "adamw", "--peers",
                             "--csv", path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    with open(path) as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
assert list(rows) == ["ddpkit-elastic", "ddpkit-restart", "torchft", "torchft-defaults"], rows
for system, row in rows.items():
    assert row["ranks"] == "2" and float(row["kill_to_step_ms"]) > 0, row
    if system == "ddpkit-restart":
        assert row["rejoin_ms"] == row["stall_ms"] == "-", row
    else:
        assert float(row["rejoin_ms"]) > 0 and float(row["stall_ms"]) > 0, row
print(f"{len(rows)} systems")
