"""Prints docs/language.md."""

from . import language_page

print(language_page(), end="")
