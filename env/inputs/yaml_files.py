"""
One way to read YAML: whoever wrote the file, reading it is cheap and ends in one line.

Scenarios, profiles, recipes and rules' parameters may come from anybody. PyYAML's safe loader
makes plain values only, but deep nesting overflows the interpreter's stack, aliases multiply, and
of a key that is given twice the last one wins unseen. So the events are counted before anything is
made of them, and keys are compared.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from env.errors import InputError
from env.inputs.text_files import read_text

MOST_BYTES = 1 << 20
"""Size of a file; the largest profile has 40 KiB."""

MOST_DEPTH = 20
"""Collections within each other; a profile has 4."""

MOST_VALUES = 20_000
"""Collections and single values, aliases written out; a profile has 1200."""

LONGEST_SCALAR = 10_000
"""Characters of one value: numbers of more take the square of that to read."""

MOST_BITS = 64
"""Of an integer: one of more cannot always be printed, nor be made a float."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML has it


class _Loader(_SafeLoader):
    """PyYAML's safe loader, which takes each key once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a key must be a single value", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_yaml_int(self, node: Any) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > MOST_BITS:
            raise yaml.constructor.ConstructorError(
                problem=f"an integer of more than {MOST_BITS} bits", problem_mark=node.start_mark
            )
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_yaml(path: Path, what: str, instead: str = "") -> Any:
    """
    The content of a YAML file.

    :param path: a regular file of at most `MOST_BYTES`
    :param what: what it should be, for messages: "a scenario"
    :param instead: what else could have been given, said where the file cannot be read
    :return: mappings, lists, texts and numbers
    :raises InputError: one line that names the file, the line of the fault and what is allowed
    """
    return parse_yaml(read_text(path, what, MOST_BYTES, instead), str(path))


def parse_yaml(text: str, origin: str) -> Any:
    """
    What a YAML text holds, within the limits of `read_yaml`.

    :param text: as it was read
    :param origin: where from, for messages
    :return: mappings, lists, texts and numbers
    :raises InputError: one line that names the origin, the line of the fault and what is allowed
    """
    try:
        _require_modest(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{origin}: not valid YAML{_where(error)}") from error
    except ValueError as error:  # a date or a number that is none
        raise InputError(f"{origin}: not valid YAML: a value that cannot be read") from error


@dataclass
class _Open:
    """A collection under way: its anchor, if any, and the values and levels it has so far."""

    anchor: str | None
    values: int = 1
    levels: int = 1

    def add(self, values: int, levels: int) -> None:
        """Count what lies in it, as if aliases were written out."""
        self.values += values
        self.levels = max(self.levels, 1 + levels)


def _require_modest(text: str) -> None:
    """
    Look at a document's events one by one, which takes no memory, before it is made.

    An alias counts as what it stands for, so that it cannot multiply.

    :raises yaml.YAMLError: where it is no YAML, or more than any file of ours needs
    """
    document = _Open(None, 0, 0)
    under_way = [document]
    anchored: dict[str, tuple[int, int]] = {}  # values and levels
    for event in yaml.parse(text, _SafeLoader):
        if tag := getattr(event, "tag", None):
            raise _refusal(f"tags ({tag}) are not allowed", event)
        if isinstance(event, yaml.CollectionStartEvent):
            under_way.append(_Open(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = under_way.pop()
            under_way[-1].add(ended.values, ended.levels)
            if ended.anchor is not None:
                anchored[ended.anchor] = ended.values, ended.levels
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise _refusal(f"*{event.anchor} stands for nothing before it", event)
            under_way[-1].add(*anchored[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > LONGEST_SCALAR:
                raise _refusal(f"a value of more than {LONGEST_SCALAR} characters", event)
            under_way[-1].add(1, 0)
            if event.anchor is not None:
                anchored[event.anchor] = 1, 0
        if len(under_way) - 1 + under_way[-1].levels > MOST_DEPTH + 1:
            raise _refusal(f"nested more than {MOST_DEPTH} deep", event)
        if sum(one.values for one in under_way) > MOST_VALUES:
            raise _refusal(f"more than {MOST_VALUES} values", event)


def _refusal(problem: str, event: Any) -> yaml.YAMLError:
    return yaml.parser.ParserError(problem=problem, problem_mark=event.start_mark)


def _where(error: yaml.YAMLError) -> str:
    """The line of a fault and what it is, as far as PyYAML knows them."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = f" at line {mark.line + 1}" if mark else ""
    return line + (f": {' '.join(problem.split())}" if problem else "")
