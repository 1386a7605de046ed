"""Scoring: captures are paired with the reference's and scored into a report.  No engine is needed."""
