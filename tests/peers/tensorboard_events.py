"""Python's tensorboard reads the scalars and texts that har writes, also from a run that was stopped and resumed."""
import json
import math
import os
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

har = sys.argv[1]


def run(*arguments):
    result = subprocess.run([har, *arguments], capture_output=True, text=True, timeout=200,
                            env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


with tempfile.TemporaryDirectory() as folder:
    data, save = f"{folder}/set", f"{folder}/run"
    run("generate", data, "--train", "96", "--test", "24", "--steps", "32")
    common = ("--data", data, "--epochs", "4", "--save-dir", save, "--tensorboard", "--json")
    # Stopped in the third epoch. Afterwards that epoch must show only the events of the second run.
    first = run(*common, "--max-steps", "14")
    second = run(*common)
    assert [line["epoch"] for line in first + second] == [1, 2, 3, 4], (first, second)
    events = EventAccumulator(f"{save}/logs").Reload()
    tags = {"loss/train": "train_loss", "loss/test": "test_loss", "accuracy/train": "train_accuracy",
            "accuracy/test": "test_accuracy", "f1/test": "test_macro_f1", "training/lr": "lr",
            "training/samples_per_second": "samples_per_second"}
    assert set(events.Tags()["scalars"]) == set(tags), events.Tags()
    for tag, key in tags.items():
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        wanted = [(line["step"], line[key]) for line in first + second]
        assert [step for step, _ in found] == [step for step, _ in wanted], (tag, found, wanted)
        assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found, wanted)), (tag, found, wanted)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"mode": "cnn"' in text, text
print("7 scalars of 4 epochs and the run's config")
