"""
Folders that a root program writes to, and that nobody else has a hand in.

Whoever may write to a folder may put links into it that lead elsewhere what is written or moved
there. So a folder is opened once, must be ours, and its files are opened through it; no link is
followed. The guardian uses this file: it needs the standard library alone.
"""

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
import time
from pathlib import Path

OTHERS_RIGHTS = 0o077


class OwnFolder:
    """
    A folder of this user, open until `close`.

    :param path: made if need be
    :param closed: whether others may not even look into it
    :param parent: descriptor of the folder that the path counts from; None for the current one
    :raises OSError: if it cannot be made, is a link or somebody else's, or others have rights that
        they must not have, be it to move a closed one away
    """

    def __init__(self, path: Path, closed: bool = False, parent: int | None = None):
        if parent is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700 if closed else 0o755, dir_fd=parent)
        rights = "closed to others (mode 0700)" if closed else "writable by you alone (mode 0755)"
        refused = PermissionError(errno.EPERM, f"must be a folder of yours, {rights}, no link")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, dir_fd=parent)
        except OSError as error:
            raise refused if error.errno in (errno.ENOTDIR, errno.ELOOP) else error from None
        try:
            found = os.fstat(self._file)
            is_open = found.st_mode & OTHERS_RIGHTS if closed else _others_may_write(found)
            if found.st_uid != os.geteuid() or is_open:
                raise refused
            if closed and (whose := _in_others_hands(self._file)):
                reason = f"others could put another in its place: {whose}"
                raise PermissionError(errno.EPERM, reason)
        except OSError:
            self.close()
            raise

    def __enter__(self) -> "OwnFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._file)

    def names(self) -> list[str]:
        """What the folder holds."""
        return os.listdir(self._file)  # noqa: PTH208 - Path cannot list a descriptor

    def own_file(self, name: str) -> os.stat_result | None:
        """
        What is known of a file of the folder.

        :param name: of the file
        :return: None if it is not there, is no plain file or not ours
        """
        found = self.stat(name)
        return found if found is not None and _is_own_file(found) else None

    def open(self, name: str, flags: int) -> int:
        """
        Open a file of the folder.

        :param name: of the file
        :param flags: as for `os.open`
        :return: its descriptor
        :raises OSError: if that is not possible, or it is no plain file of ours
        """
        refused = PermissionError(errno.EPERM, f"{name} must be a plain file of yours, no link")
        # Without O_NONBLOCK a pipe would be waited for.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(name, flags, 0o644, dir_fd=self._file)
        except OSError as error:
            raise refused if error.errno in (errno.ELOOP, errno.ENXIO) else error from None
        if not _is_own_file(os.fstat(file)):
            os.close(file)
            raise refused
        return file

    def replace(self, name: str, content: bytes, lasting: bool = False) -> None:
        """
        Put a new file in a file's place; one that was there stays as it is until then.

        :param name: of the file
        :param content: of the new one
        :param lasting: whether it is waited for until the content would outlive a power cut
        :raises OSError: if the disk refuses it, or what is there is no plain file of ours
        """
        with contextlib.suppress(FileNotFoundError):
            os.close(self.open(name, os.O_RDONLY))
        new = f"{name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self._file)
        try:
            file = os.fdopen(self.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
            with file:
                file.write(content)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())
            os.rename(new, name, src_dir_fd=self._file, dst_dir_fd=self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._file)
            raise

    def subfolder(self, name: str) -> "OwnFolder":
        """
        A folder in the folder, made if need be.

        :param name: of the folder
        :raises OSError: as for `OwnFolder`
        """
        return OwnFolder(Path(name), parent=self._file)

    def move(self, name: str, target: "OwnFolder", new_name: str = "") -> None:
        """
        Move a file to another folder.

        :param name: of the file
        :param target: the other folder
        :param new_name: of the file there; the same if none is given
        :raises OSError: if that is not possible
        """
        os.rename(name, new_name or name, src_dir_fd=self._file, dst_dir_fd=target._file)

    def stat(self, name: str) -> os.stat_result | None:
        """
        What is known of whatever has a name in the folder; no link is followed.

        :param name: of the file
        :return: None if nothing has that name
        """
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._file, follow_symlinks=False)
        return None

    def add(self, name: str, content: bytes) -> None:
        """
        Put a new file into the folder, whole and for good, where nothing has its name.

        :param name: of the file
        :param content: of it
        :raises FileExistsError: if something has that name
        :raises OSError: if the disk refuses it
        """
        hidden = f".{name}.{os.getpid()}"
        self.replace(hidden, content, lasting=True)
        try:
            os.link(hidden, name, src_dir_fd=self._file, dst_dir_fd=self._file)
        finally:
            self.remove(hidden)
        self.sync()

    def touch(self, name: str) -> None:
        """
        Have a file count as changed just now.

        :param name: of the file
        :raises OSError: if that is not possible
        """
        now_ns = time.time_ns()  # the kernel's own time stamps are milliseconds apart
        os.utime(name, ns=(now_ns, now_ns), dir_fd=self._file, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """
        Remove a file that may be there.

        :param name: of the file
        :raises OSError: if that is not possible
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._file)

    def sync(self) -> None:
        """
        Wait until what the folder lists would outlive a power cut.

        :raises OSError: if the disk refuses it
        """
        os.fsync(self._file)

    def lock(self) -> None:
        """
        Keep whoever else locks the folder away, until `close`.

        :raises BlockingIOError: if somebody has locked it
        """
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_own(path: Path, content: str) -> None:
    """
    Write a whole file of a folder of ours.

    :param path: path of the file
    :param content: all that it is to hold
    :raises OSError: see `OwnFolder` and `OwnFolder.replace`
    """
    with OwnFolder(path.parent) as folder:
        folder.replace(path.name, content.encode())


def _in_others_hands(folder: int) -> str:
    """
    The first folder above one whose contents somebody else may rename; empty if there is none.

    :param folder: descriptor of the folder
    """
    for above in Path(f"/proc/self/fd/{folder}").readlink().parents:
        found = above.stat()
        shared = not found.st_mode & stat.S_ISVTX and _others_may_write(found)
        if shared or found.st_uid not in (0, os.geteuid()):
            return str(above)
    return ""


def _others_may_write(found: os.stat_result) -> bool:
    """Whether a folder's rights let somebody else than its owner write to it."""
    # All users are listed for it: only where it matters.
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or by_group)


def _is_own_group(group: int) -> bool:
    """
    Whether a group is this user's alone, as systems make one for each user (umask 002 is theirs).

    :param group: its number
    """
    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    members = {*found.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group)}
    return found.gr_name == name and members <= {name}


def _is_own_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
