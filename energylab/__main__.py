"""`python -m energylab`."""

import sys

from energylab.cli import main

if __name__ == "__main__":
    sys.exit(main())
