"""What the lab's users run."""

from __future__ import annotations

OK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(250_000)
dist.all_reduce(x)
print(f"ok world={int(x[0])} mesh={os.environ.get('NODUS_NODE_RANK', '?')} rank={dist.get_rank()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
"""The yardstick: one all-reduce over all ranks."""

BEACON = """
import os, signal, socket, sys, threading, time
folder, rank, epoch = sys.argv[1], os.environ["NODE_RANK"], os.environ["NODUS_GANG_EPOCH"]
path = f"{folder}/{epoch}.{rank}.{os.environ['LAB_HOST']}"
at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

def stop(number, frame):
    os.write(file, f"stop {time.monotonic()}\\n".encode())
    os._exit(143)

def hear(sock):
    with sock, sock.makefile() as words:
        try:
            os.write(file, f"heard {words.readline()}".encode())
            for word in words:
                pass
        except OSError:
            pass

def listen():
    listener = socket.create_server(("", at[1]))
    while True:
        sock, peer = listener.accept()
        threading.Thread(target=hear, args=(sock,), daemon=True).start()

def speak():
    while True:
        try:
            with socket.create_connection(at, timeout=5) as sock:
                while True:
                    sock.sendall(f"{epoch} {rank}\\n".encode())
                    time.sleep(0.05)
        except OSError:
            time.sleep(0.05)

signal.signal(signal.SIGTERM, stop)
file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
threading.Thread(target=speak if int(rank) else listen, daemon=True).start()
while not os.path.exists(f"{folder}/done"):
    os.write(file, f"{time.monotonic()}\\n".encode())
    time.sleep(0.01)
"""
"""Says every 10 ms that it is alive, where every host of the lab can see it: what a ghost would do to shared data. And
says its epoch to rank 0 for as long as it lives, to whoever is rank 0 by now: what a ghost would do to its peers."""

STUBBORN = """
import os, sys, time, torch, torch.distributed as dist
folder, epoch, rank = sys.argv[1], int(os.environ["NODUS_GANG_EPOCH"]), int(os.environ["RANK"])
file = open(f"{folder}/{epoch}.{rank}.{os.environ['LAB_HOST']}", "a", buffering=1)
while True:
    try:
        dist.init_process_group("gloo")
        while True:
            said = [torch.zeros(2) for _ in range(dist.get_world_size())]
            dist.all_gather(said, torch.tensor([float(epoch), float(os.path.exists(f"{folder}/done"))]))
            file.write(f"met {time.monotonic()} {[int(who[0]) for who in said]}\\n")
            if any(who[1] for who in said):
                dist.barrier()
                dist.destroy_process_group()
                sys.exit(0)
            time.sleep(0.02)
    except RuntimeError as error:
        file.write(f"door {time.monotonic()} {error!r:.100}\\n")
        if dist.is_initialized():
            dist.destroy_process_group()
"""
"""Ranks that say in each step of which epoch they are. One that loses its peers goes back to MASTER_ADDR and tries to
meet whoever is there now: what stale workers do, by their launcher or by themselves."""

GHOST = """
import socket, sys, time
while True:
    try:
        sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=15)
        sock.sendall(b"from the grave")
        print("heard" if sock.recv(100) else "ended", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
    time.sleep(0.3)
"""
"""Dials somebody for ever: a program that an epoch before has left."""
