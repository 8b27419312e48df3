"""ddpkit's shared-memory backend for torch.distributed, for CPU ranks of one host.

    import ddpkit_torch
    torch.distributed.init_process_group("shm")                    # or "cpu:shm,cuda:nccl"
    model = torch.nn.parallel.DistributedDataParallel(model)       # unchanged
"""
import torch
import torch.distributed

from ._built_with import TORCH_VERSION

if torch.__version__.split("+")[0] != TORCH_VERSION:
    raise ImportError(
        f"ddpkit_torch was built with torch {TORCH_VERSION}, but this is torch {torch.__version__}: build it again with "
        "`pip install --no-build-isolation` in this environment")

from ._backend import create_shm_backend  # noqa: E402

torch.distributed.Backend.register_backend("shm", create_shm_backend, devices=["cpu"])
