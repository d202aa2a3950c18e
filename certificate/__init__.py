"""The independent checker of builds: it proves from a build's texts alone that all roles together compute what
``programs/model.py`` says. It imports nothing of parc, torch or sympy, so it shares no mistake with what it checks.
"""

VERSION = "1"
"""The version of the rows and of the normal form."""
