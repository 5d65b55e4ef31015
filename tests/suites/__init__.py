"""Other projects' own test suites with cgt injected: `python -m tests.suites`, or `make suites`.

| file | what it does |
|---|---|
| `entries.py` | the table of suites: a project, its version, which of its tests |
| `__main__.py` | fetches them, runs each without and with the plugin, writes docs/suites.md |
| `page.py` | the page |
| `plugin.py` | what pytest loads: modules and optimizers go through `cgt.jit`, each replay is compared with eager |
| `outcomes.py` | what pytest loads in both runs: what became of each test |
"""
