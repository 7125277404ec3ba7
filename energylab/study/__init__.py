"""Studies: what is compared, run once, kept, and read again.

from energylab.study import RunConfig, Study        # what a study file returns
from energylab.study import load_results, load_run  # what a notebook reads
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energylab.study.config import RunConfig, Study
    from energylab.study.store import RunResults, StudyResults, load_results, load_run, load_study

__all__ = ["RunConfig", "RunResults", "Study", "StudyResults", "load_results", "load_run", "load_study"]


def __getattr__(name: str) -> Any:
    """Looked up when asked for, so that `energylab status` need not wait for PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "config" if name in ("RunConfig", "Study") else "store"
    return getattr(importlib.import_module(f"energylab.study.{room}"), name)
