"""What the command lines of this package share."""

from env.errors import InputError
from env.simulator.profile import Profile, load_profile


def read_profile(name_or_path: str) -> Profile:
    """
    A profile of fitted parameters.

    :param name_or_path: a shipped profile's name, or a YAML file
    :raises InputError: one line that says what is wrong
    """
    try:
        return load_profile(name_or_path)
    except ValueError as error:
        raise InputError(str(error)) from error
