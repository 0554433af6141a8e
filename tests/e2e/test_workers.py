"""Worker processes end with the command, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = """
import os, time
from actors.workers import workers

if __name__ == "__main__":
    with workers(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_command_takes_its_workers_along(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    command = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    worker = int(command.stdout.readline())
    assert _is_alive(worker)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    deadline = time.monotonic() + 10
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(worker)
