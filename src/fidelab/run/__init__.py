"""Runs: execute a plan, pair its captures with the reference's, score them, and report."""
