"""verl's own FSDP engines, each with a manager that places its tensors.

Nothing has to be called: verl finds the plug-in by its entry point (``plugin.py``), and its
registry gives out the engines of ``engine.py`` in the place of its own. ``platform.py`` lets verl
run on the simulated accelerator. What works, and what does not, is listed in ``docs/clients.md``.
"""
