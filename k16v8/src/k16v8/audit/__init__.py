"""Measure the error of any attention implementation against float64: k16v8's, those of libraries, a user's function."""
