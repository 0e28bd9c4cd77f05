"""The kubeconfig of a server of ours."""

from pathlib import Path

import yaml


def write_kubeconfig(path: Path, server: str, token: str = "", checked: bool = True) -> Path:
    """
    Write a kubeconfig.

    :param path: the file
    :param server: the server's URL
    :param token: who asks; empty for nobody
    :param checked: whether its certificate must be one that the machine trusts
    :return: `path`
    """
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [
            {"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": not checked}}
        ],
        "users": [{"name": "u", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path
