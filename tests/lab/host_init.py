"""Process 1 of a lab host: reaps what nobody else does, and takes the host down when the tests are gone.

Standard library only, run with `python -S`. Its stdin is a pipe that the tests hold: when it ends, they are dead, and
everything of the host is killed through its control group.
"""

from __future__ import annotations

import os
import select
import signal


def main() -> None:
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"up\n")
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
        _reap()
        if 0 in readable and not os.read(0, 4096):
            with open("/sys/fs/cgroup/cgroup.kill", "w") as file:
                file.write("1")


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main()
