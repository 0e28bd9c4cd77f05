"""Files that grow by lines, each handed to the kernel at once; a full disk stops nobody."""

import os
from collections import deque
from pathlib import Path

from deploy.linux.own_folder import OwnFolder
from deploy.records.terminal import complain

KEPT_LINES = 20_000
"""How many lines of a file wait in memory while the disk is full; at 200 bytes a line, 4 MB."""


class Disk:
    """
    Where files of lines are; what it refuses is said once for all of them.

    :param name: what messages call the place
    """

    def __init__(self, name: str):
        self._name = name
        self._refused = False
        self._lost = 0

    def refuse(self, error: OSError) -> None:
        """
        Note that a line was not taken.

        :param error: what the system said
        """
        if not self._refused:
            self._refused = True
            complain(f"{self._name}: {error.strerror}; lines wait in memory until there is room")

    def lose(self, lines: int) -> None:
        """
        Note lines that will never be written.

        :param lines: number of lines
        """
        self._lost += lines

    def close(self) -> None:
        """Say what the files do not hold."""
        if self._lost:
            complain(f"{self._name}: {self._lost} lines could not be written")


class LineFile:
    """
    Appends lines to a file.

    What the disk refuses waits for the next line; what does not fit into memory is lost.

    :param file: the file's descriptor
    :param disk: the disk of the file
    """

    def __init__(self, file: int, disk: Disk):
        self._file = file
        self._disk = disk
        self._waiting: deque[bytes] = deque()

    @classmethod
    def at(cls, path: Path, disk: Disk) -> "LineFile":
        """
        The file at a path, made if need be; half a line that a killed writer left is ended.

        :param path: the file
        :param disk: the disk of the file
        :raises OSError: if it cannot be opened, or it or its folder is not ours
        """
        with OwnFolder(path.parent) as folder:
            lines = cls(folder.open(path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND), disk)
        size = lines.size
        if size > 0 and os.pread(lines._file, 1, size - 1) != b"\n":
            lines._waiting.append(b"\n")
        return lines

    @property
    def size(self) -> int:
        """Its length [bytes]."""
        return os.fstat(self._file).st_size

    def append(self, line: str) -> None:
        """
        Write a line, or keep it.

        :param line: without its end
        """
        if len(self._waiting) < KEPT_LINES:
            self._waiting.append(line.encode() + b"\n")
        else:
            self._disk.lose(1)
        try:
            while self._waiting:
                text = self._waiting[0]
                written = os.write(self._file, text)
                if written == len(text):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = text[written:]
        except OSError as error:
            self._disk.refuse(error)

    def close(self) -> None:
        """Close the file."""
        self._disk.lose(len(self._waiting))
        os.close(self._file)
