"""Debug snapshots: the evidence of one step, and that step run again."""
