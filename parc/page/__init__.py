"""Pages: a build as one file of HTML, with its modules, memory, messages, timeline, plan and programs."""
