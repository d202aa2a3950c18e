"""The documentation's site: pages of README and docs/, built and checked by ``python -m website OUT``.

``staging`` collects the pages, ``highlighting`` colours plans, ``built`` checks what came out; ``api`` prints
docs/api.md, and ``pictures`` draws docs/pictures.
"""
