"""Objects by URL: a client for each kind of place that fsspec knows, for tiers and archives alike.

URL --opening--> ObjectClient: get, put if new, list, remove; one retry layer, bounded times, errors by kind (`faults`)
"""

from kvstore.objects.opening import connect

__all__ = ["connect"]
