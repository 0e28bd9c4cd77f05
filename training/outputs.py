"""What the commands of this package write."""

import json
from pathlib import Path
from typing import Any

from env.errors import InputError


def write_json(content: Any, path: Path) -> None:
    """
    Write a report.

    :param content: what to write
    :param path: the file to write
    :raises InputError: if that cannot be written
    """
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
