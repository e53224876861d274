"""Everything that touches vLLM.

`plugin` is what vLLM itself imports, in every one of its processes; `worker`, `capture`, `layout` and `writer` run
inside the workers; `session`, `arguments` and `requests` drive an engine from outside; `describe` says what ran.
"""
