"""Runs several test cases in one Python process: importing torch takes longer than a case."""
import os
import sys
import time
import traceback

import torch

# LibTorch replaces its thread pool at the first use in a child of fork(). If two threads do that at once, one of them
# fails with "Invalid thread pool!".
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def run_each(cases, body):
    """Runs body(*case) in a forked process per case. Exits with 1 and the names of the cases that failed, if any.

    The caller must not have run an operator on several threads: these do not survive a fork."""
    failed = []
    for case in cases:
        sys.stdout.flush()
        sys.stderr.flush()
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            code = 0
            try:
                body(*case)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 0:
            failed.append(f"{case}: exit code {code} after {time.monotonic() - start:.1f} s")
            print(f"FAILED: {failed[-1]}", flush=True)
    # script/test sums these lines.
    print(f"test cases: {len(cases) - len(failed)} passed, 0 skipped, {len(failed)} failed")
    if failed:
        sys.exit("\n".join(failed))
