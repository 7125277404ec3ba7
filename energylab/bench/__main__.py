"""``python -m energylab.bench NAME [OPTIONS]``."""

import importlib
import sys

BENCHES = {
    "step": "a training step against its matrix products",
    "layers": "CEM layers against ordinary ones, and against autograd of their energy",
    "kernels": "the fused Triton kernels against PyTorch, on a GPU",
    "tasks": "tasks with their floors against a training step and against gpytorch's prior",
}


def main(arguments: list[str]) -> int:
    """Run one bench; 2, with one line, for a name that is none."""
    if not arguments or arguments[0] not in BENCHES:
        given = arguments[0] if arguments else "nothing"
        print(f"bench: expected one of {', '.join(BENCHES)}, got {given}", file=sys.stderr)
        return 2
    importlib.import_module(f"energylab.bench.{arguments[0]}").main(arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
