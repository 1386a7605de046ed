"""Studies: one question about one model, asked many times, with one record, one table and one way to run."""
