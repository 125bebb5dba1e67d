"""The gate beside pytest-benchmark, asv and pyperf: false alarms without a change, detection of real extra work."""
