"""Stream assignment, memory plans and schedules; pure."""
