"""What is needed to run and to see a deployment: nothing that is large."""

import subprocess
import sys


def test_running_and_seeing_a_deployment_imports_nothing_heavy() -> None:
    program = (
        "import sys, deploy.report, deploy.view, deploy.records.metrics\n"
        "import deploy.commands, deploy.jobs.containers, deploy.check, deploy.live_episodes\n"
        "import deploy.load.dynamic_load, deploy.load.probe\n"
        "import deploy.engines.images, deploy.engines.daemon, deploy.engines.memcached\n"
        "heavy = {'torch', 'stable_baselines3', 'gymnasium', 'numba', 'pandas', 'matplotlib',"
        " 'tensorboard', 'scipy'}\n"
        "print(heavy & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


def test_dockers_sdk_comes_without_what_guesses_encodings_and_without_a_word() -> None:
    program = (
        "import sys, deploy.jobs.containers as containers\n"
        "print(containers.sdk().__name__, 'charset_normalizer' in sys.modules)\n"
        "import charset_normalizer"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "docker False" and result.stderr == ""
