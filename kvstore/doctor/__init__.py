"""What a tier needs at its place, and whether it is there: the engine of `kvstore doctor`.

`examine` asks the URL's backend (`BlockStore.diagnose`), opens the tier read-only and, where that is wanted, moves
scratch blocks through it (`trial`). `LocalPlace` holds the checks that every tier in a local folder shares; a backend
picks those that matter to it and adds its own. Nothing is made, written or changed unless a trial was asked for.
"""

from kvstore.doctor.examination import examine
from kvstore.doctor.finding import Finding, Grade, ok, problem, warning
from kvstore.doctor.local import LocalPlace

__all__ = ["Finding", "Grade", "LocalPlace", "examine", "ok", "problem", "warning"]
