"""What the shim costs a program: a connect, and a byte. One C program does both ways in turns; no gateway is asked.

The listener has room for all connections and nobody accepts them, so only the connecting side is measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from mesh.net.shim.addresses import GATEWAY
from mesh.net.shim.library import TABLE_NAME, ShimPlace, missing, shim_environment
from mesh.net.shim.table import ShimTable
from tests.bench.gateway_bench import row

TARGET_ADDED_US = 5.0
TARGET_PER_CALL = 1.05
CONNECTS = 400
SENDS = 400_000
LIMIT_S = 60.0
PROGRAM = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define AT_ONCE 20
static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}
static struct sockaddr_in at(const char *host, int port) {
  struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, host, &name.sin_addr);
  return name;
}
static int ascending(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return a < b ? -1 : a > b;
}
static double connect_us(struct sockaddr_in *to) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  double began = now_us();
  int failed = connect(fd, (struct sockaddr *)to, sizeof *to);
  double took = now_us() - began;
  if (failed) { perror("connect"); exit(1); }
  return took; /* stays open: a reset would be work for the next one */
}
int main(int count, char **words) {
  int listener = socket(AF_INET, SOCK_STREAM, 0), connects = atoi(words[1]), sends = atoi(words[2]);
  struct sockaddr_in own = at(words[3], 0);
  socklen_t length = sizeof own;
  bind(listener, (struct sockaddr *)&own, sizeof own);
  listen(listener, 4096);
  getsockname(listener, (struct sockaddr *)&own, &length);
  printf("%d\n", ntohs(own.sin_port));
  fflush(stdout);
  getchar(); /* the table has the port */
  struct sockaddr_in overlay = at("198.19.0.2", 29500);
  double *through = calloc(connects, sizeof *through), *plain = calloc(connects, sizeof *plain);
  for (int i = 0; i < connects; i++) {
    if (count > 4) through[i] = connect_us(&overlay);
    plain[i] = connect_us(&own);
  }
  qsort(through, connects, sizeof *through, ascending);
  qsort(plain, connects, sizeof *plain, ascending);
  int pair[2];
  char data[64] = {0};
  if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) != 0) return 1;
  struct iovec part = {data, sizeof data};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  int turns = sends / AT_ONCE / 2; /* short ones: what else runs here finds both ways alike */
  double *named = calloc(turns, sizeof *named), *raw = calloc(turns, sizeof *raw);
  for (int turn = 0; turn < 2 * turns; turn++) { /* by the library's name, and past every library */
    double began = now_us();
    for (int i = 0; i < AT_ONCE; i++) {
      if (turn % 2) sendmsg(pair[0], &message, 0);
      else syscall(SYS_sendmsg, pair[0], &message, 0);
      recv(pair[1], data, sizeof data, 0);
    }
    (turn % 2 ? named : raw)[turn / 2] = (now_us() - began) / AT_ONCE;
  }
  qsort(named, turns, sizeof *named, ascending);
  qsort(raw, turns, sizeof *raw, ascending);
  printf("%f %f %f %f\n", through[connects / 2], plain[connects / 2], named[turns / 2], raw[turns / 2]);
}
"""


def run(quick: bool) -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    lacking = missing()
    if lacking is not None:
        raise RuntimeError(lacking)
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "program.c"), Path(folder, "program")
        source.write_text(PROGRAM)
        subprocess.run(["gcc", "-O2", "-o", built, source], check=True)
        table = ShimTable(Path(folder, TABLE_NAME))
        place = ShimPlace(gateway_folder=Path(folder), device="gm0", addresses=("198.19.0.1",))
        found = [
            (take(built, table, shim_environment(os.environ, place)), take(built, None, {}))
            for _ in range(rounds)
        ]
        table.close()
    through, plain = (statistics.median(one[i] for one, _ in found) for i in range(2))
    call, bare_call = (statistics.median(one[i] for one, _ in found) for i in (2, 3))
    untouched = statistics.median(other[1] for _, other in found)
    added = statistics.median(one[0] - one[1] for one, _ in found)
    ratio = statistics.median(one[2] / one[3] for one, _ in found)
    target = f"added ≤ {TARGET_ADDED_US:g}"
    per_call = f"ratio ≤ {TARGET_PER_CALL:g}"
    return [
        row("shim: connect to a member", through, plain, added, "µs", target, added <= TARGET_ADDED_US),
        row("shim: connect elsewhere", plain, untouched, plain / untouched, "µs", "–", True),
        row(
            "shim: sendmsg and recv, system calls",
            call,
            bare_call,
            ratio,
            "µs",
            per_call,
            ratio <= TARGET_PER_CALL,
        ),
    ]


def take(program: Path, table: ShimTable | None, environment: dict[str, str]) -> list[float]:
    """Microseconds: a connect to the overlay, one to the listener itself; a small message, and by system calls."""
    argv = [str(program), str(CONNECTS), str(SENDS), GATEWAY, *(["overlay"] if table else [])]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        if table is not None:
            table.serve(port)
        out, _ = process.communicate("\n", timeout=LIMIT_S)
    return [float(word) for word in out.split()]
