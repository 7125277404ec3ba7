"""How words become values: tyro parses, and its errors become one line each."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from energylab.project import Problem


class Helped(Exception):
    """The help of a command was printed; there is nothing more to do."""


def parse(
    command: str, words: Sequence[str], options: type | None, description: str, study: Callable[..., Any] | None = None
) -> tuple[str, dict[str, Any], Any]:
    """STUDY, the study's knobs if its function is given, and the options of the command."""
    fields: dict[str, Any] = {
        "word": argument(str, tyro.conf.Positional, name="study", metavar="STUDY", help="The study.")
    }
    known = [] if options is None else names_of(options)
    if study is not None:

        @functools.wraps(study)
        def knobs_of(**knobs: Any) -> dict[str, Any]:
            return knobs

        fields["knobs"] = argument(dict, constructor=knobs_of)
        known = [*inspect.signature(study).parameters, *known]
    if options is not None:
        fields["options"] = argument(options, name="common" if command == "run" else command)
    parsed = parse_fields(fields, f"energylab {command}", words, description, known)
    return parsed.word, getattr(parsed, "knobs", {}), getattr(parsed, "options", None)


def argument(kind: Any, *markers: Any, default_hint: str | None = None, **details: Any) -> Any:
    """A type with what tyro should know of it."""
    if default_hint is not None:
        details["help_behavior_hint"] = f"(default: {default_hint})"
    return Annotated[(kind, *markers, tyro.conf.arg(**details))]


def parse_fields(
    fields: Mapping[str, Any], prog: str, words: Sequence[str], description: str, known: Sequence[str]
) -> Any:
    """Parse with tyro into an object with these fields, each a type, or a type and its default.

    The errors of tyro become a Problem of one line.
    """
    given = [(name, *field) if isinstance(field, tuple) else (name, field) for name, field in fields.items()]
    target = dataclasses.make_dataclass("Arguments", given, kw_only=True)
    options = ["--help", *(f"--{dashed(name)}" for name in known)]
    for word in words:
        name = word.partition("=")[0]
        plain = "--" + dashed(name[2:])
        if name.startswith("--") and not any(
            plain in (option, f"--no-{option[2:]}") or plain.startswith(f"{option}.") for option in options
        ):
            near = difflib.get_close_matches(plain, options, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise Problem(f"{name}: unknown option of `{prog}`, expected some of {', '.join(options)}{meant}")
    if {"-h", "--help"} & set(words):
        words = ["--help"]  # otherwise the help would leave out what is given already
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
            return tyro.cli(target, prog=prog, description=description, args=words, config=config)
    except SystemExit as end:
        if end.code in (0, None):
            raise Helped from None
        raise Problem(_from_box(said.getvalue(), words)) from None


def _from_box(text: str, words: Sequence[str]) -> str:
    """The sentence in one of tyro's error boxes, which is drawn with dashes alone where the output knows only ASCII."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in text.splitlines()]
    sections: list[list[str]] = [[]]
    for line in filter(None, lines):
        if set(line) <= set("-─╰╯"):
            sections.append([])
        elif not line.startswith("╭"):
            sections[-1].append(line)
    if "╭" not in text:
        sections = sections[1:]  # the title
    sentence = " ".join(" ".join(sections[0]).split()) if sections else squeezed(text)
    details = [line for section in sections[1:] for line in section]
    option = re.match(r"Error parsing (--[\w-]+)", sentence)
    if option is not None:
        expected = next((line for line in details if line.startswith(option[1])), "").partition(" ")[2]
        given = _value_of(option[1], words)
        if expected and given is not None:
            return f"{option[1]}: expected {expected.replace('{None}|', '')}, got {given!r}"
    choice = re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*?),?\)\.", sentence)
    if choice is not None:
        return f"{choice[2]}: expected one of {choice[3]}, got {choice[1]!r}"
    absent = re.match(r"Missing from energylab \S+ (\S+)", sentence)
    if absent is not None:
        return f"{absent[1]}: expected a value, got none"
    missing = re.match(r"Missing value for argument '(\S+)'", sentence)
    if missing is not None:
        return f"{missing[1]}: expected a value, got none"
    unexpected = re.match(r"Unrecognized options: (.*)", sentence)
    if unexpected is not None:
        return f"expected no further arguments, got {unexpected[1]}"
    return sentence


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """What was given for an option; the last counts."""
    for index in reversed(range(len(words))):
        name, equals, value = words[index].partition("=")
        if name.startswith("--") and "--" + dashed(name[2:]) == option:
            return value if equals else (words[index + 1] if index + 1 < len(words) else None)
    return None


def study_word(words: Sequence[str], options: type | None) -> str | None:
    """STUDY: the first argument that is neither an option nor the value of one.

    It is needed before the study's own options are known; each of those is taken to have a value.
    """
    fields = () if options is None else dataclasses.fields(options)
    flags = {f"--{dashed(field.name)}" for field in fields if field.type is bool}
    flags |= {f"--no-{flag[2:]}" for flag in flags} | {"--help", "-h"}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return word
        if "=" not in word and "--" + dashed(word.lstrip("-")) not in flags and word not in flags:
            next(rest, None)
    return None


def names_of(options: type) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def dashed(name: str) -> str:
    return name.replace("_", "-")


def squeezed(message: object) -> str:
    return " ".join(str(message).split())
