"""Ways to talk to schedulers: wire messages to dispatches, and reports to wire messages."""
