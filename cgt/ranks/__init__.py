"""Processes that exchange data, and their collectives."""
