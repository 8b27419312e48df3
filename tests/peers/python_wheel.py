"""python_wheel.py SOURCE_FOLDER: builds the wheel of ddpkit_torch, installs it, and trains with it under torchrun."""
import os
import pathlib
import subprocess
import sys
import tempfile

PROGRAM = """
import torch
import ddpkit_torch
torch.distributed.init_process_group("shm")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.full((4, 3), 1.0 + torch.distributed.get_rank())).sum().backward()
# One write: torchrun's ranks share stdout, without buffers.
print(f"{model.module.weight.grad.sum().item()}\\n", end="")
torch.distributed.destroy_process_group()
"""


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, **options)
    assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"
    return result.stdout


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        # This environment has no pip, so the pip of the system works on it.
        pip = ("python3", "-m", "pip", "--python", sys.executable, "--disable-pip-version-check")
        # With -Werror and this name of the compiler, the compiler cache has the objects of the default build.
        run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder,
            "--config-settings=cmake.define.DDPKIT_WERROR=ON", f"{sys.argv[1]}/python", env={**os.environ, "CXX": "c++"})
        (wheel,) = folder.glob("ddpkit_torch-*.whl")
        run(*pip, "install", "--no-deps", "--root-user-action=ignore", "--target", folder / "installed", wheel)
        assert {path.name.split(".")[0] for path in (folder / "installed/ddpkit_torch").iterdir()} - {"__pycache__"} == {
            "__init__", "_built_with", "_backend"}
        (folder / "program.py").write_text(PROGRAM)
        output = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                     folder / "program.py", env={"PYTHONPATH": str(folder / "installed"), "PATH": "/usr/bin:/bin"})
        # Rank r's gradient is 4 * (1 + r) in all 6 elements.
        assert output.split() == ["36.0", "36.0"], output
        print(f"{wheel.name}: right")


main()
