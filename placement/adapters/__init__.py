"""Engines of other projects, put under a manager. Nothing in ``placement`` imports an adapter."""
