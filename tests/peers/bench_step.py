"""`ddpkit bench step --peers` measures Python's DistributedDataParallel in the same run, on the same models.

bench_step.py DDPKIT MODEL..."""
import csv
import os
import subprocess
import sys
import tempfile

ddpkit, *models = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "rows.csv")
    command = [ddpkit, "bench", "step", "--model", ",".join(models), "--batch", "8", "--steps", "4",
               "--optimizer", "adamw", "--update", "torch,sharded,fsdp", "--activation-checkpoint", "--backend", "shm", "--peers",
               "--csv", path]
    result = subprocess.run(command, env=dict(os.environ, DDPKIT_PEER_PYTHON=sys.executable), capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    with open(path) as file:
        rows = list(csv.DictReader(file))

systems = {"alone": "1", "alone-checkpointed": "1", "alone-x2": "2", "alone-barrier": "2", "ddpkit-shm": "2",
           "ddpkit-shm-sharded": "2", "ddpkit-shm-fsdp": "2", "python-ddp-gloo": "2", "python-ddp-shm": "2", "python-fsdp-gloo": "2",
           "python-alone": "1"}
build = os.path.dirname(os.path.dirname(os.path.abspath(ddpkit)))
if not os.path.exists(os.path.join(build, "python/ddpkit_torch/__init__.py")):
    del systems["python-ddp-shm"]
found = [(row["model"], row["system"]) for row in rows]
expected = [(model, system) for model in models for system in systems if (model, system) != ("lstm", "python-fsdp-gloo")
            and (system != "alone-checkpointed" or model.startswith("transformer"))]
assert found == expected, found
for model in models:
    of_model = {row["system"]: row for row in rows if row["model"] == model}
    assert len({row["params"] for row in of_model.values()}) == 1, of_model
    assert all(row["wrong"] == "0" and float(row["us"]) > 0 for row in of_model.values()), of_model
    assert all(row["ranks"] == systems[system] for system, row in of_model.items()), of_model
    # The same bytes, except for the padding of our buckets.
    for ours in ("ddpkit-shm", "ddpkit-shm-sharded", "ddpkit-shm-fsdp"):
        more = int(of_model[ours]["reduced_bytes"]) - int(of_model["python-ddp-gloo"]["reduced_bytes"])
        assert 0 <= more <= 64 * 200, (model, ours, more)
assert "times as fast" in result.stderr, result.stderr
print(f"{len(rows)} rows; Python's models have our parameters")
