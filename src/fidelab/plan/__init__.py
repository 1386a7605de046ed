"""Plans: an experiment resolved into arms, jobs and an estimate.  Nothing runs."""
