"""The plan language: text to statements with source spans, and the diagnostics of every layer. It knows no torch."""
