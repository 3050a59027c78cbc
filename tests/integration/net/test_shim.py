"""Programs with the shim: real ones, two gateways on this host, no rights needed."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mesh.net.refusals import Refusal
from mesh.net.shim import addresses as shim_addresses
from mesh.net.shim.library import LIBRARY
from mesh.net.shim.table import ShimTable
from tests.shim_world import DEVICE, ShimWorld, addresses_of, ended, shim_world

ECHO = """
import json, socket, sys, threading
def serve(sock, peer):
    print(json.dumps([peer[:2], sock.getpeername()[:2], sock.getsockname()[:2]]), flush=True)
    while data := sock.recv(65536):
        sock.sendall(data)
    sock.close()
listener = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print(json.dumps(listener.getsockname()[:2]), flush=True)
while True:
    threading.Thread(target=serve, args=listener.accept(), daemon=True).start()
"""
SAY = """
import json, socket, sys
def talk(sock):
    sock.settimeout(15)
    sock.sendall(b"hello")
    sock.shutdown(socket.SHUT_WR)
    heard = b""
    while data := sock.recv(100): heard += data
    return heard.decode()
def names(sock):
    return [sock.getpeername()[:2], sock.getsockname()[:2]]
"""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[ShimWorld]:
    async with shim_world(tmp_path) as made:
        yield made


@pytest.fixture
def free_port() -> int:
    """Free on loopback: of the system's choice, on an address that only these tests have."""
    with socket.socket() as sock:
        sock.bind((shim_addresses.loopback_of(addresses_of(1)[0]), 0))
        return int(sock.getsockname()[1])


async def echo(mesh: ShimWorld, on: str, address: str, port: int) -> asyncio.subprocess.Process:
    server = await mesh.python(on, ECHO, address, str(port))
    assert await heard(server) == [address, port]
    return server


async def heard(program: asyncio.subprocess.Process) -> object:
    assert program.stdout is not None
    async with asyncio.timeout(20):
        line = await program.stdout.readline()
    assert line, await program.communicate()
    return json.loads(line)


async def told(mesh: ShimWorld, on: str, text: str, *arguments: str) -> list[object]:
    """What a program says, line by line."""
    out = await ended(await mesh.python(on, SAY + text, *arguments))
    return [json.loads(line) for line in out.splitlines()]


async def test_programs_reach_each_other_and_both_see_overlay_addresses(
    mesh: ShimWorld, free_port: int
) -> None:
    text = """
for address in sys.argv[2:]:
    sock = socket.create_connection((address, int(sys.argv[1])))
    print(json.dumps([names(sock)[0], sock.getsockname()[0], talk(sock)]))
"""
    mine, theirs = addresses_of(0), addresses_of(1)
    v4 = await echo(mesh, "b", theirs[0], free_port)
    mapped = f"::ffff:{theirs[0]}"  # as gRPC dials
    said = await told(mesh, "a", text, str(free_port), *theirs, mapped)
    assert said == [
        [[theirs[0], free_port], mine[0], "hello"],
        [[theirs[1], free_port], mine[1], "hello"],
        [[mapped, free_port], f"::ffff:{mine[0]}", "hello"],
    ]
    for _ in range(3):
        peer, again, own = await heard(v4)  # type: ignore[misc]
        assert peer == again
        assert (peer[0], own) == (mine[0], [theirs[0], free_port])
    v4.kill()
    await v4.wait()
    v6 = await echo(mesh, "b", theirs[1], free_port)
    assert await told(mesh, "a", text, str(free_port), theirs[0]) == [
        [[theirs[0], free_port], mine[0], "hello"]
    ]
    peer, _, own = await heard(v6)  # type: ignore[misc]
    assert (peer[0], own) == (mine[1], [theirs[1], free_port])
    assert mesh.gateways["b"].counters()["ended"] == {"finished": 4}

    # To oneself nothing goes through the gateway; the names are the same.
    assert await told(mesh, "b", text, str(free_port), theirs[1]) == [
        [[theirs[1], free_port], theirs[1], "hello"]
    ]
    assert (await heard(v6))[0][0] == theirs[1]  # type: ignore[index]
    assert mesh.gateways["b"].counters()["refused_out"] == {}


