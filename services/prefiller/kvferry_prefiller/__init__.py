"""The prefiller: batch scheduler, chunk schedules, KV leaving layer by layer."""
