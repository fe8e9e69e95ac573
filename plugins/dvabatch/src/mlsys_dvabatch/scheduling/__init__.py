"""Batch table, queues and policies; pure."""
