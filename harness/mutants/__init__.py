"""Can the comparison see? Saboteurs against cells, correct kernels against false alarms, and the rules of others."""
