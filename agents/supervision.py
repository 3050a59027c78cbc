"""The supervisor's work: one command, from its start to the end of everything that came from it.

Rules of this file
- Standard library only, and nothing heavy; siblings are loaded by path. One thread, one poll: no call in the
  loop waits.
- We are the child subreaper of the command: every descendant stays below us, so "no children" means "nothing is
  left".
- One number decides the end: `_kill_at`, which only ever comes nearer.
- After a natural exit, what is left gets LINGER_S to end by itself (`cmd > >(tee log)`: tee still holds the last
  lines), then SIGKILL, as in a container. During a stop it gets the rest of the grace: with
  `bash -c "…; torchrun …"` the shell, which is the main process, dies of SIGTERM at once while torchrun saves.
- SIGTERM reaches whoever would otherwise not hear of it, once (`process_tree.who_must_be_told`).
- A disk, a pipe or a launcher that fails costs output or an event, never the command.

torchrun and the grace period. torchrun forwards SIGTERM to its workers and kills them 30 s later by itself. From
torch 2.12 on that limit is TORCH_ELASTIC_SHUTDOWN_TIMEOUT (whole seconds; also `--shutdown-timeout`,
PET_SHUTDOWN_TIMEOUT): whoever builds a rank's environment sets it well above the grace period, since we end the
tree on time anyway. Before, it is fixed. A second SIGTERM would make torchrun signal its workers again, which is
why nobody is told twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    import signal
    from collections.abc import Callable

    from agents import command_start, control_group, output_rest, process_tree, spool, supervisor_protocol
    from agents.process_option import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, set_process_option
    from agents.supervisor_protocol import GRACE_S_DEFAULT, ProtocolError, StartOrder, checked
else:
    import _signal as signal

    import command_start
    import control_group
    import output_rest
    import process_tree
    import spool
    import supervisor_protocol
    from process_option import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, set_process_option
    from supervisor_protocol import GRACE_S_DEFAULT, ProtocolError, StartOrder, checked

LINGER_S = 0.5
ENDING_EXTRA_BYTES = 32 * 1024 * 1024
"""How much more is spooled once the command is ending: one that waits for us to read could not save its state."""

PIPE_BYTES = 1024 * 1024
READ_BYTES = spool.RECORD_DATA_BYTES_MAX
COMMAND_LINE_BYTES_MAX = 64 * 1024 * 1024
REPORTED_PIDS_MAX = 1000
KILL_ROUND_S = 0.05
KILL_ROUND_AFTER_FAILURE_S = 1.0
NEVER = float("inf")
WAIT_S_MAX = 3600.0
"""poll(2) counts milliseconds in 31 bits; we just wait again."""


EXIT_DONE = 0
EXIT_NOT_EMPTY = 1


class Supervisor:
    """One command, from its start to the end of everything that came from it."""

    def __init__(self, *, commands: int, events: int) -> None:
        self._commands = commands
        self._events = events
        self._line = bytearray()
        """What came of a command whose newline has not come yet."""
        self._poll = select.poll()
        self._on_readable: dict[int, Callable[[], None]] = {}
        self._launcher_is_gone = False
        self._is_subreaper = set_process_option(PR_SET_CHILD_SUBREAPER, 1)

        self._order: StartOrder | None = None
        self._main_pid = 0
        """0 before the fork, and for ever when there was none."""
        self._main_status: int | None = None
        self._start_report = -1
        """The pipe on which the child says why it could not start; -1 once that is known either way."""
        self._group: control_group.ControlGroup | None = None
        self._is_over = False
        """No command will start any more, and every process is gone or given up."""

        self._spool: spool.SpoolWriter | None = None
        self._pipes: dict[int, int] = {}
        """Open read ends of the command's pipes, and their streams."""
        self._pipes_are_read = False
        self._rest = output_rest.OutputRest()
        self._loss_reported = False

        self._is_stopping = False
        self._dealt_with: set[tuple[int, int]] = set()
        """Who was sent SIGTERM, or spared it: nobody hears it twice, or when it only has to finish reading."""
        self._kill_at = NEVER
        self._kill_began_at = NEVER
        self._fence_failed = False
        self._killed: set[int] = set()

    def run(self) -> int:
        """Until nothing is left. Answers our exit code."""
        self._watch_signals()
        self._watch_launcher()
        self._watch(self._commands, self._read_commands)
        while not self._is_over:
            for file, _ in self._poll.poll(self._timeout_ms()):
                if handler := self._on_readable.get(file):
                    handler()
            if time.monotonic() >= self._rest.until:
                self._end_rest()
            self._reap()
            if time.monotonic() >= self._kill_at and not self._is_over:
                self._kill_round()
        return self._finish()

    def kill_all(self) -> None:
        """For the guard: we are about to die of a fault of our own."""
        self._launcher_is_gone = True
        while self._main_pid and not self._is_over:
            self._kill_round()
            self._poll.poll(KILL_ROUND_S * 1000)
            self._reap()

    # What we listen to

    def _watch(self, file: int, handler: Callable[[], None]) -> None:
        self._on_readable[file] = handler
        self._poll.register(file, select.POLLIN)

    def _unwatch(self, file: int) -> None:
        if self._on_readable.pop(file, None):
            self._poll.unregister(file)

    def _watch_signals(self) -> None:
        wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._watch(wakeup_read, lambda: self._read_signals(wakeup_read))

    def _watch_launcher(self) -> None:
        """Beside the end of stdin: that never comes when a fork of the launcher holds the other end."""
        parent = os.getppid()
        if parent <= 1:
            return
        try:
            handle = os.pidfd_open(parent)
        except OSError:
            return  # an old kernel, or already gone: then stdin has ended
        self._watch(handle, lambda: self._launcher_died(handle))

    def _read_signals(self, wakeup: int) -> None:
        for number in os.read(wakeup, 4096):
            if number != signal.SIGCHLD:
                self._stop(self._order.grace_s if self._order else 0)

    def _launcher_died(self, file: int) -> None:
        self._unwatch(file)
        self._launcher_is_gone = True
        self._kill()

    def _read_commands(self) -> None:
        try:
            piece = os.read(self._commands, READ_BYTES)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
            piece = b""
        if not piece:
            self._launcher_died(self._commands)
            return
        self._line += piece
        if len(self._line) > COMMAND_LINE_BYTES_MAX:
            raise ProtocolError(f"a command of more than {COMMAND_LINE_BYTES_MAX} bytes")
        while b"\n" in piece:
            line, _, rest = bytes(self._line).partition(b"\n")
            self._line = bytearray(rest)
            self._obey(line)
            piece = rest

    def _obey(self, line: bytes) -> None:
        try:
            command = checked(dict, supervisor_protocol.decode(line), "a command")
            operation = command.get("op")
            if operation == "start":
                self._start(StartOrder(command))
            elif operation == "stop":
                self._stop(float(checked((int, float), command.get("grace_s", GRACE_S_DEFAULT), "grace_s")))
            elif operation == "kill":
                self._kill()
            elif operation == "acked":
                self._acknowledge(checked(int, command.get("offset"), "offset"))
            else:
                raise ProtocolError(f"unknown operation {operation!r}")
        except ValueError as error:
            message = f"the supervisor did not understand a command of its launcher: {error}"
            complain(message)
            if not self._order:
                self._fail_start(command_start.COMMAND_START_FAILED, message)

    # Start

    def _start(self, order: StartOrder) -> None:
        if self._order or self._is_over:
            raise ProtocolError("a second start")
        self._order = order
        self._spool = spool.SpoolWriter(order.spool)
        control_group.remove_leftovers()
        self._group = control_group.create(order.incarnation)
        out_read, out_write = self._output_pipe()
        err_read, err_write = self._output_pipe()
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        supervisor_pid = os.getpid()

        def before_exec() -> None:
            set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor_pid:
                os._exit(command_start.FAILED_START_EXIT_CODE)  # it died before the kernel knew of our wish
            if self._group:
                self._group.join_by(os.getpid())

        # Blocked, or a signal that meets the child before it has its own handlers would be taken for one to us.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            self._fail_start(
                command_start.COMMAND_START_FAILED, f"this machine cannot create a process: {error.strerror}"
            )
            return
        if pid == 0:
            command_start.become_command(
                arguments=order.arguments,
                environment=order.environment,
                working_directory=order.directory,
                output=out_write,
                errors=err_write,
                report=report_write,
                before_exec=before_exec,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for file in (out_write, err_write, report_write):
            os.close(file)
        self._main_pid = pid
        self._start_report = report_read
        self._pipes = {out_read: spool.STDOUT, err_read: spool.STDERR}
        self._watch(report_read, self._read_start_report)
        self._read_pipes_as_allowed()

    def _output_pipe(self) -> tuple[int, int]:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        try:
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # The user's share of pipe memory is used up: the default 64 KiB serves, more slowly.
            return read, write
        return read, write

    def _read_start_report(self) -> None:
        """The child became the command (end of file), or says why not."""
        report = b""
        while piece := os.read(self._start_report, READ_BYTES):
            report += piece
        self._unwatch(self._start_report)
        os.close(self._start_report)
        self._start_report = -1
        if report:
            failure = command_start.StartError.from_bytes(report)
            self._fail_start(failure.reason, failure.message)
        else:
            self._report({"ev": "started", "pid": self._main_pid})

    def _fail_start(self, reason: str, message: str) -> None:
        self._report({"ev": "start_failed", "reason": reason, "message": message})
        self._main_status = self._main_status or 0
        self._kill()

    # Output

    def _read_pipes_as_allowed(self) -> None:
        """Backpressure: stop reading when the head lags too far behind, so that the command waits, not the disk
        fills.
        """
        if not self._order or not self._spool:
            return
        is_ending = self._is_stopping or self._main_status is not None
        most = self._order.unacked_bytes_max + (ENDING_EXTRA_BYTES if is_ending else 0)
        allowed = self._spool.unacked() <= most
        if allowed == self._pipes_are_read:
            return
        self._pipes_are_read = allowed
        for file in self._pipes:
            if allowed:
                self._watch(file, self._output_reader(file))
            else:
                self._unwatch(file)

    def _output_reader(self, file: int) -> Callable[[], None]:
        def read() -> None:
            if file != self._rest.file:
                self._end_rest()
            if self._rest.begins(file, size=self._read_output(file), now=time.monotonic()):
                self._unwatch(file)

        return read

    def _end_rest(self) -> None:
        """What has gathered in a pipe that rested is read before anything else, and the pipe watched again."""
        file = self._rest.end()
        if file not in self._pipes or not self._pipes_are_read:
            return
        if self._rest.begins(file, size=self._read_output(file), now=time.monotonic()):
            self._unwatch(file)
        elif file in self._pipes and self._pipes_are_read:
            self._watch(file, self._output_reader(file))

    def _read_output(self, file: int) -> int:
        """Spool one piece; answers its size, 0 when there is none."""
        assert self._spool is not None
        try:
            data = os.read(file, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._unwatch(file)
            del self._pipes[file]
            os.close(file)
            return 0
        self._spool.append(self._pipes[file], data, now=time.time())
        if self._spool.lost_total and not self._loss_reported:
            self._loss_reported = True
            message = f"output is being lost: the spool {self._spool_words()}"
            self._report({"ev": "output_lost", "message": message})
        self._read_pipes_as_allowed()
        return len(data)

    def _spool_words(self) -> str:
        assert self._spool is not None and self._order is not None
        return f"{self._order.spool} cannot be written ({self._spool.failure})"

    def _drain(self) -> None:
        """What the pipes still hold. Nobody of ours writes any more; a stranger who holds a pipe is not waited
        for.
        """
        left = dict.fromkeys(self._pipes, PIPE_BYTES)
        while left:
            for file in list(left):
                count = self._read_output(file) if file in self._pipes else 0
                left[file] -= count
                if not count or left[file] <= 0:
                    del left[file]

    def _acknowledge(self, offset: int) -> None:
        if self._spool:
            self._spool.acknowledge(offset)
            self._read_pipes_as_allowed()

    # The end

    def _stop(self, grace_s: float) -> None:
        if not self._main_pid:
            self._kill()
            return
        self._shorten(time.monotonic() + max(grace_s, 0.0))
        if self._is_stopping:
            return
        self._is_stopping = True
        self._tell_to_stop()
        self._read_pipes_as_allowed()

    def _kill(self) -> None:
        self._shorten(time.monotonic())
        if not self._main_pid:
            self._is_over = True

    def _shorten(self, kill_at: float) -> None:
        self._kill_at = min(self._kill_at, kill_at)

    def _tell_to_stop(self) -> None:
        """SIGTERM to whoever would not hear of the stop; SIGCONT too, or a stopped one could not obey."""
        processes = process_tree.snapshot()
        children = process_tree.children_by_parent(processes)
        roots = [pid for pid in (self._main_pid, *children.get(os.getpid(), ())) if pid in processes]
        told, spared = process_tree.who_must_be_told(children, roots, process_tree.manners_of)
        self._dealt_with.update(processes[pid].identity for pid in spared)
        for pid in told:
            process = processes[pid]
            if process.identity in self._dealt_with:
                continue
            self._dealt_with.add(process.identity)
            process_tree.send_signal(process, signal.SIGTERM)
            if process.is_stopped:
                process_tree.send_signal(process, signal.SIGCONT)

    def _tell_orphans(self) -> None:
        """Who lost its parent during the stop: the parent may have died without passing the signal on."""
        known = {pid for pid, _ in self._dealt_with}
        if any(pid not in known for pid in process_tree.children_of(os.getpid())):
            self._tell_to_stop()

    def _reap(self) -> None:
        """Take leave of every child that has ended; know when none is left."""
        if not self._main_pid:
            return
        reaped = 0
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._is_over = self._is_subreaper or not self._find_tree()
                return
            if pid == 0:
                break
            reaped += 1
            if pid == self._main_pid:
                self._main_ended(status)
        if reaped and self._is_stopping:
            self._tell_orphans()

    def _main_ended(self, status: int) -> None:
        if self._start_report >= 0:
            self._read_start_report()
        if self._main_status is not None:
            return  # it never became the command
        self._main_status = status
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        self._report({"ev": "exited", "code": code, "signal": number})
        if not self._is_stopping:
            self._shorten(time.monotonic() + LINGER_S)
        self._read_pipes_as_allowed()

    def _find_tree(self) -> dict[int, process_tree.Process]:
        if self._is_subreaper or not self._order:
            return process_tree.find_descendants(os.getpid())
        return process_tree.find(self._order.incarnation, roots=(os.getpid(),))

    def _kill_round(self) -> None:
        now = time.monotonic()
        self._kill_began_at = min(self._kill_began_at, now)
        found = self._find_tree()
        if self._group:
            self._group.kill()
        killed = process_tree.kill_found(found, self._find_tree)
        self._killed.update(killed.keys() - {self._main_pid})
        round_s = KILL_ROUND_AFTER_FAILURE_S if self._fence_failed else KILL_ROUND_S
        self._kill_at = now + round_s
        if found and now - self._kill_began_at >= process_tree.KILL_LIMIT_S and not self._fence_failed:
            self._fence_failed = True
            self._report({"ev": "fence_failed", "pids": sorted(found)[:REPORTED_PIDS_MAX]})
        if self._fence_failed and self._launcher_is_gone:
            self._is_over = True  # SIGKILL waits for them in the kernel; nobody is left whom we could tell

    def _timeout_ms(self) -> float | None:
        if self._is_over:
            return 0
        next_s = min(self._kill_at, self._rest.until)
        if next_s == NEVER:
            return None
        return min(max(0.0, next_s - time.monotonic()), WAIT_S_MAX) * 1000

    def _finish(self) -> int:
        lost = 0
        if self._spool:
            self._drain()
            self._spool.finish(now=time.time())
            lost = self._spool.lost_total
        is_empty = not self._fence_failed or not self._find_tree()
        if self._group:
            self._group.remove()
        if is_empty:
            self._report({"ev": "empty", "leftover": sorted(self._killed)[:REPORTED_PIDS_MAX], "lost": lost})
        return EXIT_DONE if is_empty else EXIT_NOT_EMPTY

    def _report(self, event: dict[str, supervisor_protocol.EventValue]) -> None:
        """All events of a life fit into the pipe's buffer, so this does not wait for a launcher that does not
        read.
        """
        try:
            os.write(self._events, supervisor_protocol.encode(event))
        except OSError:
            return  # the launcher has gone; the end of stdin says so too, and that is what ends us


def complain(message: str) -> None:
    try:
        os.write(2, f"gangmesh supervisor: {message}\n".encode("utf-8", "replace"))
    except OSError:
        return  # nobody reads our stderr, and there is nowhere else to say it
