"""Night after night: one Parquet file a run, never rewritten, and the nights at which a cell changed for good."""
