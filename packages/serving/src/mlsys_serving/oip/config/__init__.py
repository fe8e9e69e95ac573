"""Configuration of models: a subset of Triton's ``config.pbtxt``, as text or JSON, from files or with a load request.

Data flow: :mod:`.files` (text to a message; other fields are refused by name) -> :mod:`.settings` (plain data) ->
:class:`~mlsys_serving.oip.models.version.Version`, :mod:`.warmup`, :mod:`.cache`.
"""
