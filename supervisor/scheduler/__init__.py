"""The embedded single-host scheduler. Of ours it shares the wire messages only."""
