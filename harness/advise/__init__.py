"""Which kind of attention for which constraint: from exact formulas, and from what this machine was measured to do."""
