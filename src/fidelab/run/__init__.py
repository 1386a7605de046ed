"""Runs: a plan is executed, captures are paired with the reference's and scored, and what follows from scores."""
