"""`ddpkit bench step --peers` measures Python's DistributedDataParallel in the same run, on the same models."""
import csv
import os
import subprocess
import sys
import tempfile

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "rows.csv")
    command = [sys.argv[1], "bench", "step", "--model", "mlp-10k,cnn,lstm,transformer", "--batch", "8", "--steps", "4",
               "--optimizer", "adamw", "--backend", "shm", "--peers", "--csv", path]
    result = subprocess.run(command, env=dict(os.environ, DDPKIT_PEER_PYTHON=sys.executable), capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    with open(path) as file:
        rows = list(csv.DictReader(file))

models = ("mlp-10k", "cnn", "lstm", "transformer")
systems = ("alone", "alone-x2", "ddpkit-shm", "python-ddp-gloo", "python-alone")
assert [(row["model"], row["system"]) for row in rows] == [(m, s) for m in models for s in systems], rows
for model in models:
    of_model = [row for row in rows if row["model"] == model]
    assert len({row["params"] for row in of_model}) == 1, of_model
    assert all(row["wrong"] == "0" and float(row["us"]) > 0 for row in of_model), of_model
    assert [row["ranks"] for row in of_model] == ["1", "2", "2", "2", "1"], of_model
    # The same bytes, up to the padding of our buckets.
    ours, python = (int(of_model[i]["reduced_bytes"]) for i in (2, 3))
    assert 0 <= ours - python <= 64 * 200, (ours, python)
assert "times as fast" in result.stderr, result.stderr
print(f"{len(rows)} rows; Python's models have our parameters")
