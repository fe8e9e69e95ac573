"""Decoders on the CPU as one native program: packed weights, ragged attention and a thread team of our own.

:mod:`.lowering` turns a decoder's modules into a :class:`~.plan.DecoderPlan`, a list of operators that can be printed;
:mod:`.decoder` packs its weights and runs it through :mod:`.library`, whose C++ is compiled on first use. A model that
has a part the plan has no operator for, or a machine without a compiler, keeps the torch path.
"""
