"""Runs: start the processes of a plan, keep their outcomes, and conduct a run from settings to report."""
