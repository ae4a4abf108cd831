"""Blocks between an engine and its tiers: a pool of host memory in front, URLs behind it."""

from kvstore.tiering.manager import TieringManager

__all__ = ["TieringManager"]
