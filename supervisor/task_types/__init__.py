"""The kinds of task: each turns a dispatch into something to run."""
