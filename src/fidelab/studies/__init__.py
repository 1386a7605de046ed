"""Studies: one question about one model, asked many times, with one kind of record, table and run."""
