"""``/v1/responses``: OpenAI's newer endpoint, with answers kept to be gone on with by id."""
