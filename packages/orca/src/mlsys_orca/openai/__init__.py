"""The OpenAI-compatible front: wire types, rendering of answers, routes."""
