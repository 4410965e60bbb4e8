"""The supervisor: intake, journal, executor, heartbeat, reporter, and the command line."""
