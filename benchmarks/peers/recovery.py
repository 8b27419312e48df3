"""torchft's side of `ddpkit bench recovery --peers`, which starts it: with --lighthouse the lighthouse, otherwise one
replica of one process.

Uses the model and the batch of cli/bench/recovery_rank.cpp, and prints the same lines (cli/bench/recovery_rank.h)."""
import argparse
import datetime
import os
import signal
import time

parser = argparse.ArgumentParser()
parser.add_argument("--lighthouse", action="store_true")
parser.add_argument("--tuned", action="store_true", help="detect a lost replica after 200 ms")
parser.add_argument("--address", help="port of the lighthouse")
parser.add_argument("--replicas", type=int)
parser.add_argument("--replacement", type=int, help="takes the place of this replica; otherwise LOCAL_RANK")
parser.add_argument("--resident-mib", type=int, default=0)
parser.add_argument("--model", help="mlp-HIDDENxLAYERS")
parser.add_argument("--optimizer", choices=("sgd", "adamw"))
arguments = parser.parse_args()

WARMUP, STEPS_AFTER, BATCH = 20, 20, 32


def report(line):
    # In one write: torchft's threads print to the same pipe.
    os.write(1, f"recovery {line}\n".encode())


def run_lighthouse():
    from torchft.coordination import LighthouseServer

    tuned = {"heartbeat_timeout_ms": 200, "quorum_tick_ms": 20} if arguments.tuned else {}
    server = LighthouseServer(bind="[::]:0", min_replicas=1, **tuned)
    report(f"lighthouse {os.getpid()} {server.address().rsplit(':', 1)[1].rstrip('/')}")
    signal.sigwait({signal.SIGTERM})


def run_replica(replica):
    import torch
    from torch import nn
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    resident = b"\1" * (arguments.resident_mib << 20)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    hidden, layers = map(int, arguments.model.removeprefix("mlp-").split("x"))
    sizes = [561] + layers * [hidden]
    parts = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(hidden, 6))
    if arguments.optimizer == "sgd":
        local = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        local = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def load(state):
        model.load_state_dict(state["model"])
        local.load_state_dict(state["optimizer"])

    options = {"heartbeat_interval": datetime.timedelta(milliseconds=50)} if arguments.tuned else {}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": local.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{arguments.address}",
        hostname="localhost",
        replica_id=f"bench_{replica}",
        **options,
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, local)
    generator = torch.Generator().manual_seed(replica)
    inputs, targets = torch.randn(BATCH, 561, generator=generator), torch.randint(6, (BATCH,), generator=generator)

    phase, steps = "warm up", 0  # Steps of all replicas in this phase.
    last, longest = time.monotonic_ns(), 0
    while steps < (3 * STEPS_AFTER if arguments.replacement is not None else STEPS_AFTER) or phase != "joined":
        before = manager.current_step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        if manager.current_step() == before:
            continue  # The step was dropped.
        now = time.monotonic_ns()
        longest, last = max(longest, now - last), now
        is_complete = manager.num_participants() == arguments.replicas
        if arguments.replacement is not None:
            phase, steps = "joined", steps + 1
        elif phase == "warm up":
            steps += is_complete
            if steps == WARMUP:
                phase = "complete"
                report(f"ready {replica} {os.getpid()}")
        elif phase == "complete" and not is_complete:
            phase = "lost"
            report(f"step {replica} {now / 1e3:.1f} {longest / 1e3:.1f}")
            longest = 0
        elif phase == "lost" and is_complete:
            phase, steps, joined_at = "joined", 0, now
        elif phase == "joined":
            steps += 1
    if arguments.replacement is None:
        report(f"step {replica} {joined_at / 1e3:.1f} {longest / 1e3:.1f}")
    assert not resident or resident[-1] == 1
    os._exit(0)


if arguments.lighthouse:
    run_lighthouse()
else:
    run_replica(int(os.environ["LOCAL_RANK"]) if arguments.replacement is None else arguments.replacement)
