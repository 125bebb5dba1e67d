"""Did it get worse? Exactly (statuses, errors, bytes) against an accepted baseline, and in time against a commit."""
