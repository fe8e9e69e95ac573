"""Parts of a model on a Ray cluster: a plan, a launcher beside the server, an actor for each node process."""