async def test_who_does_not_block_gets_the_kernels_own_answers(mesh: ShimWorld, free_port: int) -> None:
    await echo(mesh, "b", addresses_of(1)[0], free_port)
    text = """
import errno, select
target = (sys.argv[1], int(sys.argv[2]))
sock = socket.socket(); sock.setblocking(False)
poll = select.epoll(); poll.register(sock, select.EPOLLOUT)
first = sock.connect_ex(target)
poll.poll(10)
print(json.dumps([errno.errorcode.get(first), sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)]))
print(json.dumps([sock.connect_ex(target), errno.errorcode[sock.connect_ex(target)], names(sock)[0]]))
print(json.dumps(talk(sock)))
import asyncio
async def both():
    readers = [await asyncio.open_connection(*target) for _ in range(50)]
    for number, (_, writer) in enumerate(readers): writer.write(b"%d" % number); writer.write_eof()
    return [int(await reader.read()) for reader, _ in readers]
print(json.dumps(asyncio.run(both()) == list(range(50))))
"""
    assert await told(mesh, "a", text, addresses_of(1)[0], str(free_port)) == [
        ["EINPROGRESS", 0],
        [0, "EISCONN", [addresses_of(1)[0], free_port]],
        "hello",
        True,
    ]


async def test_a_socket_keeps_its_names_after_dup_fork_and_exec(mesh: ShimWorld, free_port: int) -> None:
    await echo(mesh, "b", addresses_of(1)[0], free_port)
    text = """
import os, subprocess
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(json.dumps(sock.dup().getpeername()), flush=True)
if os.fork() == 0:
    print(json.dumps(names(sock)[0]), flush=True)
    os._exit(0)
os.wait()
child = f"import socket; sock = socket.socket(fileno={sock.fileno()}); print(list(sock.getpeername()))"
heard = subprocess.run([sys.executable, "-c", child], pass_fds=[sock.fileno()], env={}, capture_output=True, text=True)
print(heard.stdout.replace("'", '"').strip())
print(json.dumps(talk(sock)))
"""
    target = [addresses_of(1)[0], free_port]
    assert await told(mesh, "a", text, target[0], str(free_port)) == [target, target, target, "hello"]  # type: ignore[arg-type]


async def test_whoever_starts_programs_cannot_lose_the_shim(mesh: ShimWorld, free_port: int) -> None:
    await echo(mesh, "b", addresses_of(1)[0], free_port)
    dial = f"import socket; socket.create_connection(('{addresses_of(1)[0]}', {free_port})); print('there')"
    shell = f'unset LD_PRELOAD GANGMESH_SHIM; exec {sys.executable} -c "{dial}"'
    grandchild = f"import os; os.environ.clear(); os.execlp('sh', 'sh', '-c', '{sys.executable} -c \"$0\"', \"{dial}\")"
    for argv in (
        ("env", "-i", sys.executable, "-c", dial),
        ("bash", "-c", shell),
        (sys.executable, "-c", grandchild),
        ("env", "-u", "GANGMESH_SHIM", "nice", "sh", "-c", shell),
    ):
        assert await mesh.run("a", *argv) == "there\n", argv
    # What the user preloads stays, behind ours.
    others = {"LD_PRELOAD": "libm.so.6 libresolv.so.2"}
    said = await mesh.run(
        "a", "bash", "-c", "echo $LD_PRELOAD; env -u LD_PRELOAD printenv LD_PRELOAD", env=others
    )
    assert said.split() == [f"{LIBRARY}:libm.so.6:libresolv.so.2", str(LIBRARY)]


async def test_a_program_that_is_given_another_place_or_none_keeps_that(mesh: ShimWorld) -> None:
    """As a member's command is, by a supervisor that is in the machine's place itself."""
    text = """
import os, subprocess
show = "import socket; s = socket.socket(type=2); s.connect(('198.18.0.9', 9)); print(s.getsockname()[0])"
own = os.environ["GANGMESH_SHIM"]
def told(place):
    env = {"LD_PRELOAD": os.environ["LD_PRELOAD"], "GANGMESH_SHIM": place}
    return subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True).stdout.strip()
print(json.dumps([told(own), told(own.replace("198.18.0.1,", "198.19.0.7,"))]))
env = {"GANGMESH_SHIM": ""}
show = "import os; print(os.environ.get('LD_PRELOAD'), os.environ['GANGMESH_SHIM'] == '')"
print(json.dumps(subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True).stdout.strip()))
"""
    assert await told(mesh, "a", text) == [["198.18.0.1", "198.19.0.7"], "None True"]


