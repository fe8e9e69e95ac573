"""Streamed answers that outlive their connection, and with a journal their server."""
