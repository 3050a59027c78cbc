"""One host of the lab: its own network, processes, host name and control group, and the ways in which it is lost.

Rules of this file:
1. A host's processes are those of its control group; whatever is started "on" it is put there before anything else.
2. Machines have a process table of their own. The head has not: whoever uses `mesh` looks for its process by number.
3. `kill` and `cut` say no goodbye. `power_off` is both at once: what the others see of a host that burns down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from agents.machine import MASTER_PORT_FIRST, MASTER_PORT_LAST
from tests.lab.network import NETNS_ETC, LabNetwork, call, group_pids, kill_group

BOOT_LIMIT_S = 10.0
RENDEZVOUS_PORTS = frozenset(str(port) for port in range(MASTER_PORT_FIRST, MASTER_PORT_LAST + 1))
FREEZE_LIMIT_S = 5.0
INIT = Path(__file__).with_name("host_init.py")
OWN_PROCESSES = ("--pid", "--fork", "--mount-proc", "--kill-child=KILL")


@dataclass(kw_only=True)
class Host:
    """A host; `boot` it before use.

    Args:
        name: short; the host name that its processes see is `lab-<name>`.
        number: last byte of its address.
        own_processes: rule 2.
    """

    network: LabNetwork
    name: str
    number: int
    own_processes: bool = True
    _init: subprocess.Popen[bytes] | None = None
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.network.address(self.number)

    @property
    def host_name(self) -> str:
        return f"lab-{self.name}"

    @property
    def group(self) -> Path:
        return self.network.cgroup / self.name

    @property
    def is_up(self) -> bool:
        return self._init is not None and self._init.poll() is None

    # ---- life -------------------------------------------------------------------------------------

    def boot(self, *, hosts_file: str = "127.0.0.1 localhost\n") -> None:
        """Plugs it in (unless it is) and starts its first process. `hosts_file` is its /etc/hosts."""
        namespace = self.network.namespace(self.name)
        if not Path("/run/netns", namespace).exists():
            self.network.plug(self.name, self.number, hosts_file=hosts_file)
        self.group.mkdir(exist_ok=True)
        mounts = "mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /dev/shm"
        begin = f'{mounts} && hostname {self.host_name} && exec "$@"'
        self._init = subprocess.Popen(
            [
                *("ip", "netns", "exec", namespace),
                *("unshare", "--cgroup", "--uts", *(OWN_PROCESSES if self.own_processes else ())),
                *("sh", "-c", begin, "sh", sys.executable, "-S", str(INIT)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=self._enter_group,
            start_new_session=True,
        )
        assert self._init.stdout is not None
        said = self._init.stdout.readline()
        assert said == b"up\n", said.decode()

    def _enter_group(self) -> None:
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def shut_down(self) -> None:
        """Ends everything on it; its cable and address stay."""
        if not self.group.exists():
            return
        self.thaw()
        kill_group(self.group)
        for process in [self._init, *self._started]:
            if process is not None:
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
        self._init = None
        self._started.clear()

    def write_hosts_file(self, text: str) -> None:
        """Replaces its /etc/hosts, which is a file of its own bound over this machine's."""
        (NETNS_ETC / self.network.namespace(self.name) / "hosts").write_text(text)

    # ---- processes --------------------------------------------------------------------------------

    def start(
        self, *words: str, environment: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """Starts a program on the host. What comes back is the way into the host; the program is its child."""
        assert self._init is not None, "boot it first"
        process = subprocess.Popen(
            [*self._way_in(), *words],
            env=dict(os.environ if environment is None else environment),
            preexec_fn=self._enter_group,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **how},
        )
        self._started.append(process)
        return process

    def run(self, *words: str, limit_s: float = 60.0, **how: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program on the host to its end, whatever that is."""
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)
        out, _ = process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(words, process.returncode, out, "")

    def _way_in(self) -> Sequence[str]:
        assert self._init is not None
        target = self._init.pid
        if self.own_processes:
            # `unshare --fork` stays outside; its child is the host's process 1
            deadline = time.monotonic() + BOOT_LIMIT_S
            while not (children := psutil.Process(target).children()):
                assert time.monotonic() < deadline, "the host has no first process"
            target = children[0].pid
        kinds = ("--net", "--mount", "--uts", "--cgroup", *(("--pid",) if self.own_processes else ()))
        return ("nsenter", f"--target={target}", *kinds, "--")

    def pids(self) -> list[int]:
        """Of everything on the host, as seen from outside."""
        return group_pids(self.group) if self.group.exists() else []

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Those of the host whose command line has a part that begins or ends with this word."""
        found = []
        for pid in self.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(part.startswith(word) or part.endswith(word) for part in process.cmdline()):
                    found.append(process)
        return found

    def rendezvous_sockets(self) -> list[str]:
        """What listens or is connected on a rendezvous port, on either side, as the kernel says it."""
        table = call("ip", "netns", "exec", self.network.namespace(self.name), "ss", "-Htan")
        found = []
        for line in table.splitlines():
            state, _, _, local, peer = line.split()[:5]
            ports = {end.rpartition(":")[2] for end in (local, peer)}
            if state in ("LISTEN", "ESTAB") and ports & RENDEZVOUS_PORTS:
                found.append(line)
        return found

    def connected_ports(self, process: psutil.Process) -> set[int]:
        """This side's ports of the connections that the process has."""
        table = call(
            "ip", "netns", "exec", self.network.namespace(self.name), "ss", "-Htnp", "state", "established"
        )
        lines = [line for line in table.splitlines() if f"pid={process.pid}," in line]
        return {int(line.split()[2].rpartition(":")[2]) for line in lines}

    # ---- faults -----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pulls the cable: no reset, no goodbye."""
        self.network.cut(self.name)

    def heal(self) -> None:
        """Puts the cable back."""
        self.network.heal(self.name)

    def cut_towards(self, other: Host) -> None:
        """What this host sends to the other one is lost; the other direction works."""
        self.network.cut_one_way(self.name, towards=other.address)

    def heal_towards(self, other: Host) -> None:
        self.network.heal_one_way(self.name, towards=other.address)

    def freeze(self) -> None:
        """Nothing on the host runs, until `thaw`. Its network card still answers."""
        (self.group / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + FREEZE_LIMIT_S
        while "frozen 1" not in (self.group / "cgroup.events").read_text():
            assert time.monotonic() < deadline, f"{self.name} did not freeze"

    def thaw(self) -> None:
        (self.group / "cgroup.freeze").write_text("0")

    def mend(self) -> None:
        """Undoes cuts and freezes; what was killed stays dead."""
        if self.group.exists():
            self.thaw()
        self.heal()
        self.network.heal_all_ways(self.name)

    def kill(self) -> None:
        """Every process of the host dies at once. The kernel closes their connections, as it does on a live host."""
        self.shut_down()

    def power_off(self) -> None:
        """The cable first, so that not even the kernel says goodbye, then every process."""
        self.cut()
        self.shut_down()