async def test_curl_fetches(mesh: ShimWorld, free_port: int, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("of the other machine")
    serve = ("-m", "http.server", "--bind", addresses_of(1)[1], "--directory", str(tmp_path), str(free_port))
    server = await mesh.start("b", sys.executable, "-u", *serve)
    assert server.stdout is not None
    async with asyncio.timeout(20):
        assert b"Serving HTTP on fd67:6d00::2" in await server.stdout.readline()
    for host in (addresses_of(1)[0], f"[{addresses_of(1)[1]}]"):
        url = f"http://{host}:{free_port}/page"
        assert await mesh.run("a", "curl", "-sS", "-m", "20", url) == "of the other machine"


async def test_a_program_may_bind_before_it_connects(mesh: ShimWorld, free_port: int) -> None:
    server = await echo(mesh, "b", addresses_of(1)[0], free_port)
    text = """
target = (sys.argv[1], int(sys.argv[2]))
for source, reuse in ((sys.argv[3], 1), ("0.0.0.0", 0), ("127.0.0.1", 0)):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    sock.bind((source, 0))
    bound = sock.getsockname()
    sock.connect(target)
    print(json.dumps([bound[0], sock.getsockname()[0], bound[1] == sock.getsockname()[1], sock.getpeername(),
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), talk(sock)]))
"""
    target, own = [addresses_of(1)[0], free_port], addresses_of(0)[0]
    assert await told(mesh, "a", text, target[0], str(free_port), own) == [  # type: ignore[arg-type]
        [own, own, True, target, 1, "hello"],
        ["0.0.0.0", own, True, target, 0, "hello"],
        ["127.0.0.1", own, True, target, 0, "hello"],
    ]
    assert [(await heard(server))[0][0] for _ in range(3)] == [own] * 3  # type: ignore[index]


async def test_what_is_no_tcp_goes_nowhere_but_to_oneself(mesh: ShimWorld) -> None:
    text = """
import errno
mine, theirs = sys.argv[1:]
def failing(call):
    try: call()
    except OSError as error: return errno.errorcode[error.errno]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print(json.dumps(failing(lambda: sock.sendto(b"x", (theirs, 9)))))
print(json.dumps(failing(lambda: sock.sendmsg([b"x"], [], 0, (theirs, 9)))))
sock.connect((theirs, 9))
print(json.dumps(sock.getsockname()[0]))
print(json.dumps(failing(lambda: [sock.send(b"x") for _ in range(2)])))
inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); inbox.bind((mine, 0)); inbox.settimeout(10)
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", inbox.getsockname())
print(json.dumps(inbox.recv(9).decode()))
"""
    assert await told(mesh, "a", text, addresses_of(0)[0], addresses_of(1)[0]) == [
        "EHOSTUNREACH",
        "EHOSTUNREACH",
        addresses_of(0)[0],
        "ECONNREFUSED",
        "x",
    ]


async def test_the_overlay_is_a_device_and_its_addresses_are_found(mesh: ShimWorld) -> None:
    text = """
import psutil
print(json.dumps([one.address for one in psutil.net_if_addrs()[sys.argv[1]]]))
print(json.dumps(psutil.net_if_addrs()["lo"][0].address))
hints = dict(type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
print(json.dumps([socket.getaddrinfo(address, 1, **hints)[0][4][0] for address in sys.argv[2:]]))
"""
    mine, theirs = addresses_of(0), addresses_of(1)
    assert await told(mesh, "a", text, DEVICE, *theirs) == [list(mine), "127.0.0.1", list(theirs)]


async def test_a_gateway_that_is_away_and_one_that_is_new(mesh: ShimWorld, free_port: int) -> None:
    await echo(mesh, "b", addresses_of(1)[0], free_port)
    text = """
target = (sys.argv[1], int(sys.argv[2]))
for line in sys.stdin:
    sock = socket.socket()
    if line.strip() == "quick": sock.setblocking(False)
    try:
        sock.connect(target)
        print(json.dumps(talk(sock)), flush=True)
    except OSError as error:
        print(json.dumps(type(error).__name__), flush=True)
"""
    program = await mesh.python("a", SAY + text, addresses_of(1)[0], str(free_port))
    assert program.stdin is not None

    async def ask(how: str = "") -> object:
        assert program.stdin is not None
        program.stdin.write(how.encode() + b"\n")
        return await heard(program)

    assert await ask() == "hello"
    await mesh.stop_gateway("a")
    assert await ask() == "ConnectionRefusedError"
    assert await ask("quick") in ("ConnectionRefusedError", "BlockingIOError")
    mesh.start_gateway("a")
    assert await ask() == "ConnectionResetError", "it knows nothing yet"
    mesh.brief()
    assert await ask() == "hello"


async def test_only_who_may_open_the_table_is_heard(mesh: ShimWorld, free_port: int) -> None:
    gateway = mesh.gateways["a"]
    table = mesh.tables["a"].path
    assert table.stat().st_mode & 0o777 == 0o600
    await echo(mesh, "b", addresses_of(1)[0], free_port)
    dial = f"import socket; socket.create_connection(('{addresses_of(1)[0]}', {free_port})); print('there')"
    assert await mesh.run("a", sys.executable, "-c", dial) == "there\n"
    # Whoever dials the gateway's listener without it, also from the address and port that another one had.
    assert gateway.capture_port is not None
    for source in (shim_addresses.SOURCE, "127.0.0.1"):
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(sock, (shim_addresses.GATEWAY, gateway.capture_port))
        with pytest.raises(ConnectionResetError):
            await asyncio.get_running_loop().sock_recv(sock, 1)
        sock.close()
    assert gateway.counters()["refused_out"] == {str(Refusal.NOT_REDIRECTED): 2}
    # A program that cannot open it cannot speak, and says why.
    table.rename(table.with_name("elsewhere"))
    program = await mesh.start("a", sys.executable, "-c", dial)
    out, err = await program.communicate()
    assert (program.returncode, out) == (1, b"")
    assert b"gangmesh shim: what GANGMESH_SHIM says cannot be used" in err
    assert b"No route to host" in err


def test_a_program_that_is_told_nonsense_runs_and_reaches_no_member(tmp_path: Path) -> None:
    good = tmp_path / "shim.table"
    ShimTable(good).close()
    (tmp_path / "short").write_bytes(b"gmshim1\0")
    (tmp_path / "other").write_bytes(bytes(good.stat().st_size))
    asked = "socket.socket().connect_ex({!r})"
    both = ", ".join(asked.format(to) for to in (("198.18.0.2", 9), ("127.0.0.1", 1)))
    dial = f"import socket; print({both})"
    program = ["/usr/bin/env", "-u", "NOTHING", sys.executable, "-c", dial]
    nonsense = [
        *(";", ";;;", "1", "1;gm0", "1;gm0;198.18.0.1", f"2;gm0;198.18.0.1;{good}", f"1;gm0;;{good}"),
        *(f"1;gm0;nonsense;{good}", f"1;gm0;198.18.0.1:{good}", f"1;{'g' * 16};198.18.0.1;{good}"),
        *(f"1;gm0;{','.join(['198.18.0.1'] * 9)};{good}", f"1;gm0;{'1' * 4000};{good}", "1;" * 3000),
        *(f"1;gm0;198.18.0.1;{tmp_path / name}" for name in ("short", "other", "missing", ".")),
    ]
    for told in nonsense:
        environment = {"GANGMESH_SHIM": told, "LD_PRELOAD": str(LIBRARY)}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=20)
        assert done.stdout.split() == [str(errno.EHOSTUNREACH), str(errno.ECONNREFUSED)], (told, done.stderr)
        assert "gangmesh shim: what GANGMESH_SHIM says cannot be used" in done.stderr
    environment = {"GANGMESH_SHIM": f"1;gm0;198.18.0.1;{good}", "LD_PRELOAD": str(LIBRARY)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == [str(errno.ECONNREFUSED)] * 2, "there is no gateway"


async def test_ends_and_resets_of_a_member_come_through(mesh: ShimWorld, free_port: int) -> None:
    text = """
import struct
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("1", flush=True)
for _ in range(2):
    sock, _ = listener.accept()
    sock.sendall(b"!")
    try: print(json.dumps(sock.recv(9).decode() + sock.recv(9).decode()), flush=True)
    except OSError as error: print(json.dumps(type(error).__name__), flush=True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
"""
    server = await mesh.python("b", SAY + text, addresses_of(1)[0], str(free_port))
    assert await heard(server) == 1
    dial = """
import struct
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
assert sock.recv(1) == b"!"
if sys.argv[3] == "end":
    sock.sendall(b"end"); sock.shutdown(socket.SHUT_WR)
    try: sock.recv(1)
    except OSError as error: print(json.dumps(type(error).__name__))
else:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); sock.close()
"""
    assert await told(mesh, "a", dial, addresses_of(1)[0], str(free_port), "end") == ["ConnectionResetError"]
    assert await heard(server) == "end"
    assert await told(mesh, "a", dial, addresses_of(1)[0], str(free_port), "reset") == []
    assert await heard(server) == "ConnectionResetError"


ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.full((2_000_000,), dist.get_rank() + 1.0)
dist.all_reduce(numbers)
assert bool((numbers == numbers[0]).all())
print(f"rank {dist.get_rank()}: {numbers[0]}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.slow
async def test_torch_with_gloo_all_reduces(mesh: ShimWorld, free_port: int) -> None:
    ranks = []
    for rank, name in enumerate(("a", "b")):
        env = {
            "MASTER_ADDR": addresses_of(0)[0],
            "MASTER_PORT": str(free_port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(await mesh.start(name, sys.executable, "-c", ALL_REDUCE, env=env))
    async with asyncio.timeout(100):
        said = [(await rank.communicate())[0].decode().strip() for rank in ranks]
    assert said == ["rank 0: 3.0", "rank 1: 3.0"]
    assert sum(mesh.gateways[name].counters()["ended"].get("finished", 0) for name in ("a", "b")) > 2


ARITHMETIC = """
#include "shim.h"
#include <arpa/inet.h>
#include <stdio.h>
struct shim shim;
int main(void) {
  char text[100], back[INET6_ADDRSTRLEN] = "-", there[INET_ADDRSTRLEN] = "-";
  while (scanf("%99s", text) == 1) {
    union name name = {0}, loop;
    struct address address;
    uint32_t ip = 0;
    int is_v6 = strchr(text, ':') != NULL;
    name.any.sa_family = is_v6 ? AF_INET6 : AF_INET;
    inet_pton(name.any.sa_family, text, is_v6 ? (void *)&name.v6.sin6_addr : (void *)&name.v4.sin_addr);
    if (!overlay_of(&name.any, sizeof name, &address) || !to_loopback(&address, &ip)) { puts("- -"); continue; }
    make_name(&loop, AF_INET, ip, 0);
    inet_ntop(AF_INET, &loop.v4.sin_addr, there, sizeof there);
    if (!from_loopback(ip, &address)) return 1;
    put_address(&name.any, &address);
    inet_ntop(name.any.sa_family, is_v6 ? (void *)&name.v6.sin6_addr : (void *)&name.v4.sin_addr, back, sizeof back);
    printf("%s %s\\n", there, back);
  }
}
"""


def test_the_library_and_the_gateway_do_the_same_arithmetic(tmp_path: Path) -> None:
    native = Path(shim_addresses.__file__).with_name("native")
    (tmp_path / "try.c").write_text(ARITHMETIC)
    built = tmp_path / "try"
    subprocess.run(
        ["gcc", "-I", native, "-o", built, tmp_path / "try.c", native / "addresses.c"], check=True, timeout=60
    )
    asked = ["198.17.255.255", "198.18.0.0", "198.19.255.255", "198.20.0.0", "10.0.0.1", "fd67:6d00::"]
    asked += [
        "fd67:6d00:1::ffff",
        "fd67:6d00::1:0",
        "fd67:6d00:2::1",
        "fd67:6d01::1",
        "fd67:6d00:0:1::1",
        "::1",
    ]
    asked += [f"198.{18 + i % 2}.{i * 7 % 256}.{i * 13 % 256}" for i in range(200)]
    asked += [f"fd67:6d00:{i % 2}::{i * 331 % 65536:x}" for i in range(200)]
    done = subprocess.run(
        [built], input="\n".join(asked), capture_output=True, text=True, check=True, timeout=60
    )
    for address, line in zip(asked, done.stdout.splitlines(), strict=True):
        there, back = line.split()
        assert there == (shim_addresses.loopback_of(address) or "-"), address
        if there != "-":
            assert socket.inet_pton(
                socket.AF_INET6 if ":" in address else socket.AF_INET, back
            ) == socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
            assert shim_addresses.overlay_of(there) == back
