"""The command line: thin, and the only room that knows tyro. A module a group of commands.

Exit codes: 0 done; 1 some runs failed, are damaged or missing, and are named; 2 the command or the study is wrong, said
in one line.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from energylab.cli import drawing, inside, machine, running, studies
from energylab.cli.parsing import Helped, squeezed
from energylab.project import Problem


@dataclass(frozen=True)
class Command:
    """A command: what it does in a line, and the function that takes the arguments after its name."""

    summary: str
    run: Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a symbol that the terminal does not know is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_overview())
            return 0
        if words[0] not in COMMANDS:
            raise Problem(f"command: expected one of {', '.join(COMMANDS)}, got {words[0]!r}")
        return COMMANDS[words[0]].run(words[1:])
    except Helped:
        return 0
    except Problem as problem:
        print(f"energylab: {squeezed(problem)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("energylab: stopped at once; what was saved before is kept", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # the reader of the output has left, as in `energylab status recursion | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            print(f"energylab: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: energylab COMMAND ...",
            "",
            "A laboratory for layers that descend an energy: train a study, look at where it is, draw it.",
            "",
            *lines,
            "",
            "`energylab COMMAND --help` explains a command. Example:",
            "  energylab run quickstart && energylab figures --study quickstart",
        ]
    )


COMMANDS = {
    "run": Command("train the runs of a study", running.run),
    "describe": Command("what the models of a study cost", studies.describe),
    "status": Command("where the runs of a study are", studies.status),
    "figures": Command("draw figures from stored results", drawing.figures),
    "trace": Command("how each layer of a run walks down its energy", inside.trace),
    "landscape": Command("draw the energy around one query of a run", inside.landscape),
    "sweep": Command("take more or fewer steps at test time", inside.sweep),
    "confidence": Command("whether energy falls deep where a run is right", inside.confidence),
    "report": Command("write one HTML file about a study", drawing.report),
    "export": Command("copy a study's results for git", studies.export),
    "tasks": Command("print and draw a prior and its floor", drawing.tasks),
    "bench": Command("time layers, tasks and training steps", machine.bench),
    "doctor": Command("what is installed, and what will run", machine.doctor),
}
