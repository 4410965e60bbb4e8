"""What to apply to a task, in what order: plans, the spawner, verdicts, clean-up."""
