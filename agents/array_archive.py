"""
Reading zip files that anybody may have made: plain JSON and float32 arrays, within limits.

Nothing is unpickled, evaluated or decompressed, so an entry is never larger than the file it lies
in, and every size is checked before memory is taken for what it announces.
"""

import io
import json
import math
import re
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from env.errors import InputError

Arrays = dict[str, npt.NDArray[np.float32]]

ARRAY_START = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<f4', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,9}, )*\d{1,9},?)?\), \} *\n",
    re.DOTALL,
)
"""What a `.npy` entry begins with if it is a float32 array in C order; its group is the shape."""


def read_entry(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """
    One entry's content.

    :param archive: the zip file that holds it
    :param name: of the entry
    :param limit: the most bytes it may have
    :raises KeyError: if there is none of that name
    :raises InputError: if it is compressed or too large
    """
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise InputError(
            f"{archive.filename}: {name} is compressed; a checkpoint's entries are not"
        )
    if entry.file_size > limit:
        raise InputError(
            f"{archive.filename}: {name} has {entry.file_size} bytes; allowed are {limit}"
        )
    return archive.read(entry)


def read_json(archive: zipfile.ZipFile, name: str, limit: int) -> Any:
    """
    An entry that is plain JSON.

    :param archive: the zip file that holds it
    :param name: of the entry
    :param limit: the most bytes it may have
    :raises KeyError: if there is none of that name
    :raises ValueError: if it is not JSON; an `InputError` if it is too large or too deep
    """
    try:
        return json.loads(read_entry(archive, name, limit))
    except RecursionError as error:
        raise InputError(f"{archive.filename}: {name} is nested too deep") from error


def read_arrays(archive: zipfile.ZipFile, name: str, limit: int) -> Arrays:
    """
    An entry that is a `.npz` file of float32 arrays.

    :param archive: the zip file that holds it
    :param name: of the entry
    :param limit: the most bytes all arrays may have together
    :return: the arrays by name, all of them finite
    :raises KeyError: if there is no entry of that name
    :raises ValueError: if it is not a `.npz` file; an `InputError` if it holds anything else
    """
    where = f"{archive.filename}: {name}"
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(read_entry(archive, name, limit))) as inner:
        names = inner.namelist()
        if len(set(names)) < len(names):  # a long directory would have one array read many times
            raise InputError(f"{where}: names an array twice")
        for index, entry in enumerate(names):
            content = read_entry(inner, entry, limit)
            limit -= len(content)
            array = _array(content)
            if array is None:
                raise InputError(f"{where}: its array {index} is not of float32 and of its size")
            if not np.isfinite(array).all():
                raise InputError(f"{where}: its array {index} has values that are not finite")
            arrays[entry.removesuffix(".npy")] = array
    return arrays


def _array(content: bytes) -> npt.NDArray[np.float32] | None:
    """The array that a `.npy` entry holds, None if it is not one of float32 or not complete."""
    start = ARRAY_START.match(content)
    if start is None or start.end() != 10 + int.from_bytes(content[8:10], "little"):
        return None
    shape = [int(size) for size in (start[1] or b"").replace(b",", b" ").split()]
    if 4 * math.prod(shape) != len(content) - start.end():
        return None
    return np.frombuffer(content, np.float32, offset=start.end()).reshape(shape).copy()
