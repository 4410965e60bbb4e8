"""Celery's side of a benchmark: ``celery -A celery_app worker`` finds it."""

from __future__ import annotations

import os

import jobs
from celery import Celery

ADDRESS = os.environ["BENCHMARK_REDIS"]

app = Celery("celery_app", broker=f"redis+socket://{ADDRESS}", backend=f"redis+socket://{ADDRESS}")
app.conf.broker_connection_retry_on_startup = True
run_command = app.task(name="run_command")(jobs.run_command)
