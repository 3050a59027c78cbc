"""The lab's wires: a bridge, a veth pair and a network namespace per host, and whatever is done to them.

Rules of this file:
1. Every name that is made begins with the prefix and the lab's own id, and the lab is entered in a registry first, with
   a lock that its owner holds for life. `sweep` takes away the labs whose owners are dead, and nothing else.
2. What a fault needs is checked to be in force before the test goes on: a cut that did not cut proves nothing.
3. A cut sends nothing to anybody: no reset, no ICMP. Who is cut off finds out by silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh.net.programs import not_installed

PREFIX = "gmlab"
REGISTRY = Path("/run/gangmesh-lab")
NETNS_ETC = Path("/etc/netns")
PROGRAMS = ("ip", "ss", "tc", "unshare", "nsenter")
HOST_NUMBERS = (3, 20, 100, 9, 30, 4)
"""Last byte of the hosts' addresses: sorted as text (.100 .20 .3 .30 .4 .9) they are in another order than as ranks."""
HEAD_NUMBER = 2
GATE_NUMBER = 1
NO_SUCH_MAC = "02:00:00:00:00:01"
KILL_LIMIT_S = 10.0


def skip_without_redirect() -> None:
    """For tests of the mesh's gateways."""
    lacking = not_installed()
    if lacking is not None:
        pytest.skip(f"no redirect here: {lacking}")


def why_not() -> str | None:
    """What this machine lacks for a lab; None when nothing does."""
    if os.geteuid() != 0:
        return "a lab needs root (network namespaces)"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"a lab needs the programs {', '.join(missing)} (packages iproute2, util-linux)"
    if cgroup_mount() is None:
        return "a lab needs cgroup v2 (to freeze and kill a host)"
    done = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "ve0", "type", "veth"], capture_output=True, text=True
    )
    return (
        None if done.returncode == 0 else f"this kernel makes no veth in a namespace: {done.stderr.strip()}"
    )


def cgroup_mount() -> Path | None:
    """Where cgroup v2 is mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split(" ")[4])
    return None


def call(*words: str, stdin: str | None = None) -> str:
    """Runs a program to its end; its stdout. Fails with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, input=stdin, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout


class LabNetwork:
    """One lab's bridge and namespaces. Make it with `LabNetwork.build`, end it with `close`."""

    def __init__(self, *, lab_id: str, subnet: str, lock: int) -> None:
        self.id = lab_id
        self.subnet = subnet
        self._lock = lock
        self.bridge = f"{lab_id}b"
        mount = cgroup_mount()
        assert mount is not None, "see why_not"
        self.cgroup = mount / lab_id

    @classmethod
    def build(cls) -> LabNetwork:
        sweep()
        lab_id, lock = _enter()
        lab = cls(lab_id=lab_id, subnet=_free_subnet(), lock=lock)
        try:
            lab.cgroup.mkdir()
            call("ip", "link", "add", lab.bridge, "type", "bridge", "forward_delay", "0")
            call("ip", "addr", "add", f"{lab.address(GATE_NUMBER)}/24", "dev", lab.bridge)
            call("ip", "link", "set", lab.bridge, "up")
        except BaseException:
            lab.close()
            raise
        return lab

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number}"

    def namespace(self, name: str) -> str:
        return f"{self.id}-{name}"

    def port(self, name: str) -> str:
        """The bridge's end of a host's cable; names of interfaces have 15 characters at most."""
        return f"{self.id}{name}"

    def plug(self, name: str, number: int, *, hosts_file: str) -> None:
        """A namespace with an `eth0` that has the address of this number."""
        namespace, port = self.namespace(name), self.port(name)
        folder = NETNS_ETC / namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(hosts_file)
        call("ip", "netns", "add", namespace)
        call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        call("ip", "link", "set", port, "master", self.bridge, "up")
        call("ip", "-n", namespace, "link", "set", "lo", "up")
        call("ip", "-n", namespace, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        call("ip", "-n", namespace, "link", "set", "eth0", "up")

    def unplug(self, name: str) -> None:
        """Takes the namespace away; what is not there is no error."""
        _remove_namespace(self.namespace(name))

    # ---- faults -----------------------------------------------------------------------------------

    def cut(self, name: str) -> None:
        """Pulls the host's cable."""
        call("ip", "link", "set", self.port(name), "down")
        assert "state DOWN" in call("ip", "link", "show", self.port(name))

    def heal(self, name: str) -> None:
        call("ip", "link", "set", self.port(name), "up")

    def cut_one_way(self, name: str, *, towards: str) -> None:
        """What this host sends to that address is lost; what comes from there still arrives.

        By a neighbour entry that names a network card that nobody has: the frames leave, and no one takes them.
        """
        entry = ("to", towards, "lladdr", NO_SUCH_MAC, "dev", "eth0", "nud", "permanent")
        call("ip", "-n", self.namespace(name), "neigh", "replace", *entry)
        shown = call("ip", "-n", self.namespace(name), "neigh", "show", "to", towards)
        assert NO_SUCH_MAC in shown, shown
        assert "PERMANENT" in shown, shown

    def heal_one_way(self, name: str, *, towards: str) -> None:
        call("ip", "-n", self.namespace(name), "neigh", "del", "to", towards, "dev", "eth0")

    def heal_all_ways(self, name: str) -> None:
        call("ip", "-n", self.namespace(name), "neigh", "flush", "nud", "permanent")

    def slow(self, name: str, *, kbit: int) -> None:
        """Both directions of the host's cable carry this much and no more."""
        shape = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "16kb", "latency", "500ms")
        call("tc", "qdisc", "replace", "dev", self.port(name), *shape)
        call("tc", "-n", self.namespace(name), "qdisc", "replace", "dev", "eth0", *shape)
        assert "tbf" in call("tc", "qdisc", "show", "dev", self.port(name))

    def fast(self, name: str) -> None:
        call("tc", "qdisc", "del", "dev", self.port(name), "root")
        call("tc", "-n", self.namespace(name), "qdisc", "del", "dev", "eth0", "root")

    # ---- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kills what runs in the lab and takes everything away. May be called again."""
        _remove_lab(self.id)
        os.close(self._lock)
        _entry(self.id).unlink(missing_ok=True)


