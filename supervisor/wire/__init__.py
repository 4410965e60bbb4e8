"""What travels between worker and scheduler: message types only. Imports nothing of ours."""
