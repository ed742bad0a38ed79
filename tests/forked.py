"""Processes on TensorFlow without its import: `start("a.module", "argument")` is as `python -m a.module argument`.

The import of TensorFlow and Keras takes seconds in each process. Here one process does so for all that a test process
starts, and forks a copy of itself for each of them. It has a single thread and computes nothing, so that in a copy
TensorFlow starts as in a new process. Two things differ: the modules are imported already, and all copies have the same
hashes of strings. Where Python cannot fork, each is a new process. `scripts/check` starts test processes so, too, which
then need no other process to fork.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 1 << 20  # bytes of a request
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
SERVER = "KERAS_TX_TEST_FORKS"  # the number of a file: the connection to the process that forks, if a caller has one


class Process:
    """What tests use of `subprocess.Popen`, for a process that another one has started."""

    def __init__(self, pid, connection, stdin, stdout):
        self.pid, self.stdin, self.stdout, self.returncode = pid, stdin, stdout, None
        self._connection = connection  # gets the status when the process has ended

    def wait(self, timeout=None):
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(_received(self._connection))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
            self._connection.close()
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start(module, *arguments, new=False, forks=False, stdin=None, stdout=None, stderr=None, cwd=None, env=None):
    """Runs a module as `python -W ignore -m module arguments` does, or with "-c" as `module` the code that follows.

    The other arguments are as those of `subprocess.Popen`; pipes are of text, and `stderr` cannot be one. A `new`
    process and one on another backend than TensorFlow are not forked. One that `forks` has the same process to fork
    as this one. Returns a `Process`.
    """
    arguments = [str(one) for one in arguments]
    env = {"KERAS_BACKEND": "tensorflow", **(os.environ if env is None else env)}
    if new or not CAN_FORK or env["KERAS_BACKEND"] != "tensorflow":
        command = [sys.executable, "-W", "ignore", *([] if module == "-c" else ["-m"]), module, *arguments]
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).strip(os.pathsep)
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, text=True)
    with contextlib.ExitStack() as closed:  # here, once the process has them
        theirs, stdin = _ends(stdin, 0, closed)
        out, stdout = _ends(stdout, 1, closed)
        error, _ = _ends(out if stderr == subprocess.STDOUT else stderr, 2, closed)
        connection, other = socket.socketpair()
        closed.callback(other.close)
        request = {"module": module, "arguments": arguments, "cwd": str(cwd or os.getcwd()), "env": env}
        files = [other.fileno(), theirs, out, error, *([server().fileno()] if forks else [])]
        socket.send_fds(server(), [json.dumps(request).encode()], files)
    return Process(int(_received(connection)), connection, stdin, stdout)


def _ends(file, number, closed):
    """The file of a process, 0, 1 or 2, as a number; and the other end if it is a pipe, else None."""
    if file != subprocess.PIPE:
        return (number if file is None else file if isinstance(file, int) else file.fileno()), None
    ends = os.pipe()
    theirs, ours = ends if number == 0 else ends[::-1]
    closed.callback(os.close, theirs)
    return theirs, open(ours, "w" if number == 0 else "r", encoding="utf-8")


def _received(connection):
    found = connection.recv(64)
    if not found:
        raise ChildProcessError("The process that forks has ended.")
    return found


@functools.cache
def server():
    """A connection to the process that forks. When all processes have closed it, that one ends."""
    number = os.environ.get(SERVER)
    if number and _is_socket(int(number)):
        return socket.socket(fileno=int(number))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.forked", str(theirs.fileno())],
        env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end():
        ours.close()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    atexit.register(end)
    return ours


def _is_socket(number):
    """Whether a file of this process is a socket: one of the process that started it may not be open here."""
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def _serve(requests):
    """Forks for each request, and returns in the copies what they are to run."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import keras_tx  # noqa: F401

    gc.collect()
    gc.freeze()  # a copy need not look at what it shares
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is requests:
                content, files, _, _ = socket.recv_fds(requests, MOST, 5)
                if not content:
                    return None
                pid = os.fork()
                if not pid:
                    waiting.close()
                    requests.close()
                    return json.loads(content), files
                for file in files[1:]:
                    os.close(file)
                connection = socket.socket(fileno=files[0])
                connection.send(str(pid).encode())
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                waiting.unregister(key.fileobj)
                os.close(key.fileobj)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection, contextlib.suppress(BrokenPipeError):
                    connection.send(str(status).encode())


def _run(request, files):
    for number, file in enumerate(files[1:4]):
        os.dup2(file, number)
    for file in files[:4]:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.pop(SERVER, None)
    if len(files) > 4:
        os.environ[SERVER] = str(files[4])
    os.chdir(request["cwd"])
    module, arguments = request["module"], request["arguments"]
    if module == "-c":
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    found = _serve(socket.socket(fileno=int(sys.argv[1])))
    if found:
        _run(*found)
