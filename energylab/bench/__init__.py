"""What is fast, and against what. Each bench is a command: ``energylab bench NAME`` or ``python -m energylab.bench NAME``.

Machines are shared and noisy, so what is compared runs in one process, interleaved, and ratios are of medians.
"""
