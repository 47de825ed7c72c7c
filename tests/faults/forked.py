"""Work in forked children, which may be killed: they have fedloom imported already."""

import os
import signal
import traceback


def fork(work):
    """Starts a child that does `work` and ends; gives its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  (a child must never go on with its parent's tests)
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ending(child):
    """Waits for a child; gives its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash_at(place, work):
    """Does `work` in a child that dies at a crash point; gives whether it did."""

    def doomed():
        os.environ["FEDLOOM_CRASH_AT"] = place
        work()

    code = ending(fork(doomed))
    assert code in (0, -signal.SIGKILL)
    return code != 0


def content(folder):
    """Every file of a folder."""
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