def sweep() -> None:
    """Takes away what labs left whose owners are dead."""
    REGISTRY.mkdir(mode=0o700, exist_ok=True)
    for entry in REGISTRY.iterdir():
        lock = os.open(entry, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            if re.fullmatch(PREFIX + "[0-9a-f]{4}", entry.name):
                _remove_lab(entry.name)
                entry.unlink(missing_ok=True)
        finally:
            os.close(lock)


def _entry(lab_id: str) -> Path:
    return REGISTRY / lab_id


def _enter() -> tuple[str, int]:
    while True:
        lab_id = f"{PREFIX}{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            lock = os.open(_entry(lab_id), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, str(os.getpid()).encode())
            return lab_id, lock


def _free_subnet() -> str:
    """Three bytes of a network that this machine has no address in."""
    used = {
        ".".join(address["local"].split(".")[:3])
        for link in json.loads(call("ip", "-j", "-4", "addr"))
        for address in link["addr_info"]
    }
    routed = call("ip", "-4", "route")
    while True:
        subnet = f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
        if subnet not in used and f"{subnet}." not in routed:
            return subnet


def _remove_lab(lab_id: str) -> None:
    mount = cgroup_mount()
    assert mount is not None
    kill_group(mount / lab_id)
    # Both ends of a cable go at once; with the namespace they would go when the kernel finds the time.
    for link in json.loads(call("ip", "-j", "link")):
        if re.fullmatch(f"{lab_id}(b|m[0-9]+|head)", link["ifname"]):
            _call_quietly("ip", "link", "del", link["ifname"])
    for name in _namespaces():
        if name.startswith(f"{lab_id}-"):
            _remove_namespace(name)
    if NETNS_ETC.exists():
        for folder in NETNS_ETC.iterdir():
            if folder.name.startswith(f"{lab_id}-"):
                shutil.rmtree(folder, ignore_errors=True)


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return [entry.name for entry in folder.iterdir()] if folder.exists() else []


def _remove_namespace(name: str) -> None:
    _call_quietly("ip", "netns", "del", name)
    shutil.rmtree(NETNS_ETC / name, ignore_errors=True)


def _call_quietly(*words: str) -> None:
    subprocess.run(words, capture_output=True, timeout=30)


def kill_group(group: Path) -> None:
    """Kills everything in a control group and below it at once, waits for its end, and removes it."""
    if not group.exists():
        return
    (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + KILL_LIMIT_S
    while "populated 1" in (group / "cgroup.events").read_text():
        assert time.monotonic() < deadline, f"{group} is not empty: {group_pids(group)}"
        time.sleep(0.005)
    for folder in sorted(groups_below(group), key=lambda p: len(p.parts), reverse=True):
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()


def groups_below(group: Path) -> Sequence[Path]:
    """The group and all below it."""
    return [group, *(path for path in group.rglob("*") if path.is_dir())]


def group_pids(group: Path) -> list[int]:
    """Every process in the group and below it."""
    found = []
    for folder in groups_below(group):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    return found
