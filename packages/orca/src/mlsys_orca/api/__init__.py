"""The HTTP front: OpenAI's protocol, and what else clients of language models speak. A file for each endpoint."""
