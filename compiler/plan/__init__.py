"""Plans: the directives of the language and what a plan's lines say."""
