"""Values in flight: what a text, a machine or a backend does wrong with them is refused, or shows in numbers."""

from __future__ import annotations

from tests.planted_awaits import agrees, await_rows
from tests.planted_builds import COMPRESSED_BUILDS, EXPERT_BUILDS, good_build


def test_what_is_wrong_with_values_in_flight_is_noticed() -> None:
    names = COMPRESSED_BUILDS[1], EXPERT_BUILDS[0]
    assert all(agrees(good_build(name, early=True).case) for name in names)
    rows = await_rows(names, share=12)
    assert len(rows) == 4 and not any(row.accepted for row in rows.values()), rows
    assert all(row.mutants > 1 for row in rows.values()), rows
    in_texts = [row for kind, row in rows.items() if "machine" not in kind and "write" not in kind]
    assert not any(row.first["numbers"] for row in in_texts), rows
