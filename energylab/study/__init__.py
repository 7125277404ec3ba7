"""Studies: what is compared, run once, kept, and read again.

from energylab.study import RunConfig, Study        # what a study file returns
from energylab.study import load_results, load_run  # what a notebook reads
"""

from energylab.study.config import RunConfig, Study
from energylab.study.store import RunResults, StudyResults, load_results, load_run, load_study

__all__ = ["RunConfig", "RunResults", "Study", "StudyResults", "load_results", "load_run", "load_study"]
