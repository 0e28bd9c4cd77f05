"""What asks a program to end, and comes at a bad moment."""

import subprocess
import sys
import textwrap

INTERRUPTED = textwrap.dedent(
    """
    import os, signal, sys
    from deploy.jobs.containers import sdk
    from deploy.linux.signals import interrupt_on_stop

    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "requests.models":
                sys.meta_path.remove(self)
                os.kill(os.getpid(), signal.SIGINT)

    sys.meta_path.insert(0, Interrupting())
    interrupt_on_stop()
    try:
        try:
            sdk()
        except sdk().errors.DockerException:
            print("not interrupted")
    except KeyboardInterrupt as stop:
        print("interrupted by", stop)
    """
)


def test_a_signal_in_the_midst_of_an_import_of_dockers_sdk_is_answered_after_it() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert (run.stdout, run.stderr) == ("interrupted by 2\n", "")
