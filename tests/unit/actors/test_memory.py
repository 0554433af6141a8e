"""Freed memory stays with the process."""

import subprocess
import sys

SCRIPT = """
import resource, sys
from actors.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(3):
    [bytes(16 << 20) for _ in range(4)]
before = faults()
for _ in range(20):
    [bytes(16 << 20) for _ in range(4)]
print(faults() - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def test_a_block_is_used_again_without_fresh_pages():
    assert page_faults("keep") < page_faults("leave") / 10
