"""The error of any attention implementation against float64: ours, those of libraries, a user's own function."""
