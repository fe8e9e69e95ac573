"""The Python front: a model as an object that answers, :class:`~mlsys_orca.llm.llm.LLM`."""
