"""Settings of a run: dataclasses, what fills them (recipes, flags), what checks them. No torch in here."""
