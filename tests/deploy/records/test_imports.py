"""What is needed to run and to see a deployment: nothing that is large."""

import hashlib
import subprocess
import sys

import pytest

from deploy.jobs.spared import has_own_digests


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


@pytest.mark.skipif(not has_own_digests(), reason="this Python leaves digests to OpenSSL")
def test_a_deployment_comes_without_openssl_encodings_and_a_word_to_the_same_digest() -> None:
    program = (
        "import sys; from deploy.jobs.spared import import_digests\n"
        "import_digests(); import hashlib, deploy.commands, deploy.deployment\n"
        "from deploy.jobs.containers import sdk\n"
        "print(sdk().__name__, {'charset_normalizer', '_ssl', '_hashlib'} & set(sys.modules))\n"
        "print(hashlib.sha256(b'coretide').hexdigest())\n"
        "import charset_normalizer, ssl"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    digest = hashlib.sha256(b"coretide").hexdigest()
    assert result.stdout.splitlines() == ["docker set()", digest] and result.stderr == ""


def test_who_has_openssl_already_keeps_tls_beside_dockers_sdk() -> None:
    program = (
        "import hashlib, _hashlib; from deploy.jobs.containers import sdk\n"
        "sdk(); import urllib3.connection; print(urllib3.connection.ssl.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "ssl" and result.stderr == ""


def test_a_library_that_is_spared_while_another_is_imported_may_be_had_later() -> None:
    program = (
        "import sys; from deploy.jobs.spared import without\n"
        "with without('ssl', 'sys'): import http.client\n"
        "import ssl; print(hasattr(http.client, 'HTTPSConnection'), ssl.__name__, sys.platform)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "ssl", sys.platform], result.stderr
